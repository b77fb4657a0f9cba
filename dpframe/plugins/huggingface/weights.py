"""A model's weights, read from its safetensors by their names when they are needed."""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpframe.plugin import fill_later

INDEX = "model.safetensors.index.json"


def outline_of(build: Callable[[], Any], model: str) -> Any:
    """What `build` makes without its numbers, which are read when it is cut. None: the files don't
    have each weight as it is, once and by its own name, so that transformers has to read them."""
    import huggingface_hub
    import transformers

    folder = Path(model)
    if not folder.is_dir():
        wanted = ["model*.safetensors", INDEX, "generation_config.json"]
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=wanted))
    files = _files(folder)
    with _NoNumbers(), torch.random.fork_rng(devices=[]):  # a model that is read draws nothing
        net = build()
    if not files or _is_converted(net):
        return None
    stored = {name: each for file in files for name, each in _Stored.all_of(file)}
    tensors = chain(
        net.named_parameters(remove_duplicate=False), net.named_buffers(remove_duplicate=False)
    )
    names: dict[int, list[str]] = {}  # a tied weight has several
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    kept = net.state_dict(keep_vars=True)
    for tensor in kept.values():
        found = [name for name in names.get(id(tensor), ()) if name in stored]
        if len(found) != 1 or stored[found[0]].shape != tensor.shape:
            return None
    if any(tensor.is_meta and name not in kept for name, tensor in net.named_buffers()):
        return None
    fill_later(net, {name: each.read for name, each in stored.items()})
    if (folder / "generation_config.json").exists():
        net.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return net


class _NoNumbers(TorchFunctionMode):
    """What is made without values, as weights are, has no memory; what is computed is as always."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


class _Stored:
    def __init__(self, file: Any, name: str) -> None:
        self.read: Callable[[], Tensor] = partial(file.get_tensor, name)
        self.shape = torch.Size(file.get_slice(name).get_shape())

    @classmethod
    def all_of(cls, path: Path) -> "list[tuple[str, _Stored]]":
        from safetensors import safe_open

        file = safe_open(path, framework="pt")  # maps it
        return [(name, cls(file, name)) for name in file.keys()]  # noqa: SIM118


def _files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if (folder / INDEX).exists():
        named = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(named))]
    return []


def _is_converted(net: Any) -> bool:
    """Whether transformers computes weights from what files have, e.g. of quantized ones."""
    if getattr(net.config, "quantization_config", None) is not None:
        return True
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # another version
        return True
    return bool(get_model_conversion_mapping(net, add_legacy=False))
