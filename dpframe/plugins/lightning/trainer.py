"""What `self.trainer` is in a LightningModule: Lightning's names for what dpframe's Trainer has."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from dpframe import UserError
from dpframe.plugins.lightning.numbers import STAGES, without_stage


class Absent(UserError, AttributeError):
    """So that `hasattr(self.trainer, …)` is false, and a use of it is one line."""


PRECISIONS = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# What a module reads as `self.trainer.NAME`; `here` is a TheirTrainer, `here.ours` dpframe's.
READ: dict[str, Callable[[Any], Any]] = {
    # how far it has come
    "current_epoch": lambda here: here.task.current_epoch,
    "min_epochs": lambda here: here.ours.settings.min_epochs,
    "min_steps": lambda here: here.ours.settings.min_steps,
    "max_epochs": lambda here: here.read_length("max_epochs", here.ours.settings.max_epochs, -1),
    "max_steps": lambda here: here.read_length("max_steps", here.ours.settings.max_steps, -1),
    "estimated_stepping_batches": lambda here: here.read_length(
        "estimated_stepping_batches", here.task.total_steps or None, math.inf
    ),
    "num_training_batches": lambda here: _or_endless(here.ours.feed.batches_per_epoch),
    "num_val_batches": lambda here: [
        _or_endless(loader.batches) for loader in here.ours.feed.validation.values()
    ],
    "is_last_batch": lambda here: (
        here.task.run_context.batch_index + 1 == here.ours.feed.batches_in(here.ours.epoch)
    ),
    # what it does
    "training": lambda here: here.kind == "train",
    "validating": lambda here: here.kind == "val" and not here.sanity_checking,
    "sanity_checking": lambda here: (
        here.kind == "val" and here.ours.mode == "fit" and not here.ours.has_begun
    ),
    "testing": lambda here: here.kind == "test",
    "predicting": lambda here: here.kind == "predict",
    "evaluating": lambda here: here.kind in ("val", "test"),
    "state": lambda here: SimpleNamespace(
        fn=here.ours.mode or "fit", stage=here.stage, status="running"
    ),
    # its settings
    "accumulate_grad_batches": lambda here: here.ours.settings.accumulate,
    "gradient_clip_val": lambda here: (
        here.task.clip_norm if here.task.clip_value is None else here.task.clip_value
    ),
    "gradient_clip_algorithm": lambda here: "norm" if here.task.clip_value is None else "value",
    "log_every_n_steps": lambda here: here.ours.settings.log_every,
    "precision": lambda here: PRECISIONS.get(
        here.ours.settings.precision, here.ours.settings.precision
    ),
    # where
    "world_size": lambda here: 1 if here.is_setting_up else here.ours.strategy.replicas,
    "num_devices": lambda here: here.world_size,
    "num_nodes": lambda here: 1,
    "node_rank": lambda here: 0,
    "device_ids": lambda here: list(range(here.world_size)),
    "global_rank": lambda here: 0 if here.is_setting_up else here.ours.strategy.rank,
    "local_rank": lambda here: (
        here.ours.strategy.rank
        if here.ours.strategy.device.index is None
        else here.ours.strategy.device.index
    ),
    "is_global_zero": lambda here: here.ours.strategy.is_main,
    "default_root_dir": lambda here: here.ours.run.directory or ".",
    "log_dir": lambda here: here.ours.run.directory or ".",
    # its module, its data and its logger
    "model": lambda here: here.task.module,
    "lightning_module": lambda here: here.task.module,
    "datamodule": lambda here: getattr(here.ours.data, "module", None),
    "train_dataloader": lambda here: here.ours.data.train_dataset(),
    "val_dataloaders": lambda here: here.ours.data.val_dataset(),
    "logger": lambda here: TheirLogger(here.ours),
    "loggers": lambda here: [TheirLogger(here.ours)],
    # what only Lightning's has
    **dict.fromkeys(
        ("barebones", "fast_dev_run", "interrupted", "received_sigterm"), lambda here: False
    ),
    **dict.fromkeys(
        (
            *("ckpt_path", "profiler", "progress_bar_callback", "checkpoint_callback"),
            "early_stopping_callback",
        ),
        lambda here: None,
    ),
    "callbacks": lambda here: [],
    "limit_predict_batches": lambda here: 1.0,
    "reload_dataloaders_every_n_epochs": lambda here: 0,
}


class Held:
    """The Trainer that trains a task: a copy of the task has the same, and none in a file."""

    trainer: Any = None

    def __deepcopy__(self, memo: dict) -> "Held":
        return self

    def __reduce__(self) -> tuple:
        return Held, ()


class TheirTrainer:
    """Stands for the Trainer of Lightning."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.lengths: dict[str, float] = {}  # of the training, those that the module has read
        self.is_setting_up = False

    def __getattr__(self, name: str) -> Any:
        if name in READ:
            return READ[name](self)
        if name.startswith("__"):
            raise AttributeError(name)
        raise Absent(
            f"{type(self.task.module).__name__} reads self.trainer.{name}, which is not here; "
            "docs/from-lightning.md lists what is"
        )

    @property
    def ours(self) -> Any:
        return self.task.held.trainer

    @property
    def kind(self) -> str:
        """Of the pass: train, val, test or predict."""
        return self.task.numbers.kind

    @property
    def stage(self) -> str:
        if self.sanity_checking:
            return "sanity_check"
        return {"": "train", "val": "validate"}.get(self.kind, self.kind)

    def read_length(self, name: str, value: int | None, without: float) -> float:
        self.lengths[name] = without if value is None else value
        return self.lengths[name]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Within, it answers as one process: loaders, their batches and the steps over them are
        those of the whole job, so that nothing may be divided or multiplied by the devices."""
        before, self.is_setting_up = self.is_setting_up, True
        try:
            yield
        finally:
            self.is_setting_up = before

    @property
    def global_step(self) -> int:
        """Updates; in manual optimization the steps of all optimizers."""
        is_by_hand = self.task.optimizes_by_hand
        return self.task.by_hand.steps if is_by_hand else self.ours.progress.global_step

    @property
    def should_stop(self) -> bool:
        return self.ours.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.ours.stop(f"{type(self.task.module).__name__} has set trainer.should_stop")

    @property
    def strategy(self) -> Any:
        ours = self.ours.strategy
        return SimpleNamespace(
            root_device=ours.device,
            world_size=self.world_size,
            global_rank=self.global_rank,
            is_global_zero=ours.is_main,
            barrier=lambda name=None: ours.collectives.broadcast(None),
            broadcast=lambda value, src=0: ours.collectives.broadcast(value),
        )

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Under dpframe's names, e.g. `val/loss`, and as the module has logged them."""
        known = self.task.known
        kinds = [kind for kind in STAGES if kind != self.kind] + [self.kind]  # the newest last
        named: dict[str, float] = {}
        for kind in filter(None, kinds):
            for key, value in known.items():
                if key.startswith(f"{kind}/"):
                    name = key.removeprefix(f"{kind}/")
                    named |= {name: value, f"{kind}_{name}": value}
        return {name: torch.tensor(value) for name, value in (named | dict(known)).items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    def print(self, *args: Any, **options: Any) -> None:
        if self.is_global_zero:
            print(*args, **options)


def _or_endless(batches: int | None) -> float:
    return math.inf if batches is None else batches


class TheirLogger:
    """What `self.logger` is: all loggers of the run, and TensorBoard's writer as `experiment`."""

    version = 0

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.name = trainer.run.recipe
        self.save_dir = self.log_dir = self.root_dir = trainer.run.directory

    @property
    def experiment(self) -> Any:
        """Nothing happens on processes that write no log, in the sanity pass, nor without
        TensorBoard."""
        if not self._trainer.has_begun and self._trainer.mode == "fit":
            return Silent()
        writers = (getattr(logger, "writer", None) for logger in self._trainer.loggers)
        return next(filter(None, writers), Silent())

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        kind = self._trainer.task.numbers.kind or "train"
        self._trainer.log({f"{kind}/{without_stage(kind, name)}": v for name, v in metrics.items()})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """The config's are logged."""

    def log_image(self, key: str, images: list[Any], **_: Any) -> None:
        for index, image in enumerate(images):
            self._trainer.log_image(f"{key}_{index}" if len(images) > 1 else key, image)

    def log_graph(self, *_: Any, **__: Any) -> None: ...


class Silent:
    """Takes any call."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> "Silent":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())
