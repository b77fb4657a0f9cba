"""Checkpoints: plain containers, written whole or not at all, read without running code."""

import errno
import importlib.util
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpframe import accelerator, bombs, files, parts
from dpframe.bombs import PLAIN
from dpframe.errors import Failure, UserError, first_line
from dpframe.launch.watchdog import beat
from dpframe.parts import Own, Part, Parts, Stored
from dpframe.snapshot import Memory, Snapshot

log = logging.getLogger("dpframe")
FORMAT = 2
WEIGHTS = ("state_dict", "model_state_dict", "model", "net")  # where other programs keep them
WRAPPERS = ("module", "_orig_mod")  # in names: of DataParallel and DDP, and of torch.compile
LARGE = 64 << 20  # bytes of a state
CANT_SYNC = {  # what network and FUSE mounts answer that can't sync a file or a directory
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.EACCES,
}


SaveParts = Callable[[Parts, Path, int], files.Parts | None]
"""Writes parts into a new folder in this one, together with all other processes; of this step. The
main process gets what the seal is to say."""


class Copy(NamedTuple):
    """A copy of a state, which can be read after `snapshot.wait()`."""

    state: dict[str, Any]
    snapshot: Snapshot
    save_parts: SaveParts | None = None
    is_main: bool = True

    def write(self, paths: Sequence[Path]) -> None:
        if not self.is_main and self.save_parts is not None:
            self.save_parts(self.state, paths[0].parent, 0)
            return
        with _replacing(paths):
            if self.save_parts is None:
                write(self.state, *paths)
            else:
                write(self.state, *paths, save_parts=self.save_parts)


class Writer:
    """Saves on a thread of its own, one state at a time; a failure is raised by the next call.

    A state that comes while another is being written, or less than `seconds_between` later, waits,
    and a newer one for the same file replaces it. A large one does not wait: training waits for the
    one before it, so that there are never three of them in memory. Nor does one whose parts all
    processes write: what they wait for must not depend on a clock. The memory of what is written is
    kept for the next state.
    """

    def __init__(self, seconds_between: float = 0.0) -> None:
        self._seconds_between = seconds_between
        self._is_urgent = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._waiting: dict[Path, Copy] = {}
        self._dropped: list[Path] = []
        self._spare: Memory = {}
        self._failure: BaseException | None = None

    def __reduce__(self) -> tuple:  # in another process there is nothing to write yet
        return Writer, (self._seconds_between,)

    def save(
        self,
        state: dict[str, Any],
        paths: Sequence[Path],
        drop: Sequence[Path] = (),
        *,
        save_parts: SaveParts | None = None,
        is_main: bool = True,
    ) -> None:
        """From its return on `state` may change; `drop` is removed when the new files are there.

        With `save_parts` every process calls it, and the main one writes the files."""
        if save_parts is not None:
            self.wait()
        with self._lock:
            spare, self._spare = self._spare, {}
        snapshot = Snapshot(spare)
        copied = _plain(state if is_main else parts.taken_out(state)[1], "", snapshot.copy)
        copy = Copy(copied, snapshot, save_parts, is_main)
        snapshot.start()
        if snapshot.nbytes > LARGE:
            self.wait()
        self._raise()
        with self._lock:
            for path in paths:
                self._waiting.pop(path, None)  # the newest is written last
                self._waiting[path] = copy
            self._dropped += drop
            is_writing, self._is_writing = self._is_writing, True
        if not is_writing:
            device = torch.accelerator.current_device_index() if accelerator.in_use() else None
            self._thread = threading.Thread(
                target=self._write, args=[device], name="dpframe checkpoint"
            )
            self._thread.start()

    def wait(self) -> None:
        """Until all is written, which is then no longer put off."""
        if self._thread is not None:
            self._is_urgent.set()
            self._thread.join()
            self._thread = None
            self._is_urgent.clear()
        self._raise()

    def finish(self) -> None:
        """Waits, and lets go of the memory."""
        self.wait()
        self._spare = {}

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, device: int | None) -> None:
        try:
            # A thread begins with GPU 0, and takes memory there when it waits for another one.
            with torch.accelerator.device_index(device):
                while taken := self._take():
                    self._write_taken(*taken)
                    self._is_urgent.wait(self._seconds_between)
        except BaseException as error:
            self._failure, self._waiting, self._is_writing = error, {}, False

    def _write_taken(self, waiting: dict[Path, Copy], dropped: list[Path]) -> None:
        for copy in {id(copy): copy for copy in waiting.values()}.values():
            copy.snapshot.wait()
            copy.write([path for path in waiting if waiting[path] is copy])
            with self._lock:
                self._spare = copy.snapshot.memory
        for path in dropped:
            with _replacing([path]):
                path.unlink(missing_ok=True)

    def _take(self) -> tuple[dict[Path, Copy], list[Path]] | None:
        with self._lock:
            taken = self._waiting, self._dropped
            self._waiting, self._dropped = {}, []
            self._is_writing = bool(taken[0])
        return taken if taken[0] else None


def save(state: dict[str, Any], path: Path, *copies: Path) -> None:
    """Written beside its target, synced, then renamed over it: a reader sees the old or the new."""
    write(_plain(state, ""), path, *copies)


def write(
    state: dict[str, Any], path: Path, *copies: Path, save_parts: SaveParts | None = None
) -> None:
    """`save`, of what is known to be plain. `save_parts` writes what is in parts."""
    kept = "; the one before it is kept" if path.exists() else ""
    named: Parts = {}
    if save_parts is not None:
        state, named = parts.taken_out(state)
    if name := _first_nan(state.get("task", {})):
        raise Failure(f"{name} is no longer a number, so {path} is not written{kept}")
    step = state.get("progress", {}).get("global_step")
    folder = None
    try:
        if save_parts is not None:
            folder = save_parts(named, path.parent, step)
            state = parts.gathered(state)
        for attempts_left in reversed(range(5)):
            try:
                return _write_all(state, path, copies, step, folder)
            except FileNotFoundError:  # the folder was moved or deleted meanwhile
                if not attempts_left or folder is not None:
                    raise
    except parts.NotANumber as error:
        raise Failure(f"{error} is no longer a number, so {path} is not written{kept}") from None
    except OSError as error:
        if folder is not None:
            files.remove_parts(path.parent, [folder.name])
        raise Failure(
            f"the checkpoint {path} can't be written: {error.strerror or error}{kept}"
        ) from error


def _write_all(
    state: dict[str, Any],
    path: Path,
    copies: Sequence[Path],
    step: int | None,
    folder: files.Parts | None,
) -> None:
    run = path.parent.parent
    if not run.is_dir():
        log.warning("%s was moved or deleted; what is saved goes on there", run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(path) as part:
        with part.open("w+b") as file:
            dump({"format": FORMAT, **state}, file)
            files.seal(file, step=step, parts=folder)
        sync(part)
    sync(path.parent)
    for other in copies:
        copy(path, other)
    beat()


def join(path: Path, target: Path) -> int:
    """Writes a checkpoint as one file; returns its step. What is in parts is never in memory all at
    once: until the file is written, its tensors are in files beside it."""
    state = load(path, whole=False)
    del state["file"]
    if "progress" not in state:
        raise UserError(
            f"checkpoint={path} holds weights alone, so no run can go on from it; use "
            "export.formats=[weights]"
        )
    if target.exists():
        raise UserError(f"{target} is there already; name another directory by hydra.run.dir=DIR")
    target.parent.mkdir(exist_ok=True)
    name = f".{target.name}.{os.getpid()}"  # as `files.sweep` finds it
    with TemporaryDirectory(prefix=name, suffix=".part", dir=target.parent) as folder:
        save(parts.whole(state, partial(parts.in_file, folder=folder)), target)
    return files.step_of(target)


def copy(path: Path, target: Path) -> None:
    with files.whole(target) as part:
        shutil.copyfile(path, part)
        sync(part)
    sync(target.parent)


@contextmanager
def _replacing(paths: Sequence[Path]) -> Iterator[None]:
    """Afterwards removes the parts of replaced checkpoints, unless another one needs them."""
    before = [(path.parent, found.name) for path in paths if (found := files.parts_of(path))]
    yield
    for folder, name in before:
        files.remove_parts(folder, [name])


def dump(value: Any, file: Any) -> None:
    """`torch.save`, which raises what went wrong in the file's `write`."""
    try:
        torch.save(value, file)
    except RuntimeError as error:  # torch's own
        raise error.__cause__ or error.__context__ or error from None


def load(path: str | Path, *, key: str = "checkpoint", whole: bool = True) -> dict[str, Any]:
    """Always `weights_only`: a checkpoint from a stranger can't run code here. `key` is the
    config's, for the errors. Unless `whole`, tensors in parts are `Stored`, and not read yet.

    It may be another program's: safetensors, or what `torch.save` has made of a state dict, alone
    or among other things. `load_task` finds out which weight is which."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{key}={path}: there is no such file")
    wrong, state = _of_safetensors(path) if path.suffix == ".safetensors" else _read(path)
    folder = files.parts_of(path)
    if folder is not None and not wrong:
        wrong = parts.put_in(state, path.parent / folder.name, f"{key}={path}")
    if wrong:
        raise UserError(f"{key}={path} {wrong}{files.instead_of(path)}")
    return (parts.whole(state) if whole else state) | {"file": str(path)}


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with it, or '' and the state. Its parts are checked when they are read."""
    flaw = files.flaw(path, reads_parts=False)
    bomb = bombs.in_file(path) if flaw in ("", files.UNSEALED) else ""
    if bomb or (flaw and flaw != files.UNSEALED):
        return f"can't be used: {flaw or bomb}", {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = first_line(error).partition(". ")[0]
        if flaw and (found := re.search(r"Unsupported global: GLOBAL (\S+)", str(error))):
            cause = f"it holds {found[1]}, which is code; save a state_dict() instead"
        return f"can't be read: {cause[:160]}", {}
    if flaw and not (isinstance(state, dict) and {"format", "task"} <= state.keys()):
        wrong, state = _of_others(state)
        return wrong or bombs.in_state(state, path.stat().st_size), state
    if flaw:
        return f"can't be used: {flaw}", {}
    weights = [state.get("task"), state.get("averaged", {})] if isinstance(state, dict) else [None]
    if not all(isinstance(part, dict) for part in weights):
        return "is not a dpframe checkpoint", {}
    if type(state.get("format")) is not int:
        return "is not a dpframe checkpoint", {}
    if state["format"] != FORMAT:
        what = "upgrade dpframe" if state["format"] > FORMAT else "read it with the older dpframe"
        return f"has format {state['format']}, this dpframe reads {FORMAT}; {what}", {}
    return bombs.in_state(state, path.stat().st_size), state


def _of_safetensors(path: Path) -> tuple[str, dict[str, Any]]:
    if importlib.util.find_spec("safetensors") is None:
        return "needs the package safetensors: pip install 'dpframe[export]'", {}
    try:
        return _of_others(importlib.import_module("safetensors.torch").load_file(path))
    except Exception as error:  # of its own kind
        return f"can't be read: {str(error)[:160]}", {}


def _of_others(saved: Any) -> tuple[str, dict[str, Any]]:
    """A state dict, or the one among what a program has saved."""
    inside = saved if isinstance(saved, dict) else {}
    found = {str(name): value for name, value in inside.items() if _are_weights(value)}
    names = [name for name in WEIGHTS if name in found] or list(found)
    if len(found) > 1 and names[0] not in WEIGHTS:
        return f"holds several state dicts, {', '.join(found)}; save one of them alone", {}
    weights = saved if _are_weights(saved) else found[names[0]] if names else None
    if weights is None:
        return "is no dpframe checkpoint, and holds no state dict, i.e. tensors by their names", {}
    return "", {"format": FORMAT, "task": weights, "is_foreign": True}


def _are_weights(value: Any) -> bool:
    pairs = value.items() if isinstance(value, dict) else ()
    return bool(pairs) and all(isinstance(n, str) and isinstance(v, Tensor) for n, v in pairs)


def load_task(
    task: torch.nn.Module,
    state: dict[str, Any],
    *,
    is_resumed: bool = False,
    key: str = "checkpoint",
    part: Callable[[Tensor, Any], Tensor] | None = None,
) -> None:
    """Where the weights were averaged, their average; a run resumes with the weights themselves.
    `part`: the strategy's, of a Trainer that has the task."""
    what = f"{key}={state['file']}" if "file" in state else "the checkpoint"
    weights = state["averaged" if "averaged" in state and not is_resumed else "task"]
    here, matched = task.state_dict(), ""
    if state.get("is_foreign"):
        weights = _as_named_here(weights, task, here)
        count = len(weights.keys() & here.keys())
        matched = f"{count} of the task's {len(here)} names are in it; "
    if mismatch := _first_mismatch(here, weights):
        kind = type(task).__name__
        raise UserError(f"{what} does not fit this recipe's {kind}: {matched}{mismatch}")
    if name := _first_nan(weights):
        raise UserError(f"{what} has weights that are not numbers, in {name}; use an earlier one")
    if part is not None:
        are = {name: isinstance(value, Tensor) for name, value in weights.items()}
        weights = {n: part(value, here[n]) if are[n] else value for n, value in weights.items()}
    task.load_state_dict(weights)


def _as_named_here(
    weights: dict[str, Any], task: torch.nn.Module, here: dict[str, Any]
) -> dict[str, Any]:
    """Under the task's names, whatever was around the network there, and is around it here."""
    ways = [(_bare(here, cut), _bare(weights, other)) for cut, other in product((1, 0), repeat=2)]
    ours, theirs = max(ways, key=lambda way: len(way[0].keys() & way[1].keys()))
    if weights.keys() == here.keys() or len(theirs) < len(weights) or len(ours) < len(here):
        return weights  # nothing to do, or which is which is not known
    renamed = {ours.get(bare, name): weights[name] for bare, name in theirs.items()}
    # Of a weight that has several names, safetensors keeps one.
    named = list(task.named_parameters(remove_duplicate=False))
    known = {id(weight): renamed[name] for name, weight in named if name in renamed}
    return {name: known[id(weight)] for name, weight in named if id(weight) in known} | renamed


def _bare(names: Iterable[str], is_cut: int) -> dict[str, str]:
    """The names by what is left without wrappers and, if `is_cut`, the common beginning."""
    parts = [[part for part in name.split(".") if part not in WRAPPERS] for name in names]
    shared = len(os.path.commonprefix([each[:-1] for each in parts])) if is_cut else 0
    return {".".join(each[shared:]): name for each, name in zip(parts, names, strict=True)}


def _first_mismatch(wanted: dict[str, Any], saved: dict[str, Any]) -> str:
    for name, value in wanted.items():
        if name not in saved:
            return f"it has no {name}"
        if _form(value) != _form(saved[name]):
            return f"{name} has {_form(saved[name])} in the checkpoint, {_form(value)} in the task"
    extra = next((name for name in saved if name not in wanted), None)
    return f"it has {extra}, which the task has not" if extra is not None else ""


def _form(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"size {tuple(value.shape)}" if is_tensor else f"type {type(value).__name__}"


def _first_nan(weights: dict[str, Any]) -> str:
    """An infinity may be meant, e.g. in a mask."""
    for name, value in weights.items():
        is_read = isinstance(value, Tensor) and not isinstance(value, Stored)
        if is_read and value.is_floating_point() and bool(value.isnan().any()):
            return name
    return ""


def _plain(value: Any, where: str, copied: Callable[[Tensor], Tensor] | None = None) -> Any:
    """The same, if `weights_only` can read it back; its tensors are `copied`."""
    kind = type(value)
    if kind in PLAIN and value != b"":  # which is pickled as a call that is refused
        return value
    if isinstance(value, dict):  # of whatever class: only a dict can be read back
        return {name: _plain(part, f"{where}.{name}", copied) for name, part in value.items()}
    if kind in (list, tuple, set):
        return kind([_plain(part, where, copied) for part in value])
    if isinstance(value, Tensor):
        return value if copied is None else copied(value)
    if isinstance(value, Part):
        return Part(copied(value.rows), value.size, value.first, value.is_copy) if copied else value
    if isinstance(value, Own):
        return Own(_plain(value.value, where, copied))
    what = "empty bytes" if kind is bytes else f"a {kind.__module__}.{kind.__name__}"
    raise UserError(
        f"a checkpoint can't hold {where[1:]}, {what}; use numbers, text, tensors and lists or "
        "dicts of them"
    )


def sync(path: Path) -> None:
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
    log.warning(
        "the file system of %s can't sync all it writes (%s): its newest checkpoints survive "
        "a killed process, but perhaps not a power cut",
        directory,
        why,
    )
