"""A step that is tried on shares of a few rows: what it gives, with nothing left behind."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpframe import seeding
from dpframe.data import Rows, Share, move
from dpframe.data.module import OfSets
from dpframe.data.reading import ByName
from dpframe.devices import memory
from dpframe.errors import UserError, first_line
from dpframe.metrics import is_number
from dpframe.parameters import Watched
from dpframe.rows import current_share, ongoing
from dpframe.strategies.base import Strategy
from dpframe.strategies.data_parallel import Replicas
from dpframe.task import Output, Task, TaskContext
from dpframe.trainer.checks.draws import Drawn, DrawRecorder, NotCompared
from dpframe.trainer.checks.kept import KeptValue, kept_in, moving
from dpframe.trainer.checks.put_back import Unwritten, put_back
from dpframe.trainer.checks.shares import Gatherable, Gathers, SharesOf, ShareStep
from dpframe.trainer.checks.statistics import BufferSums, sums_of_buffers
from dpframe.trainer.checks.surroundings import Moment, foreign_states, nothing_tuned
from dpframe.trainer.compute.placement import default_dtype
from dpframe.trainer.outputs import Measured, detached, one_loss

ROWS = 5
BRIEF_SECONDS = 0.5
FOREIGN = "Python's or NumPy's random numbers"
INNER = (
    "it takes a gradient through what it gathers (trainer.batch_norm=global, self.all_gather), of "
    "which a share has that of its own rows alone: take it through layers that see a row alone, "
    "e.g. LayerNorm or a BatchNorm in evaluation mode"
)

AGAIN = 1e-6  # of a loss that is computed twice


@dataclass
class Noticed:
    """What tries of a step have shown besides its numbers."""

    drawn: list[Drawn] = field(default_factory=list)
    collate_draws: bool = False
    # Of attributes on which the loss of the next step depends, by the rows of this one.
    kept: dict[int, dict[str, KeptValue]] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)  # of these
    # In a compare, by a share's places.
    statistics: dict[Any, BufferSums] = field(default_factory=dict)
    with_statistics: set[str] = field(default_factory=set)  # modules that keep those of a share
    likely: str = ""  # what makes the loss differ
    gradients_left_out: str = ""  # why they are not compared
    not_compared: list[str] = field(default_factory=list)  # in a mode, or at a later step
    is_told: bool = False  # whether any rows have a loss or a number that tells something


@dataclass
class StepOnShares:
    """A step of a task, or of one of its turns: `measured` tries it on shares of a few rows, and
    leaves the task as it was."""

    task: Task
    strategy: Strategy
    progress: Any
    turn: str = ""
    step: str = "training_step"
    named: Mapping[str, str] = field(default_factory=dict)  # what else it takes
    prefix: str = ""  # of the numbers of an evaluation, e.g. val, or val/clean of the set `clean`
    alone: Callable[[], AbstractContextManager[None]] = nullcontext  # its weights get gradients
    is_brief: bool = False  # on few rows, given up where it takes long or may leave something
    in_training: bool = False  # in the modes that the task has, not in evaluation
    # How the next try goes, as the ones before it have shown.
    needs_gradients: bool = field(default=False, init=False)
    gathers: bool = field(default=False, init=False)  # shares are tried together
    is_looked_at: bool = field(default=False, init=False)  # else what draws is refused
    factors: dict[Any, float] | None = field(default=None, init=False)  # of backwards, by rows
    noticed: Noticed = field(default_factory=Noticed, init=False)

    def __post_init__(self) -> None:
        self.dtype: torch.dtype | None = self.strategy.dtype
        self.moment = Moment(self.progress.epoch, self.progress.global_step)
        self.ends = math.inf

    @property
    def trains(self) -> bool:
        return not self.prefix

    def look(self, samples: Any, collate: Any) -> list[Drawn]:
        """What a step of these rows draws, in the modes that the task has."""
        self.noticed.drawn, self.is_looked_at = [], True
        rows = range(len(samples))
        try:
            self._tried(lambda: self._share(samples, rows, collate)._replace(total=len(rows)))
            return self.noticed.drawn
        except (NotCompared, Moved):
            raise
        except Exception as error:
            raise NotCompared(f"in training mode, a step says: {first_line(error)}") from None
        finally:
            self.is_looked_at = False

    def measured(self, samples: Any, cuts: Sequence[range], collate: Any) -> list[Measured]:
        """What the step gives for each cut, as shares of one batch."""
        shares = [partial(self._share, samples, cut, collate) for cut in cuts]
        if self.gathers and len(cuts) > 1:
            return self._together(shares)
        results = []
        for make in shares:
            self.refuse_late()
            try:
                results += [self._tried(make)]
            except Gathers:
                self.gathers = True
                return self._together(shares)
        return results

    def _tried(self, make: Callable[[], Share]) -> Measured:
        """Without gradients, unless the step needs them."""
        if not self.needs_gradients:
            try:
                return self._alone(make)
            except RuntimeError as error:
                if "grad" not in str(error):
                    raise
                self.needs_gradients = True
        return self._alone(make)

    def _alone(self, make: Callable[[], Share]) -> Measured:
        with self._trying(SharesOf(self.strategy)):
            share = make()
            with default_dtype(self.dtype):
                return self._differentiated([(share.rows, self._gathered(share))], [share])[0]

    def _together(self, shares: Sequence[Callable[[], Share]]) -> list[Measured]:
        """As replicas that gather each other's rows, in turns."""
        if self.strategy.sharding.cuts:
            raise NotCompared(f"it gathers rows, and {self.strategy.name} keeps parts of weights")
        with self._trying(strategy := Gatherable(self.strategy)):
            made = [make() for make in shares]
            tasks = {
                share.places: self._copied() if n else self.task for n, share in enumerate(made)
            }
            step = ShareStep(lambda share: self._step(share, tasks[share.places]))
            replicas = Replicas(step, [torch.device("cpu")] * len(made))
            with default_dtype(self.dtype):  # once: the replicas have threads
                results: list[Measured] = replicas(made)
                if strategy.is_differentiated:
                    self.noticed.likely = INNER
                return self._differentiated(results, made)

    def _differentiated(self, results: list[Measured], shares: list[Share]) -> list[Measured]:
        if self.factors is not None:
            pairs = zip(results, shares, strict=True)
            of = [(output["loss"], self.factors[share.rows]) for (_, output), share in pairs]
            losses = [loss * factor for loss, factor in of if factor]
            total = sum(losses[1:], losses[0]) if losses else None
            if total is not None and total.requires_grad:
                total.backward()
        return [(rows, detached(output)) for rows, output in results]

    def _copied(self) -> Task:
        """With the same weights, and buffers and attributes of its own, as in a process."""
        shared = {id(each): each for each in [*self.task.parameters(), *self._shared]}
        try:
            return deepcopy(self.task, shared)
        except Exception as error:
            if memory.ran_out(error):
                raise
            raise NotCompared(f"it gathers rows, and a copy says: {first_line(error)}") from None

    def _share(self, samples: Any, cut: range, collate: Any) -> Share:
        places: Sequence[int] = cut
        if isinstance(collate, ByName):
            places = OfSets(collate.places(samples)[cut.start : cut.stop])
        generators = Rows(None, collate).generators
        states = generators.states()
        batch = move(collate(samples[cut.start : cut.stop]), self.strategy.device, self.dtype)
        if generators.have_drawn(states):
            generators.restore(states)
            self.noticed.collate_draws = True
            if not self.is_looked_at:
                raise NotCompared("its collate draws random numbers")
        return Share(batch, len(cut), ROWS, places)

    def _gathered(self, share: Share) -> Output:
        """Where the weights are cut, every process computes the same rows at the same time."""
        return self.strategy.sharding.run_alone(self.task, self._step, share, self.task)

    def _step(self, share: Share, task: Task) -> Output:
        draws, states = DrawRecorder(self.strategy.device), foreign_states()
        is_kept = self.is_looked_at and self.trains
        before = kept_in(task) if is_kept else {}
        random_state = seeding.random_state() if is_kept else {}
        trained = _in_training(task)
        output = self._called(share, task, draws)
        seen = draws.seen
        if foreign_states() != states:
            seen.append(Drawn(FOREIGN, None, None))
        self.noticed.drawn = [*self.noticed.drawn, *seen] if self.is_looked_at else seen
        if seen and not self.is_looked_at:
            by = seen[0].by
            how = "" if by == FOREIGN else "torch's "
            more = "" if by == FOREIGN else "; self.randn_rows makes it comparable"
            raise NotCompared(f"it draws by {how}{by}{more}")
        if not isinstance(output, dict) or (self.trains and not is_number(output.get("loss"))):
            raise NotCompared("the step returns no loss")
        if self.in_training:
            self.noticed.statistics[share.places] = sums_of_buffers(task)
        elif not self.is_looked_at and trained < _in_training(task):
            raise NotCompared("the step puts modules into training mode itself")
        if is_kept and (names := moving(before, once := kept_in(task))):
            seeding.restore_random_state(random_state)
            if self._depends(share, task, output["loss"]):
                twice = kept_in(task)
                names &= moving(once, twice)
                self.noticed.kept[share.rows] = {name: once[name] for name in names}
                self.noticed.in_place |= {
                    name for name in names if twice[name].object == once[name].object
                }
        return output if self.factors is not None else detached(output)

    def _called(self, share: Share, task: Task, within: AbstractContextManager[Any]) -> Output:
        turn = (self.turn,) if self.turn else ()
        turn_or_none = self.turn if self.trains else None
        of_share = current_share.of(share, task.run_context, turn_or_none)
        with of_share, self._unwritten(), within:
            output = task.adapter.step_alone(task, self.step, share.batch, *turn, **self.named)
            return one_loss(output, task, self.step)

    def _depends(self, share: Share, task: Task, loss: Any) -> bool:
        """Whether a step of the same rows, and of the same random numbers, has another loss now."""
        try:
            again = self._called(share, task, ongoing.watch.resting())["loss"]
        except Exception:
            return False  # which the run will say
        return not math.isclose(float(loss), float(again), rel_tol=AGAIN)

    def _unwritten(self) -> Any:
        """Where weights are cut, those that a step sees are gathered for it."""
        if self.strategy.sharding.cuts:
            return nullcontext()
        large = (each for each in self._shared if isinstance(each, Tensor))
        unnamed = {f"a tensor of {each.nbytes} bytes": each for each in large}
        return Unwritten(unnamed | dict(self.task.named_parameters()))

    @contextmanager
    def _trying(self, strategy: Any) -> Iterator[None]:
        """Everything is as before, before and after."""
        context = self.task.run_context
        weights = Watched(self.task.named_parameters())
        weights.begin()
        try:
            with ExitStack() as stack:
                copies = stack.enter_context(put_back(self.task))
                if self.is_brief and copies.opaque:
                    raise NotCompared(f"a {type(copies.opaque[0]).__name__} has no copy")
                self._shared = copies.shared
                stack.enter_context(seeding.seeded(0))
                stack.enter_context(torch.set_grad_enabled(self.needs_gradients))
                stack.enter_context(nothing_tuned())
                stack.callback(setattr, self.task, "run_context", context)
                self.task.run_context = TaskContext(self.moment, strategy, seed=context.seed)
                yield
        finally:
            if not self.strategy.sharding.cuts and (changed := weights.changed()):
                raise Moved(
                    f"{type(self.task).__name__}.{self.step} changes {changed} in "
                    "place, which the share check can neither foresee nor take back; "
                    "trainer.share_check=off leaves it out"
                )

    def refuse_late(self) -> None:
        if time.perf_counter() > self.ends:
            raise NotCompared(f"it takes more than {BRIEF_SECONDS} s")


def _in_training(task: Task) -> int:
    """How many modules are."""
    return sum(module.training for module in task.modules())


class Moved(UserError):
    """A step has changed a weight for good."""
