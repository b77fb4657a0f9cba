"""What of a recipe can be compared at all, which is seen before anything is.

Only means over rows are the same on any number of replicas, where nothing is drawn by share."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from dpframe import Trainer
from dpframe.layers.exact import BATCH_NORMS
from dpframe.plugin import Measured, Share, current_share, default_dtype, move, seeding
from dpframe.plugins.verify.course import TRAINS_NOTHING, Course, own_layers, why_not
from dpframe.plugins.verify.distance import ROUNDINGS, roundings
from dpframe.strategies import CPU
from dpframe.trainer.checks.draws import DrawRecorder, NotCompared
from dpframe.trainer.checks.few_rows import picked
from dpframe.trainer.checks.own import Own, drawn_by
from dpframe.trainer.checks.put_back import put_back
from dpframe.trainer.checks.trial import CUT, ROWS, Trial
from dpframe.trainer.outputs import detached, one_loss

EXACT = 1e-9  # of a difference that no rounding of float64 makes
SIZES = f"{CUT} {ROWS - CUT}"


@dataclass
class Separable:
    """Which numbers of a recipe are means over its rows: only those can be the same everywhere."""

    reason: str = ""  # why its curve can't be compared
    own: Own = field(default_factory=Own)  # layers that are each replica's own
    others: set[str] = field(default_factory=set)  # metrics that are no such means
    compared: str = ""  # the loss of which shares, where that could be tried
    coupled: str = ""  # how the loss differs
    rounding: dict[str, float] = field(default_factory=dict)  # of numbers that it rounds
    changed: list[str] = field(default_factory=list)  # the buffers that a step changes

    @property
    def has_curve(self) -> bool:
        """Whether it can be compared, at least without what it drops."""
        return not (self.reason or self.own.layers["BatchNorm"])

    def left_out(self, parts: Iterable[str] = ()) -> str:
        """What of the curve in a run, or of these parts of it, is not compared, as the result of a
        check; empty if all of it is."""
        if self.reason:
            return "" if self.reason == TRAINS_NOTHING else f"left out: {self.reason}"
        if not self.own.is_empty:
            return f"{'left out' if self.own.others else 'by choice'}: {self.own.line}"
        if self.others and "metrics" in parts:
            return f"left out: {', '.join(sorted(self.others))}: no mean over rows"
        return ""


def separable(course: Course, replicas: int) -> Separable:
    """By the share check, on a Trainer that has not begun."""
    task, data = course.build()
    recipe = course.recipe
    found = Separable(why_not(task, recipe), own_layers(recipe.task(), recipe, replicas))
    if not task.has_own("training_step") or task.optimizes_by_hand:
        return found
    task.double()
    with CPU() as strategy:
        trainer = Trainer(task, data, strategy=strategy, settings=course.settings)
        trainer.prepare()
        try:
            _look(trainer, found)
            for turn in trainer.updates:
                _compare(trainer, turn, found, course.recipe.name)
        except NotCompared as why:
            found.reason = found.reason or f"its loss can't be compared with its shares': {why}"
    return found


def _look(trainer: Trainer, found: Separable) -> None:
    """What a step draws, rounds and changes."""
    task = trainer.task
    if not found.has_curve:
        task.eval()
    norms = tuple(name for name, m in task.named_modules() if isinstance(m, BATCH_NORMS))
    before = {
        name: buffer.clone()
        for name, buffer in task.named_buffers()
        if name.rpartition(".")[0] not in norms
    }
    with put_back(task):
        first = _measured(trainer, seed=0)
        now = dict(task.named_buffers())
        found.changed = [name for name, was in before.items() if not torch.equal(was, now[name])]
    with put_back(task):
        second = _measured(trainer, seed=1)
    task.train()
    found.rounding = roundings([first])
    if float(first[1]["loss"]) != float(second[1]["loss"]):
        with put_back(task), DrawRecorder(torch.device("cpu")) as draws:
            _measured(trainer, seed=0)
        by = ", ".join(drawn_by(draws.seen, task)) or "not by torch"
        drawn = f"the loss of the same {ROWS} rows differs by what it draws at random: {by}"
        found.reason = found.reason or drawn
    elif found.rounding["loss"] > 0:
        rounded = "its loss is rounded to float32, so that its shares' gradients are, too"
        found.reason = found.reason or rounded


def _measured(trainer: Trainer, *, seed: int) -> Measured:
    task, source, (turn, *_) = trainer.task, trainer.feed.source, trainer.updates
    samples = next(picked(source.dataset, ROWS))
    batch: Any = move(source.collate(samples), torch.device("cpu"), torch.float64)
    share = Share(batch, ROWS, ROWS, range(ROWS))
    of_share = current_share.of(share, task.run_context, turn)
    with seeding.seeded(seed), default_dtype(torch.float64), of_share:
        output = task.adapter.step_alone(task, "training_step", batch, *filter(None, [turn]))
        return ROWS, detached(one_loss(output, task, "training_step"))


def _compare(trainer: Trainer, turn: str, found: Separable, name: str) -> None:
    trial = Trial(trainer.task, trainer.strategy, trainer.progress, turn, exact=EXACT)
    trial.in_training = not (found.reason or found.left_out())
    apart = {
        each.name: each
        for each in trial.differences(trainer.feed.source)
        if not each.off <= ROUNDINGS * found.rounding.get(each.name, 0.0)
    }
    found.compared = f"{name}'s loss of {ROWS} rows, and of shares of {SIZES}"
    found.others |= apart.keys() - {"loss"}
    if loss := apart.get("loss"):
        what = f"the gradient of {loss.weight} in {name}" if loss.weight else name
        found.coupled = (
            f"{what}'s loss{f' of turn {turn}' if turn else ''} of {ROWS} rows is "
            f"{loss.whole:.9g} in one batch and {loss.parts:.9g} in shares of {SIZES}, so that "
            "other numbers of replicas train on something else: return the mean over the rows, or "
            "as 'weight' what it is a mean over; a loss that compares rows with each other, e.g. a "
            "contrastive one, has to use self.all_gather"
        )
