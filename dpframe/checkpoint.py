"""Checkpoints: plain containers, written whole or not at all, read without running code."""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from dpframe.errors import UserError

FORMAT = 1
PLAIN = (int, float, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device)


def save(state: dict[str, Any], path: Path) -> None:
    """Written beside its target, synced, then renamed over it: a reader sees the old or the new."""
    _refuse_objects(state, "")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _sync_directory(path.parent)


def sweep(directory: Path) -> None:
    """Removes what killed processes left half-written."""
    for part in directory.glob(".*.ckpt.*.part"):
        part.unlink(missing_ok=True)


def load(path: str | Path) -> dict[str, Any]:
    """Always `weights_only`: a checkpoint from a stranger can't run code here."""
    if not Path(path).is_file():
        raise UserError(f"checkpoint={path}: there is no such file")
    try:
        damaged = zipfile.ZipFile(path).testzip()  # torch.load takes a flipped bit for a number
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} in it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"checkpoint={path} can't be read: {cause[:160]}") from error
    if not isinstance(state, dict) or "task" not in state or "format" not in state:
        raise UserError(f"checkpoint={path} is not a dpframe checkpoint")
    if state["format"] > FORMAT:
        raise UserError(
            f"checkpoint={path} has format {state['format']}, this dpframe reads {FORMAT}; "
            "upgrade dpframe"
        )
    return state


def load_task(task: torch.nn.Module, state: dict[str, Any], path: str | Path = "") -> None:
    mismatch = _first_mismatch(task.state_dict(), state["task"])
    if mismatch:
        what = f"checkpoint={path}" if path else "the checkpoint"
        raise UserError(f"{what} does not fit this recipe's {type(task).__name__}: {mismatch}")
    task.load_state_dict(state["task"])


def _first_mismatch(wanted: dict[str, Any], given: dict[str, Any]) -> str:
    for name, value in wanted.items():
        if name not in given:
            return f"it has no {name}"
        sizes = [tuple(getattr(one, "shape", ())) for one in (given[name], value)]
        if sizes[0] != sizes[1]:
            return f"{name} has size {sizes[0]} there and {sizes[1]} here"
    extra = next((name for name in given if name not in wanted), None)
    return f"it has {extra}, which is not here" if extra is not None else ""


def _refuse_objects(value: Any, where: str) -> None:
    """What `weights_only` could not read back must not be written."""
    if isinstance(value, dict):
        for name, part in value.items():
            _refuse_objects(part, f"{where}.{name}" if where else str(name))
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            _refuse_objects(part, where)
    elif not (isinstance(value, torch.Tensor) or type(value) in PLAIN):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise UserError(
            f"a checkpoint can't hold {where}, a {kind}; give numbers, text, tensors and "
            "lists or dicts of them"
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
