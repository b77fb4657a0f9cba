"""The share check: before a fit on several replicas, whether a loss is a mean over its rows.

It takes five rows in one share, and as shares of three and two. A loss that is another one then
would train other weights on each number of replicas; a number that is another one is logged as the
mean of its shares'. State and random numbers are as before it.
"""

import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dpframe import seeding
from dpframe.accelerator import has_float64
from dpframe.data import Share, move
from dpframe.data.divided import first_of
from dpframe.data.source import Source
from dpframe.errors import UserError, first_line
from dpframe.metrics import SOMETIMES_WEIGHTED, is_number
from dpframe.rows import current_share
from dpframe.strategies.base import Strategy
from dpframe.strategies.data_parallel import DataParallel, Replicas
from dpframe.task import Output, Task, TaskContext
from dpframe.trainer.draws import AlikeDraws, NotCompared
from dpframe.trainer.evaluation import restore_modes
from dpframe.trainer.outputs import Measured, detached, one_loss
from dpframe.trainer.placement import default_dtype
from dpframe.trainer.put_back import put_back, widened
from dpframe.trainer.updates import Updates

log = logging.getLogger("dpframe")
# No share has one row, which an honest squeeze() or std() would not survive.
ROWS, CUT = 5, 3
AGAIN, CUT_AGAIN = 13, 7  # where random numbers may have a size of rows by chance
EXACT = 1e-6  # in float64, of the numbers that are added
ROUNDINGS = 64  # in float32, from which on float64 is asked
TINY = 1e-9  # a loss that is smaller is rounding
HALVES = (torch.float16, torch.bfloat16)
LARGE = 1e-4  # in float32, where the step can't be computed in float64
SLOW_SECONDS = 1.0
WAYS = (
    'return its "weight" (tokens, boxes) where it is a mean over something else, or a dict of '
    '{"boxes": (mean, how_many)} where it has several, multiply a sum by self.batch_rows / '
    "len(rows), and take what needs all rows from self.all_gather"
)
NOT_COMPARED = "the share check has not compared the loss"
TRAIN_ANYWAY = "trainer.share_check=warn trains anyway"


class Verdict(NamedTuple):
    refusal: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Difference(NamedTuple):
    name: str
    whole: float
    parts: float
    off: float  # of the size of what is added


def check_shares(
    task: Task, strategy: Strategy, source: Source, updates: Updates, progress: Any, mode: str
) -> Verdict:
    """Refuses a loss that depends on the shares, and warns of other numbers.

    Logical shares are the same on any number of replicas, so that nothing depends on these."""
    if mode == "off" or strategy.replicas == 1 or strategy.logical_shares:
        return Verdict()
    if updates.by_hand is not None:
        return Verdict(notes=(f"{NOT_COMPARED}: the task steps its optimizers itself",))
    if strategy.sharding is not None and strategy.sharding.rounds:
        return Verdict(notes=(f"{NOT_COMPARED}: strategy.param_dtype rounds the weights",))
    verdict = judge(task, strategy, source, [*updates], progress, mode)
    # Where processes round otherwise, all of them do what the main one does.
    verdict = Verdict(*strategy.collectives.broadcast(tuple(verdict)))
    if verdict.refusal:
        raise UserError(verdict.refusal)
    for warning in verdict.warnings if strategy.is_main else ():
        log.warning(warning)
    return verdict


def judge(
    task: Task, strategy: Strategy, source: Source, turns: Sequence[str], progress: Any, mode: str
) -> Verdict:
    began = time.perf_counter()
    refusal, warnings, notes = "", [], []
    for turn in turns:
        of_turn = f" of turn {turn}" if turn else ""
        trial = Trial(task, strategy, progress, turn)
        try:
            found = trial.differences(source)
            if found and trial.draws:
                again = Trial(task, strategy, progress, turn, rows=AGAIN, cut=CUT_AGAIN)
                names = {each.name for each in again.differences(source)}
                found = [each for each in found if each.name in names]
        except NotCompared as why:
            notes.append(f"{NOT_COMPARED}{of_turn}: {why}")
            continue
        for each in found:
            said = _described(each, task, of_turn, strategy.replicas)
            if each.name == "loss" and mode != "warn":
                refusal = refusal or f"{said}; {WAYS}; {TRAIN_ANYWAY}"
            elif mode == "strict":
                refusal = refusal or f"{said}; trainer.share_check=on warns of it"
            else:
                warnings.append(said)
    if (seconds := time.perf_counter() - began) > SLOW_SECONDS:
        notes.append(f"the share check took {seconds:.1f} s; trainer.share_check=off leaves it out")
    return Verdict(refusal, tuple(warnings), tuple(notes))


def _described(found: Difference, task: Task, of_turn: str, replicas: int) -> str:
    kind = (task.own_class or type(task)).__name__
    numbers = f"{found.whole:.6g} for {ROWS} rows, {found.parts:.6g} for shares of 3 and 2"
    if found.name == "loss":
        by = f"{100 * found.off:.2g}%" if math.isfinite(found.off) else "not finite"
        return (
            f"the loss of {kind}{of_turn} depends on how its rows are shared ({numbers}: {by}), so "
            f"{replicas} replicas would train by another loss than one"
        )
    return (
        f"{found.name} of {kind}{of_turn} is no mean over rows ({numbers}): on {replicas} replicas "
        "it is the mean of what their shares give; log a torchmetric, or gather the rows"
    )


@dataclass
class Trial:
    """The step of a task, or of one of its turns, on a few rows."""

    task: Task
    strategy: Strategy
    progress: Any
    turn: str = ""
    needs_gradients: bool = False
    rows: int = ROWS
    cut: int = CUT
    exact: float = EXACT
    gathers: bool = field(default=False, init=False)
    draws: bool = field(default=False, init=False)
    shapes: list[list[Any]] = field(default_factory=list, init=False)  # of each share's draws
    is_told: bool = field(default=False, init=False)  # by any rows

    def __post_init__(self) -> None:
        self.dtype: torch.dtype | None = self.strategy.dtype

    def differences(self, source: Source) -> list[Difference]:
        found: dict[str, Difference] = {}
        with seeding.seeded(0), restore_modes(self.task):
            self.task.eval()
            for samples in picked(source.dataset, self.rows):
                apart = []
                if not (is_half := _dtype(self.task) in HALVES):
                    apart = self.compare(samples, source.collate, self._limit())
                if is_half or (apart and _dtype(self.task) != torch.float64):
                    apart = self._beyond_rounding(apart, samples, source.collate)
                found = {each.name: each for each in apart} | found
        if not (found or self.is_told):
            raise NotCompared(
                "on the rows that it looks at the loss is 0 or NaN, or counts nothing"
            )
        return sorted(found.values(), key=lambda each: each.name != "loss")

    def compare(self, samples: Any, collate: Any, limit: float) -> list[Difference]:
        """The numbers of all samples that are not the means of their shares' by `limit`."""
        self.shapes.clear()
        try:
            rows = range(self.rows)
            ((_, whole),) = self.measured(samples, [rows], collate)
            parts = self.measured(samples, [rows[: self.cut], rows[self.cut :]], collate)
        except NotCompared:
            raise
        except Exception as error:
            raise NotCompared(f"a step of a few rows says: {first_line(error)}") from None
        pairs = list(compared(whole, parts))
        self.is_told |= any(p.name == "loss" and p.whole and math.isfinite(p.whole) for p in pairs)
        return self._trusted([each for each in pairs if not each.off <= limit], whole)

    def _trusted(self, apart: list[Difference], whole: Output) -> list[Difference]:
        """Without those that other draws or few digits may have made."""
        halves = {n for n, v in whole.items() if isinstance(v, Tensor) and v.dtype in HALVES}
        why = ""
        if any(shapes != self.shapes[0] or None in shapes for shapes in self.shapes):
            why = "it draws random numbers, and not the same for each row"
        elif "loss" in halves:
            why = "it is computed in 16 bits"
        if why and any(each.name == "loss" for each in apart):
            raise NotCompared(why)
        return [] if why else [each for each in apart if each.name not in halves]

    def _limit(self) -> float:
        dtype = _dtype(self.task)
        return self.exact if dtype == torch.float64 else ROUNDINGS * torch.finfo(dtype).eps

    def _beyond_rounding(
        self, apart: list[Difference], samples: Any, collate: Any
    ) -> list[Difference]:
        """Those that are apart in float64, too; where the step can't do it, the large ones."""
        before = self.dtype
        if has_float64(self.strategy.device) and self.strategy.sharding is None:
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

    def measured(self, samples: Any, cuts: Sequence[range], collate: Any) -> list[Measured]:
        """What the step gives for each cut, as shares of one batch."""
        shares = [partial(self._share, samples, cut, collate) for cut in cuts]
        if self.gathers and len(cuts) > 1:
            return self._together(shares)
        results = []
        for make in shares:
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
            alike = AlikeDraws(share.rows, self.strategy.device)
            states = _foreign_states()
            with default_dtype(self.dtype), alike:
                output = self._gathered(share)
            alike.refuse_unseen()
            self.draws |= alike.draws
            self.shapes.append(alike.shapes)
            if _foreign_states() != states:
                raise NotCompared("it draws by Python's or NumPy's random numbers")
            return share.rows, output

    def _together(self, shares: Sequence[Callable[[], Share]]) -> list[Measured]:
        """As replicas that gather each other's rows, in turns."""
        if self.strategy.sharding is not None:
            raise NotCompared(f"it gathers rows, and {self.strategy.name} keeps parts of weights")
        with self._trying(Gatherable(self.strategy)):
            made = [make() for make in shares]
            tasks = {
                share.places: self._copied() if n else self.task for n, share in enumerate(made)
            }
            before = torch.get_rng_state()
            step = ShareStep(lambda share: self._step(share, tasks[share.places]))
            replicas = Replicas(step, [torch.device("cpu")] * len(made))
            with default_dtype(self.dtype):  # once: the replicas have threads
                results: list[Measured] = replicas(made)
            if not torch.equal(before, torch.get_rng_state()):
                raise NotCompared("it gathers rows and draws random numbers")
            return results

    def _copied(self) -> Task:
        """With the same trained weights, and buffers and attributes of its own, as in a process."""
        shared = {id(weight): weight for weight in self.task.parameters() if weight.requires_grad}
        try:
            return deepcopy(self.task, shared)
        except Exception as error:
            raise NotCompared(f"it gathers rows, and a copy says: {first_line(error)}") from None

    def _share(self, samples: Any, cut: range, collate: Any) -> Share:
        states = torch.get_rng_state(), _foreign_states()
        batch = move(collate(samples[cut.start : cut.stop]), self.strategy.device, self.dtype)
        if not torch.equal(states[0], torch.get_rng_state()) or states[1] != _foreign_states():
            raise NotCompared("its collate draws random numbers")
        return Share(batch, len(cut), self.rows, cut)

    def _gathered(self, share: Share) -> Output:
        """Where the weights are cut, every process computes the same rows at the same time."""
        if self.strategy.sharding is None:
            return self._step(share, self.task)
        return self.strategy.sharding.run_alone(self.task, self._step, share, self.task)

    def _step(self, share: Share, task: Task) -> Output:
        with current_share.of(share, self.turn):
            output = task.step_alone(share.batch, *([self.turn] if self.turn else []))
            output = one_loss(output, task, "training_step")
        if not isinstance(output, dict) or not is_number(output.get("loss")):
            raise NotCompared("the step returns no loss")
        return detached(output)

    @contextmanager
    def _trying(self, strategy: Any) -> Iterator[None]:
        """Everything is as before, before and after."""
        context = self.task.run_context
        with ExitStack() as stack:
            stack.enter_context(put_back(self.task))
            stack.enter_context(seeding.seeded(0))
            stack.enter_context(torch.set_grad_enabled(self.needs_gradients))
            stack.callback(setattr, self.task, "run_context", context)
            self.task.run_context = TaskContext(self.progress, strategy, seed=context.seed)
            yield


class Gathers(Exception):
    """A step wants the rows of the other shares."""


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


def picked(dataset: Any, count: int) -> Iterator[list[Any]]:
    """The first rows of a data set, and as many from all over it; the first ones of a stream."""
    if isinstance(dataset, IterableDataset):
        rows = _first(dataset, 2 * count)
        yield from (rows[at : at + count] for at in range(0, len(rows) - count + 1, count))
        return
    if len(dataset) < count:
        raise NotCompared(f"there are fewer than {count} rows")
    spread = [place * (len(dataset) - 1) // (count - 1) for place in range(count)]
    for rows in [list(range(count)), spread][: 1 if len(dataset) < 2 * count else 2]:
        try:
            getitems = getattr(dataset, "__getitems__", None)
            samples = getitems(rows) if getitems else [dataset[row] for row in rows]
        except Exception as error:  # the run will say so, with its place
            raise NotCompared(f"a row that is read says: {first_line(error)}") from None
        if not isinstance(samples, list):
            raise NotCompared("rows are not read one by one")
        yield samples


def _first(stream: Any, count: int) -> list[Any]:
    try:
        rows = first_of(stream, count)
    except Exception as error:
        raise NotCompared(f"a copy of the stream says: {first_line(error)}") from None
    if len(rows) < count // 2:
        raise NotCompared(f"there are fewer than {count // 2} rows")
    return rows


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
