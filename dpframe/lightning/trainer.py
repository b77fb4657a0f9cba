"""What `self.trainer` is in a LightningModule: Lightning's names for what dpframe's Trainer has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from dpframe.errors import UserError
from dpframe.lightning.numbers import STAGES, bare


class Absent(UserError, AttributeError):
    """So that `hasattr(self.trainer, …)` is false, and a use of it is one line."""


class TheirTrainer:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.lengths: dict[str, float] = {}  # of the training, those that the module has read
        self.is_setting_up = False
        # What Lightning's Trainer would have besides.
        self.barebones = self.fast_dev_run = self.interrupted = self.received_sigterm = False
        self.num_nodes = 1
        self.node_rank = 0
        self.ckpt_path = self.profiler = None
        self.progress_bar_callback = self.checkpoint_callback = self.early_stopping_callback = None
        self.callbacks: list[Any] = []
        self.limit_predict_batches = 1.0
        self.reload_dataloaders_every_n_epochs = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Absent(
            f"{type(self.task.module).__name__} reads self.trainer.{name}, which is not here; "
            "docs/from-lightning.md lists what is"
        )

    # ---- how far it has come

    @property
    def current_epoch(self) -> int:
        return self.task.current_epoch

    @property
    def global_step(self) -> int:
        """Updates; in manual optimization the steps of all optimizers."""
        if self.task.optimizes_by_hand:
            return self.task.by_hand.steps
        return self._ours.progress.global_step

    @property
    def max_epochs(self) -> int:
        return self._length("max_epochs", self._settings.max_epochs, -1)

    @property
    def max_steps(self) -> int:
        return self._length("max_steps", self._settings.max_steps, -1)

    @property
    def min_epochs(self) -> int | None:
        return self._settings.min_epochs

    @property
    def min_steps(self) -> int | None:
        return self._settings.min_steps

    @property
    def num_training_batches(self) -> int | float:
        batches = self._ours.feed.batches_per_epoch
        return float("inf") if batches is None else batches

    @property
    def num_val_batches(self) -> list[int | float]:
        several = [loader.batches for loader in self._ours.feed.validation.values()]
        return [float("inf") if batches is None else batches for batches in several]

    @property
    def estimated_stepping_batches(self) -> int | float:
        steps = self.task.total_steps or None
        return self._length("estimated_stepping_batches", steps, float("inf"))

    @property
    def is_last_batch(self) -> bool:
        done = self.task.run_context.batch_index + 1
        return done == self._ours.feed.batches_in(self._ours.epoch)

    @property
    def should_stop(self) -> bool:
        return self._ours.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self._ours.stop(f"{type(self.task.module).__name__} has set trainer.should_stop")

    # ---- what it does

    @property
    def training(self) -> bool:
        return self._kind == "train"

    @property
    def validating(self) -> bool:
        return self._kind == "val" and not self.sanity_checking

    @property
    def sanity_checking(self) -> bool:
        return self._kind == "val" and self._ours.mode == "fit" and not self._ours.has_begun

    @property
    def testing(self) -> bool:
        return self._kind == "test"

    @property
    def predicting(self) -> bool:
        return self._kind == "predict"

    @property
    def evaluating(self) -> bool:
        return self._kind in ("val", "test")

    # ---- its settings

    @property
    def accumulate_grad_batches(self) -> int:
        return self._settings.accumulate

    @property
    def gradient_clip_val(self) -> Any:
        return self.task.clip_norm if self.task.clip_value is None else self.task.clip_value

    @property
    def gradient_clip_algorithm(self) -> str:
        return "norm" if self.task.clip_value is None else "value"

    @property
    def log_every_n_steps(self) -> int:
        return self._settings.log_every

    @property
    def precision(self) -> str:
        names = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
        return names.get(self._settings.precision, self._settings.precision)

    # ---- where

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
    def world_size(self) -> int:
        return 1 if self.is_setting_up else self._ours.strategy.replicas

    num_devices = world_size

    @property
    def device_ids(self) -> list[int]:
        return list(range(self.world_size))

    @property
    def global_rank(self) -> int:
        return 0 if self.is_setting_up else self._ours.strategy.rank

    @property
    def local_rank(self) -> int:
        index = self._ours.strategy.device.index
        return self._ours.strategy.rank if index is None else index

    @property
    def is_global_zero(self) -> bool:
        return self._ours.strategy.is_main

    @property
    def strategy(self) -> Any:
        ours = self._ours.strategy
        return SimpleNamespace(
            root_device=ours.device,
            world_size=self.world_size,
            global_rank=self.global_rank,
            is_global_zero=ours.is_main,
            barrier=lambda name=None: ours.collectives.broadcast(None),
            broadcast=lambda value, src=0: ours.collectives.broadcast(value),
        )

    @property
    def default_root_dir(self) -> str:
        return self._ours.run.directory or "."

    log_dir = default_root_dir

    # ---- its data, its module and its numbers

    @property
    def lightning_module(self) -> Any:
        return self.task.module

    model = lightning_module

    @property
    def datamodule(self) -> Any:
        return getattr(self._ours.data, "module", None)

    @property
    def train_dataloader(self) -> Any:
        return self._ours.data.train_dataset()

    @property
    def val_dataloaders(self) -> Any:
        return self._ours.data.val_dataset()

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Under dpframe's names, e.g. `val/loss`, and as the module has logged them."""
        known = self.task.known
        kinds = [kind for kind in STAGES if kind != self._kind] + [self._kind]  # the newest last
        named: dict[str, float] = {}
        for kind in filter(None, kinds):
            for key, value in known.items():
                if key.startswith(f"{kind}/"):
                    name = key.removeprefix(f"{kind}/")
                    named |= {name: value, f"{kind}_{name}": value}
        return {name: torch.tensor(value) for name, value in (named | dict(known)).items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def logger(self) -> "TheirLogger":
        return TheirLogger(self._ours)

    @property
    def loggers(self) -> list["TheirLogger"]:
        return [self.logger]

    def print(self, *args: Any, **options: Any) -> None:
        if self.is_global_zero:
            print(*args, **options)

    def _length(self, name: str, value: int | None, without: float) -> Any:
        self.lengths[name] = without if value is None else value
        return self.lengths[name]

    @property
    def _kind(self) -> str:
        return self.task.numbers.kind

    @property
    def _ours(self) -> Any:
        return self.task.trainer_here

    @property
    def _settings(self) -> Any:
        return self._ours.settings


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
        self._trainer.log({f"{kind}/{bare(kind, name)}": v for name, v in metrics.items()})

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
