"""The files of an export: written by one function each, and tried without dpframe."""

import importlib.util
import io
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpframe import Task, Trainer, UserError
from dpframe.data.module import mapped
from dpframe.plugin import Failure, checkpoint, first_line, leaves
from dpframe.trainer.feed import evaluated
from dpframe.util import files

PROGRAM, ONNX, WEIGHTS, SAFETENSORS = (
    *("program.pt2", "model.onnx", "weights.pt", "weights.safetensors"),
)
NET = "net."
TRIED = Path(__file__).with_name("check_export.py")


def write_files(
    trainer: Trainer, directory: Path, formats: Sequence[str] | None, start: Path | None = None
) -> list[str]:
    """Writes the files, and returns a line about each. None: all that torch alone can use. `start`
    is the checkpoint that the task has its weights of."""
    wanted = formats or ("program", "weights", "safetensors")
    if trainer.strategy.sharding.cuts:
        name = trainer.strategy.name
        raise UserError(
            f"mode=export runs in one process, without {name}; leave strategy out: it reads the "
            "parts of a sharded checkpoint, too"
        )
    task = trainer.task.cpu().eval()
    directory.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    if "checkpoint" in wanted:
        lines.append(_join_checkpoint(start, directory))
    cases: list[tuple[Any, Any]] = []
    written: list[str] = []
    weights = weights_of(task)
    if "weights" in wanted:
        with files.atomic_write(directory / WEIGHTS) as part, part.open("wb") as file:
            checkpoint.dump(weights, file)
        written.append(WEIGHTS)
        of = "of task.net" if isinstance(getattr(task, "net", None), nn.Module) else "of the task"
        lines.append(f"{directory / WEIGHTS}  {len(weights)} tensors {of}, by torch.load")
    if "safetensors" in wanted and _are_there(
        ["safetensors"], "safetensors", extra="export", is_needed=formats is not None
    ):
        save_file = importlib.import_module("safetensors.torch").save_file
        with files.atomic_write(directory / SAFETENSORS) as part:
            save_file({name: weight.clone() for name, weight in weights.items()}, part)
        written.append(SAFETENSORS)
        lines.append(f"{directory / SAFETENSORS}  the same tensors")
    programs = [name for name in PROGRAMS if name in wanted]
    for name in programs:
        _are_there(PROGRAMS[name].packages, name, extra=name)
    batch = _first_batch(trainer) if programs else None
    traced: Traced | None = None
    for name in programs:
        kind = PROGRAMS[name]
        try:
            traced = traced or trace(task, batch)
            with _quiet(), files.atomic_write(directory / kind.file) as part:
                kind.save(traced, part)
        except Exception as error:  # torch.export raises many kinds
            if isinstance(error, OSError):
                raise
            line = f"{kind.maker} can't take {type(task).__name__}.predict_step: "
            line += first_line(error)
            if formats is not None:
                raise Failure(f"{line}; leave {name} out of export.formats") from error
            lines.append(line)
        else:
            cases = traced.cases
            written.append(kind.file)
            takes = ", ".join(f"{name}: {form}" for name, form in traced.takes.items())
            lines.append(f"{directory / kind.file}  takes {takes}, by {kind.loader}")
    if set(wanted) != {"checkpoint"}:
        lines.append(_try_without_dpframe(directory, written, cases))
    return lines


def _join_checkpoint(start: Path | None, directory: Path) -> str:
    if start is None:
        raise UserError(
            "export.formats=[checkpoint] writes a checkpoint as one file; name it by "
            "checkpoint=last, or checkpoint=FILE"
        )
    target = directory / "checkpoints" / start.name
    step = checkpoint.join(start, target)
    return f"{target}  one file with all of step {step}: resume={directory} goes on from it"


def weights_of(task: Task) -> dict[str, Tensor]:
    """The weights by the network's own names, if all are in `task.net`."""
    state = {name: value.contiguous() for name, value in task.state_dict().items()}
    if all(name.startswith(NET) for name in state):
        return {name.removeprefix(NET): value for name, value in state.items()}
    return state


class Predict(nn.Module):
    """`predict_step` of those tensors of a batch whose numbers, among its leaves, are `used`."""

    def __init__(self, task: Task, batch: Any, used: Sequence[int]) -> None:
        super().__init__()
        self.task = task
        self.batch = mapped(lambda leaf: None if isinstance(leaf, Tensor) else leaf, batch)
        self.used = list(used)

    def forward(self, *tensors: Tensor) -> Any:
        given = dict(zip(self.used, tensors, strict=True))
        numbers = count()
        batch = mapped(lambda leaf: given.get(next(numbers), leaf), self.batch)
        return self.task.predict_step(batch)


class Traced(NamedTuple):
    """`predict_step` as a program, what it takes by its names, and cases to try it with."""

    program: Any
    takes: dict[str, str]
    cases: list[tuple[Any, Any]]


def trace(task: Task, batch: Any) -> Traced:
    names = list(_names(batch))
    tensors = {at: leaf for at, leaf in enumerate(leaves(batch)) if isinstance(leaf, Tensor)}
    program = _program(task, batch, tensors)
    read = _read_inputs(program)
    used = {
        at: tensor for (at, tensor), is_read in zip(tensors.items(), read, strict=True) if is_read
    }
    if len(used) < len(tensors):
        program = _program(task, batch, used)
    rows = len(next(iter(used.values())))
    cases = []
    with torch.no_grad():
        model = Predict(task, batch, list(used))
        for length in dict.fromkeys((rows, max(1, rows // 2))):
            inputs = [tensor[:length] for tensor in used.values()]
            cases.append((inputs, model(*inputs)))
    return Traced(program, {names[at]: _form(tensor) for at, tensor in used.items()}, cases)


def _save_program(traced: Traced, path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(traced.program, file)


def _save_onnx(traced: Traced, path: Path) -> None:
    try:
        made = torch.onnx.export(traced.program, input_names=list(traced.takes), dynamo=True)
    except Exception as error:
        raise error.__cause__ or error from None  # which names the operation
    assert made is not None
    made.save(path, external_data=False)


class Kind(NamedTuple):
    """A file with a program."""

    file: str
    maker: str
    loader: str
    save: Callable[[Traced, Path], None]
    packages: tuple[str, ...] = ()


PROGRAMS = {
    "program": Kind(PROGRAM, "torch.export", "torch.export.load", _save_program),
    "onnx": Kind(
        *(ONNX, "torch.onnx.export", "onnxruntime.InferenceSession", _save_onnx),
        packages=("onnx", "onnxscript", "onnxruntime"),
    ),
}


def _program(task: Task, batch: Any, tensors: dict[int, Tensor]) -> Any:
    model = Predict(task, batch, list(tensors)).eval()
    rows = torch.export.Dim.AUTO  # any number of them, if the task's code does not fix it
    shapes = ({0: rows},) * len(tensors)
    with _quiet(), torch.no_grad():
        return torch.export.export(model, tuple(tensors.values()), dynamic_shapes=(shapes,))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log, and the graph that it prints beside an error: that is one line here."""
    level = logging.root.manager.disable
    with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(level)


def _read_inputs(program: Any) -> list[bool]:
    """Whether each input of a program is read by anything."""
    names = set(program.graph_signature.user_inputs)
    nodes = [
        node for node in program.graph.nodes if node.op == "placeholder" and node.name in names
    ]
    return [bool(node.users) for node in nodes]


def _try_without_dpframe(
    directory: Path, written: Sequence[str], cases: list[tuple[Any, Any]]
) -> str:
    """Has an interpreter load what was written, without dpframe; other files may be older."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(cases, Path(folder) / "cases.pt")
        command = [sys.executable, "-P", str(TRIED), folder]
        command += [str(directory.absolute() / name) for name in written]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise Failure(f"{directory}: what was exported does not load without dpframe: {last}")
    counts = json.loads(done.stdout.splitlines()[-1])
    if not counts:
        return "loaded without dpframe"
    alone = ", and it takes no other number" * (len(counts) < len(cases))
    same = f"the same outputs for {' and '.join(map(str, counts))} rows{alone}"
    return f"loaded without dpframe: {same}"


def _first_batch(trainer: Trainer) -> Any:
    args = trainer.data, trainer.strategy, trainer.settings
    loader = next(iter(evaluated("predict", *args, seed=trainer.seed).values()))
    first = next(islice(loader.epoch(limit=1), 1), None)
    if first is None:
        raise UserError("mode=export: predict_dataset() gave no rows to try it with; return some")

    def here(leaf: Any) -> Any:  # waits for the copy
        of_type = trainer.precision.dtype
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to("cpu", of_type if is_float else None) if isinstance(leaf, Tensor) else leaf

    return mapped(here, first.shares[0].batch)


def _are_there(packages: Sequence[str], kind: str, *, extra: str, is_needed: bool = True) -> bool:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and is_needed:
        packages_missing = "package" + "s" * (len(missing) > 1) + " " + ", ".join(missing)
        raise UserError(
            f"export.formats={kind} needs the {packages_missing}: pip install 'dpframe[{extra}]'"
        )
    return not missing


def _names(batch: Any, name: str = "batch") -> Any:
    """The paths of the leaves of a batch: `batch[0]`, `batch['image']`."""
    if isinstance(batch, dict):
        for key, part in batch.items():
            yield from _names(part, f"{name}[{key!r}]")
    elif isinstance(batch, list | tuple) and not hasattr(batch, "to"):
        for at, part in enumerate(batch):
            yield from _names(part, f"{name}[{at}]")
    else:
        yield name


def _form(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} [{', '.join(['rows', *map(str, tensor.shape[1:])])}]"
