"""The share check: before a fit on several replicas, whether a loss is a mean over its rows.

It takes five rows in one share, and as shares of three and two. A loss that is another one then
would train other weights on each number of replicas; a number that is another one is logged as the
mean of its shares'. State and random numbers are as before it.
"""

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dpframe.data.source import Source
from dpframe.errors import UserError
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.draws import NotCompared
from dpframe.trainer.trial import ROWS, Difference, Trial
from dpframe.trainer.updates import Updates

log = logging.getLogger("dpframe")
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
