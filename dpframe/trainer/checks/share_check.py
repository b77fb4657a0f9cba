"""The share check: before a fit on several replicas, whether a loss is a mean over its rows.

It takes five rows in one share, and as shares of three and two. A loss that differs then
would train other weights on each number of replicas; a number that differs is logged as the
mean of its shares'. State and random numbers are as before it.
"""

import inspect
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpframe.data import Loader
from dpframe.errors import UserError
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.checks.draws import NotCompared
from dpframe.trainer.checks.own import Own
from dpframe.trainer.checks.step_on_shares import INNER
from dpframe.trainer.checks.surroundings import moments
from dpframe.trainer.checks.trial import ROWS, Difference, Trial
from dpframe.trainer.evaluation import STEPS, Evaluations, Placed
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.optim.turns import Turns
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import TrainerSettings

log = logging.getLogger("dpframe")
SLOW_SECONDS = 1.0
WAYS = (
    'return its "weight" (tokens, boxes) where it is a mean over something else, or a dict of '
    '{"boxes": (mean, how_many)} where it has several, multiply a sum by self.batch_rows / '
    "len(rows), take what needs all rows from self.all_gather, and draw noise by self.randn_rows"
)
NOT_COMPARED = "the share check has not compared the loss"
TRAIN_ANYWAY = "trainer.share_check=warn trains anyway"


class Verdict(NamedTuple):
    """What the share check has found, as lines to show."""

    refusal: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_shares(
    placed: Placed,
    settings: TrainerSettings,
    feed: TrainingData,
    updates: Turns,
    progress: Progress,
    monitored: Sequence[tuple[str, str]],
    own: Own,
    *,
    is_resumed: bool,
) -> Sequence[str]:
    """Before training: refuses a loss that depends on the shares, and warns of other numbers, also
    of validations; of those it tells who waits for them, of `monitored` keys and metrics. Returns
    notes. On one replica it warns of a loss in a run's first fit.

    A task that has nothing of each replica's `own` is tried in training mode. More of that may be
    found."""
    task, strategy = placed.task, placed.strategy
    if settings.share_check == "off" or strategy.has_fixed_shares:
        return ()
    is_whole = strategy.replicas == 1 and feed.cut is None
    if is_whole and not is_resumed:
        is_tried = updates.by_hand is None
        for turn in updates if is_tried and feed.source.batch_size > 1 else ():
            warn_alone(Trial(task, strategy, progress, turn, is_brief=True), feed.source)
    if is_whole:
        return ()
    placed.checked.add("val")
    trials, notes = list[tuple[Trial, Any]](), list[str]()
    if is_rounded := strategy.sharding.rounds:
        notes.append(f"{NOT_COMPARED}: strategy.param_dtype rounds the weights")
    elif updates.by_hand is not None:
        notes.append(f"{NOT_COMPARED}: the task steps its optimizers itself")
    else:
        later = moments(feed.steps_per_epoch, feed.total_steps, settings.max_epochs)
        each = [
            Trial(
                task,
                strategy,
                progress,
                turn,
                alone=update.alone,
                later=later,
                in_training=own.is_empty,
            )
            for turn, update in updates.items()
        ]
        trials += [(trial, feed.source) for trial in each]
    evaluations = []
    if strategy.replicas > 1 and not is_rounded:
        evaluations = evaluated(task, strategy, progress, "val", feed.validation)
    notes += _told([*trials, *evaluations], strategy, settings, monitored)
    own.add_statistics(set[str]().union(*(trial.noticed.with_statistics for trial, _ in trials)))
    own.add_draws(trial for trial, _ in evaluations)
    _refuse(own, settings, "trains")
    return notes


def _refuse(own: Own, settings: TrainerSettings, does: str) -> None:
    if settings.share_check == "strict" and own.line:
        raise UserError(f"{own.line}; trainer.share_check=on {does} all the same")


def warn_alone(trial: Trial, source: Any) -> None:
    """Of a loss that depends on which rows meet in a batch."""
    try:
        found = [each for each in trial.differences(source) if each.name == "loss"]
    except NotCompared:
        return
    for each in found:
        way = trial.noticed.likely or (
            "that is right for one that compares rows, e.g. a contrastive loss; else return the "
            'mean over rows, or its "weight" (tokens, boxes)'
        )
        log.warning(
            f"{_loss_of(trial)} depends on which rows are in a batch ({_numbers(each)}), so it "
            f"would change with the batch size and the number of replicas; {way}; "
            "trainer.share_check=off leaves this check out"
        )


def check_evaluation(
    placed: Placed, settings: TrainerSettings, evaluations: Evaluations, progress: Progress
) -> None:
    """Before a validation or a test alone, warns of its numbers."""
    kind, strategy = evaluations.kind, placed.strategy
    if kind == "predict" or kind in placed.checked or strategy.sharding.rounds:
        return
    if strategy.replicas == 1 or strategy.has_fixed_shares or settings.share_check == "off":
        return
    placed.checked.add(kind)
    loaders = {name: each.loader for name, each in evaluations.by_name.items()}
    trials = evaluated(placed.task, strategy, progress, kind, loaders)
    _told(trials, strategy, settings, ())
    own = Own()
    own.add_draws(trial for trial, _ in trials)
    _refuse(own, settings, "evaluates")
    if own.line and strategy.is_main:
        log.warning(own.line)


def evaluated(
    task: Task, strategy: Strategy, progress: Progress, kind: str, loaders: Mapping[str, Loader]
) -> list[tuple[Trial, Any]]:
    """The trials of a validation or a test; a step that is training's has been tried with that."""
    step = STEPS[kind]
    if step == "test_step" and not task.has_own(step):
        step = "validation_step"
    if not task.has_own(step):
        return []
    is_named = "name" in inspect.signature(getattr(task, step)).parameters
    trials = []
    for name, loader in loaders.items():
        named = {"name": name} if is_named else {}
        prefix = f"{kind}/{name}" if name else kind
        trial = Trial(task, strategy, progress, step=step, named=named, prefix=prefix)
        trials.append((trial, loader.rows))
    return trials if is_named else trials[:1]  # else the step is the same for all of them


def _told(
    trials: Sequence[tuple[Trial, Any]],
    strategy: Strategy,
    settings: TrainerSettings,
    monitored: Sequence[tuple[str, str]],
) -> Sequence[str]:
    if not trials:
        return ()
    verdict = judge(trials, settings.share_check, monitored)
    # If processes round differently, all of them do what the main one does.
    verdict = Verdict(*strategy.collectives.broadcast(tuple(verdict)))
    if verdict.refusal:
        raise UserError(verdict.refusal)
    for warning in verdict.warnings if strategy.is_main else ():
        log.warning(warning)
    return verdict.notes


def judge(
    trials: Sequence[tuple[Trial, Any]], mode: str, monitored: Sequence[tuple[str, str]] = ()
) -> Verdict:
    """Of trials, each with the source of its rows."""
    began = time.perf_counter()
    refusal, warnings, notes = "", [], []
    for trial, source in trials:
        of_turn = f" of turn {trial.turn}" if trial.turn else ""
        what = NOT_COMPARED if trial.trains else f"the share check has not compared {trial.step}"
        try:
            found = trial.differences(source)
        except NotCompared as why:
            notes.append(f"{what}{of_turn}: {why}")
            continue
        notes += [f"{what}{of_turn} {why}" for why in trial.noticed.not_compared]
        if trial.noticed.gradients_left_out:
            why_none = trial.noticed.gradients_left_out
            notes.append(f"the share check has compared no gradients{of_turn}: {why_none}")
        for each in found:
            said = _described(each, trial, monitored)
            if each.name == "loss" and trial.trains and mode != "warn":
                other = "" if trial.noticed.likely == INNER else WAYS
                ways = "; ".join(filter(None, [trial.noticed.likely, other, TRAIN_ANYWAY]))
                refusal = refusal or f"{said}; {ways}"
            elif mode == "strict":
                refusal = refusal or f"{said}; trainer.share_check=on warns of it"
            else:
                warnings.append(said)
    if (seconds := time.perf_counter() - began) > SLOW_SECONDS:
        notes.append(f"the share check took {seconds:.1f} s; trainer.share_check=off leaves it out")
    return Verdict(refusal, tuple(warnings), tuple(notes))


def _described(found: Difference, trial: Trial, monitored: Sequence[tuple[str, str]]) -> str:
    replicas = trial.strategy.replicas
    others = f"{replicas} replicas" if replicas > 1 else "pieces of a batch"
    when = f" at step {found.step}" if found.step else ""
    if found.name == "loss" and trial.trains:
        what = f"the gradient of {found.weight} in " if found.weight else ""
        return (
            f"{what}{_loss_of(trial)} depends on how its rows are shared{when} "
            f"({_numbers(found)}), so {others} would train by another loss than one"
        )
    name = found.name if trial.trains else f"{trial.prefix}/{found.name}"
    readers = " and ".join(sorted({key for key, metric in monitored if metric == name}))
    mean = "it is the mean of what their shares give"
    if readers:
        mean += f", which {readers} will read"
    return (
        f"{name} of {_named(trial)} is no mean over rows{when} ({_numbers(found)}): on {others} "
        f"{mean}; log a torchmetric, or gather the rows"
    )


def _loss_of(trial: Trial) -> str:
    return f"the loss of {_named(trial)}"


def _named(trial: Trial) -> str:
    kind = trial.task.own_class.__name__
    return f"{kind} of turn {trial.turn}" if trial.turn else kind


def _numbers(found: Difference) -> str:
    numbers = f"{found.whole:.6g} for {ROWS} rows, {found.parts:.6g} for shares of 3 and 2"
    by = f"{100 * found.off:.2g}%" if math.isfinite(found.off) else "not finite"
    return f"{numbers}: {by}" if found.name == "loss" else numbers
