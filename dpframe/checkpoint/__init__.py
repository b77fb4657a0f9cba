"""Checkpoints: plain containers, written whole or not at all, read without running code.

    plain      what a checkpoint holds: numbers, text and tensors in dicts and lists
    file       saves it as one file, loads it, and puts its weights into a task
    seal       the checksum at the file's end, by which it is whole or damaged; finds the newest one
    writer     the thread that writes, while training goes on
    snapshot   copies of the tensors, which the thread reads while training changes them
    sharded    tensors of which each process has a shard, in a folder beside the file
    foreign    weights that other programs have saved
    address    fetches one from https:// or s3:// into a cache; `fetching` is its process

`callbacks.checkpoint.Checkpoint` decides when, and under which names: it gives the Trainer's state
to its `writer`, which copies it and writes it later. A file is there once it is sealed, on disk and
renamed over the one before; a sharded one's folder is there before that.

Another store, e.g. a bucket, gets the files when they are whole: see `Writer.after_write`.
"""

# Each name is imported when first used: `seal` alone, which chooses a checkpoint, imports no torch.
from typing import TYPE_CHECKING

from dpframe.util.lazy import lazy

if TYPE_CHECKING:
    from dpframe.checkpoint.file import copy, dump, join, load, load_task, save
    from dpframe.checkpoint.writer import Writer

__all__ = ["Writer", "copy", "dump", "join", "load", "load_task", "save"]

_HOMES = dict.fromkeys(__all__, "file") | {"Writer": "writer"}
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
