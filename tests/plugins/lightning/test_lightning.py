"""LightningModules train unmodified: as Lightning's own loop does, on every strategy."""

import importlib
import json
import logging
import math
import os
import re
import warnings
from copy import deepcopy
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch", reason="needs `pip install 'dpframe[lightning]'`")
import lit  # noqa: E402
from command import ROOT, attempts, write  # noqa: E402
from command import dpframe as dpframe_command  # noqa: E402
from forked import on  # noqa: E402
from small import heavy  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

import dpframe  # noqa: E402
from dpframe import Trainer, TrainerSettings, UserError  # noqa: E402
from dpframe.callbacks.checkpoint import Checkpoint  # noqa: E402
from dpframe.launch.environment import Rank  # noqa: E402
from dpframe.lightning import Lightning, LightningData  # noqa: E402
from dpframe.loggers.tensorboard import TensorBoard  # noqa: E402
from dpframe.plugins.verify.course import Recipe  # noqa: E402
from dpframe.schedules import Linear  # noqa: E402
from dpframe.strategies import group  # noqa: E402
from dpframe.strategies.data_parallel import DataParallel  # noqa: E402
from dpframe.strategies.ddp import DDP  # noqa: E402
from dpframe.strategies.fsdp import FSDP  # noqa: E402
from dpframe.testing import check_strategy, verify  # noqa: E402
from dpframe.trainer import RunInfo  # noqa: E402

EPOCHS = 3


def theirs(module: Any, data: Any, **settings: Any) -> dict[str, float]:
    """Lightning's own numbers."""
    metrics = theirs_trained(module, data, **settings).callback_metrics
    return {name: float(value) for name, value in metrics.items()}


def theirs_trained(module: Any, data: Any, **settings: Any) -> Any:
    """The module is trained by Lightning, in double precision."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            **{"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **quiet, **settings},
            accelerator="cpu",
            devices=1,
        )
        trainer.fit(module.double(), data)
    return trainer


def ours(
    module: Any, data: Any, strategy: Any = None, resume: Any = None, **settings: Any
) -> Trainer:
    known = {"max_epochs": EPOCHS, "threads": 1, "sanity_batches": 0, "precision": "64"}
    trainer = Trainer(
        Lightning(module),
        LightningData(data),
        strategy=strategy,
        settings=TrainerSettings(**{**known, **settings}),
    )
    trainer.fit(resume)
    return trainer


def weights_apart(one: Any, other: Any) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


SAME = {  # a module, Lightning's settings, and ours
    "logs": (lit.Regression, {}, {}),
    "accumulates": (lit.Regression, {"accumulate_grad_batches": 2}, {"accumulate": 2}),
    "overrides": (lit.Warm, {"gradient_clip_val": 0.3}, {"clip_norm": 0.3}),
    "by hand": (lit.ByHand, {}, {}),
    "measures": (lit.Measures, {}, {}),
    "closures": (lit.Closures, {}, {}),
    "reads its loss": (lit.ReadsItsLoss, {}, {}),
    "draws": (lit.Draws, {"precision": "64-true"}, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_module_is_trained_as_lightning_trains_it(name):
    make, for_lightning, for_us = SAME[name]
    module, other = make(), make()
    rows = 24 if name == "accumulates" else lit.ROWS  # whose tails Lightning weighs otherwise
    wanted = theirs(module, lit.Rows(rows=rows), **for_lightning)
    trainer = ours(other, lit.Rows(rows=rows), **for_us)
    assert weights_apart(module, other) <= 1e-12
    assert type(other).__name__ == make.__name__ and isinstance(other, make)
    numbers = other.trainer.callback_metrics
    missing = {n for n in wanted if not n.endswith("_step")} - {f"{n}_epoch" for n in numbers}
    for metric in missing & numbers.keys():
        assert float(numbers[metric]) == pytest.approx(wanted[metric], rel=1e-6), metric
    assert missing <= numbers.keys()
    assert other.global_step == module.global_step > trainer.epoch == EPOCHS


@pytest.mark.parametrize("what", lit.RETURNS)
def test_each_return_of_configure_optimizers_schedules_as_in_lightning(what):
    module, other = lit.Returns(what), lit.Returns(what)
    theirs(module, lit.Rows(), max_epochs=5)
    ours(other, lit.Rows(), max_epochs=5)
    assert weights_apart(module, other) <= 1e-12


STRATEGIES = {
    "data_parallel": lambda: DataParallel(3, "cpu"),
    "ddp": lambda: DDP(2, "cpu"),
    "fsdp": lambda: FSDP(2, "cpu"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["logs", "overrides", "measures", "by hand"])
def test_the_numbers_are_those_of_one_process_on_every_strategy(name, strategy):
    if name == "by hand" and strategy != "ddp":
        pytest.skip("it is refused")
    make, _, settings = SAME[name]
    alone = ours(make(), lit.Rows(), **settings)
    weights, metrics = on(STRATEGIES[strategy](), trained, make, settings)
    assert metrics == pytest.approx(alone.metrics, rel=1e-9)
    for one, other in zip(alone.task.parameters(), weights, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def trained(strategy: Any, make: Any, settings: dict[str, Any], make_data: Any = lit.Rows) -> Any:
    trainer = ours(make(), make_data(), strategy, **settings)
    weights = trainer.task.parameters()
    whole = [getattr(weight, "full_tensor", lambda w=weight: w)() for weight in weights]
    return [weight.detach() for weight in whole], trainer.metrics


class DividedRows(lit.Rows):
    """Divides its batch, as lightning-hydra-template does, and its rows by the devices."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        rank, world = self.trainer.global_rank, self.trainer.num_nodes * self.trainer.num_devices
        self.train = torch.utils.data.Subset(self.train, range(rank, len(self.train), world))
        self.per_device = self.batch_size // self.trainer.world_size

    def train_dataloader(self) -> Any:
        assert self.trainer.strategy.world_size == len(self.trainer.device_ids) == 1
        return torch.utils.data.DataLoader(self.train, self.per_device)


class ScalesByDevices(lit.Linear):
    """What it does by the number of devices: a learning rate, the length of a schedule, and rows
    that it gathers only where there are several."""

    def setup(self, stage: str) -> None:
        self.devices = self.trainer.num_devices

    def configure_optimizers(self) -> Any:
        rate = 0.02 * self.trainer.world_size
        optimizer = torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)
        batches = self.trainer.num_training_batches // self.devices
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, batches // 3)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        errors = self.net(batch[0])[:, 0] - batch[1]
        if self.trainer.world_size > 1:
            errors = self.all_gather(errors, sync_grads=True)
        return errors.square().mean().sqrt()  # no mean over rows


class SumsNoise(ScalesByDevices):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = self.randn_rows(*batch[0].shape) + self.rand_rows(*batch[0].shape)
        errors = (self.net(batch[0] + noise)[:, 0] - batch[1]).square()
        return errors.sum() * self.batch_rows / len(errors) / 8


@pytest.mark.parametrize("strategy", ["data_parallel", "ddp"])
def test_a_module_sums_over_the_batch_and_draws_alike_for_its_rows(strategy):
    alone = ours(SumsNoise(), DividedRows())
    weights, metrics = on(STRATEGIES[strategy](), trained, SumsNoise, {}, DividedRows)
    assert metrics == pytest.approx(alone.metrics, rel=1e-9)
    for one, other in zip(alone.task.parameters(), weights, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_second_trainer_of_a_module_logs_its_metrics_as_the_first_one_does():
    task, data = Lightning(lit.LogsValues()), LightningData(lit.Rows())
    settings = TrainerSettings(max_epochs=1, threads=1, precision="64")
    first = Trainer(task, data, settings=settings).fit()
    task.load_state_dict(Lightning(lit.LogsValues()).state_dict())
    second = Trainer(task, LightningData(lit.Rows()), settings=settings).fit()
    assert second == pytest.approx(first, rel=1e-12)


def test_a_metric_that_is_the_loss_logs_nothing_by_itself():
    alone, wanted = ours(lit.Forecasts(), lit.Rows()), theirs(lit.Forecasts(), lit.Rows())
    assert alone.metrics["train/error"] == pytest.approx(wanted["train_error_epoch"], rel=1e-6)
    assert alone.metrics["train/other"] == pytest.approx(wanted["train_other_epoch"], rel=1e-6)


def test_what_a_checkpoint_can_not_hold_comes_back_from_the_module_as_it_is_built(tmp_path, caplog):
    run = RunInfo(directory=str(tmp_path))
    settings = TrainerSettings(max_epochs=1, threads=1, precision="64")
    parts = {"callbacks": [Checkpoint(monitor="auto")], "run": run, "settings": settings}
    first = Trainer(Lightning(lit.Forecasts(4)), LightningData(lit.Rows()), **parts)
    first.task.module.scaler["rows"] = np.int64(9)
    first.fit()
    said = [record.message for record in caplog.records]
    assert any("scaler.kind (Fraction), hyper_parameters.half (Fraction)" in line for line in said)
    assert any("val/loss is not measured, so only last.ckpt is kept" in line for line in said)
    assert len(said) == 2
    resumed = ours(lit.Forecasts(5), lit.Rows(), resume=f"{tmp_path}/checkpoints/last.ckpt")
    module = resumed.task.module
    assert module.scaler["rows"] == 9 and module.scaler["kind"] == Fraction(1, 3)
    assert module.scaler["means"].tolist() == [0, 1, 2]
    assert module.loaded == {"width": 4, "half": Fraction(1, 2)}


def test_why_a_property_can_not_be_read_is_said():
    with pytest.raises(UserError, match=r"Asks reads self.trainer.gpus_of_the_node, which is not"):
        ours(lit.Asks(), lit.Rows())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_metric_returned_is_logged_as_the_metric(strategy):
    alone = ours(lit.LogsValues(), lit.Rows())
    assert alone.metrics["val/mse"] == pytest.approx(alone.metrics["val/loss"])
    _, metrics = on(STRATEGIES[strategy](), trained, lit.LogsValues, {"share_check": "strict"})
    assert metrics == pytest.approx(alone.metrics, rel=1e-9)
    assert {"train/score", "val/rmse", "val/mse"} <= metrics.keys()


def test_a_hook_that_replicas_of_a_process_would_call_several_times_may_not_change_weights():
    said = r"Momentum.on_train_batch_end changes module.slow.weight, which 3 replicas in .*=ddp$"
    with pytest.raises(UserError, match=said):
        ours(lit.Momentum(), lit.Rows(), STRATEGIES["data_parallel"]())
    alone = ours(lit.Momentum(), lit.Rows())
    weights, _ = on(STRATEGIES["ddp"](), trained, lit.Momentum, {})
    for one, other in zip(alone.task.parameters(), weights, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def said_in_rank(strategy: Any, make: Any) -> str:
    with pytest.raises(UserError) as refusal:
        trained(strategy, make, {})
    return str(refusal.value)


def test_a_number_that_one_rank_alone_logs_is_refused():
    assert "1 of 2 processes return 'loss' in each step and the others never" in on(
        DDP(2, "cpu"), said_in_rank, lit.OnlyTheFirst
    )


@pytest.mark.parametrize("strategy", ["data_parallel", "ddp"])
def test_what_is_set_up_by_the_number_of_devices_is_that_of_one_as_batches_are_global(strategy):
    alone = ours(ScalesByDevices(), DividedRows())
    weights, metrics = on(STRATEGIES[strategy](), trained, ScalesByDevices, {}, DividedRows)
    assert metrics == pytest.approx(alone.metrics, rel=1e-9)
    for one, other in zip(alone.task.parameters(), weights, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_hooks_come_as_in_lightning():
    module, other = lit.Noting(), lit.Noting()
    theirs(module, lit.Rows(rows=9), max_epochs=2)
    ours(other, lit.Rows(rows=9), max_epochs=2)
    assert other.seen == module.seen


class Watching(lit.Linear):
    """Writes down the learning rate in its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def note(self, hook: str) -> None:
        rate = self.optimizers().param_groups[0]["lr"]
        assert self.lr_schedulers().get_last_lr() == [rate]
        self.seen.append((hook, self.current_epoch, self.global_step, rate))

    def on_train_epoch_start(self) -> None:
        self.note("epoch start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(f"batch {batch_idx} end")

    def on_validation_epoch_end(self) -> None:
        self.note("validation end")

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_see_the_steps_and_learning_rates_that_they_see_in_lightning(accumulate):
    module, other = Watching(), Watching()
    theirs(module, lit.Rows(rows=8, batch_size=2), accumulate_grad_batches=accumulate)
    ours(other, lit.Rows(rows=8, batch_size=2), accumulate=accumulate)
    assert other.seen == module.seen and len(module.seen) == EPOCHS * 7


class Regularized(lit.Linear):
    """Logs another loss than it returns, in training and in a validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = self.loss(batch)
        self.log("train_loss", error, on_epoch=True)
        return error + 0.1 * self.net.weight.square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        error = self.loss(batch)
        self.log("val_loss", error)
        return error + 1.0

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        config = {"scheduler": scheduler, "monitor": "train_loss_epoch"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def test_what_a_module_logs_as_its_loss_is_not_what_it_returns():
    module, other = Regularized(), Regularized()
    wanted = theirs(module, lit.Rows())
    numbers = ours(other, lit.Rows()).metrics
    assert weights_apart(module, other) <= 1e-12
    assert numbers["val/loss"] == pytest.approx(wanted["val_loss"], rel=1e-6)
    assert numbers["train/loss"] == pytest.approx(wanted["train_loss_epoch"], rel=1e-6)
    assert numbers["train/optimized_loss"] > numbers["train/loss"]
    assert "train/optimized_loss" not in ours(lit.Regression(), lit.Rows()).metrics


class Weighted(lit.Regression):
    """Its loss is a mean over what counts: another number of rows in each share."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        counts = (x[:, 0] > 0).to(x)
        error = (self(x) - y).square() * counts
        self.log("weight", 7.0)
        return {"loss": error.sum() / counts.sum().clamp(min=1), "weight": counts.sum()}


def test_a_loss_with_its_weight_is_the_same_on_replicas_and_a_number_of_that_name_is_logged():
    alone = ours(Weighted(), lit.Rows())
    weights, metrics = on(DDP(2, "cpu"), trained, Weighted, {})
    assert metrics == pytest.approx(alone.metrics, rel=1e-9)
    assert metrics["train/weight"] == 7
    for one, other in zip(alone.task.parameters(), weights, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


class TwoSets(lit.Rows):
    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), super().val_dataloader()]


class MeasuresTwo(lit.Measures):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def test_a_best_of_all_epochs_is_kept_and_a_metric_that_is_logged_begins_again(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wanted = theirs(lit.Best(), lit.Rows(), logger=True, max_epochs=4)
    names = {name.replace("val_", "val/"): value for name, value in wanted.items()}
    assert names["val/best"] < 0 and names["val/newest"] < 0
    whole = ours(lit.Best(), lit.Rows(), max_epochs=4, sanity_batches=2)
    measured = {name: value for name, value in whole.metrics.items() if name.startswith("val/")}
    assert measured == pytest.approx(names, rel=1e-6)
    state = deepcopy(ours(lit.Best(), lit.Rows(), max_epochs=2).state_dict())
    resumed = ours(lit.Best(), lit.Rows(), max_epochs=4, sanity_batches=2, resume=state)
    assert resumed.metrics == whole.metrics
    assert on(DDP(2, "cpu"), trained, lit.Best, {"max_epochs": 4})[1] == pytest.approx(
        whole.metrics, rel=1e-9
    )


def test_the_sanity_pass_writes_nothing_to_tensorboard(tmp_path):
    parts = Lightning(lit.Best()), LightningData(lit.Rows())
    run = RunInfo(directory=str(tmp_path))
    Trainer(*parts, loggers=[TensorBoard()], run=run, max_epochs=2, precision="64").fit()
    [written] = tmp_path.glob("*.writer")
    assert [event.step for event in EventAccumulator(str(written)).Reload().Scalars("error")] == [
        0,
        1,
    ]


def test_metrics_of_several_validation_loaders_have_results_for_each():
    one = ours(lit.Measures(), lit.Rows()).metrics
    numbers = ours(MeasuresTwo(), TwoSets()).metrics
    for name in ("val/0/r2", "val/1/r2", "val/r2"):
        assert numbers[name] == pytest.approx(one["val/r2"], rel=1e-9)


class Stops(lit.Linear):
    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.stop)

    def stop(self) -> None:
        if self.current_epoch == 1:
            self.trainer.should_stop = True


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_epoch_end"])
def test_a_module_stops_training_from_the_hooks_of_an_epochs_end(hook):
    module, other = Stops(hook), Stops(hook)
    theirs(module, lit.Rows())
    trainer = ours(other, lit.Rows())
    assert other.global_step == module.global_step and trainer.epoch == 2
    assert weights_apart(module, other) <= 1e-12


class LogsNumber(lit.ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.log("train_loss", 0.5)


def test_a_module_that_steps_by_hand_may_log_a_plain_number_as_its_loss():
    assert ours(LogsNumber(), lit.Rows()).metrics["train/loss"] == 0.5


class Plateau(lit.Returns):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__("an optimizer")
        self.config = config

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        config = {"scheduler": lit.plateau(optimizer), **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize(
    "config, line",
    [
        ({"monitor": "val_loss", "interval": "step"}, "with interval='step'"),
        ({"monitor": "train_loss_step"}, "monitors train_loss_step, the number of one batch"),
    ],
)
def test_a_plateau_of_single_steps_is_refused(config, line):
    with pytest.raises(UserError) as caught:
        ours(Plateau(config), lit.Rows())
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_module_that_reads_its_loss_in_optimizer_step_reads_that_of_all_ranks():
    weights, _ = on(DDP(3, "cpu"), trained, lit.ReadsItsLoss, {})
    for one, other in zip(
        ours(lit.ReadsItsLoss(), lit.Rows()).task.parameters(), weights, strict=True
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


class Backward(lit.ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        self.loss(batch).backward()
        first.step()


class LateBackward(lit.ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        first.zero_grad()
        loss = self.loss(batch)
        loss.backward() if self.global_step >= 4 else self.manual_backward(loss)
        first.step()


class LooksFirst(lit.ByHand):
    """Makes gradients that no optimizer sees."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        self.loss(batch).backward()
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()


class Differs(lit.Linear):
    def on_validation_epoch_end(self) -> None:
        self.log("val_here", float(self.global_rank))


class NoLoss(lit.Linear):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class Skips(lit.Linear):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class OneOfTwo(lit.Linear):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


class NoOptimizer(lit.Linear):
    def configure_optimizers(self) -> Any:
        return None


class Zeros(lit.Linear):
    def optimizer_zero_grad(self, *args: Any) -> None: ...


class OfLightning1(lit.Linear):
    def validation_epoch_end(self, outputs: Any) -> None: ...


class Twice(lit.Linear):
    """As SAM does."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        closure()
        closure()
        optimizer.step()


class Median(lit.Linear):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), reduce_fx=torch.median)


class Reads(lit.Linear):
    def on_train_start(self) -> None:
        assert not hasattr(self.trainer, "lite")
        self.trainer.fit_loop.max_epochs = 3  # noqa


REFUSED = [
    (NoLoss, {}, "NoLoss.training_step returned no loss, which leaves out the batch"),
    (Skips, {}, "Skips.on_train_batch_start returned -1, which ends the epoch"),
    (OneOfTwo, {}, "OneOfTwo.configure_optimizers returned 2 optimizers, which takes manual"),
    (NoOptimizer, {}, "NoOptimizer.configure_optimizers returned a NoneType; return an opt"),
    (Zeros, {}, "Zeros.optimizer_zero_grad is never called here: "),
    (OfLightning1, {}, ".validation_epoch_end is never called here: it is Lightning 1's"),
    (Twice, {}, "Twice.optimizer_step calls its closure again in a step, and Twice's SGD takes"),
    (
        lit.Closures,
        {"strategy": DataParallel(2, "cpu"), "clip_norm": 1.0},
        "can't be combined with LBFGS",
    ),
    (Median, {}, "reduce_fx=median) could not be exact over replicas"),
    (Reads, {}, "Reads reads self.trainer.fit_loop, which is not here"),
    (lit.ByHand, {"accumulate": 2}, "trainer.accumulate=2: ByHand steps its optimizers itself"),
    (lit.ByHand, {"precision": "fp16"}, "trainer.precision=fp16 scales the loss"),
    (lit.ByHand, {"strategy": DataParallel(2, "cpu")}, "would each do so; use strategy=ddp"),
    (lit.ByHand, {"strategy": FSDP(1, "cpu")}, "and FSDP cuts them; use strategy=ddp"),
]


@pytest.mark.parametrize(
    "make, settings, line", REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_can_not_be_exact_is_refused_in_one_line(make, settings, line):
    with pytest.raises(UserError) as caught:
        ours(make(), lit.Rows(), **settings)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make, line",
    [
        (Backward, "steps SGD with gradients that differ between the ranks; call self.manual_b"),
        (LateBackward, "steps SGD with gradients that differ between the ranks; call self.manual"),
        (Differs, "logs here in a hook, 0 on one rank and something else on another"),
        (lit.ByHand, "a batch of 1 rows leaves one without a row; set data.drop_last=true"),
    ],
)
def test_ranks_that_would_differ_are_refused_in_one_line(make, line):
    rows = 21 if make is lit.ByHand else lit.ROWS
    assert line in on(DDP(2, "cpu"), refused, make, rows)


def test_gradients_that_no_optimizer_sees_may_be_a_ranks_own():
    alone = ours(LooksFirst(), lit.Rows())
    weights, _ = on(DDP(2, "cpu"), trained, LooksFirst, {})
    for one, other in zip(alone.task.parameters(), weights, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def refused(strategy: Any, make: Any, rows: int) -> str:
    with pytest.raises(UserError) as caught:
        ours(make(), lit.Rows(rows=rows), strategy)
    return str(caught.value)


# ---- the command

LIT = ["recipe=lightning", "task.module._target_=lit.Regression", "data.module._target_=lit.Rows"]
PATHS = f"{Path(__file__).parent}{os.pathsep}{ROOT}"


def lines(*several: list[str], folder: Path) -> list[Any]:
    return attempts(
        [[*LIT, "trainer.max_epochs=2", *line] for line in several], folder, PYTHONPATH=PATHS
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on one process, with its summary."""
    folder = tmp_path_factory.mktemp("run")
    [done] = lines(
        ["hydra.run.dir=one", "+task.module.width=5", "trainer.precision=64"], folder=folder
    )
    assert done.code == 0, done.err
    return folder, json.loads((folder / "one" / "summary.json").read_text())


def test_the_command_trains_a_module_with_the_default_monitor(run):
    folder, summary = run
    assert summary["best"] == {"val/loss": summary["metrics"]["val/loss"]}
    assert summary["metrics"].keys() >= {
        "train/loss",
        "val/mae",
        "val/bias",
        "val/rows",
        "val/worst",
    }
    task = dpframe.load(folder / "one", *LIT[1:])
    assert type(task.module).__name__ == "Regression" and task.module.hparams.width == 5


def test_ranks_of_the_command_end_with_the_same_numbers(run):
    folder, summary = run
    words = [*LIT, "trainer.max_epochs=2", "+task.module.width=5", "trainer.precision=64"]
    ranks = ["strategy=ddp", "trainer.gpus=3", "hydra.run.dir=three"]
    done = dpframe_command(*words, *ranks, cwd=folder, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder / "three" / "summary.json").read_text())["metrics"]
    assert metrics == pytest.approx(summary["metrics"], rel=1e-9)


def test_a_checkpoint_of_lightning_is_loaded_and_one_that_is_cut_is_not(tmp_path):
    module = lit.Regression()
    made = theirs_trained(module, lit.Rows())
    made.save_checkpoint(tmp_path / "theirs.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "theirs.ckpt").read_bytes()[:2000])
    words = ["mode=test", "trainer.precision=64", "hydra.run.dir=test"]
    done, cut, missing = lines(
        ["checkpoint=theirs.ckpt", *words],
        ["checkpoint=cut.ckpt", *words],
        ["task.module._target_=lit.Missing"],
        folder=tmp_path,
    )
    assert done.code == 0, done.err
    metrics = json.loads((tmp_path / "test" / "summary.json").read_text())["metrics"]
    assert metrics["test/loss"] == pytest.approx(float(made.callback_metrics["val_loss"]), rel=1e-6)
    assert cut.code == 2 and "it has no checksum" in cut.err
    assert missing.code == 2 and "lit has no Missing" in missing.err


def test_what_is_no_lightning_module_is_one_line(tmp_path):
    kinds = {
        "lit.Rows": "task.module is a Rows; name a LightningModule: task.module._target_=my.Lit",
        "builtins.dict": "task.module is a dict; name a LightningModule: ",
    }
    done = lines(*([f"task.module._target_={kind}"] for kind in kinds), folder=tmp_path)
    for line, says in zip(done, kinds.values(), strict=True):
        assert line.code == 2 and line.err.count("\n") == 1 and says in line.err


def test_a_part_of_lightnings_is_refused_with_what_to_use(tmp_path):
    write(tmp_path, {"mine.py": "import lightning as L\n\n\nclass Watch(L.Callback): ...\n"})
    parts = {
        "+callbacks.watch._target_=mine.Watch": "Callback of Lightning's; docs/from-lightning.md "
        "lists dpframe's, e.g. callbacks=ema",
        "task._target_=lit.Regression": "LightningModule of Lightning's; use recipe=lightning "
        "task.module._target_=lit.Regression",
        "data._target_=lit.Rows": "LightningDataModule of Lightning's; use recipe=lightning "
        "data.module._target_=lit.Rows",
    }
    done = lines(*([part] for part in parts), folder=tmp_path)
    for line, (part, says) in zip(done, parts.items(), strict=True):
        assert line.code == 2 and line.err.splitlines()[-1] == (
            f"dpframe: {part.removeprefix('+')} is a {says}"
        )


# ---- a resume


class Resumed(lit.Returns):
    def __init__(self) -> None:
        super().__init__("two schedulers")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"steps": self.global_step}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["own"]["steps"], sorted(checkpoint["state_dict"])


@pytest.mark.parametrize("make", [Resumed, lit.ByHand])
@pytest.mark.parametrize("step", [4, 6])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(make, step):
    whole, first, second = make(), make(), make()
    ours(whole, lit.Rows())
    state = deepcopy(ours(first, lit.Rows(), max_steps=step).state_dict())
    trainer = ours(second, lit.Rows(), resume=state)
    assert weights_apart(whole, second) == 0
    assert second.global_step == whole.global_step and trainer.epoch == EPOCHS
    if make is Resumed:
        assert second.loaded == (step, ["net.bias", "net.weight"])


@pytest.mark.parametrize(
    "schedule, then, now",
    [("OneCycleLR", 12, 24), ("LambdaLR", 12, 24), ("CosineAnnealingLR", 2, 4)],
)
def test_a_run_whose_schedule_ends_with_it_goes_on_to_that_end_and_no_further(schedule, then, now):
    whole, second = lit.ForAsLong(schedule), lit.ForAsLong(schedule)
    ended = ours(whole, lit.Rows(), max_epochs=2)
    state = deepcopy(ours(lit.ForAsLong(schedule, 4), lit.Rows(), max_epochs=2).state_dict())
    ours(second, lit.Rows(), max_epochs=2, resume=state)
    assert weights_apart(whole, second) == 0 and second.global_step == whole.global_step
    with pytest.raises(UserError) as caught:
        ours(lit.ForAsLong(schedule), lit.Rows(), max_epochs=4, resume=deepcopy(ended.state_dict()))
    assert f"scheduler's steps={then} there, {now} here; set back what has" in str(caught.value)
    settings = TrainerSettings(max_epochs=4, threads=1, sanity_batches=0, precision="64")
    longer = Trainer(
        Lightning(lit.ForAsLong(schedule)), LightningData(lit.Rows()), settings=settings
    )
    longer.prepare(ended.state_dict(), resume_anyway=True)
    [halfway] = [group["lr"] for group in longer.update.optimizer.param_groups]
    stopped = ours(lit.ForAsLong(schedule, 12), lit.Rows(), max_epochs=4)
    assert [halfway] == [group["lr"] for group in stopped.update.optimizer.param_groups]


def test_a_module_whose_schedule_ends_with_the_run_is_not_told_to_go_on(tmp_path):
    words = ["task.module._target_=lit.ForAsLong", "trainer.precision=64"]
    longer = [*words, "resume=one", "trainer.max_epochs=4"]
    done, again = lines([*words, "hydra.run.dir=one"], longer, folder=tmp_path)
    assert done.code == 0, done.err
    assert "\ntest  " in done.out and "\nresume  " not in done.out
    assert again.code == 2 and "scheduler's steps=12 there, 24 here" in again.err


def test_a_trainer_in_python_starts_its_own_ranks():
    settings = TrainerSettings(max_epochs=EPOCHS, threads=1, sanity_batches=0, precision="64")
    module = heavy(lit.Regression())
    parts = Lightning(module), LightningData(lit.Rows())
    metrics = Trainer(*parts, strategy=DDP(2, "cpu"), settings=settings).fit()
    alone = ours(heavy(lit.Regression()), lit.Rows())
    assert metrics == pytest.approx(alone.metrics, rel=1e-9)
    assert weights_apart(module, alone.task.module) <= 1e-12
    copied = deepcopy(module)
    assert type(copied) is type(module) and weights_apart(copied, module) == 0


def test_what_the_page_shows_trains(tmp_path):
    page = (Path(ROOT) / "docs" / "from-lightning.md").read_text()
    files = dict(re.findall(r"^`(\S+)`:\n```python\n(.*?)^```$", page, re.S | re.M))
    shown = re.findall(r"^dpframe (recipe=lightning .*)$", page, re.M)
    assert list(files) == ["my.py"] and len(shown) == 2
    write(tmp_path, files)
    for number, line in enumerate(shown):
        more = ["trainer.max_epochs=2", "trainer.accelerator=cpu", f"hydra.run.dir={number}"]
        done = dpframe_command(*line.split(), *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^epoch 2/2  step 10  .*val/loss \d", done.stdout, re.M), done.stdout


class Summed(lit.Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0])[:, 0] - batch[1]).square().sum()


def recipe_of(kind: Any) -> Recipe:
    return Recipe("mine", partial(adapted, kind), partial(LightningData, lit.Rows()))


def adapted(kind: Any) -> Lightning:
    return Lightning(kind())


@pytest.mark.parametrize("kind", [lit.LogsValues, lit.ByHand])
def test_a_module_is_verified_beside_one_trainer(kind):
    only = ["weights", "loss_curve", "metrics", "evaluation", "checkpoint"]
    report = check_strategy(DDP, recipe=recipe_of(kind), only=only, gpus=2, accelerator="cpu")
    assert report.notes == [] and "6 of mine" in report["metrics"].compared


def test_a_module_whose_loss_is_no_mean_over_rows_is_noticed():
    only = ["weights", "loss_curve", "mean_over_rows"]
    report = verify(partial(DataParallel, 3, "cpu"), recipe=recipe_of(Summed), only=only)
    assert [finding.check for finding in report.failed] == only
    assert "mine's loss of 5 rows is" in report["mean_over_rows"].cause


def test_reports_that_time_or_compare_parts_of_a_step_refuse_what_a_module_does_itself(tmp_path):
    by_hand = ["task.module._target_=lit.ByHand", "strategy=cpu"]
    [tune] = lines(["mode=tune", "tune.find=[batch_size]", *by_hand], folder=tmp_path)
    assert "mode=tune times the parts of a step, and ByHand steps its" in tune.err
    assert tune.code == 2


# ---- modules as Lightning ships them

DEMOS = "lightning.pytorch.demos"


@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel"])
@pytest.mark.parametrize("data", [None, "BoringDataModule", "BoringDataModuleNoLen"])
def test_lightnings_boring_models_train_test_and_predict(name, data):
    classes = importlib.import_module(f"{DEMOS}.boring_classes")
    trainer = Trainer(
        Lightning(getattr(classes, name)()),
        LightningData(data and getattr(classes, data)()),
        settings=TrainerSettings(max_epochs=2, threads=1, limit_train_batches=20),
    )
    metrics = {**trainer.fit(), **trainer.test()}
    assert metrics.keys() == {"train/loss", "val/x", "test/y"}
    assert math.isfinite(metrics["train/loss"]) and trainer.global_step == 40
    assert trainer.predict().joined().shape[1] == 2


class Sentences(torch.utils.data.Dataset):
    """For the models of language: what WikiText2 has after its download."""

    def __init__(self, rows: int, length: int) -> None:
        self.text = torch.randint(
            20, (rows, length + 1), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.text[row, :-1], self.text[row, 1:]


class Language(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Sentences(8, 6), batch_size=4)


def test_lightnings_transformer_trains_on_several_replicas_as_on_one():
    transformer = importlib.import_module(f"{DEMOS}.transformer")

    class Transformer(transformer.LightningTransformer):
        def prepare_data(self) -> None:
            """Downloads nothing."""

    def made() -> Any:
        torch.manual_seed(0)
        module = Transformer(vocab_size=20)
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
            elif isinstance(part, torch.nn.MultiheadAttention):
                part.dropout = 0.0
        return module

    alone = ours(made(), Language(), max_epochs=2, precision="32")
    two = ours(made(), Language(), DataParallel(2, "cpu"), max_epochs=2, precision="32")
    assert two.metrics == pytest.approx(alone.metrics, rel=1e-4)
    assert alone.metrics["train/loss"] < 3.1


def test_lightnings_lstm_keeps_its_state_from_batch_to_batch():
    lstm = importlib.import_module(f"{DEMOS}.lstm")

    class LSTM(lstm.LightningLSTM):
        def __init__(self) -> None:
            super().__init__(vocab_size=20)
            self.model = lstm.SimpleLSTM(vocab_size=20, ninp=8, nhid=8, nlayers=1)

        def prepare_data(self) -> None:
            """Downloads nothing."""

        def train_dataloader(self) -> Any:
            rows = Sentences(16, 6)
            sampler = lstm.SequenceSampler(rows, batch_size=4)
            return torch.utils.data.DataLoader(rows, batch_sampler=sampler)

    module = LSTM()
    trainer = ours(module, None, max_epochs=2, precision="32")
    assert trainer.metrics.keys() == {"train/loss"} and module.hidden is None


class Prepares:
    """A module or its data, which say where they were prepared and set up."""

    folder: Path

    def prepare_data(self) -> None:
        self._note("prepares")

    def setup(self, stage: str) -> None:
        super().setup(stage)  # type: ignore[misc]
        self._note("sets up")

    def _note(self, what: str) -> None:
        with (self.folder / "seen").open("a") as file:
            file.write(f"{type(self).__name__} {what} on {os.environ['RANK']}\n")


class PreparedData(Prepares, lit.Rows):
    pass


class PreparedModule(Prepares, lit.Regression):
    pass


def prepared_on_machines(strategy: Any, folder: Path, is_per_node: bool) -> list[str]:
    """Of two ranks each is the first one of a machine."""
    parts = PreparedModule(), PreparedData()
    for part in parts:
        part.folder, part.prepare_data_per_node = folder, is_per_node
    first_of_two = SimpleNamespace(read_rank=lambda: Rank(strategy.rank, 2, 0, 1))
    with patch.object(group, "environment", first_of_two):
        ours(*parts, strategy, max_epochs=1)
    return (folder / "seen").read_text().splitlines()


@pytest.mark.parametrize("is_per_node", [True, False])
def test_modules_and_data_are_prepared_once_a_machine_or_once(tmp_path, is_per_node):
    seen = on(DDP(2, "cpu"), prepared_on_machines, tmp_path, is_per_node)
    machines = (0, 1) if is_per_node else (0,)
    both = "PreparedData", "PreparedModule"
    wanted = [f"{part} prepares on {machine}" for part in both for machine in machines]
    assert sorted(seen[: len(wanted)]) == wanted
    assert not [line for line in seen[len(wanted) :] if "prepares" in line]


class Images(torch.utils.data.Dataset):
    def __init__(self, *_: Any, **__: Any) -> None:
        draw = torch.Generator().manual_seed(2)
        self.images = torch.rand(48, 1, 28, 28, generator=draw)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.images[row], row % 10


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = importlib.import_module(f"{DEMOS}.boring_classes").Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.nll_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adadelta(self.parameters())


def test_lightnings_mnist_data_are_read(monkeypatch):
    mnist = importlib.import_module(f"{DEMOS}.mnist_datamodule")
    monkeypatch.setattr(mnist, "MNIST", Images)
    data = mnist.MNISTDataModule(val_split=16, num_workers=0, batch_size=10)
    trainer = ours(Digits(), data, max_epochs=1, precision="32")
    assert trainer.global_step == 3  # its last batch of 2 is left out
    assert trainer.metrics.keys() == {"train/loss", "val/loss"}


# ---- more of the data


class Several(lit.Rows):
    def val_dataloader(self) -> Any:
        halves = torch.utils.data.random_split(self.held_out, [8, 14])
        return [torch.utils.data.DataLoader(half, 4) for half in halves]


class Counts(lit.Linear):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_number", float(dataloader_idx))


def test_several_loaders_are_sets_by_their_numbers():
    metrics = ours(Counts(), Several(), DataParallel(2, "cpu")).metrics
    assert metrics["val/0/number"] == 0 and metrics["val/1/number"] == 1
    assert metrics["val/number"] == pytest.approx(14 / 22)  # over the rows of both


class Named(lit.Rows):
    def train_dataloader(self) -> Any:
        few = TensorDataset(*self.train[:5])
        return {"few": DataLoader(few, 3), "many": DataLoader(self.train, 6)}


class StepsOfBoth(lit.Linear):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["few"]) + 2 * self.loss(batch["many"])


def test_a_dict_of_training_loaders_gives_a_dict_of_batches_as_in_lightning():
    module, other = StepsOfBoth(), StepsOfBoth()
    theirs(module, Named(rows=24))
    ours(other, Named(rows=24))
    assert weights_apart(module, other) <= 1e-12


class Pairs(lit.Rows):
    def train_dataloader(self) -> Any:
        return [super().train_dataloader()] * 2


class NoLoader(lit.Rows):
    def train_dataloader(self) -> Any:
        return (batch for batch in super().train_dataloader())


@pytest.mark.parametrize(
    "data, line",
    [
        (Pairs, "Pairs.train_dataloader returned 2 loaders without names; return a dict of them"),
        (
            NoLoader,
            "NoLoader.train_dataloader returned a generator, whose rows can't be divided",
        ),
    ],
)
def test_loaders_that_can_not_be_divided_are_refused_in_one_line(data, line):
    with pytest.raises(UserError, match=re.escape(line)):
        ours(lit.Linear(), data())


def test_data_are_set_up_for_what_is_done():
    data = lit.Rows()
    trainer = ours(lit.Regression(), data)
    trainer.test()
    assert data.stages == ["fit", "test"] and data.trainer.datamodule is data


def test_a_schedule_of_the_task_is_stepped_by_step_unless_the_module_has_one():
    class Watched(lit.Regression):
        def on_before_optimizer_step(self, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    def scheduled(module: Any) -> Trainer:
        task = Lightning(module)
        task.lr_schedule = schedule
        return Trainer(task, LightningData(lit.Rows()), max_epochs=2, threads=1, precision="64")

    rates: list[float] = []
    schedule = Linear(warmup=2)
    scheduled(Watched()).fit()
    assert rates == [0.05 * schedule.factor(step, 12) for step in range(12)]
    with pytest.raises(UserError, match="task.schedule: Returns has a scheduler already; leave"):
        scheduled(lit.Returns("two lists")).prepare()
