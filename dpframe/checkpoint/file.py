"""One checkpoint file: saved whole or not at all, loaded without running code, put into a task."""

import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dpframe.checkpoint import foreign, seal
from dpframe.checkpoint.plain import (
    Cuts,
    NotANumber,
    Stored,
    Unusable,
    map_tensors,
    refuse_more_numbers,
)
from dpframe.errors import Failure, UserError, first_line
from dpframe.launch.watchdog import beat
from dpframe.util import files
from dpframe.util.patterns import Patterns, match_names

log = logging.getLogger("dpframe")
FORMAT = 2
FEW = 4  # modules, of which the weights that differ are: the others make it worth loading


SaveShards = Callable[[Path, int], seal.Parts | None]
"""`ShardWriter.save`, of shards that are known: into a folder below this one, of this step."""


def save(state: dict[str, Any], path: Path, *copies: Path) -> None:
    """Written beside its target, synced, then renamed over it: a reader sees the old or the new."""
    write(map_tensors(state, lambda tensor, _: tensor), path, *copies)


def write(
    state: dict[str, Any], path: Path, *copies: Path, save_shards: SaveShards | None = None
) -> None:
    """`save`, of what is known to be plain."""
    kept = "; the one before it is kept" if path.exists() else ""
    step = state.get("progress", {}).get("global_step")
    parts = None
    try:
        if save_shards is not None:  # first of all: the other processes take part in it
            parts = save_shards(path.parent, step)
        if name := _first_nan(state.get("task", {})):
            raise NotANumber(name)
        for attempts_left in reversed(range(5)):
            try:
                return _write_all(state, path, copies, step, parts)
            except FileNotFoundError:  # the folder was moved or deleted meanwhile
                if not attempts_left or parts is not None:
                    raise
    except (NotANumber, OSError) as error:
        if parts is not None:
            seal.remove_parts(path.parent, [parts.name])
        if isinstance(error, NotANumber):
            why = f"{error} is no longer a number, so {path} is not written"
            raise Failure(why + kept) from None
        why = f"the checkpoint {path} can't be written: {error.strerror or error}"
        raise Failure(why + kept) from error


def _write_all(
    state: dict[str, Any],
    path: Path,
    copies: Sequence[Path],
    step: int | None,
    parts: seal.Parts | None,
) -> None:
    run = path.parent.parent
    if not run.is_dir():
        log.warning("%s was moved or deleted; what is saved goes on there", run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as part:
        with part.open("w+b") as file:
            dump({"format": FORMAT, **state}, file)
            seal.add(file, step=step, parts=parts)
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
            f"checkpoint={path} holds only weights, so no run can go on from it; use "
            "export.formats=[weights]"
        )
    if target.exists():
        raise UserError(f"{target} is there already; name another directory by hydra.run.dir=DIR")
    target.parent.mkdir(exist_ok=True)
    name = f".{target.name}.{os.getpid()}"  # as `files.remove_leftovers` finds it
    from dpframe.checkpoint import sharded  # imports much of torch: only when used

    with TemporaryDirectory(prefix=name, suffix=".part", dir=target.parent) as folder:
        save(sharded.read_all(state, partial(sharded.read_into_file, folder=folder)), target)
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
    config's, for the errors. Unless `whole`, sharded tensors are `Stored`, and not read yet.

    It may be another program's: safetensors, or what `torch.save` has made of a state dict, alone
    or among other things. `load_task` finds out which weight is which."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{key}={path}: there is no such file")
    parts = seal.parts_of(path)
    try:
        is_safetensors = path.suffix == ".safetensors"
        state = foreign.read_safetensors(path) if is_safetensors else _read(path)
        refuse_more_numbers(state, path.stat().st_size, is_sharded=parts is not None)
    except Unusable as error:
        raise UserError(f"{key}={path} {error}{seal.instead_of(path)}") from None
    if parts is not None:
        from dpframe.checkpoint import sharded  # imports much of torch: only when used

        state = sharded.fill(state, path.parent / parts.name, f"{key}={path}")
        state = sharded.read_all(state) if whole else state
    return state | {"file": str(path)}


def _read(path: Path) -> dict[str, Any]:
    damage = seal.damage(path, reads_parts=False)  # each part is checked when it is read
    if damage not in ("", seal.UNSEALED):
        raise Unusable(f"can't be used: {damage}")
    if wrong := _wrong_entries(path):
        raise Unusable(f"can't be used: {damage or wrong}")
    is_sealed = not damage  # else it may be another program's
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = first_line(error).partition(". ")[0]
        found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        if found and not is_sealed:
            cause = f"it holds {found[1]}, which is code; save a state_dict() instead"
        raise Unusable(f"can't be read: {cause[:160]}") from None
    if is_sealed:
        _refuse_others(state)
    elif isinstance(state, dict) and {"format", "task"} <= state.keys():
        raise Unusable(f"can't be used: {damage}")
    return state if is_sealed else foreign.pick_weights(state)


def _refuse_others(state: Any) -> None:
    weights = [state.get("task"), state.get("averaged", {})] if isinstance(state, dict) else [None]
    if not all(isinstance(each, dict) for each in weights) or type(state.get("format")) is not int:
        raise Unusable("is not a dpframe checkpoint")
    if state["format"] != FORMAT:
        what = "upgrade dpframe" if state["format"] > FORMAT else "read it with the older dpframe"
        raise Unusable(f"has format {state['format']}, this dpframe reads {FORMAT}; {what}")


def _wrong_entries(path: Path) -> str:
    """Whether torch would unpack more bytes than the file has."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, LookupError, ValueError, EOFError):
        return "it is no zip file as torch writes them"
    return "its entries are larger than the file" if unpacked > path.stat().st_size else ""


def load_task(
    task: torch.nn.Module,
    state: dict[str, Any],
    *,
    is_resumed: bool = False,
    key: str = "checkpoint",
    sharding: Cuts | None = None,
    skip: Patterns | None = (),
) -> list[str]:
    """Where the weights were averaged, their average; a run resumes with the weights themselves.
    `sharding`: the strategy's, of a Trainer that has the task. What `skip` matches stays as it is,
    whatever the file has of it; None: nothing may. Returns the names of what stays."""
    what = f"{key}={state['file']}" if "file" in state else "the checkpoint"
    weights = state["averaged" if "averaged" in state and not is_resumed else "task"]
    here, matched = task.state_dict(), ""
    if state.get("is_foreign"):
        weights = foreign.rename_to_match(weights, task, here)
        count = len(weights.keys() & here.keys())
        matched = f"{count} of the task's {len(here)} names are in it; "
    patterns = [skip] if isinstance(skip, str) else [*(skip or ())]
    skipped = match_names([*here.items(), *weights.items()], patterns, key=f"{key}_skip")
    weights = {name: value for name, value in weights.items() if name not in skipped}
    wanted = {name: value for name, value in here.items() if name not in skipped}
    if found := dict(_mismatches(wanted, weights)):
        kind, first = type(task).__name__, next(iter(found.values()))
        may_skip = skip is not None and not is_resumed
        hint = _way_on(found, patterns, key) if may_skip else ""
        raise UserError(f"{what} does not fit this recipe's {kind}: {matched}{first}{hint}")
    if name := _first_nan(weights):
        raise UserError(f"{what} has weights that are not numbers, in {name}; use an earlier one")
    given = {n: _like(here[n], value, sharding) for n, value in weights.items()}
    task.load_state_dict(given, strict=not skipped)
    return sorted(skipped & here.keys())


def _way_on(names: Iterable[str], patterns: Sequence[str], key: str) -> str:
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    if len(modules) > FEW:
        return ""
    return f"; {key}_skip=[{','.join([*patterns, *modules])}] leaves as it is what differs"


def _like(here: Any, value: Any, sharding: Cuts | None) -> Any:
    if sharding is not None and isinstance(value, Tensor):
        return sharding.shard_like(value, here)
    return value.read() if isinstance(value, Stored) else value


def _mismatches(wanted: dict[str, Any], saved: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names, and how each differs."""
    for name, value in wanted.items():
        if name not in saved:
            yield name, f"it has no {name}"
        elif (there := _form(saved[name])) != (here := _form(value)):
            yield name, f"{name} has {there} in the checkpoint, {here} in the task"
    for name in [name for name in saved if name not in wanted]:
        yield name, f"it has {name}, which the task has not"


def _form(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"size {tuple(value.shape)}" if is_tensor else f"type {type(value).__name__}"


def _first_nan(weights: dict[str, Any]) -> str:
    """An infinity may be meant, e.g. in a mask."""
    for name, value in weights.items():
        is_read = isinstance(value, Tensor) and not value.is_meta
        if is_read and value.is_floating_point() and bool(value.isnan().any()):
            return name
    return ""
