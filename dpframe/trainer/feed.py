"""What a Trainer reads: each data set's loader, and how long training will be."""

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from dpframe import seeding
from dpframe.data import Loader
from dpframe.errors import UserError
from dpframe.task import Task
from dpframe.trainer import readers, residence
from dpframe.trainer.evaluation import Evaluation

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer


def set_up(trainer: "Trainer") -> None:
    """The training and the validation data, and the lengths that schedulers and bars ask for."""
    settings, data, task = trainer.settings, trainer.data, trainer.task
    trainer.train_dataset = train = _dataset(trainer, "train")
    trainer.train_loader = _loader(
        trainer, train, shuffle=data.shuffle, sampler=data.train_sampler(train)
    )
    trainer.has_validation = data.val_dataset() is not None
    if trainer.has_validation:
        trainer.validation = evaluation(trainer, "val", "validation_step")
    batches = trainer.train_loader.batches
    if batches is not None and settings.limit_train_batches is not None:
        batches = min(batches, settings.limit_train_batches)
    trainer.batches_per_epoch = batches
    trainer.steps_per_epoch = -(-(batches or 0) // settings.accumulate)
    ends = [settings.max_steps, (settings.max_epochs or 0) * trainer.steps_per_epoch]
    trainer.total_steps = min((end for end in ends if end), default=0)
    task.steps_per_epoch, task.total_steps = trainer.steps_per_epoch, trainer.total_steps
    per_call = 1 if settings.scheduler_every == "step" else trainer.steps_per_epoch or 1
    task.scheduler_steps = -(-trainer.total_steps // per_call)


def evaluation(trainer: "Trainer", kind: str, step: str) -> Evaluation:
    return Evaluation(
        trainer.task,
        step,
        _loader(trainer, _dataset(trainer, kind)),
        trainer.strategy,
        autocast=trainer.precision.autocast,
        limit_batches=trainer.settings.limit_eval_batches,
        interruption=trainer.interruption,
        is_lean=trainer.settings.lean,
    )


def draw_graph(trainer: "Trainer") -> None:
    """For the loggers of the main process, where a batch more costs next to nothing."""
    is_cheap = (
        trainer.train_loader.readers.processes == 0 and trainer.train_loader.batches is not None
    )
    has_predict = type(trainer.task).predict_step is not Task.predict_step
    if trainer.report.loggers and is_cheap and has_predict:
        with seeding.seeded(trainer.seed):
            batch = next(trainer.train_loader.epoch(), None)
            if batch is not None:
                trainer.report.graph(trainer.task, batch)


def _dataset(trainer: "Trainer", kind: str) -> Any:
    dataset = getattr(trainer.data, f"{kind}_dataset")()
    named = f"{type(trainer.data).__name__}.{kind}_dataset()"
    if dataset is None:
        raise UserError(f"{named} gives no data set; write it")
    if not isinstance(dataset, IterableDataset) and len(dataset) == 0:
        hint = "return None for no validation" if kind == "val" else "give it at least one"
        raise UserError(f"{named} has no rows; {hint}")
    return dataset


def _loader(
    trainer: "Trainer", dataset: Any, *, shuffle: bool = False, sampler: Any = None
) -> Loader:
    data, strategy = trainer.data, trainer.strategy
    asked = trainer.settings.data_on_device
    loader = Loader(
        dataset,
        batch_size=data.batch_size,
        shares=strategy.shares,
        shuffle=shuffle,
        seed=trainer.seed,
        sampler=sampler,
        workers=readers.workers_of(trainer),
        collate=data.collate,
        pin_memory=strategy.device.type == "cuda",
        rank=strategy.rank,
        agree=strategy.share,
        timeout_seconds=trainer.settings.data_timeout_seconds,
        place=residence.place_of(strategy, asked),
    )
    residence.check(loader, strategy, asked)
    return loader
