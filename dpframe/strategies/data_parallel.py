"""One process, N devices: each replica computes its own loss, autograd sums the gradients."""

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply, replicate

from dpframe.data import Share, move, split
from dpframe.data.copies import OF_MODULES
from dpframe.errors import UserError
from dpframe.metrics import is_metric
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import announce


class DataParallel(Strategy, takes_logical_shares=True):
    """On a machine without GPUs, N virtual replicas on the CPU with the same shares."""

    def setup(self) -> None:
        self.places = self.choose_devices(default=None)
        self.replicas = len(self.places)
        kind = self.places[0].type
        if self.replicas > 1 and kind not in ("cpu", "cuda"):  # torch's replicate copies for these
            raise UserError(
                f"strategy=data_parallel on {self.replicas} {kind.upper()} devices: torch copies "
                "modules only to CUDA devices; use strategy=ddp"
            )
        self.take(self.places[0])
        self.replicates_task = self.replicas > 1 and self.device.type != "cpu"
        announce(self.places, self.accelerator, kind="virtual replica")

    @property
    def devices(self) -> list[str]:
        return [str(place) for place in self.places]

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        return Replicas(module, self.places)

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        return split(rows, self.replicas)

    def to_device(self, shares: list[Share]) -> list[Share]:
        return [
            share._replace(batch=move(share.batch, place, self.dtype))
            for share, place in zip(shares, self.places, strict=True)
            if share.rows
        ]

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        if not total or SEAT.meeting is None:  # outside of a step, or the only share
            return x
        return torch.cat([rows.to(x.device) for rows in SEAT.meeting.exchange(x)])


class Replicas(nn.Module):
    """Calls the module once a share, on the share's device, and combines what comes back.

    On the CPU the replicas run one after the other, each with buffers and attributes of its own.
    Where the first one's step gathers rows, the others begin beside it, each in a thread, and all
    of them take turns, one at a time.
    """

    def __init__(self, module: Any, places: list[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.places = places
        self.gathers: bool | None = None  # None before the first pass
        self.parts: list[nn.Module] = []
        self.buffers_at: Places = []
        self._look()

    def _look(self) -> None:
        """A hook may have replaced a module since."""
        parts = list(self.module.modules())
        if parts != self.parts:
            self.parts = parts
            self.buffers_at = [
                (part, name)
                for part in parts
                for name, _ in part.named_buffers(recurse=False, remove_duplicate=False)
            ]

    def forward(self, shares: list[Share], *args: Any) -> Any:
        if len(shares) == 1:
            SEAT.meeting = None
            return self.module.combine([self.module(shares[0], *args)])
        self._look()
        if self.places[0].type != "cpu":
            return self._at_once(shares, args)
        if self._needs_thread():
            return Thread(partial(self.forward, shares, *args)).result()
        steps = [partial(self.module, share, *args) for share in shares]
        # A metric counts the rows of all replicas.
        parts = [part for part in self.parts if not is_metric(part)]
        with OwnStates(parts, self.buffers_at, len(steps)) as own:
            with Meeting(steps, take_turn=own.use) as meeting:
                first = steps[0]()
            results = [first, *meeting.results()]
            for index in range(len(results), len(steps)):  # they have not begun beside it
                own.use(index)
                results.append(steps[index]())
        SEAT.meeting = None
        if meeting.threads or self.gathers is None:
            self.gathers = bool(meeting.threads)
        return self.module.combine(results)

    def _needs_thread(self) -> bool:
        """Autograd adds up gradients in the order in which a thread has computed what they are of.

        So that the last digits don't depend on what this thread has computed before, replicas that
        take turns begin in new threads, the first one, too. Of a first pass nobody knows yet.
        """
        is_new = isinstance(threading.current_thread(), Thread)
        return self.gathers is not False and torch.is_grad_enabled() and not is_new

    def _at_once(self, shares: list[Share], args: tuple) -> Any:
        places = self.places[: len(shares)]
        copies = replicate(self.module, places, detach=not torch.is_grad_enabled())
        steps = [partial(copy, share, *args) for copy, share in zip(copies, shares, strict=True)]
        meeting = Meeting(steps)
        seats: Any = [partial(meeting.run, index) for index in range(len(shares))]
        first = self._places_in(copies[0])
        shared = buffers_at(first)  # what the first copy changes in place, the module has, too
        results = parallel_apply(seats, [() for _ in shares], devices=places)
        for (part, name), was, now in zip(self.buffers_at, shared, buffers_at(first), strict=True):
            if now is not was:
                setattr(part, name, now)
        return self.module.combine(results)

    def _places_in(self, copy: nn.Module) -> "Places":
        if not self.buffers_at:
            return []
        parts = dict(zip(self.module.modules(), copy.modules(), strict=True))
        return [(parts[part], name) for part, name in self.buffers_at]


Places = list[tuple[nn.Module, str]]
"""Modules, and the name of a buffer in each."""


def buffers_at(places: Places) -> list[Tensor]:
    return [getattr(part, name) for part, name in places]


class OwnStates:
    """Each replica's own buffers and attributes of these modules, as copies of a module have them
    on GPUs, and processes: what a step sets for a while, another replica's does not see.

    All begin a pass with the module's. The first replica's stay; the others' are lost.
    """

    def __init__(self, parts: Sequence[nn.Module], places: Places, replicas: int) -> None:
        self._parts, self._places = parts, places
        own = [vars(part) for part in parts]
        self._spaces = [own, *([_copy_of(space) for space in own] for _ in range(1, replicas))]
        self._user = 0
        tensors = buffers_at(places)
        for replica in range(1, replicas):
            self.use(replica)
            for (part, name), buffer in zip(places, _copied(tensors), strict=True):
                setattr(part, name, buffer)
        self.use(0)

    def __enter__(self) -> "OwnStates":
        return self

    def __exit__(self, *error: object) -> None:
        self.use(0)

    def use(self, replica: int) -> None:
        """Gives the modules this replica's."""
        if replica == self._user:
            return
        for part, space in zip(self._parts, self._spaces[replica], strict=True):
            object.__setattr__(part, "__dict__", space)
        self._user = replica


def _copy_of(space: dict[str, Any]) -> dict[str, Any]:
    """With dicts of its own for parameters, buffers and modules, which a step may exchange."""
    return {
        name: value.copy() if name in OF_MODULES and isinstance(value, dict) and value else value
        for name, value in space.items()
    }


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One that is there twice is one copy."""
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors}
    return [copies[id(tensor)] for tensor in tensors]


class Meeting:
    """Where the replicas of one pass exchange rows; `steps` are their calls, by replica.

    `take_turn` is called with the one that goes on; None: all of them run at once."""

    def __init__(
        self,
        steps: Sequence[Callable[[], Any]],
        *,
        take_turn: Callable[[int], None] | None = None,
    ) -> None:
        self.steps = steps
        self.threads: list[Thread] = []  # of all replicas but the first, if they take turns
        self._take_turn = take_turn
        self._is_grad_enabled = torch.is_grad_enabled()  # before any step has changed it
        self._turn: int | None = 0
        self._exchanges: list[dict[int, Tensor]] = []  # each one's rows by replica
        self._ended: set[int] = set()
        self._error: BaseException | None = None
        self._condition = threading.Condition()

    def __enter__(self) -> "Meeting":
        SEAT.meeting, SEAT.index = self, 0
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._leave(0, error)
        for thread in self.threads:
            thread.join()
        if error is None and self._error is not None:
            raise self._error

    def run(self, index: int) -> Any:
        """A replica's step, in a thread of its own."""
        SEAT.meeting, SEAT.index = self, index
        with self._condition:
            self._go_on(index)
        error: BaseException | None = self._error
        try:
            if error is not None:
                raise error
            return self.steps[index]()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._leave(index, error)

    def exchange(self, x: Tensor) -> list[Tensor]:
        """What all replicas call this with, each for the same time."""
        index = SEAT.index
        with self._condition:
            if self._take_turn and not self.threads:
                if self._ended:
                    raise _left_alone(0)
                with torch.set_grad_enabled(self._is_grad_enabled):
                    self.threads = [Thread(partial(self.run, i)) for i in range(1, len(self.steps))]
                for thread in self.threads:
                    thread.start()
            rows = next((rows for rows in self._exchanges if index not in rows), None)
            if rows is None:
                self._exchanges.append(rows := {})
            rows[index] = x
            self._pass_on(index)
            self._go_on(
                index, lambda: len(rows) == len(self.steps) or bool(self._ended - rows.keys())
            )
        if self._error is not None:
            raise self._error
        if len(rows) < len(self.steps):
            raise _left_alone(min(self._ended - rows.keys()))
        return [rows[other] for other in range(len(self.steps))]

    def results(self) -> list[Any]:
        return [thread.value for thread in self.threads]

    def _go_on(self, index: int, has_what_it_needs: Callable[[], bool] = lambda: True) -> None:
        """When it is this replica's turn, or a different one has failed."""
        in_turn = self._take_turn is not None
        self._condition.wait_for(
            lambda: (
                self._error is not None
                or ((not in_turn or self._turn == index) and has_what_it_needs())
            )
        )
        if self._take_turn is not None:
            self._take_turn(index)

    def _leave(self, index: int, error: BaseException | None) -> None:
        with self._condition:
            self._ended.add(index)
            self._error = self._error or error
            self._pass_on(index)

    def _pass_on(self, index: int) -> None:
        """To the next replica that has not ended."""
        count = len(self.steps)
        following = [(index + step) % count for step in range(1, count + 1)]
        self._turn = next((other for other in following if other not in self._ended), None)
        self._condition.notify_all()


def _left_alone(index: int) -> UserError:
    return UserError(
        f"replica {index} has ended its step without the self.all_gather, or the BatchNorm of "
        "trainer.batch_norm=global, in which another replica waits; call it equally often on all "
        "replicas, whatever their rows"
    )


class Thread(threading.Thread):
    """Calls with the context and the grad mode of the thread that made it, and keeps the value."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="replica")
        self._call = call
        self._context = contextvars.copy_context()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._error: BaseException | None = None
        self.value: Any = None

    def run(self) -> None:
        try:
            with torch.set_grad_enabled(self._is_grad_enabled):
                self.value = self._context.run(self._call)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.start()
        self.join()
        if self._error is not None:
            raise self._error
        return self.value


class Seat(threading.local):
    """Which replica this thread computes."""

    meeting: Meeting | None = None
    index = 0


SEAT = Seat()
