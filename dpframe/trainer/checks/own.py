"""What of a task is each replica's own: layers, draws and statistics, which change the curve.

A step of a few rows in training mode shows what is drawn, and where the rows of a layer are.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from dpframe import seeding
from dpframe.data import split
from dpframe.data.batches import Batches
from dpframe.errors import UserError, listed
from dpframe.layers.exact import (
    BATCH_NORMS,
    DROPOUTS,
    GlobalBatchNorm,
    RowDropout,
    convert,
    is_torchs,
)
from dpframe.rows import ongoing
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.checks.draws import Drawn, NotCompared
from dpframe.trainer.checks.few_rows import drawn_apart
from dpframe.trainer.checks.kept import moving
from dpframe.trainer.checks.step_on_shares import ROWS
from dpframe.trainer.checks.surroundings import Moment, moments
from dpframe.trainer.checks.trial import CUT, Trial
from dpframe.trainer.checks.watch import Watch
from dpframe.trainer.evaluation import Placed, restore_modes
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.optim.turns import Turns
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import TrainerSettings

KEYS = {"BatchNorm": "trainer.batch_norm=global", "Dropout": "trainer.dropout=row"}
UNKNOWN = "what else a step has of each"
ONE_VALUE = "more than 1 value per channel"  # what torch says of BatchNorm on one row


@dataclass
class Own:
    """What each replica has of its own, or each piece of a batch on one replica."""

    layers: Counter[str] = field(default_factory=Counter)  # for which KEYS has a key
    others: list[str] = field(default_factory=list)  # in words
    data: list[str] = field(default_factory=list)  # of rows and collates, in words
    unknown: str = ""  # why it is not known what else there is
    whose: str = "replica's"
    is_several: bool = False  # whether there are several replicas or pieces

    @property
    def is_empty(self) -> bool:
        return not (self.layers or self.others or self.unknown)

    def add_statistics(self, modules: Iterable[str]) -> None:
        """Of modules, by their names, that keep statistics of each replica's rows."""
        self.others += [f"{name or 'the task'} (statistics of its rows)" for name in modules]

    def add_draws(self, trials: Iterable[Trial]) -> None:
        """Of steps to evaluate by."""
        drawn = ((trial.step, each.by) for trial in trials for each in trial.noticed.drawn)
        self.others += [f"{step} ({by})" for step, by in dict.fromkeys(drawn)]

    @property
    def line(self) -> str:
        """Empty where there is nothing."""
        said = []
        if self.layers:
            kinds = " and ".join(f"{count} {kind}" for kind, count in self.layers.items())
            verb = "layer sees" if self.layers.total() == 1 else "layers see"
            keys = " ".join(KEYS[kind] for kind in self.layers)
            said.append(f"{kinds} {verb} each {self.whose} rows alone: {keys}")
        if others := [*self.others, *self.data]:
            said.append(f"of each {self.whose} own: {listed(others, 4)}")
        if self.unknown:
            said.append(f"{UNKNOWN} {self.whose} own is unknown: {self.unknown}")
        return "; ".join(said)


def find_own(
    placed: Placed,
    settings: TrainerSettings,
    feed: TrainingData,
    updates: Turns,
    progress: Progress,
    *,
    modes_may_change: bool,
) -> Own:
    """Gives the layers of a task the classes that the settings ask for, tells dropout layers where
    the rows are, and finds what each of several replicas has of its own. Refuses a BatchNorm that
    would get one row, unless hooks may put it into evaluation mode first."""
    task, strategy = placed.task, placed.strategy
    kinds = {"batch_norm": settings.has_global_batch_norm, "dropout": settings.drops_by_row}
    is_cut = feed.cut is not None
    is_several = (strategy.replicas > 1 or is_cut) and not strategy.has_fixed_shares
    convert(task, **kinds)
    dropouts = [m for m in task.modules() if isinstance(m, RowDropout)]
    norms = [m for m in task.modules() if isinstance(m, BATCH_NORMS) and m.training]
    if not (is_several or dropouts or norms):
        return Own()
    if is_several:
        _refuse_divided(feed.source, settings, norms, dropouts)
    replicas = 1 if kinds["batch_norm"] else strategy.replicas
    is_looked_at = bool(dropouts) or (is_several and settings.share_check != "off")
    may_have_one = bool(norms) and not modes_may_change
    has_one = may_have_one and 1 in shares_of(feed, settings, replicas)
    whose = "piece's" if is_cut and strategy.replicas == 1 else "replica's"
    own = Own(whose=whose, is_several=True)
    watch, drawn, trials = Watch(), list[Drawn](), list[Trial]()
    convert(task, batch_norm=True, dropout=True)  # which the watch can see
    try:
        if updates.by_hand is not None:
            raise NotCompared("the task steps its optimizers itself")
        if strategy.sharding.rounds:
            raise NotCompared("strategy.param_dtype rounds the weights")
        trials = [Trial(task, strategy, progress, turn) for turn in updates]
        for trial in trials if is_looked_at else ():
            drawn += _looked_at(trial, feed.source, watch)
            if trial.moment.is_asked:
                drawn += _drawn_later(trial, feed, settings, watch)
        if has_one:
            _refuse_one_row(trials[0], feed.source, replicas)
    except NotCompared as why:
        own.unknown = str(why)
    finally:
        convert(task, **kinds)
    if dropouts:
        _place(task, strategy, watch)
    if not is_several:
        return Own()
    _name_layers(own, task, strategy, watch)
    own.others += drawn_by(drawn, task)
    if not watch.gathers:
        kept = chain.from_iterable(_kept_by(trial, strategy) for trial in trials)
        own.others += list(dict.fromkeys(kept))
    if any(trial.noticed.collate_draws for trial in trials):
        own.data.append(f"collate (it draws for each {own.whose} rows)")
    if settings.share_check != "off" and strategy.replicas > 1:
        sets = [(f"the rows of val {name}", each) for name, each in feed.validation.items()]
        for name, loader in [("the rows", feed.train), *sets]:
            if how := drawn_apart(loader.rows):
                own.data.append(f"{name.strip()} ({how})")
    return own


def _place(task: Task, strategy: Strategy, watch: Watch) -> None:
    """Tells dropout layers where the rows are: one of the processes may have had no memory to
    look."""
    names = {module: name for name, module in task.named_modules()}
    found = {names[layer]: place for layer, *place in watch.places()}
    places = strategy.collectives.broadcast(found)
    for module, name in names.items():
        if isinstance(module, RowDropout):
            module.row_dim, module.row_blocks = places.get(name, (None, False))


def _name_layers(own: Own, task: Task, strategy: Strategy, watch: Watch) -> None:
    for name, module in task.named_modules():
        is_synced = isinstance(module, nn.SyncBatchNorm) and strategy.world_size > 1
        if is_synced or not module.training:
            continue
        if said := _said_of(module, name, watch, own.unknown):
            own.others.append(said)
        elif has_inner_dropout(module):
            own.others.append(of_inner_dropout(module, name))
        elif kind := kind_of(module):
            own.layers[kind] += 1


def _kept_by(trial: Trial, strategy: Strategy) -> Iterator[str]:
    """Attributes that a step moves by its share's rows, and by which the next one computes; of
    replicas in one process also what all of them change."""
    whole, part = (trial.noticed.kept.get(rows, {}) for rows in (ROWS, CUT))
    of_shares = moving(part, whole)
    is_shared = strategy.replicas > strategy.world_size
    for name in whole:
        if name in of_shares or (is_shared and name in trial.noticed.in_place):
            yield f"{name} (kept from step to step)"


def drawn_by(drawn: Iterable[Drawn], task: Task) -> list[str]:
    """What a step has drawn, in words, by the modules that have."""
    names: dict[Any, str] = {module: name for name, module in task.named_modules()}
    said = (f"{names.get(each.module) or 'the step'} ({each.by})" for each in drawn)
    return list(dict.fromkeys(said))


def shares_of(feed: TrainingData, settings: TrainerSettings, replicas: int) -> set[int]:
    """How many rows replicas get, as far as that is known."""
    size = feed.source.batch_size
    batches = {size}
    rows = 0 if feed.train.order is None else feed.train.order.rows
    is_whole = feed.source.drop_last or settings.limit("train", rows // size) is not None
    if rows and rows % size and not is_whole:
        batches.add(rows % size)
    return {len(share) for batch in batches for share in split(range(batch), replicas)}


def _refuse_divided(
    source: Any,
    settings: TrainerSettings,
    norms: Sequence[nn.Module],
    dropouts: Sequence[nn.Module],
) -> None:
    is_divided = source.is_divided and isinstance(source.dataset, IterableDataset)
    if not (is_divided or source.is_by_rank):
        return
    if norms and settings.has_global_batch_norm:
        kind = "BatchNorm"
    elif dropouts:
        kind = "Dropout"
    else:
        return
    how = "data.divide_streams=true" if is_divided else "data.divided=by_rank"
    if isinstance(source.dataset, Batches):
        how = "dpframe.Batches"
    raise UserError(
        f"{KEYS[kind]} with {how}: which rows make a batch depends on the number of ranks, so no "
        f"{kind} can be the same on all; use {KEYS[kind].partition('=')[0]}=replica, or give all "
        "ranks the same data"
    )


def kind_of(module: Any) -> str:
    """Of a layer that a key would make the batch's."""
    if isinstance(module, BATCH_NORMS):
        return "" if isinstance(module, GlobalBatchNorm) else "BatchNorm"
    is_torchs_own = isinstance(module, DROPOUTS) and is_torchs(module)
    is_own = is_torchs_own and not isinstance(module, RowDropout)
    return "Dropout" if is_own and module.p > 0 else ""


def _said_of(module: Any, name: str, watch: Watch, unknown: str) -> str:
    """Of a layer that no key makes the batch's. One that the trial has not called may have none in
    the run; else it tells so itself."""
    if isinstance(module, RowDropout) and vars(module)["p"] > 0 and module.row_dim is None:
        why = "its rows were not found" if module in watch.called else unknown
        module.row_told += ["the trial"] * bool(why)
        return f"{name} (dropout: {why})" if why else ""
    if module in watch.unlike:
        return f"{name} (a {type(module).__name__} with statistics of its own)"
    return ""


def has_inner_dropout(module: Any) -> bool:
    is_attention = isinstance(module, nn.MultiheadAttention)
    is_deep = isinstance(module, nn.RNNBase) and vars(module)["num_layers"] > 1
    return (is_attention or is_deep) and bool(vars(module)["dropout"])


def of_inner_dropout(module: nn.Module, name: str) -> str:
    return f"{name} ({type(module).__name__}'s own dropout)"


def _looked_at(trial: Trial, source: Any, watch: Watch) -> list[Drawn]:
    """What a step draws beside dropout layers. These and BatchNorms do nothing, so that a row is
    the same whatever rows are with it."""
    task = trial.task
    with seeding.seeded(0), restore_modes(task), _without_inner_dropout(task):
        for module in task.modules():
            module.training &= not isinstance(module, BATCH_NORMS)
        samples = next(iter(trial.picked(source.dataset)))
        ongoing.watch = watch
        try:
            drawn, _ = [trial.look(samples[:rows], source.collate) for rows in (ROWS, CUT)]
        finally:
            ongoing.watch = None
        watch.compare()
        return drawn


def _drawn_later(
    trial: Trial, feed: TrainingData, settings: TrainerSettings, watch: Watch
) -> list[Drawn]:
    """By a step that asks how far the run has come."""
    now, drawn = trial.moment, list[Drawn]()
    try:
        for moment in moments(feed.steps_per_epoch, feed.total_steps, settings.max_epochs):
            trial.moment = Moment(*moment)
            drawn += _looked_at(trial, feed.source, watch)
    except NotCompared:
        pass  # the share check says so
    finally:
        trial.moment = now
    return drawn


@contextmanager
def _without_inner_dropout(task: Task) -> Iterator[None]:
    modules: list[Any] = [module for module in task.modules() if has_inner_dropout(module)]
    rates = [module.dropout for module in modules]
    try:
        for module in modules:
            module.dropout = 0.0
        yield
    finally:
        for module, rate in zip(modules, rates, strict=True):
            module.dropout = rate


def _refuse_one_row(trial: Trial, source: Any, replicas: int) -> None:
    """Torch does so at the end of an epoch, when such a share comes."""
    with seeding.seeded(0), restore_modes(trial.task):
        samples = next(iter(trial.picked(source.dataset)))
        try:
            trial.look(samples[:1], source.collate)
        except NotCompared as error:
            if ONE_VALUE not in str(error):
                return
        else:
            return
    of, use = "a batch", "data.drop_last=true, or another data.batch_size"
    if replicas > 1:
        of, use = "a replica's share of a batch", f"{KEYS['BatchNorm']}, {use}"
    raise UserError(f"BatchNorm can't normalise one row, and {of} has one; use {use}")


class Later:
    """Layers that a hook thaws, replaces or turns on once training has begun."""

    def __init__(self, task: Task, settings: TrainerSettings, own: Own) -> None:
        self._keys = {
            "batch_norm": settings.has_global_batch_norm,
            "dropout": settings.drops_by_row,
        }
        self._whose = own.whose
        self._known = {name for name, _ in _counted(task)}
        self._inner = set(_inner(task))

    def look(self, task: Task) -> str:
        """At the beginning of an epoch: makes those of the batch that a key asks for, and returns
        a line on others that were not there before."""
        new = {name: kind for name, kind in _counted(task) if name not in self._known}
        if new:
            convert(task, **self._keys)
            new = {name: kind for name, kind in _counted(task) if name in new}
            self._known |= new.keys()
        inner = [said for said in _inner(task) if said not in self._inner]
        self._inner.update(inner)
        return Own(Counter(new.values()), inner, whose=self._whose).line


def _counted(task: Task) -> Iterator[tuple[str, str]]:
    """The layers that a key would make the batch's, by their names, and their kinds."""
    for name, module in task.named_modules():
        if module.training and (kind := kind_of(module)):
            yield name, kind


def _inner(task: Task) -> Iterator[str]:
    """Those that have dropout of their own, in words."""
    for name, module in task.named_modules():
        if module.training and has_inner_dropout(module):
            yield of_inner_dropout(module, name)
