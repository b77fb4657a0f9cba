"""Batches are copied to the GPU on a stream of their own, while it computes what came before."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from dpframe.data import Batch, Loader
from dpframe.strategies.base import Strategy

DEPTH = 3  # batches that the host may be in front of the GPU: each of them takes memory there


def reader(
    loader: Loader, strategy: Strategy
) -> tuple[Callable[..., Iterator[Batch]], Callable[[Any], Any]]:
    """What gives an epoch's batches, and what makes of their shares what a step is called with."""
    if strategy.device.type != "cuda" or loader.device.type == "cuda":
        return loader.epoch, strategy.to_device
    return Ahead(loader, strategy, Side(places(strategy))).epoch, as_it_is


def places(strategy: Strategy) -> list[torch.device]:
    """The devices of this process."""
    if strategy.world_size > 1 or strategy.replicas == 1:
        return [strategy.device]
    return [torch.device(name) for name in dict.fromkeys(strategy.devices)]


def as_it_is(shares: Any) -> Any:
    return shares


class Ahead:
    """Where nobody can tell, a batch is read and its copy begun before the one in front is used.

    Rows that are read in this process may draw its random numbers, in between those of the steps:
    these are read when they are asked for. Their copies overlap too, as the host does not wait.
    """

    def __init__(self, loader: Loader, strategy: Strategy, side: "Side") -> None:
        self._loader = loader
        self._strategy = strategy
        self._side = side

    def epoch(self, epoch: int = 0, *, skip: int = 0, limit: int | None = None) -> Iterator[Batch]:
        batches = self._loader.epoch(epoch, skip=skip, limit=limit)
        copies = (self._copied(batch) for batch in batches)
        for copied in one_ahead(copies) if self._loader.can_read_ahead else copies:
            batch, event = copied
            self._side.hand_over(batch.shares, event)
            yield batch
            self._side.pace()

    def _copied(self, batch: Batch) -> tuple[Batch, Any]:
        to_device = self._strategy.to_device
        if not is_plain(batch.shares):
            return Batch(to_device(batch.shares), batch.rows), None
        with self._side.copying():
            moved = to_device(batch.shares)
        return Batch(moved, batch.rows), self._side.mark()


def one_ahead(items: Iterable[Any]) -> Iterator[Any]:
    """The same, each drawn before the one in front of it is given."""
    waiting: list[Any] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


class Side:
    """A stream for copies on each device, and how the steps' streams wait for it."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._steps: deque[torch.cuda.Event] = deque()

    def copying(self) -> ExitStack:
        stack = ExitStack()
        for stream in self._streams:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    def mark(self) -> list[torch.cuda.Event]:
        """An event each when the copies up to here are done."""
        return [stream.record_event() for stream in self._streams]

    def hand_over(self, shares: Any, events: list[torch.cuda.Event] | None) -> None:
        """The steps' streams wait for this copy, not for the one after it that is under way.

        The memory is the copies' stream's: it may be used anew only after what a step, which the
        device has yet to come to, does with it.
        """
        if events is None:
            return
        for stream, event in zip(self._streams, events, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)
        for tensor in tensors_in(shares):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def pace(self) -> None:
        """The host does not get so far in front that its batches fill the device."""
        self._steps.append(torch.cuda.current_stream(self._streams[0].device).record_event())
        if len(self._steps) > DEPTH:
            self._steps.popleft().synchronize()


def is_plain(value: Any) -> bool:
    """Whether what is moved are tensors of the host, whose copies' memory we can look after."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, Tensor):
        return not value.is_cuda  # the stream that it is being computed on is not ours
    return not hasattr(value, "to")


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
