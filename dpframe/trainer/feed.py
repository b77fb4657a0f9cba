"""What a run reads: the loader of each data set, and how long training will be."""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dpframe.data import Batch, DataModule, DataSets, Loader, Rows, Share
from dpframe.data.batches import Batches
from dpframe.data.divided import ByRank, OwnRows, are_alike, unlike
from dpframe.data.input import dataset_of
from dpframe.data.mix import Mix
from dpframe.data.order import Order, SamplerOrder, TogetherOrder
from dpframe.data.pieces import Cut
from dpframe.data.prefetch import keep_on, prefetched
from dpframe.data.source import Here, Source
from dpframe.data.stream import Division
from dpframe.data.together import Together, together
from dpframe.data.workers import WorkerCount, cores_per_rank, measured
from dpframe.devices.accelerator import has_streams
from dpframe.errors import UserError
from dpframe.strategies.base import Strategy
from dpframe.trainer.profile import timed_batches
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import TrainerSettings

log = logging.getLogger("dpframe")
METHODS = {
    "train": "train_dataset",
    "val": "val_dataset",
    "test": "test_dataset",
    "predict": "predict_dataset",
}
INSTEAD = {"test": "or use mode=validate", "predict": "or name a file by data.input=FILE"}
NAME = re.compile(r"[A-Za-z0-9_-]+")  # of a data set: it is part of metrics' and files' names


@dataclass(frozen=True)
class TrainingData:
    """The data of a training run, and the lengths that schedulers and progress bars ask for."""

    source: Source  # what training reads
    train: Loader
    read: Callable[..., Iterator[Batch]]  # the batches of an epoch
    to_device: Callable[[list[Share]], Any]
    cut: Cut | None  # of each share
    accumulate: int  # batches of an update
    owner: str  # the class of the DataModule
    validation: dict[str, Loader]  # by the data set's name; one alone has the name ""
    batches_per_epoch: int | None  # None: unknown, of a stream
    limit: int | None  # of an epoch's batches; None: all
    steps_per_epoch: int  # 0 where that is unknown
    total_steps: int  # 0 where that is unknown

    @classmethod
    def of(
        cls,
        data: DataModule,
        strategy: Strategy,
        settings: TrainerSettings,
        *,
        seed: int,
    ) -> "TrainingData":
        sources = _sources("train", data)
        source = sources.get("") or together(sources, data)
        source = _by_rank(source, strategy, settings, seed, trains=True)
        train = _loader(source, strategy, settings, seed=seed, piece=settings.micro_batch)
        batches = train.batches
        if batches == 0:
            raise UserError(
                f"drop_last=true leaves no batch: {type(data).__name__}.train_dataset() has "
                f"{len(source.dataset)} rows, and a batch {source.batch_size}; use a smaller "
                "data.batch_size, or data.drop_last=false"
            )
        limit = settings.limit("train", batches)
        if batches is not None and limit is not None:
            batches = min(batches, limit)
        steps = -(-(batches or 0) // settings.accumulate)
        ends = [settings.max_steps, (settings.max_epochs or 0) * steps]
        read, to_device = prefetched(train, strategy.to_device, strategy.local_devices)
        return cls(
            source,
            train,
            timed_batches(read) if settings.profile else read,
            to_device,
            _cut(source, strategy, settings),
            settings.accumulate,
            type(data).__name__,
            evaluated("val", data, strategy, settings, seed=seed, may_be_none=True),
            batches,
            limit,
            steps,
            min((end for end in ends if end), default=0),
        )

    def warn_of_a_short_batch(self, replicas: int) -> None:
        """A batch of all rows may be meant, so that it is not refused; the steps of an epoch, what
        a learning rate is chosen for and the banner are not what they seem to be."""
        rows = self.train.order.rows if isinstance(self.train.order, Order) else math.inf
        if rows < self.source.batch_size:
            log.warning(
                "a batch is %s rows, and there are %s to train on: each batch is all of them; "
                "set data.batch_size=%s, or less",
                *(self.source.batch_size, rows, rows),
            )
        order = self.train.order
        for name, few in order.fewest() if isinstance(order, TogetherOrder) else ():
            if few < replicas:
                log.warning(
                    "%s replicas share the rows of %s, of which a batch may have %s: the dict of "
                    "a share without any lacks that name; set data.drop_last=true or a larger "
                    "batch, or write the step for that",
                    *(replicas, name, few),
                )

    def steps(self, progress: Progress) -> Iterator[list[Batch]]:
        """The rest of the epoch's batches, as many at a time as make one optimizer update."""
        batches = self.read(progress.epoch, skip=progress.batches_done, limit=self.limit)
        clock = time.perf_counter
        asked = clock()
        while step := list(islice(batches, self.accumulate)):
            progress.data_seconds += clock() - asked
            yield step
            asked = clock()
        if progress.batches_done == 0:
            raise UserError(f"{self.owner}.train_dataset() gave no rows; check its stream")

    def batches_in(self, epoch: int) -> int | None:
        """Those of this epoch: a batch sampler may make more or fewer in each."""
        order = self.train.order
        if not isinstance(order, SamplerOrder):
            return self.batches_per_epoch
        drawn = len(order.epoch(epoch))
        return drawn if self.limit is None else min(drawn, self.limit)

    def validations_within(self, settings: TrainerSettings) -> frozenset[int]:
        """After how many of an epoch's batches to validate, where that is done by a share of it."""
        share, steps = settings.validate_every_epochs, self.steps_per_epoch
        if share >= 1:
            return frozenset()
        if not steps:
            raise UserError(
                f"trainer.validate_every_epochs={share} is a share of an epoch, and a "
                "stream has no known length; use trainer.validate_every_steps"
            )
        nearest = {round(share * part * steps) for part in range(1, math.ceil(1 / share))}
        return frozenset(step * settings.accumulate for step in nearest if 0 < step < steps)

    def scheduler_steps(self, settings: TrainerSettings) -> int:
        """How often the scheduler is called in the whole run; 0 where that is unknown."""
        if settings.scheduler_every == "step":
            return self.total_steps
        if not self.steps_per_epoch:
            return settings.max_epochs or 0
        return -(-self.total_steps // self.steps_per_epoch)


def evaluated(
    kind: str,
    data: DataModule,
    strategy: Strategy,
    settings: TrainerSettings,
    *,
    seed: int,
    may_be_none: bool = False,
) -> dict[str, Loader]:
    """The loader of each `val`, `test` or `predict` data set by its name."""
    return {
        name: _loader(
            _by_rank(source, strategy, settings, seed),
            strategy,
            settings,
            seed=seed,
            refuses_copies=kind == "predict",
        )
        for name, source in _sources(kind, data, may_be_none=may_be_none).items()
    }


def _by_rank(
    source: Source,
    strategy: Strategy,
    settings: TrainerSettings,
    seed: int,
    *,
    trains: bool = False,
) -> Source:
    """With `data.divided=by_rank` each rank reads its own rows of a set to train on; a set to
    evaluate on is read as without it if it is alike in all processes. Without it, rows that differ
    between processes are refused."""
    if strategy.world_size == 1:
        return replace(source, is_by_rank=False)
    collectives, is_said = strategy.collectives, source.is_by_rank
    is_ready = isinstance(source.dataset, Batches)
    is_compared = settings.share_check != "off" and not is_ready
    how = ""
    if is_compared:
        how = unlike(source.dataset, collectives.gather, collectives.broadcast, is_said=is_said)
    if not is_said:
        if how:
            raise UserError(
                f"{source.method} gives {how}, and dpframe divides each batch itself, so that rows "
                "would be left out: give all rows in each process, or set data.divided=by_rank "
                "where each has its own (not to predict)"
            )
        return source
    if is_compared and not how and not trains:
        return replace(source, is_by_rank=False, may_differ=True)
    if is_compared and not how and strategy.is_main:
        log.warning(
            "data.divided=by_rank, and the rows of %s that were looked at are the same on all "
            "ranks: leave it out if each process has all rows, which are read once for each rank "
            "now",
            source.method,
        )
    if isinstance(source.dataset, IterableDataset):
        return source
    if source.sampler is not None or isinstance(source.dataset, Mix):
        what = "a dpframe.Mix" if source.sampler is None else "a sampler of its own"
        what = "several sets in a step" if isinstance(source.dataset, Together) else what
        raise UserError(
            f"data.divided=by_rank with {what}, which can't know how many rows the other processes "
            "have; leave it out"
        )
    own = OwnRows(source.dataset, shuffle=source.shuffle, seed=seed, rank=strategy.rank)
    return replace(source, dataset=own)


def _sources(kind: str, data: DataModule, *, may_be_none: bool = False) -> dict[str, Source]:
    """The data sets by their names; one alone has the name ""."""
    if kind == "predict" and isinstance(data.input, str):
        returned: Any = dataset_of(data.input, data.input_row)
    else:
        returned = getattr(data, METHODS[kind])()
    if returned is None and may_be_none:
        return {}
    method = f"{type(data).__name__}.{METHODS[kind]}()"
    # In training not e.g. a DatasetDict of Hugging Face, in which the test set is, too.
    is_dict = type(returned) is dict if kind == "train" else isinstance(returned, dict)
    if is_dict and not returned:
        raise UserError(f"{method} returned an empty dict; return a data set for each name")
    sources = {}
    for name, dataset in (returned if is_dict else {"": returned}).items():
        label = f"{method}[{name!r}]" if is_dict else method
        if is_dict and not (isinstance(name, str) and NAME.fullmatch(name)):
            raise UserError(
                f"{method} has a data set named {name!r}; use letters, digits, _ and -, e.g. clean"
            )
        if dataset is None:
            raise _no_dataset(kind, data, label)
        sources[name] = source = Source.of(dataset, data, label, kind=kind, name=name)
        if kind != "train" and isinstance(source.dataset, Mix):
            raise UserError(
                f"{label} returned a dpframe.Mix, which is an order to train in; return a dict of "
                "its sets by their names"
            )
        if not isinstance(source.dataset, IterableDataset) and len(source.dataset) == 0:
            is_alone = kind == "val" and not is_dict
            hint = "return None for no validation" if is_alone else "it needs at least one"
            raise UserError(f"{label} has no rows; {hint}")
    return sources


def _no_dataset(kind: str, data: DataModule, label: str) -> UserError:
    if isinstance(data, DataSets):
        key = "test" if kind == "predict" else kind
        return UserError(f"{label} returned None; set data.{key}, or pass it to the Trainer")
    if kind not in INSTEAD:
        return UserError(f"{label} returned None; return a data set")
    if any(map(data.has_own, ("test_dataset", METHODS[kind]))):
        return UserError(f"{label} returned None; return a data set, which mode={kind} reads")
    return UserError(f"{type(data).__name__} has no {METHODS[kind]}; write one, {INSTEAD[kind]}")


def _loader(
    source: Source,
    strategy: Strategy,
    settings: TrainerSettings,
    *,
    seed: int,
    piece: int | None = None,
    refuses_copies: bool = False,
) -> Loader:
    workers: Any = source.workers
    if isinstance(workers, str):
        workers = _measured_workers(source, strategy, seed)
    if not isinstance(workers, WorkerCount):
        workers = WorkerCount(workers)
    has_one_replica = strategy.replicas == strategy.world_size  # in this process
    division: Division | ByRank | None = None
    if source.is_by_rank:
        division = ByRank(strategy.world_size)
    elif source.is_divided and isinstance(source.dataset, IterableDataset):
        division = Division(source.dataset, strategy.world_size, workers.processes)
    is_ready = isinstance(source.dataset, Batches)
    if division is not None and strategy.has_fixed_shares:
        how = "data.divided=by_rank" if source.is_by_rank else "data.divide_streams=true"
        raise UserError(
            f"{'dpframe.Batches' if is_ready else how} with trainer.logical_replicas: which rows "
            "meet in a batch would depend on the number of ranks; give all rows in each process"
        )
    if division is not None and not is_ready:
        _refuse_idle_ranks(source.batch_size, strategy)
    here = Here(
        shares=strategy.split_rows,
        rank=strategy.rank,
        looks_always=strategy.has_fixed_shares,  # else other bits would follow
        agree=strategy.collectives.broadcast,
        tally=strategy.collectives.sum_numbers,
        place=partial(
            keep_on,
            strategy.device if has_one_replica else torch.device("cpu"),
            dtype=strategy.dtype,
            data_on_device=settings.data_on_device,
        ),
        pins=strategy.device.type != "cpu" and has_streams(strategy.device),
    )
    loader = Loader(
        replace(
            source,
            workers=workers,
            timeout_seconds=source.timeout_seconds or settings.data_timeout_seconds,
        ),
        here,
        seed=seed,
        piece=piece,
        division=division,
        look=partial(_look_at_first, source, strategy, refuses_copies)
        if division is not None and is_ready
        else None,
    )
    if source.is_loader:
        loader.how += ", batches and order by its DataLoader"
    if settings.data_on_device is True and strategy.device.type != loader.device.type:
        why = (
            "the data set is not a plain TensorDataset without a collate of its own"
            if has_one_replica
            else f"{strategy.name} has several devices in one process"
        )
        raise UserError(f"trainer.data_on_device=true but {why}; use trainer.data_on_device=auto")
    return loader


def _cut(source: Source, strategy: Strategy, settings: TrainerSettings) -> Cut | None:
    if settings.micro_batch is None:
        return None
    if isinstance(source.dataset, Batches):
        raise UserError(
            f"trainer.micro_batch={settings.micro_batch} cuts a batch before it is collated, and "
            f"{source.method} gives ready ones; make the batches of its loader smaller, and use "
            "trainer.accumulate"
        )
    has_own_rows = source.is_by_rank or source.is_divided
    share = -(-source.batch_size // strategy.replicas) if has_own_rows else 0
    return Cut(settings.micro_batch, strategy.replicas, share)


def _look_at_first(source: Source, strategy: Strategy, refuses_copies: bool, batch: Any) -> None:
    """Whether all ranks have the same first batch: all of them then read all that there is."""
    collectives = strategy.collectives
    if not collectives.broadcast(are_alike(batch, collectives.gather)):
        return
    line = (
        f"the first batch of {source.method} is the same on all {strategy.world_size} ranks, so "
        "that each row is probably read once for each of them: divide the data where the loader "
        "is made, e.g. by nodesplitter=webdataset.split_by_node"
    )
    if refuses_copies:
        raise UserError(line)
    if strategy.is_main:
        log.warning("%s", line)


def _refuse_idle_ranks(batch_size: int, strategy: Strategy) -> None:
    """A rank that has no row of a whole batch would never come to the end of its rows."""
    here = sum(map(len, strategy.split_rows(range(batch_size))))
    if strategy.collectives.sum_numbers([float(not here)])[0]:
        each = -(-batch_size // strategy.world_size)
        raise UserError(
            f"a batch of {batch_size} rows leaves one of {strategy.world_size} ranks without a "
            f"row, and each reads rows of its own; use data.batch_size={each * strategy.world_size}"
        )


def _measured_workers(source: Source, strategy: Strategy, seed: int) -> WorkerCount:
    workers = None
    if strategy.is_main:
        rows = Rows(source.dataset, source.collate)
        largest = max(1, sum(map(len, strategy.split_rows(range(source.batch_size)))))
        cores = cores_per_rank(strategy.world_size)
        workers = tuple(measured(rows, share=largest, cores=cores, seed=seed))
    return WorkerCount(*strategy.collectives.broadcast(workers))
