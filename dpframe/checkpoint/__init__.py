"""Checkpoints: plain containers, written whole or not at all, read without running code."""

# Each name is imported when first used: `seal` alone, which chooses a checkpoint, imports no torch.
import importlib

TYPE_CHECKING = False

_HOME = {
    "Writer": "dpframe.checkpoint.writer",
    "copy": "dpframe.checkpoint.file",
    "dump": "dpframe.checkpoint.file",
    "join": "dpframe.checkpoint.file",
    "load": "dpframe.checkpoint.file",
    "load_task": "dpframe.checkpoint.file",
    "save": "dpframe.checkpoint.file",
}

if TYPE_CHECKING:
    from dpframe.checkpoint.file import copy, dump, join, load, load_task, save
    from dpframe.checkpoint.writer import Writer

__all__ = ["Writer", "copy", "dump", "join", "load", "load_task", "save"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dpframe.checkpoint' has no attribute '{name}'")
