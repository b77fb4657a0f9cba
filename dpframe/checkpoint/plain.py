"""What a checkpoint holds: numbers, text and tensors in plain containers, which run no code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dpframe.checkpoint.seal import Parts
from dpframe.errors import UserError

PLAIN = {int, float, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device}


class Unusable(Exception):
    """What is wrong with a checkpoint, in words that follow its name."""


class NotANumber(Exception):
    """The name of a weight that has a NaN."""


class Stored(Tensor):
    """A tensor of a sharded checkpoint whose numbers are not read yet: a meta tensor."""

    load_into: Callable[[Tensor], None]

    def read(self, into: Tensor | None = None) -> Tensor:
        """All of it, in the host's memory; or into this tensor, of which a process may have some
        rows alone."""
        target = torch.zeros(self.shape, dtype=self.dtype) if into is None else into
        self.load_into(target)
        return target


class Cuts(Protocol):
    """How a strategy cuts the weights that it loads."""

    def shard_like(self, whole: Tensor, like: Any) -> Tensor:
        """A tensor, which may be Stored, cut as the weight `like` is."""


class ShardWriter(Protocol):
    """What a checkpoint asks of a strategy whose processes each have a shard of a tensor. Every
    process calls it, and the main one writes the checkpoint's file."""

    @property
    def is_main(self) -> bool: ...

    def split(
        self, state: dict[str, Any], copy: Callable[[Tensor], Tensor]
    ) -> tuple[dict[str, Any], Any]:
        """A copy of the state without these tensors, and copies of this process's shards."""

    def save(self, shards: Any, folder: Path, step: int) -> Parts | None:
        """Writes the shards into a new folder below this one, on a thread. The main process gets
        the folder's name and the hash of its list, for the checkpoint's seal, or raises what went
        wrong in any process."""


def map_tensors(value: Any, call: Callable[[Tensor, str], Any], where: str = "") -> Any:
    """The same, if `weights_only` can read it back, with `call(tensor, name)` in the place of each
    tensor; its name is the path to it."""
    kind = type(value)
    if kind in PLAIN and value != b"":  # which is pickled as a call that is refused
        return value
    if isinstance(value, dict):  # of whatever class: only a dict can be read back
        return {name: map_tensors(each, call, f"{where}.{name}") for name, each in value.items()}
    if kind in (list, tuple, set):
        return kind([map_tensors(each, call, where) for each in value])
    if isinstance(value, Tensor):
        return call(value, where[1:])
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of NumPy's
        return map_tensors(value.item(), call, where)
    what = "empty bytes" if kind is bytes else f"a {kind.__module__}.{kind.__name__}"
    raise UserError(
        f"a checkpoint can't hold {where[1:]}, {what}; use numbers, text, tensors and lists or "
        "dicts of them"
    )


def refuse_unplain(state: dict[str, Any]) -> None:
    """What `weights_only` could not read back, before there is a file."""
    map_tensors(state, lambda tensor, _: tensor)


def refuse_more_numbers(state: Any, size: int, *, is_sharded: bool) -> None:
    """Tensors that were read from `size` bytes have no more. Only those of a sharded checkpoint,
    which are in other files, have no numbers here."""
    storages: dict[int, int] = {}
    seen, waiting = set(), [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            if value.nbytes > storage.nbytes() or (value.is_meta and not is_sharded):
                raise Unusable(f"holds a tensor of size {tuple(value.shape)} without its numbers")
            if not value.is_meta:
                storages[storage.data_ptr()] = storage.nbytes()
    if sum(storages.values()) > size:
        raise Unusable(f"has more numbers than its {size} bytes can hold")
