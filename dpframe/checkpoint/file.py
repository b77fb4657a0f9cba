"""Checkpoints: plain containers, written whole or not at all, read without running code."""

import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dpframe import files
from dpframe.checkpoint import foreign, parts, seal
from dpframe.checkpoint.parts import Own, Part, Parts, Stored
from dpframe.errors import Failure, UserError, first_line
from dpframe.heartbeat import beat

log = logging.getLogger("dpframe")
FORMAT = 2
PLAIN = {int, float, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device}


SaveParts = Callable[[Parts, Path, int], seal.Parts | None]
"""Writes parts into a new folder in this one, together with all other processes; of this step. The
main process gets what the seal is to say."""


def save(state: dict[str, Any], path: Path, *copies: Path) -> None:
    """Written beside its target, synced, then renamed over it: a reader sees the old or the new."""
    write(to_plain(state, ""), path, *copies)


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
            seal.remove_parts(path.parent, [folder.name])
        raise Failure(
            f"the checkpoint {path} can't be written: {error.strerror or error}{kept}"
        ) from error


def _write_all(
    state: dict[str, Any],
    path: Path,
    copies: Sequence[Path],
    step: int | None,
    folder: seal.Parts | None,
) -> None:
    run = path.parent.parent
    if not run.is_dir():
        log.warning("%s was moved or deleted; what is saved goes on there", run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as part:
        with part.open("w+b") as file:
            dump({"format": FORMAT, **state}, file)
            seal.add(file, step=step, parts=folder)
        files.sync(part)
    files.sync(path.parent)
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
    name = f".{target.name}.{os.getpid()}"  # as `files.remove_leftovers` finds it
    with TemporaryDirectory(prefix=name, suffix=".part", dir=target.parent) as folder:
        save(parts.whole(state, partial(parts.in_file, folder=folder)), target)
    return seal.step_of(target)


def copy(path: Path, target: Path) -> None:
    with files.atomic_write(target) as part:
        shutil.copyfile(path, part)
        files.sync(part)
    files.sync(target.parent)


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
    wrong, state = foreign.read_safetensors(path) if path.suffix == ".safetensors" else _read(path)
    folder = seal.parts_of(path)
    if folder is not None and not wrong:
        wrong = parts.put_in(state, path.parent / folder.name, f"{key}={path}")
    if wrong:
        raise UserError(f"{key}={path} {wrong}{seal.instead_of(path)}")
    return (parts.whole(state) if whole else state) | {"file": str(path)}


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with it, or '' and the state. Its parts are checked when they are read."""
    damage = seal.damage(path, reads_parts=False)
    is_unknown = damage == seal.UNSEALED  # perhaps another program's
    wrong = _wrong_entries(path) if is_unknown or not damage else ""
    if wrong or (damage and not is_unknown):
        return f"can't be used: {damage or wrong}", {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = first_line(error).partition(". ")[0]
        if is_unknown and (found := re.search(r"Unsupported global: GLOBAL (\S+)", str(error))):
            cause = f"it holds {found[1]}, which is code; save a state_dict() instead"
        return f"can't be read: {cause[:160]}", {}
    if is_unknown and not (isinstance(state, dict) and {"format", "task"} <= state.keys()):
        wrong, state = foreign.pick_weights(state)
        return wrong or wrong_tensors(state, path.stat().st_size), state
    if is_unknown:
        return f"can't be used: {damage}", {}
    weights = [state.get("task"), state.get("averaged", {})] if isinstance(state, dict) else [None]
    if not all(isinstance(part, dict) for part in weights):
        return "is not a dpframe checkpoint", {}
    if type(state.get("format")) is not int:
        return "is not a dpframe checkpoint", {}
    if state["format"] != FORMAT:
        what = "upgrade dpframe" if state["format"] > FORMAT else "read it with the older dpframe"
        return f"has format {state['format']}, this dpframe reads {FORMAT}; {what}", {}
    return wrong_tensors(state, path.stat().st_size), state


def _wrong_entries(path: Path) -> str:
    """Whether torch would unpack more bytes than the file has."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, LookupError, ValueError, EOFError):
        return "it is no zip file as torch writes them"
    return "its entries are larger than the file" if unpacked > path.stat().st_size else ""


def wrong_tensors(state: Any, size: int) -> str:
    """Whether the tensors read from `size` bytes stand for more numbers than these can hold."""
    storages: dict[int, int] = {}
    seen, waiting = set(), [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            if value.is_meta or value.nbytes > storage.nbytes():
                return f"holds a tensor of size {tuple(value.shape)} without its numbers"
            storages[storage.data_ptr()] = storage.nbytes()
    is_more = sum(storages.values()) > size
    return f"has more numbers than its {size} bytes can hold" if is_more else ""


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
        weights = foreign.rename_to_match(weights, task, here)
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


def to_plain(value: Any, where: str, copied: Callable[[Tensor], Tensor] | None = None) -> Any:
    """The same, if `weights_only` can read it back; its tensors are `copied`."""
    kind = type(value)
    if kind in PLAIN and value != b"":  # which is pickled as a call that is refused
        return value
    if isinstance(value, dict):  # of whatever class: only a dict can be read back
        return {name: to_plain(part, f"{where}.{name}", copied) for name, part in value.items()}
    if kind in (list, tuple, set):
        return kind([to_plain(part, where, copied) for part in value])
    if isinstance(value, Tensor):
        return value if copied is None else copied(value)
    if isinstance(value, Part):
        return Part(copied(value.rows), value.size, value.first, value.is_copy) if copied else value
    if isinstance(value, Own):
        return Own(to_plain(value.value, where, copied))
    what = "empty bytes" if kind is bytes else f"a {kind.__module__}.{kind.__name__}"
    raise UserError(
        f"a checkpoint can't hold {where[1:]}, {what}; use numbers, text, tensors and lists or "
        "dicts of them"
    )
