"""Data on its way to a GPU: kept there whole, or copied batch by batch on a stream of its own."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from dpframe.data.loader import Loader
from dpframe.data.module import Batch, Share, leaves, move, tensors_of
from dpframe.data.reading import TensorTable
from dpframe.devices import memory
from dpframe.devices.accelerator import has_streams
from dpframe.errors import UserError

DEPTH = 3  # steps that the host may be in front of the GPU: the batch of each takes memory there
SHARE_OF_FREE = 10  # data_on_device=auto takes at most 1/n of the device's free bytes

Epoch = Callable[..., Iterator[Batch]]
ToDevice = Callable[[list[Share]], Any]


def keep_on(
    device: torch.device,
    table: TensorTable,
    *,
    dtype: torch.dtype | None,
    data_on_device: str | bool,
) -> TensorTable:
    """The tensors of a data set on a GPU, if they fit and `trainer.data_on_device` allows it."""
    if device.type == "cpu" or data_on_device is False:
        return table
    free = memory.free(device)
    needed = len(table) * sum(
        math.prod(tensor.shape[1:])
        * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in table.tensors
    )
    if data_on_device is True and free is not None and needed > free:
        raise UserError(
            f"trainer.data_on_device=true but the data takes {needed:,} bytes and {device} "
            f"has {free:,} free; use trainer.data_on_device=auto"
        )
    if data_on_device is not True and needed > (free or 0) // SHARE_OF_FREE:
        return table
    return TensorTable(move(table.whole(), device, dtype))


def prefetched(
    loader: Loader, to_device: ToDevice, devices: list[torch.device]
) -> tuple[Epoch, ToDevice]:
    """What gives an epoch's batches, and what makes of their shares what a step is called with.

    `devices` are those of this process."""
    is_there = devices[0].type == "cpu" or loader.device.type != "cpu"
    if is_there or not has_streams(devices[0]):
        return loader.epoch, to_device
    prefetch = Prefetch(loader, to_device, SideStreams(devices))
    return prefetch.epoch, prefetch.begin


class Prefetch:
    """Reads a batch, and begins its copy, while the GPU computes the one before.

    Rows that are read in this process may draw its random numbers, between those of the steps, so
    these are read when they are asked for. Their copies overlap too, as the host does not wait.
    """

    def __init__(self, loader: Loader, to_device: ToDevice, side: "SideStreams") -> None:
        self._loader = loader
        self._to_device = to_device
        self._side = side

    def epoch(
        self, epoch: int | None = None, *, skip: int = 0, limit: int | None = None
    ) -> Iterator[Batch]:
        batches = self._loader.epoch(epoch, skip=skip, limit=limit)
        ahead = 1 if self._loader.reads_ahead else 0
        copies: deque[tuple[Batch, Any]] = deque()
        for batch in batches:
            copies.append(self._copied(batch))
            if len(copies) > ahead:
                yield self._handed_over(copies.popleft())
        while copies:
            yield self._handed_over(copies.popleft())

    def _copied(self, batch: Batch) -> tuple[Batch, Any]:
        if not is_all_on_host(batch.shares):
            return Batch(self._to_device(batch.shares), batch.rows), None
        with self._side.copying():
            moved = self._to_device(batch.shares)
        return Batch(moved, batch.rows), self._side.mark()

    def _handed_over(self, copy: tuple[Batch, Any]) -> Batch:
        batch, events = copy
        self._side.hand_over(batch.shares, events)
        return batch

    def begin(self, shares: Any) -> Any:
        """Before a step; the wait for the GPU, if there is one, is none for data."""
        self._side.pace()
        return shares


class SideStreams:
    """A stream for copies on each device, and how the streams of the steps wait for it."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._streams = [torch.Stream(device) for device in devices]
        self._steps: deque[torch.Event] = deque()

    def copying(self) -> ExitStack:
        stack = ExitStack()
        for stream in self._streams:
            stack.enter_context(stream)
        return stack

    def mark(self) -> list[torch.Event]:
        """An event on each stream, for when the copies so far are done."""
        return [stream.record_event() for stream in self._streams]

    def hand_over(self, shares: Any, events: list[torch.Event] | None) -> None:
        """The streams of the steps wait for this copy, not for the next one that is under way.

        The memory belongs to the stream of the copies, which may use it again only after a step
        that the device has yet to reach.
        """
        if events is None:
            return
        for stream, event in zip(self._streams, events, strict=True):
            torch.accelerator.current_stream(stream.device).wait_event(event)
        for tensor in tensors_of(shares):
            if tensor.device.type != "cpu":
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))

    def pace(self) -> None:
        """The host does not get so far in front that its batches fill the device."""
        self._steps.append(torch.accelerator.current_stream(self._streams[0].device).record_event())
        if len(self._steps) > DEPTH:
            self._steps.popleft().synchronize()


def is_all_on_host(value: Any) -> bool:
    """Whether all that is moved are tensors of the host: the memory of other copies is unknown."""
    return all(
        leaf.device.type == "cpu" if isinstance(leaf, Tensor) else not hasattr(leaf, "to")
        for leaf in leaves(value)
    )
