"""A trial: what a step gives for a few rows in one share, and in shares of some of them.

State and random numbers are as before it.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dpframe import seeding
from dpframe.data import Share, move
from dpframe.devices import memory
from dpframe.devices.accelerator import has_float64
from dpframe.errors import UserError, first_line
from dpframe.metrics import SOMETIMES_WEIGHTED, is_number
from dpframe.parameters import Watched
from dpframe.rows import current_share
from dpframe.strategies.base import Strategy
from dpframe.strategies.data_parallel import DataParallel, Replicas
from dpframe.task import Output, Task, TaskContext
from dpframe.trainer.checks.broadcasts import Broadcasts
from dpframe.trainer.checks.draws import Draws, NotCompared
from dpframe.trainer.checks.few_rows import picked
from dpframe.trainer.checks.put_back import Unwritten, floats_of, put_back, widened
from dpframe.trainer.compute.placement import default_dtype
from dpframe.trainer.evaluation import restore_modes
from dpframe.trainer.outputs import Measured, detached, one_loss

# No share has one row, which an honest squeeze() or std() would not survive.
ROWS, CUT = 5, 3
EXACT = 1e-6  # in float64, of the numbers that are added
ROUNDINGS = 64  # in float32, from which on float64 is asked
TINY = 1e-9  # a loss that is smaller is rounding
HALVES = (torch.float16, torch.bfloat16)
LARGE = 1e-4  # in float32, where the step can't be computed in float64
BRIEF_SECONDS = 0.5
FREE = 4  # times the memory that the weights take in float64 has to be free


class Difference(NamedTuple):
    """A number that shares give otherwise than the whole."""

    name: str
    whole: float
    parts: float
    off: float  # of the size of what is added
    step: int = 0  # at which it is so, if not from the first one on


class Moment:
    """How far a run has come, in a trial, and whether the step has asked for that."""

    def __init__(self, epoch: int, global_step: int) -> None:
        self._epoch, self._global_step = epoch, global_step
        self.is_asked = False

    @property
    def epoch(self) -> int:
        self.is_asked = True
        return self._epoch

    @property
    def global_step(self) -> int:
        self.is_asked = True
        return self._global_step


@dataclass
class Trial:
    """A step of a task, or of one of its turns, on a few rows; `later` are epochs and steps at
    which it is tried again if it asks for these."""

    task: Task
    strategy: Strategy
    progress: Any
    turn: str = ""
    step: str = "training_step"
    named: Mapping[str, str] = field(default_factory=dict)  # what else it takes
    prefix: str = ""  # of the numbers of an evaluation, e.g. val, or val/clean of the set `clean`
    later: Sequence[tuple[int, int]] = ()
    exact: float = EXACT
    is_brief: bool = False  # on few rows, given up where it takes long or may leave something
    not_compared: list[str] = field(default_factory=list, init=False)  # at a later step
    needs_gradients: bool = field(default=False, init=False)
    gathers: bool = field(default=False, init=False)
    is_told: bool = field(default=False, init=False)  # by any rows
    broadcast: str = field(default="", init=False)  # what may make the loss another one

    def __post_init__(self) -> None:
        self.dtype: torch.dtype | None = self.strategy.dtype
        self.moment = Moment(self.progress.epoch, self.progress.global_step)

    @property
    def trains(self) -> bool:
        return not self.prefix

    def differences(self, source: Any) -> list[Difference]:
        """The numbers of all rows that are not the means of their shares'."""
        try:
            return self._differences(source)
        except Exception as error:
            if not memory.ran_out(error):
                raise
            why = f"there is not enough memory: {first_line(error)}"
        raise NotCompared(why)  # where nothing holds what it had

    def _differences(self, source: Any) -> list[Difference]:
        found: dict[str, Difference] = {}
        first: Any = None
        self._ends = time.perf_counter() + (BRIEF_SECONDS if self.is_brief else math.inf)
        with seeding.seeded(0), restore_modes(self.task):
            self.task.eval()
            for samples in self._picked(source.dataset):
                first = first or samples
                apart = self._apart(samples, source.collate)
                if any(each.name == "loss" for each in apart):
                    self.broadcast = self._broadcast(samples, source.collate)
                found = {each.name: each for each in apart} | found
            for epoch, step in self.later if self.moment.is_asked else ():
                self.moment = Moment(epoch, step)
                try:
                    apart = self._apart(first, source.collate)
                except NotCompared as why:
                    self.not_compared.append(f"at step {step}: {why}")
                    break
                found = {each.name: each._replace(step=step) for each in apart} | found
        if not (found or self.is_told):
            raise NotCompared(
                "on the rows that it looks at the loss is 0 or NaN, or counts nothing"
            )
        return sorted(found.values(), key=lambda each: each.name != "loss")

    def _picked(self, dataset: Any) -> Iterable[list[Any]]:
        if not self.is_brief:
            return picked(dataset, ROWS)
        if isinstance(dataset, IterableDataset):
            raise NotCompared("a stream may take long to begin")
        return picked(dataset, ROWS, only_spread=True, refuse_late=self._refuse_late)

    def _refuse_late(self) -> None:
        if time.perf_counter() > self._ends:
            raise NotCompared(f"it takes more than {BRIEF_SECONDS} s")

    def _broadcast(self, samples: Any, collate: Any) -> str:
        if self.broadcast or self.strategy.sharding is not None:  # of processes, one may be here
            return self.broadcast
        with Broadcasts(ROWS) as broadcasts, suppress(Exception):
            self.measured(samples, [range(ROWS)], collate)
        return broadcasts.first

    def _apart(self, samples: Any, collate: Any) -> list[Difference]:
        apart = []
        if not (is_half := _dtype(self.task) in HALVES):
            apart = self.compare(samples, collate, self._limit())
        if is_half or (apart and _dtype(self.task) != torch.float64):
            apart = self._beyond_rounding(apart, samples, collate)
        return apart

    def compare(self, samples: Any, collate: Any, limit: float) -> list[Difference]:
        """The numbers of all samples that are not the means of their shares' by `limit`."""
        try:
            rows = range(ROWS)
            ((_, whole),) = self.measured(samples, [rows], collate)
            parts = self.measured(samples, [rows[:CUT], rows[CUT:]], collate)
            pairs = list(compared(whole, parts))
        except NotCompared:
            raise
        except Exception as error:
            if memory.ran_out(error) or isinstance(error, Moved):
                raise
            said = first_line(error)
            raise NotCompared(f"in evaluation mode, a step of a few rows says: {said}") from None
        numbers = [each.whole for each in pairs if each.name == "loss" or not self.trains]
        self.is_told |= any(number and math.isfinite(number) for number in numbers)
        return self._trusted([each for each in pairs if not each.off <= limit], whole)

    def _trusted(self, apart: list[Difference], whole: Output) -> list[Difference]:
        """Without those that few digits may have made."""
        halves = {n for n, v in whole.items() if isinstance(v, Tensor) and v.dtype in HALVES}
        if "loss" in halves and any(each.name == "loss" for each in apart):
            raise NotCompared("it is computed in 16 bits")
        return [each for each in apart if each.name not in halves]

    def _limit(self) -> float:
        dtype = _dtype(self.task)
        return self.exact if dtype == torch.float64 else ROUNDINGS * torch.finfo(dtype).eps

    def _beyond_rounding(
        self, apart: list[Difference], samples: Any, collate: Any
    ) -> list[Difference]:
        """Those that are apart in float64, too; where the step can't do it, the large ones."""
        before = self.dtype
        if self._fits_in_float64():
            self.dtype = torch.float64
            try:
                with widened(self.task):
                    return self.compare(samples, collate, self.exact)
            except NotCompared:
                pass
            finally:
                self.dtype = before
        if _dtype(self.task) in HALVES:
            raise NotCompared("its weights have 16 bits")
        return [each for each in apart if not each.off <= LARGE]

    def _fits_in_float64(self) -> bool:
        device = self.strategy.device
        if not has_float64(device) or self.strategy.sharding is not None:
            return False
        free = memory.free(device) or 0
        if device.type == "cpu":  # for all ranks here
            free //= self.strategy.world_size
        return FREE * 8 * sum(tensor.numel() for tensor in floats_of(self.task)) <= free

    def measured(self, samples: Any, cuts: Sequence[range], collate: Any) -> list[Measured]:
        """What the step gives for each cut, as shares of one batch."""
        shares = [partial(self._share, samples, cut, collate) for cut in cuts]
        if self.gathers and len(cuts) > 1:
            return self._together(shares)
        results = []
        for make in shares:
            self._refuse_late()
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
                return share.rows, self._gathered(share)

    def _together(self, shares: Sequence[Callable[[], Share]]) -> list[Measured]:
        """As replicas that gather each other's rows, in turns."""
        if self.strategy.sharding is not None:
            raise NotCompared(f"it gathers rows, and {self.strategy.name} keeps parts of weights")
        with self._trying(Gatherable(self.strategy)):
            made = [make() for make in shares]
            tasks = {
                share.places: self._copied() if n else self.task for n, share in enumerate(made)
            }
            step = ShareStep(lambda share: self._step(share, tasks[share.places]))
            replicas = Replicas(step, [torch.device("cpu")] * len(made))
            with default_dtype(self.dtype):  # once: the replicas have threads
                results: list[Measured] = replicas(made)
            return results

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
        states = torch.get_rng_state(), _foreign_states()
        batch = move(collate(samples[cut.start : cut.stop]), self.strategy.device, self.dtype)
        if not torch.equal(states[0], torch.get_rng_state()) or states[1] != _foreign_states():
            raise NotCompared("its collate draws random numbers")
        return Share(batch, len(cut), ROWS, cut)

    def _gathered(self, share: Share) -> Output:
        """Where the weights are cut, every process computes the same rows at the same time."""
        if self.strategy.sharding is None:
            return self._step(share, self.task)
        return self.strategy.sharding.run_alone(self.task, self._step, share, self.task)

    def _step(self, share: Share, task: Task) -> Output:
        draws, states = Draws(self.strategy.device), _foreign_states()
        turn = (self.turn,) if self.turn else ()
        of_share = current_share.of(share, self.turn if self.trains else None)
        with of_share, self._unwritten(), draws:
            output = task.step_alone(self.step, share.batch, *turn, **self.named)
            output = one_loss(output, task, self.step)
        if draws.seen:
            by = draws.seen[0].by
            raise NotCompared(f"it draws by torch's {by}; self.randn_rows makes it comparable")
        if _foreign_states() != states:
            raise NotCompared("it draws by Python's or NumPy's random numbers")
        if not isinstance(output, dict) or (self.trains and not is_number(output.get("loss"))):
            raise NotCompared("the step returns no loss")
        return detached(output)

    def _unwritten(self) -> Any:
        """Where weights are cut, those that a step sees are gathered for it."""
        if self.strategy.sharding is not None:
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
            if self.strategy.sharding is None and (changed := weights.changed()):
                raise Moved(
                    f"{type(self.task).__name__}.{self.step} changes {changed} in "
                    "place, which the share check can neither foresee nor take back; "
                    "trainer.share_check=off leaves it out"
                )


class Gathers(Exception):
    """A step wants the rows of the other shares."""


class Moved(UserError):
    """A step has changed a weight for good."""


class SharesOf:
    """A strategy as a share's step sees it when it is computed alone."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        if current_share.rows == current_share.total:
            return x
        raise Gathers


class Gatherable(SharesOf):
    """Shares that a step may gather."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.gather_rows = DataParallel().gather_rows  # type: ignore[method-assign]


class ShareStep(nn.Module):
    """A step for `Replicas`."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.step = step

    def forward(self, share: Share) -> list[Measured]:
        return [(share.rows, self.step(share))]

    @staticmethod
    def combine(results: list[list[Measured]]) -> list[Measured]:
        return list(chain(*results))


@contextmanager
def nothing_tuned() -> Iterator[None]:
    """No kernel is chosen by its speed, and nothing is compiled, for a few rows."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    has_compiled = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if has_compiled else nullcontext():
            yield
    finally:
        torch.backends.cudnn.benchmark = before


def compared(whole: Output, parts: Sequence[Measured]) -> Iterator[Difference]:
    """Each number of all rows, and the mean of its shares'."""
    if len({"weight" in output for output in [whole, *(output for _, output in parts)]}) > 1:
        raise NotCompared(SOMETIMES_WEIGHTED)
    weights = [float(output.get("weight", rows)) for rows, output in parts]
    if not (total := sum(weights)):
        return
    for name, value in whole.items():
        others = [output.get(name) for _, output in parts]
        if name == "weight" or not all(map(is_number, [value, *others])):
            continue
        of_all, *of_parts = map(_number, (value, *others))
        pairs = [(v, w) for v, w in zip(of_parts, weights, strict=True) if w]
        mean = sum(v * w for v, w in pairs) / total
        size = max(abs(of_all), sum(abs(v) * w for v, w in pairs) / total, TINY)
        is_alike = of_all == mean or (math.isnan(of_all) and math.isnan(mean))
        off = 0.0 if is_alike else abs(of_all - mean) / size if math.isfinite(size) else math.inf
        yield Difference(name, of_all, mean, off)


def _dtype(task: Task) -> torch.dtype:
    """The widest of its floats."""
    floats = {weight.dtype for weight in task.parameters() if weight.is_floating_point()}
    return max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)


def _foreign_states() -> Any:
    numpy = sys.modules.get("numpy")
    state = random.getstate()
    if numpy is None:
        return state
    _, keys, position, *_ = numpy.random.get_state()
    return state, keys.tobytes(), position
