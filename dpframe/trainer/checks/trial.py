"""A trial: what a step gives for a few rows in one share, and in shares of some of them.

State and random numbers are as before it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from dpframe import seeding
from dpframe.devices import memory
from dpframe.devices.accelerator import has_float64
from dpframe.errors import first_line
from dpframe.task import Output, Task
from dpframe.trainer.checks.broadcasts import Broadcasts
from dpframe.trainer.checks.differences import Difference, compared
from dpframe.trainer.checks.draws import NotCompared
from dpframe.trainer.checks.few_rows import picked
from dpframe.trainer.checks.gradients import (
    FORWARD_SECONDS,
    MOST_WEIGHTS,
    gradients_apart,
    projected,
)
from dpframe.trainer.checks.put_back import floats_of, widened
from dpframe.trainer.checks.statistics import unlike
from dpframe.trainer.checks.step_on_shares import BRIEF_SECONDS, INNER, ROWS, Moved, StepOnShares
from dpframe.trainer.checks.surroundings import Moment
from dpframe.trainer.evaluation import restore_modes
from dpframe.trainer.outputs import Measured

CUT = 3  # no share has one row, which an honest squeeze() or std() would not survive
EXACT = 1e-6  # in float64, of the numbers that are added
ROUNDINGS = 64  # in float32, from which on float64 is asked
TRAINING = "in training mode"
HALVES = (torch.float16, torch.bfloat16)
LARGE = 1e-4  # in float32, where the step can't be computed in float64
FREE = 4  # times the memory that the weights take in float64 has to be free


@dataclass
class Trial(StepOnShares):
    """Compares the numbers of a few rows in one share with those of shares of some of them.

    `later` are epochs and steps at which it does so again if the step asks for these."""

    later: Sequence[tuple[int, int]] = ()
    exact: float = EXACT

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
        self.ends = time.perf_counter() + (BRIEF_SECONDS if self.is_brief else math.inf)
        with seeding.seeded(0), restore_modes(self.task), self.alone():
            if not self.in_training:
                self.task.eval()
            for samples in self.picked(source.dataset):
                first = first or samples
                apart = self._apart_in_a_mode(samples, source.collate)
                if any(each.name == "loss" for each in apart):
                    self._notice_broadcast(samples, source.collate)
                found = {each.name: each for each in apart} | found
            for epoch, step in self.later if self.moment.is_asked else ():
                self.moment = Moment(epoch, step)
                try:
                    apart = self._apart(first, source.collate)
                except NotCompared as why:
                    self.noticed.not_compared.append(f"at step {step}: {why}")
                    break
                found = {each.name: each._replace(step=step) for each in apart} | found
        if not (found or self.noticed.is_told):
            raise NotCompared(
                "on the rows that it looks at the loss is 0 or NaN, or counts nothing"
            )
        return sorted(found.values(), key=lambda each: each.name != "loss")

    def picked(self, dataset: Any) -> Iterable[list[Any]]:
        if not self.is_brief:
            return picked(dataset, ROWS)
        if isinstance(dataset, IterableDataset):
            raise NotCompared("a stream may take long to begin")
        return picked(dataset, ROWS, only_spread=True, refuse_late=self.refuse_late)

    def _notice_broadcast(self, samples: Any, collate: Any) -> None:
        if self.noticed.likely or self.strategy.sharding.cuts:  # of processes, one may be here
            return
        with Broadcasts(ROWS) as broadcasts, suppress(Exception):
            self.measured(samples, [range(ROWS)], collate)
        self.noticed.likely = broadcasts.first

    def _apart_in_a_mode(self, samples: Any, collate: Any) -> list[Difference]:
        """In training mode if it can be, else in evaluation."""
        if self.in_training:
            try:
                return self._apart(samples, collate)
            except NotCompared as why:
                if not self.noticed.with_statistics:
                    said = str(why).removeprefix(f"{TRAINING}, ")
                    self.noticed.not_compared.append(f"{TRAINING}: {said}")
            self.in_training = self.gathers = self.needs_gradients = False
            self.task.eval()
        return self._apart(samples, collate)

    def _apart(self, samples: Any, collate: Any) -> list[Difference]:
        apart = []
        if not (is_half := _dtype(self.task) in HALVES):
            apart = self.compare(samples, collate, self._limit())
        if is_half or (apart and _dtype(self.task) != torch.float64):
            apart = self._beyond_rounding(apart, samples, collate)
        return apart

    def compare(self, samples: Any, collate: Any, limit: float) -> list[Difference]:
        """The numbers of all samples that are not the means of their shares' by `limit`."""
        self.noticed.statistics.clear()
        try:
            rows, times = range(ROWS), [time.thread_time()]
            ((_, whole),) = self.measured(samples, [rows], collate)
            times.append(time.thread_time())
            parts = self.measured(samples, [rows[:CUT], rows[CUT:]], collate)
            times.append(time.thread_time())
            seconds = min(b - a for a, b in pairwise(times))  # other processes take turns, too
            self._refuse_statistics()
            pairs = list(compared(whole, parts))
            if self._compares_gradients(pairs, limit, whole, seconds):
                pairs += self._gradients_apart(samples, collate, parts)
        except NotCompared:
            raise
        except Exception as error:
            if memory.ran_out(error) or isinstance(error, Moved):
                raise
            mode = TRAINING if self.in_training else "in evaluation mode"
            said = first_line(error)
            raise NotCompared(f"{mode}, a step of a few rows says: {said}") from None
        numbers = [each.whole for each in pairs if each.name == "loss" or not self.trains]
        self.noticed.is_told |= any(number and math.isfinite(number) for number in numbers)
        return self._trusted([each for each in pairs if not each.off <= limit], whole)

    def _refuse_statistics(self) -> None:
        """What differs between shares."""
        if not self.in_training or self.noticed.likely == INNER:  # by which they are others, too
            return
        whole, *parts = self.noticed.statistics.values()
        self.noticed.with_statistics |= set[str]().union(*(unlike(whole, part) for part in parts))
        if self.noticed.with_statistics:
            raise NotCompared("it keeps statistics of a share")

    def _compares_gradients(
        self, pairs: list[Difference], limit: float, whole: Output, seconds: float
    ) -> bool:
        if not self.trains or self.is_brief:
            return False
        if any(each.name == "loss" and not each.off <= limit for each in pairs):
            return False
        if why := self._too_much_for_gradients(seconds):
            self.noticed.gradients_left_out = why
        if self.noticed.gradients_left_out:
            return False
        loss = whole["loss"]
        return not (isinstance(loss, Tensor) and loss.dtype in HALVES)

    def _too_much_for_gradients(self, seconds: float) -> str:
        """Why; `seconds` are those of a step."""
        if self.strategy.sharding.cuts:
            return "each rank holds a part of each weight"
        if sum(w.numel() for w in self.task.parameters() if w.requires_grad) > MOST_WEIGHTS:
            return f"there are more than {MOST_WEIGHTS:,} weights"
        if seconds > FORWARD_SECONDS:
            return f"a step of a few rows takes more than {FORWARD_SECONDS} s"
        return ""

    def _gradients_apart(
        self, samples: Any, collate: Any, parts: list[Measured]
    ) -> Iterator[Difference]:
        weights = [float(output.get("weight", rows)) for rows, output in parts]
        rows = range(ROWS)
        before, self.needs_gradients = self.needs_gradients, True
        found: list[dict[str, list[Tensor]]] = []
        try:
            for cuts, of in (([rows], [sum(weights)]), ([rows[:CUT], rows[CUT:]], weights)):
                total = sum(of) or 1.0
                self.factors = {len(cut): w / total for cut, w in zip(cuts, of, strict=True)}
                with projected(dict(self.task.named_parameters())) as numbers:
                    self.measured(samples, cuts, collate)
                found.append(numbers)
        finally:
            self.factors, self.needs_gradients = None, before
        dtype = self.dtype or _dtype(self.task)
        for name, whole, shares, off in gradients_apart(found[0], found[1], dtype):
            yield Difference("loss", whole, shares, off, weight=name)

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
        if not has_float64(device) or self.strategy.sharding.cuts:
            return False
        free = memory.free(device) or 0
        if device.type == "cpu":  # for all ranks here
            free //= self.strategy.world_size
        return FREE * 8 * sum(tensor.numel() for tensor in floats_of(self.task)) <= free


def _dtype(task: Task) -> torch.dtype:
    """The widest of its floats."""
    floats = {weight.dtype for weight in task.parameters() if weight.is_floating_point()}
    return max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
