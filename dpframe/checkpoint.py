"""Checkpoints: plain containers, written whole or not at all, read without running code."""

import os
from pathlib import Path
from typing import Any

import torch

from dpframe.errors import UserError

FORMAT = 1


def save(state: dict[str, Any], path: Path) -> None:
    """Written beside its target, synced, then renamed over it: a reader sees the old or the new."""
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


def load(path: str | Path) -> dict[str, Any]:
    """Always `weights_only`: a checkpoint from a stranger can't run code here."""
    if not Path(path).is_file():
        raise UserError(f"checkpoint={path}: there is no such file")
    try:
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


def load_task(task: torch.nn.Module, state: dict[str, Any], path: str | Path) -> None:
    try:
        task.load_state_dict(state["task"])
    except RuntimeError as error:
        detail = " ".join(str(error).split("\n\t")[1:2]) or str(error).splitlines()[0]
        raise UserError(
            f"checkpoint={path} does not fit this recipe's {type(task).__name__}: {detail.strip()}"
        ) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
