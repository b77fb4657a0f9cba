"""A program that loads what `mode=export` wrote, without dpframe, and compares its outputs."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


def main(cases: Path, written: dict[str, Path]) -> None:
    counts: list[int] = []
    weights: dict[str, torch.Tensor] | None = None
    if "weights.pt" in written:
        weights = torch.load(written["weights.pt"], weights_only=True)
    if "weights.safetensors" in written:
        from safetensors.torch import load_file

        others = load_file(written["weights.safetensors"])
        if weights is not None:
            assert weights.keys() == others.keys(), "other tensors in weights.safetensors"
            assert all(torch.equal(weights[n], others[n]) for n in weights), "they differ"
    if "program.pt2" in written:
        counts = tried(torch.export.load(written["program.pt2"]).module(), cases, same)
    if "model.onnx" in written:
        counts = tried(session(written["model.onnx"]), cases, nearly_same)
    assert not [name for name in sys.modules if name.split(".")[0] == "dpframe"]
    print(json.dumps(counts))


def tried(model: Callable[..., Any], cases: Path, compare: Callable[[Any, Any], None]) -> list[int]:
    """The numbers of rows that it takes, with the outputs that are wanted."""
    counts: list[int] = []
    for inputs, wanted in torch.load(cases, weights_only=True):
        try:
            got = model(*inputs)
        except Exception:
            if not counts:
                raise
            continue  # it takes as many rows as the first case alone
        compare(got, wanted)
        counts.append(len(inputs[0]))
    return counts


def session(path: Path) -> Callable[..., Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        arrays = {name: given.numpy() for name, given in zip(names, inputs, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run


def nearly_same(got: list[torch.Tensor], wanted: Any) -> None:
    """Other kernels round differently."""
    for one, other in zip(got, tensors_of(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(got, wanted)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), "other outputs"
        for name in wanted:
            same(got[name], wanted[name])
    elif isinstance(wanted, list | tuple):
        for one, other in zip(got, wanted, strict=True):
            same(one, other)


if __name__ == "__main__":
    paths = map(Path, sys.argv[2:])
    main(Path(sys.argv[1]) / "cases.pt", {path.name: path for path in paths})
