"""Saves on a thread of its own, while training goes on."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpframe.checkpoint import file, seal
from dpframe.checkpoint.plain import ShardWriter, map_tensors
from dpframe.checkpoint.snapshot import Memory, Snapshot
from dpframe.devices import accelerator

LARGE = 64 << 20  # bytes of a state


class Copy(NamedTuple):
    """A copy of a state, which can be read after `snapshot.wait()`."""

    state: dict[str, Any]
    snapshot: Snapshot
    save_shards: file.SaveShards | None = None
    is_main: bool = True

    def write(self, paths: Sequence[Path]) -> None:
        if self.save_shards is not None and not self.is_main:
            self.save_shards(paths[0].parent, 0)
            return
        with _removing_replaced_parts(paths):
            file.write(self.state, *paths, save_shards=self.save_shards)


class Writer:
    """Saves on a thread of its own, one state at a time; a failure is raised by the next call.

    A state that comes while another is being written, or less than `seconds_between` later, waits,
    and a newer one for the same file replaces it. A large one does not wait: training waits for the
    one before it, so that there are never three of them in memory. Nor does one whose shards all
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
        return type(self), (self._seconds_between,)

    def save(
        self,
        state: dict[str, Any],
        paths: Sequence[Path],
        drop: Sequence[Path] = (),
        *,
        sharding: ShardWriter | None = None,
    ) -> None:
        """From its return on `state` may change; `drop` is removed when the new files are there,
        and not written if it still waits.

        With a `sharding` every process calls it, and the main one writes the files."""
        if sharding is not None:
            self.wait()
        with self._lock:
            spare, self._spare = self._spare, {}
        snapshot = Snapshot(spare)
        if sharding is None:
            copy = Copy(map_tensors(state, lambda each, _: snapshot.copy(each)), snapshot)
        else:
            rest, shards = sharding.split(state, snapshot.copy)
            copy = Copy(rest, snapshot, partial(sharding.save, shards), sharding.is_main)
        snapshot.start()
        if snapshot.nbytes > LARGE:
            self.wait()
        self._raise()
        with self._lock:
            for path in paths:
                self._waiting.pop(path, None)  # the newest is written last
                self._waiting[path] = copy
            for path in drop:
                self._waiting.pop(path, None)
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

    def after_write(self, paths: Sequence[Path], removed: Sequence[Path]) -> None:
        """Called on the thread when these files are whole and on disk, and those are gone: to keep
        them in another store, too. What it raises ends the run as a failed save does.

        The shards of a sharded one are in the folder beside it that `seal.parts_of(path)` names.
        """

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
        removed = [path for path in dropped if path.exists()]
        for path in removed:
            with _removing_replaced_parts([path]):
                path.unlink(missing_ok=True)
        if any(copy.is_main for copy in waiting.values()):
            self.after_write([*waiting], removed)

    def _take(self) -> tuple[dict[Path, Copy], list[Path]] | None:
        with self._lock:
            taken = self._waiting, self._dropped
            self._waiting, self._dropped = {}, []
            self._is_writing = bool(taken[0])
        return taken if taken[0] else None


@contextmanager
def _removing_replaced_parts(paths: Sequence[Path]) -> Iterator[None]:
    """Afterwards removes the parts of replaced checkpoints, unless another one needs them."""
    before = [(path.parent, found.name) for path in paths if (found := seal.parts_of(path))]
    yield
    for folder, name in before:
        seal.remove_parts(folder, [name])
