"""What `fit` needs, made and checked before there is a run directory: a straight line of values.

The task is told its lengths on the way, as its optimizers and schedules may ask for them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from dpframe.errors import UserError, listed
from dpframe.layers.exact import BATCH_NORMS, drops_by_row, gathering_norms
from dpframe.metrics import Means
from dpframe.schedules import Warmed, count
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.calendar import Calendar, StopPoll
from dpframe.trainer.callback import Callback
from dpframe.trainer.checks.in_place import InPlace
from dpframe.trainer.checks.left_out import LeftOut
from dpframe.trainer.checks.loss_guard import LossGuard
from dpframe.trainer.checks.own import UNKNOWN, Later, Own, find_own
from dpframe.trainer.checks.share_check import NOT_COMPARED, check_evaluation, check_shares
from dpframe.trainer.compute.activations import drop_activations
from dpframe.trainer.compute.compiled import Compiled
from dpframe.trainer.compute.placement import Precision
from dpframe.trainer.evaluation import Evaluations, Placed, means_over
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.optim.rates import ScaledRates
from dpframe.trainer.optim.turns import Turns, turns_of
from dpframe.trainer.outputs import Measured
from dpframe.trainer.profile import Profile
from dpframe.trainer.progress import Progress
from dpframe.trainer.recorder import RunInfo
from dpframe.trainer.resume.attributes import Attributes
from dpframe.trainer.resume.fingerprint import fingerprint
from dpframe.trainer.resume.state import Resumable, changes_since
from dpframe.trainer.settings import CUDA_GRAPH_MODES, TrainerSettings
from dpframe.trainer.step import Step, StepByHand, TrainStep

log = logging.getLogger("dpframe")


@dataclass(frozen=True, repr=False)
class Training:
    """The parts of a training run."""

    feed: TrainingData
    step: Step
    updates: Turns
    means: Means
    calendar: Calendar
    validation: Evaluations
    guard: LossGuard
    left_out: LeftOut
    state: Resumable
    profile: Profile | None
    notes: list[str]  # for the log, as it begins
    own: str  # what each replica has of its own, which changes the curve
    later: Later | None  # None: there is one replica, or the shares are the same on any number
    resumed_from: dict[str, Any] | None  # the state of a checkpoint
    changes: list[str]  # what is not as it was there
    newest: dict[str, list[Measured]] = field(default_factory=dict)  # of each optimizer, here


class Watchers(NamedTuple):
    """Who is told how training goes."""

    callbacks: Sequence[Callback]
    on_batch_start: Sequence[Callable[..., None]]
    on_batch_end: Sequence[Callable[..., None]]


class Resumed(NamedTuple):
    """What a run goes on from."""

    state: dict[str, Any] | None  # of a checkpoint; None: it begins
    anyway: bool  # even if its config or code was different


class Given(NamedTuple):
    """What a training is made from."""

    placed: Placed
    settings: TrainerSettings
    feed: TrainingData
    watchers: Watchers
    progress: Progress
    run: RunInfo
    resumed: Resumed


def make_training(given: Given) -> Training:
    """Makes the parts, and refuses what can't be had.

    The order is the contract: lengths, optimizers, the share check (of the plain task, whose layers
    it may convert), activation checkpointing, wrapping and compiling, metrics, state. A line that
    returns nothing changes the task.
    """
    placed, settings, feed, watchers, progress, run, resumed = given
    task, strategy = placed.task, placed.strategy
    profile = Profile() if settings.profile else None
    if settings.on_nonfinite == "skip":
        strategy.check_skips(max(settings.accumulate, 1 if settings.micro_batch is None else 2))
    validation = Evaluations(placed, "val", settings, feed.validation)
    tell_lengths(task, settings, feed)
    scaled_rates = None
    if task.scale_lr is not None:
        scaled_rates = ScaledRates.of(task, settings, feed.source.batch_size)
    updates = turns_of(task, strategy, settings, placed.precision.scaler, scaled_rates)
    if task.optimizer_names and validation and not task.has_own("validation_step"):
        raise UserError(
            f"{type(task).__name__} has several optimizers, and training_step wants the name "
            "of one; write validation_step, or return None from val_dataset"
        )
    own, notes = compare_shares(given, updates)
    later = Later(task, settings, own) if own.is_several else None
    recomputed = drop_activations(task, settings.checkpoint_activations)
    wrap_steps(updates, task, strategy, settings, placed.precision)
    means = means_over(strategy)
    placed.task_metrics.reset()
    guard = LossGuard(strategy, settings.on_nonfinite, feed.train.order)
    left_out = LeftOut(task, placed.task_metrics, progress, settings)
    for update in updates.values() if left_out.may_be else ():
        if update.scaler is None:  # which leaves out such steps itself
            update.refuses = partial(guard.refuses_norm, progress=progress)
    step = make_step(given, guard)
    line = own.line
    state = Resumable(
        task=task,
        strategy=strategy,
        feed=feed,
        updates=updates,
        means=means,
        task_metrics=placed.task_metrics,
        callbacks=watchers.callbacks,
        progress=progress,
        attributes=Attributes(task),
        devices=strategy.local_devices,
        seed=placed.seed,
        recipe=run.recipe,
        fingerprint=fingerprint(task, placed.data, feed, updates, settings, run, placed.seed),
        own=line,
    )
    changes = []
    if resumed.state is not None:
        changes = changes_since(resumed.state, state.fingerprint, anyway=resumed.anyway)
    return Training(
        feed=feed,
        step=step,
        updates=updates,
        means=means,
        calendar=Calendar(settings, feed, StopPoll(strategy, placed.interruption)),
        validation=validation,
        guard=guard,
        left_out=left_out,
        state=state,
        profile=profile,
        notes=[*notes, *notes_of(task, strategy, settings, recomputed, scaled_rates)],
        own=line,
        later=later,
        resumed_from=resumed.state,
        changes=changes,
    )


def tell_lengths(task: Task, settings: TrainerSettings, feed: TrainingData) -> None:
    """The task's optimizers and schedules may ask for them."""
    task.steps_per_epoch, task.total_steps = feed.steps_per_epoch, feed.total_steps
    task.scheduler_steps = feed.scheduler_steps(settings)
    task.schedules_turns = settings.scheduler_every == "step"


def compare_shares(given: Given, updates: Turns) -> tuple[Own, Sequence[str]]:
    """What each replica has of its own, and the share check's notes. Modules are in the modes that
    the first step finds, as far as these are known before hooks are called."""
    placed, settings, feed, watchers, progress, _, resumed = given
    task, callbacks = placed.task, watchers.callbacks
    drop_activations(task, None)  # of an earlier fit: they were put before the layers' classes
    heed_own_modes(task)
    modes_may_change = may_change_modes(task, callbacks)
    if settings.micro_batch is not None and not modes_may_change:
        refuse_cut_norms(task)
    own = find_own(placed, settings, feed, updates, progress, modes_may_change=modes_may_change)
    monitored = [*chain(*(each.monitored() for each in callbacks)), *updates.monitored()]
    is_resumed = resumed.state is not None
    return own, check_shares(
        placed, settings, feed, updates, progress, monitored, own, is_resumed=is_resumed
    )


def make_step(given: Given, guard: LossGuard) -> Step:
    """What computes the gradients of an update, with hooks around each batch."""
    placed, settings, feed, watchers, progress, *_ = given
    task, strategy = placed.task, placed.strategy
    begin, end = watchers.on_batch_start, watchers.on_batch_end
    in_place = InPlace(task, strategy)
    if in_place.is_needed:
        begin, end = [*begin, in_place.begin], [in_place.end, *end]
    is_cuda = strategy.device.type == "cuda"
    return Step(
        task,
        strategy,
        progress,
        guard,
        placed.task_metrics,
        feed.to_device,
        on_batch_start=begin,
        on_batch_end=end,
        accumulates=settings.accumulate > 1 or settings.micro_batch is not None,
        uses_cuda_graphs=is_cuda and settings.compile_mode in CUDA_GRAPH_MODES,
        cut=feed.cut,
    )


def make_evaluations(
    placed: Placed, kind: str, settings: TrainerSettings, progress: Progress
) -> Evaluations:
    """Of a `val`, `test` or `predict` without training."""
    evaluations = Evaluations(placed, kind, settings)
    check_evaluation(placed, settings, evaluations, progress)
    return evaluations


def wrap_steps(
    updates: Turns,
    task: Task,
    strategy: Strategy,
    settings: TrainerSettings,
    precision: Precision,
) -> None:
    """Gives each update the training step that computes its loss, as the strategy wraps it."""
    mode = settings.compile_mode
    if strategy.sharding.cuts:
        settings.check_compiled_parts(strategy.name)
    if updates.by_hand is not None:
        step = strategy.wrap(StepByHand(task, precision.autocast), training=False)
        for update in (updates.by_hand, *updates.values()):
            update.use(step)
        return
    compiled = None
    if mode is not None:
        settings.check_compiled_layers(
            gathers=bool(gathering_norms(task, strategy)), drops_by_row=drops_by_row(task)
        )
        compiled = Compiled(**{**settings.compile_options, "mode": mode})
    for name, update in updates.items():
        step = TrainStep(task, precision.autocast, name, compiled)
        with update.alone() if name else nullcontext():
            update.use(strategy.wrap(step, training=True))


def notes_of(
    task: Task,
    strategy: Strategy,
    settings: TrainerSettings,
    recomputed: list[str],
    scaled_rates: ScaledRates | None,
) -> Iterator[str]:
    """What the log says of a run before it begins."""
    if settings.compile_mode is not None:
        yield (
            f"trainer.compile.mode={settings.compile_mode}: the first step may take minutes to "
            "compile"
        )
        if norms := gathering_norms(task, strategy):
            yield f"trainer.batch_norm=global: a graph ends at BatchNorm layers ({norms})"
    if resting := modules_in_eval_mode(task):
        yield (
            f"stays in evaluation mode in training: {', '.join(resting)}; call train() on it in "
            "the task's __init__ where it should not"
        )
    if caching := outermost(task, builds_cache):
        yield (
            f"builds a cache of keys and values in training: {', '.join(caching)}; documents that "
            "position_ids set apart attend to each other then, and trainer.checkpoint_activations "
            "fails; set config.use_cache=False in the task's __init__, and pass use_cache=True to "
            "generate()"
        )
    if moving := outermost(task, lambda module: moves_statistics(module, task)):
        yield (
            "running statistics move, though all weights are frozen by requires_grad=False: "
            f"{listed(moving, 3)}; add it to callbacks.freeze.patterns (callbacks=freeze), or call "
            "eval() on it in the task's __init__, where they should stay"
        )
    if recomputed:
        yield f"computed again in the backward: {', '.join(recomputed)}"
    elif strategy.sharding.keeps_casts:
        yield (
            "autocast keeps all weights in bf16 in each process from forward to backward; set "
            "strategy.param_dtype=bf16 or trainer.checkpoint_activations=true where they don't fit"
        )
    if scaled_rates is not None:
        yield str(scaled_rates)
    if task.lr_schedule is not None:
        schedule, steps = task.lr_schedule, task.total_steps
        rises = count(schedule.warmup, steps) if isinstance(schedule, Warmed) else 0
        end = ", which end within its warm-up" if 0 < steps <= rises else ""
        yield f"task.schedule: {schedule}, {steps or 'unknown'} steps in all{end}"


def may_change_modes(task: Task, callbacks: Sequence[Callback]) -> bool:
    """Whether a hook may put modules into evaluation mode before the first step."""
    kinds = [type(each) for each in callbacks]
    has_others = any(not kind.__module__.startswith("dpframe.") for kind in kinds)
    is_own = any(hasattr(task, hook) for hook in ("on_fit_start", "on_epoch_start"))
    return has_others or is_own or any(kind.__name__ == "Freeze" for kind in kinds)


def told(
    training: Training, settings: TrainerSettings, callbacks: Sequence[Callback]
) -> Iterator[tuple[int, str]]:
    """Lines of the log, each with its level: what changes a curve has to be seen, also where
    nothing shows it, e.g. in a program that writes to a file."""
    is_shown = settings.share_check == "off" or any(each.shows_banner for each in callbacks)
    if training.own and not is_shown:
        changes = "may change" if training.own.startswith(UNKNOWN) else "changes"
        yield logging.WARNING, f"{training.own}; this {changes} the curve"
    for note in training.notes:
        is_seen = is_shown or not note.startswith(NOT_COMPARED)
        yield logging.INFO if is_seen else logging.WARNING, note


def look_again(later: Later, training: Training, placed: Placed, epoch: int) -> None:
    """At the beginning of an epoch, when hooks may have changed layers."""
    if training.feed.cut is not None:
        refuse_cut_norms(placed.task)
    if (line := later.look(placed.task)) and placed.strategy.is_main:
        log.warning("from epoch %s on: %s; this changes the curve", epoch + 1, line)


def heed_own_modes(task: Task) -> None:
    """Modules that put parts of them into evaluation mode in a `train` of their own have done so
    before the first step, which a new task needs no `train()` for."""
    for module in task.modules():
        train = type(module).train
        if train is not nn.Module.train and not train.__module__.startswith("torch."):
            module.train(module.training)


def can_be_cut(task: Task, strategy: Strategy) -> bool:
    """Whether the shares of a batch can be computed in pieces."""
    return not (task.optimizes_by_hand or strategy.has_fixed_shares or any(norms_in_training(task)))


def norms_in_training(task: Task) -> Iterator[str]:
    for name, module in task.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            yield name


def refuse_cut_norms(task: Task) -> None:
    """In pieces of a batch they would see other rows than in one."""
    if name := next(norms_in_training(task), None):
        raise UserError(
            f"{name}, a BatchNorm, wants all rows of a batch, and trainer.micro_batch computes "
            "some at a time; put it into evaluation mode, or use trainer.micro_batch=null"
        )


def modules_in_eval_mode(task: Task) -> list[str]:
    """The outermost modules that the task has put into evaluation mode."""
    return outermost(task, lambda module: not module.training) if task.training else []


def moves_statistics(module: nn.Module, task: Task) -> bool:
    """Whether its weights are all frozen, and norms in it are in training mode, in which a task
    that is in evaluation mode is put as a whole."""
    trained = [weight.requires_grad for weight in module.parameters()]
    norms = (part for part in module.modules() if getattr(part, "running_mean", None) is not None)
    is_frozen = bool(trained) and not any(trained)
    return is_frozen and any(norm.training or not task.training for norm in norms)


def builds_cache(module: nn.Module) -> bool:
    """As a causal model of transformers does, unless its config says otherwise."""
    config = getattr(module, "config", None)
    return getattr(config, "use_cache", False) is True and getattr(config, "is_decoder", True)


def outermost(task: Task, fits: Callable[[nn.Module], bool]) -> list[str]:
    """The names of the modules that fit and are in no other one that does."""
    names: list[str] = []
    for name, module in task.named_modules():
        is_within = any(name.startswith(f"{outer}.") for outer in names)
        if name and not is_within and fits(module):
            names.append(name)
    return names
