"""Checkpoints: plain containers, written whole or not at all, read without running code."""

import errno
import logging
import math
import os
import shutil
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpframe import files, seal
from dpframe.errors import Failure, UserError
from dpframe.heartbeat import beat

FORMAT = 2
LARGE = 64 << 20  # bytes of a state
# What network and FUSE mounts answer that can't sync a file or, more often, a directory.
CANT_SYNC = {
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.EACCES,
}
CPU = torch.device("cpu")
PLAIN = {int, float, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device}


class Writer:
    """Saves on a thread of its own, one state at a time; a failure is raised by the next call.

    A state that comes while another is being written, or less than `seconds_between` later, waits,
    and gives way to a newer one for the same file. A large one does not wait: training waits for
    the one before it, lest there be three of them in memory.
    """

    def __init__(self, seconds_between: float = 0.0) -> None:
        self._seconds_between = seconds_between
        self._is_urgent = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._waiting: dict[Path, dict[str, Any]] = {}
        self._dropped: list[Path] = []
        self._failure: BaseException | None = None

    def save(self, state: dict[str, Any], paths: Sequence[Path], drop: Sequence[Path] = ()) -> None:
        """Returns once `state` is copied; `drop` is removed when the new files are there."""
        copies: dict[Any, Tensor] = {}
        copy = _plain(state, "", copies)
        if sum(tensor.nbytes for tensor in copies.values()) > LARGE:
            self.wait()
        self._raise()
        with self._lock:
            for path in paths:
                self._waiting.pop(path, None)  # the newest is written last
                self._waiting[path] = copy
            self._dropped += drop
            is_writing, self._is_writing = self._is_writing, True
        if not is_writing:
            self._thread = threading.Thread(target=self._write, name="dpframe checkpoint")
            self._thread.start()

    def wait(self) -> None:
        """Until all is written, which is then put off no longer."""
        if self._thread is not None:
            self._is_urgent.set()
            self._thread.join()
            self._thread = None
            self._is_urgent.clear()
        self._raise()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self) -> None:
        try:
            while taken := self._take():
                waiting, dropped = taken
                for state in {id(state): state for state in waiting.values()}.values():
                    write(state, *(path for path, its in waiting.items() if its is state))
                for old in dropped:
                    old.unlink(missing_ok=True)
                self._is_urgent.wait(self._seconds_between)
        except BaseException as error:
            self._failure, self._waiting, self._is_writing = error, {}, False

    def _take(self) -> tuple[dict[Path, dict[str, Any]], list[Path]] | None:
        with self._lock:
            taken = self._waiting, self._dropped
            self._waiting, self._dropped = {}, []
            self._is_writing = bool(taken[0])
        return taken if taken[0] else None


def save(state: dict[str, Any], path: Path, *copies: Path) -> None:
    """Written beside its target, synced, then renamed over it: a reader sees the old or the new."""
    _plain(state, "")
    write(state, path, *copies)


def write(state: dict[str, Any], path: Path, *copies: Path) -> None:
    """`save`, of what is known to be plain."""
    _refuse_nan(state, path)
    try:
        try:
            _write_all(state, path, copies)
        except FileNotFoundError:  # the folder was moved or deleted meanwhile: it is made again
            _write_all(state, path, copies)
    except OSError as error:
        kept = "; the one before it is kept" if path.exists() else ""
        raise Failure(
            f"the checkpoint {path} can't be written: {error.strerror or error}{kept}"
        ) from error


def _write_all(state: dict[str, Any], path: Path, copies: Sequence[Path]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, lambda part: _write_sealed(state, part))
    for other in copies:
        _write(other, lambda part: shutil.copyfile(path, part))
    beat()
    _sync(path.parent)


def copy(path: Path, target: Path) -> None:
    """One more of a file that is there."""
    _write(target, lambda part: shutil.copyfile(path, part))
    _sync(target.parent)


def load(path: str | Path) -> dict[str, Any]:
    """Always `weights_only`: a checkpoint from a stranger can't run code here."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"checkpoint={path}: there is no such file")
    wrong = seal.flaw(path)
    if wrong:
        raise UserError(f"checkpoint={path} can't be used: {wrong}{seal.instead_of(path)}")
    wrong, state = _loaded(path)
    if wrong:
        raise UserError(f"checkpoint={path} {wrong}{seal.instead_of(path)}")
    return state | {"file": str(path)}


def _loaded(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with it, or '' and the state."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"can't be read: {cause[:160]}", {}
    if not isinstance(state, dict) or "task" not in state or type(state.get("format")) is not int:
        return "is not a dpframe checkpoint", {}
    if state["format"] != FORMAT:
        what = "upgrade dpframe" if state["format"] > FORMAT else "read it with the older dpframe"
        return f"has format {state['format']}, this dpframe reads {FORMAT}; {what}", {}
    return _unlike_ours(state, path.stat().st_size), state


def _unlike_ours(state: dict[str, Any], size: int) -> str:
    """What `weights_only` reads but no `save` writes: it could fill the memory when it is used."""
    if not isinstance(state["task"], dict):
        return "is not a dpframe checkpoint"
    storages: dict[int, int] = {}
    try:
        count = _parts(state, {}, storages)
    except RecursionError:
        count = math.inf
    except TypeError as error:
        return f"holds {error}, which no checkpoint of dpframe's does"
    if sum(storages.values()) > size:  # as `torch.Tensor(10**9)` makes them
        return f"has more numbers than its {size} bytes can hold"
    # Each part takes up a byte or more, but for what is written once and stands in many places.
    return "" if count <= size else f"has more parts than its {size} bytes can hold"


def _parts(value: Any, known: dict[int, float], storages: dict[int, int]) -> float:
    """How many values there are when each is counted wherever it stands; no end in a circle.

    `storages` gets the address and the bytes of each tensor's storage.
    """
    if type(value) in PLAIN:
        return 1
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested
        storage = value.untyped_storage() if value.device == CPU and is_dense else None
        if value.device != CPU or (storage is not None and value.nbytes > storage.nbytes()):
            raise TypeError(f"a tensor of size {tuple(value.shape)} without its numbers")
        if storage is not None:
            storages[storage.data_ptr()] = storage.nbytes()
        return 1
    if not isinstance(value, dict | list | tuple | set):
        raise TypeError(f"a {type(value).__module__}.{type(value).__name__}")
    if id(value) not in known:
        known[id(value)] = math.inf
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_parts(part, known, storages) for part in inner)
    return known[id(value)]


def load_task(task: torch.nn.Module, state: dict[str, Any]) -> None:
    what = f"checkpoint={state['file']}" if "file" in state else "the checkpoint"
    mismatch = _first_mismatch(task.state_dict(), state["task"])
    if mismatch:
        raise UserError(f"{what} does not fit this recipe's {type(task).__name__}: {mismatch}")
    name = _first_nan(state)
    if name:
        raise UserError(f"{what} has weights that are not numbers, in {name}; use an earlier one")
    task.load_state_dict(state["task"])


def _write(path: Path, write: Any) -> None:
    with files.whole(path) as part:
        write(part)
        _sync(part)


def _write_sealed(state: dict[str, Any], part: Path) -> None:
    with part.open("wb") as file:
        sealing = seal.Sealing(file)
        dump({"format": FORMAT, **state}, sealing)
        sealing.close()


def dump(value: Any, file: Any) -> None:
    """`torch.save`, which raises what went wrong in the file's `write`."""
    try:
        torch.save(value, file)
    except RuntimeError as error:  # torch's own
        raise error.__cause__ or error.__context__ or error from None


def _plain(value: Any, where: str, copies: dict[Any, Tensor] | None = None) -> Any:
    """The same, if `weights_only` can read it back; with `copies`, a copy of it on the CPU.

    What training goes on to change is copied; tied weights stay tied.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, dict):
        # An own subclass would not be read back; an OrderedDict, as torch's, needs no more.
        return {
            name: part if type(part) in PLAIN else _plain(part, f"{where}.{name}", copies)
            for name, part in value.items()
        }
    if kind in (list, tuple, set):
        return kind([_plain(part, where, copies) for part in value])
    if isinstance(value, Tensor):
        return value if copies is None else _copied(value, copies)
    raise UserError(
        f"a checkpoint can't hold {where[1:]}, a {kind.__module__}.{kind.__name__}; give numbers, "
        "text, tensors and lists or dicts of them"
    )


def _copied(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    key = tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype
    found = copies.get(key)
    if found is None or not tensor.numel():
        is_here = tensor.device == CPU
        found = tensor.detach().clone() if is_here else tensor.detach().to(CPU, copy=True)
        copies[key] = found
    return found


def _refuse_nan(state: dict[str, Any], path: Path) -> None:
    name = _first_nan(state)
    if name:
        kept = "; the one before it is kept" if path.exists() else ""
        raise Failure(f"{name} is no longer a number, so {path} is not written{kept}")


def _first_nan(state: dict[str, Any]) -> str:
    """An infinity may be meant, as in a mask."""
    for name, value in state.get("task", {}).items():
        if isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any()):
            return name
    return ""


def _first_mismatch(wanted: dict[str, Any], given: dict[str, Any]) -> str:
    for name, value in wanted.items():
        if name not in given:
            return f"it has no {name}"
        if isinstance(value, Tensor) != isinstance(given[name], Tensor):
            return f"{name} is a {type(given[name]).__name__} there, a {type(value).__name__} here"
        sizes = [tuple(getattr(one, "shape", ())) for one in (given[name], value)]
        if sizes[0] != sizes[1]:
            return f"{name} has size {sizes[0]} there and {sizes[1]} here"
    extra = next((name for name in given if name not in wanted), None)
    return f"it has {extra}, which is not here" if extra is not None else ""


def _sync(path: Path) -> None:
    """A file or a directory, where its file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in CANT_SYNC:
            raise
        _tell_unsynced(path if path.is_dir() else path.parent, error.strerror)


@cache  # once is enough
def _tell_unsynced(directory: Path, why: str) -> None:
    logging.getLogger("dpframe").warning(
        "the file system of %s can't sync all it writes (%s): its newest checkpoints survive "
        "a killed process, but perhaps not a power cut",
        directory,
        why,
    )
