"""Copies of tensors in host memory; those of a device are made while training goes on."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpframe.devices import memory
from dpframe.devices.accelerator import has_streams, processes_here

CPU = torch.device("cpu")
SHARE_OF_FREE = 4  # copies on the device itself take at most 1/n of its free bytes
SHARE_OF_HOST = 8  # pinned memory of all processes takes at most 1/n of the bytes
SMALL_PIECE, LARGE_PIECE = 2**20, 2**26  # bytes of pinned memory that tensors share
ALIGNED = 64  # bytes
Memory = dict[tuple, list[Tensor]]
"""Of copies in the host's memory, by the form of what they are copies of."""


class Snapshot:
    """`copy` each tensor, then `start`: from then on the tensors may change. `wait` before the
    copies are read; another thread may do that.

    A device copies on a stream of its own into pinned memory, which torch uses again for the next
    snapshot. The host waits for nothing. Where the device has room for it, the tensors are copied
    there first, in an instant; else its next step begins when the copies are done.

    Other copies are made in the `spare` memory of an earlier snapshot, which nobody reads any more:
    memory that is new to the process takes many times as long.
    """

    def __init__(self, spare: Memory | None = None) -> None:
        self.nbytes = 0
        self.memory: Memory = {}
        self._spare = spare or {}
        self._pinned = Pinned()
        self._copies: dict[Any, Tensor] = {}
        self._pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}  # a tensor, and its copy
        self._done: list[Any] = []  # events
        self._in_turn: dict[torch.device, Any] = {}  # of copies on each device's own stream

    def copy(self, tensor: Tensor) -> Tensor:
        """Tied weights have one copy."""
        key: Any = id(tensor)
        if tensor.layout is torch.strided and tensor.numel():
            key = tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._copies:
            if tensor.layout is torch.strided:  # others have no nbytes
                self.nbytes += tensor.nbytes
            self._copies[key] = self._copied(tensor.detach())
        return self._copies[key]

    def copy_in_turn(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor that nobody keeps, made on the device's own stream: its memory is
        free for what comes next there, and the host waits for nothing until `wait`."""
        self.nbytes += tensor.nbytes
        if not self._pins(tensor):
            return tensor.to(CPU, copy=True)
        host, place = self._pinned.like(tensor)
        place.copy_(tensor, non_blocking=True)
        stream = torch.accelerator.current_stream(tensor.device)
        self._in_turn[tensor.device] = stream.record_event()  # after those of the copies before
        return host

    def start(self) -> None:
        self._spare.clear()
        for device, pairs in self._pairs.items():
            here, side = torch.accelerator.current_stream(device), _side_stream(device)
            room = (memory.free(device) or 0) // SHARE_OF_FREE
            has_room = sum(tensor.nbytes for tensor, _ in pairs) <= room
            if has_room:
                pairs = [(tensor.clone(), host) for tensor, host in pairs]
            side.wait_stream(here)
            with side:
                for tensor, host in pairs:
                    host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(side)  # its memory is not used again before that
            done = side.record_event()
            if not has_room:
                here.wait_event(done)
            self._done.append(done)
        self._pairs.clear()

    def wait(self) -> None:
        for event in (*self._done, *self._in_turn.values()):
            event.synchronize()
        self._done.clear()
        self._in_turn.clear()

    @property
    def is_done(self) -> bool:
        return all(event.query() for event in (*self._done, *self._in_turn.values()))

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.to(CPU, copy=True)
        if self._pins(tensor):
            host, place = self._pinned.like(tensor)
            self._pairs.setdefault(tensor.device, []).append((tensor, place))
            return host
        form = tensor.shape, tensor.stride(), tensor.dtype
        spare = self._spare.get(form)
        host = spare.pop() if spare else torch.empty_like(tensor, device=CPU)
        self.memory.setdefault(form, []).append(host)
        return host.copy_(tensor)

    def _pins(self, tensor: Tensor) -> bool:
        return tensor.device != CPU and has_streams(tensor.device) and self._is_small()

    def _is_small(self) -> bool:
        return self.nbytes <= memory.machine() // SHARE_OF_HOST // processes_here()


class Pinned:
    """Pinned memory in a few large pieces, which tensors share: torch rounds what it pins up to a
    power of two, each tensor if they were pinned by themselves, and keeps it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: list[tuple[Tensor, int]] = []  # and how much of each is taken

    def like(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors in one place. The first has a storage of its own, as files want it; the
        second is part of a piece, so that torch knows of copies there."""
        form = torch.empty_like(tensor, device="meta")
        size = form.untyped_storage().nbytes()
        piece, begin = self._room(size)
        storage = piece.untyped_storage()[begin : begin + size]
        host = torch.empty(0, dtype=form.dtype).set_(storage, 0, form.shape, form.stride())  # type: ignore[call-overload]
        place = piece[begin : begin + size].view(form.dtype)
        return host, place.as_strided(form.shape, form.stride(), place.storage_offset())

    def _room(self, size: int) -> tuple[Tensor, int]:
        free = [piece.numel() - taken for piece, taken in self._pieces]
        number = next((n for n, room in enumerate(free) if room >= size), len(free))
        if number == len(free):
            least = max(size, min(self.nbytes, LARGE_PIECE), SMALL_PIECE)
            piece = _pinned(1 << (least - 1).bit_length())
            self.nbytes += piece.numel()
            self._pieces.append((piece, 0))
        piece, begin = self._pieces[number]
        end = -(-(begin + max(size, 1)) // ALIGNED) * ALIGNED  # no two begin at one place
        self._pieces[number] = piece, end
        return piece, begin


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
