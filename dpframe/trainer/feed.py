"""What a run reads: the loader of each data set, and how long training will be."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dpframe.data import DataModule, Loader, Rows
from dpframe.data.prefetch import keep_on
from dpframe.data.source import Source
from dpframe.data.workers import Workers, cores_per_rank, measured
from dpframe.errors import UserError, suggestion
from dpframe.strategies.base import Strategy
from dpframe.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Feed:
    """The data of a training run, and the lengths that schedulers and progress bars ask for."""

    source: Source  # what training reads
    train: Loader
    validation: Loader | None
    batches_per_epoch: int | None  # None: unknown, of a stream
    steps_per_epoch: int  # 0 where that is unknown
    total_steps: int  # 0 where that is unknown

    @classmethod
    def of(
        cls, data: DataModule, strategy: Strategy, settings: TrainerSettings, *, seed: int
    ) -> "Feed":
        source = _source("train", data)
        train = _loader(source, strategy, settings, seed=seed)
        has_validation = data.val_dataset() is not None
        batches = train.batches
        if batches is not None and settings.limit_train_batches is not None:
            batches = min(batches, settings.limit_train_batches)
        steps = -(-(batches or 0) // settings.accumulate)
        ends = [settings.max_steps, (settings.max_epochs or 0) * steps]
        return cls(
            source,
            train,
            evaluated("val", data, strategy, settings, seed=seed) if has_validation else None,
            batches,
            steps,
            min((end for end in ends if end), default=0),
        )

    @property
    def dataset(self) -> Any:
        return self.source.dataset

    def scheduler_steps(self, scheduler_every: str) -> int:
        """How often the scheduler is called in the whole run."""
        return -(
            -self.total_steps // (1 if scheduler_every == "step" else self.steps_per_epoch or 1)
        )


def evaluated(
    kind: str, data: DataModule, strategy: Strategy, settings: TrainerSettings, *, seed: int
) -> Loader:
    """The loader of the `val`, `test` or `predict` data set."""
    return _loader(_source(kind, data), strategy, settings, seed=seed)


def local_devices(strategy: Strategy) -> list[torch.device]:
    """The devices of this process."""
    if strategy.world_size > 1 or strategy.replicas == 1:
        return [strategy.device]
    return [torch.device(name) for name in dict.fromkeys(strategy.devices)]


def _source(kind: str, data: DataModule) -> Source:
    methods = {
        "train": data.train_dataset,
        "val": data.val_dataset,
        "test": data.test_dataset,
        "predict": data.predict_dataset,
    }
    returned = methods[kind]()
    name = f"{type(data).__name__}.{methods[kind].__name__}()"
    if returned is None:
        raise UserError(f"{name} returned None; return a data set")
    source = Source.of(returned, data, name, trains=kind == "train")
    if not isinstance(source.dataset, IterableDataset) and len(source.dataset) == 0:
        hint = "return None for no validation" if kind == "val" else "it needs at least one"
        raise UserError(f"{name} has no rows; {hint}")
    return source


def _loader(source: Source, strategy: Strategy, settings: TrainerSettings, *, seed: int) -> Loader:
    workers: Any = source.workers
    if isinstance(workers, str):
        workers = _measured_workers(source, strategy, seed)
    has_one_replica = strategy.replicas == strategy.world_size  # in this process
    loader = Loader(
        source.dataset,
        batch_size=source.batch_size,
        shares=strategy.shares,
        shuffle=source.shuffle,
        seed=seed,
        sampler=source.sampler,
        workers=workers,
        collate=source.collate,
        pin_memory=strategy.device.type == "cuda",
        rank=strategy.rank,
        agree=strategy.share,
        timeout_seconds=source.timeout_seconds or settings.data_timeout_seconds,
        place=partial(
            keep_on,
            strategy.device if has_one_replica else torch.device("cpu"),
            dtype=strategy.dtype,
            data_on_device=settings.data_on_device,
        ),
        drop_last=source.drop_last,
        told=source.told,
        options=source.options,
    )
    if source.options:
        loader.how += ", batches and order by its DataLoader"
    if settings.data_on_device is True and strategy.device.type != loader.device.type:
        why = (
            "the data set is not a plain TensorDataset without a collate of its own"
            if has_one_replica
            else f"{strategy.name} has several devices in one process"
        )
        raise UserError(f"trainer.data_on_device=true but {why}; use trainer.data_on_device=auto")
    return loader


def _measured_workers(source: Source, strategy: Strategy, seed: int) -> Workers:
    if source.workers != "auto":
        near = suggestion(str(source.workers), ["auto"])
        raise UserError(f"data.workers={source.workers} is neither a whole number nor auto; {near}")
    workers = None
    if strategy.is_main:
        rows = Rows(source.dataset, source.collate)
        largest = max(1, sum(map(len, strategy.shares(range(source.batch_size)))))
        cores = cores_per_rank(strategy.world_size)
        workers = tuple(measured(rows, share=largest, cores=cores, seed=seed))
    return Workers(*strategy.share(workers))
