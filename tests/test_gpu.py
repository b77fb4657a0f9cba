"""On real cards: the same numbers, no waiting between log steps, checkpoints that travel."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_evaluation
import test_guard
import test_parity
import torch
from recorded import once
from small import fitted
from torch import Tensor, nn
from torch.optim import Adam

from dpframe import Callback, Strategy, Trainer, TrainerSettings, UserError, checkpoint
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.data.prefetch import tensors_in
from dpframe.errors import Failure
from dpframe.recipes.boston import Boston, BostonData
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU, SingleGPU

pytestmark = pytest.mark.gpu


def started(strategy: Strategy) -> Strategy:
    strategy.setup()
    return strategy


def boston(strategy: Strategy, **given: Any) -> Trainer:
    torch.manual_seed(0)
    batch_size = given.pop("batch_size", 128)
    return Trainer(
        Boston(test_parity.perceptron(13), lambda parameters: Adam(parameters, lr=0.01)),
        BostonData(batch_size),
        strategy=strategy,
        callbacks=given.pop("callbacks", ()),
        settings=TrainerSettings(**given),
    )


# The same numbers


@pytest.mark.parametrize("name", test_parity.CASES)
def test_one_gpu_equals_the_hand_written_loop_on_the_cpu(name):
    strategy = started(SingleGPU(accelerator="cuda"))
    test_parity.check(test_parity.trained(strategy, name, "64"), name, "64")


@pytest.mark.parametrize("name", test_parity.CASES)
def test_data_parallel_on_all_cards_equals_the_hand_written_loop(name):
    strategy = started(DataParallel(accelerator="cuda"))
    test_parity.check(test_parity.trained(strategy, name, "64"), name, "64")


@once
def by_ranks() -> dict[tuple[str, str], dict[str, Any]]:
    return DDP(accelerator="cuda").launch(test_parity.all_of_them)


@pytest.mark.parametrize("name", test_parity.CASES)
def test_ddp_on_all_cards_equals_the_hand_written_loop(name):
    test_parity.check(by_ranks()[name, "64"], name, "64")


@once
def evaluated(where: str) -> dict[tuple[str, int], Any]:
    if where == "ddp":
        return DDP(accelerator="cuda").launch(test_evaluation.in_a_rank)
    return test_evaluation.results_on(started(DataParallel(accelerator="cuda")))


@pytest.mark.parametrize("where", ["data_parallel", "ddp"])
def test_evaluation_on_all_cards_sees_every_row_once_and_in_order(where):
    for (kind, size), (everywhere, predictions) in evaluated(where).items():
        for metrics in everywhere:
            bits = round(metrics["val/code"] * size * 2**16)
            assert bits == sum(2 ** (16 - row) for row in range(size)), (kind, size)
        assert predictions["id"] == list(range(size))


# The cards


def test_the_card_that_was_asked_for_is_taken():
    last = torch.cuda.device_count() - 1
    strategy = started(SingleGPU([last], "cuda"))
    trainer = boston(strategy, max_steps=1)
    trainer.fit()
    device = torch.device("cuda", last)
    assert strategy.devices == [f"cuda:{last}"]
    assert {parameter.device for parameter in trainer.task.parameters()} == {device}
    assert torch.cuda.current_device() == last


@pytest.mark.gpu(2)
def test_data_parallel_takes_the_cards_in_the_order_of_the_list():
    strategy = started(DataParallel([1, 0], "cuda"))
    assert strategy.devices == ["cuda:1", "cuda:0"]
    trainer = boston(strategy, max_steps=3)
    trainer.fit()
    assert all(math.isfinite(value) for value in trainer.metrics.values())
    assert {str(parameter.device) for parameter in trainer.task.parameters()} == {"cuda:1"}


def devices_of_the_ranks() -> tuple[list[str], list[str]]:
    strategy = DDP([1, 0], "cuda")
    strategy.setup()
    try:
        return strategy.devices, strategy.gather(str(torch.cuda.current_device()))
    finally:
        strategy.close()


@pytest.mark.gpu(2)
def test_ranks_take_the_cards_in_the_order_of_the_list():
    devices, current = DDP([1, 0], "cuda").launch(devices_of_the_ranks)
    assert (devices, current) == (["cuda:1", "cuda:0"], ["1", "0"])


@pytest.mark.parametrize("strategy", [DataParallel, DDP])
def test_one_card_more_than_there_is_is_refused(strategy):
    there_are = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"trainer.gpus={there_are + 1} but this machine has"):
        asked = strategy(there_are + 1)
        asked.launch(asked.setup)


def kinds_with_synced_batchnorm() -> list[str]:
    strategy = DDP(accelerator="cuda", sync_batchnorm=True)
    strategy.setup()
    try:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(strategy.device)
        wrapped = strategy.wrap(module, training=True)
        return [type(part).__name__ for part in wrapped.modules()]
    finally:
        strategy.close()


def test_batchnorm_is_synced_where_that_was_asked_for():
    kinds = DDP(accelerator="cuda").launch(kinds_with_synced_batchnorm)
    assert "SyncBatchNorm" in kinds
    assert "BatchNorm1d" not in kinds


# Precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [SingleGPU, DataParallel])
def test_half_precision_trains_about_as_well(kind, precision):
    half = boston(started(kind(accelerator="cuda")), precision=precision, max_epochs=20)
    whole = boston(started(kind(accelerator="cuda")), precision="32", max_epochs=20)
    half.fit()
    whole.fit()
    assert {parameter.dtype for parameter in half.task.parameters()} == {torch.float32}
    assert half.metrics["val/loss"] == pytest.approx(whole.metrics["val/loss"], rel=0.2)


def fit_in_half_precision(precision: str) -> dict[str, float]:
    strategy = DDP(accelerator="cuda")
    strategy.setup()
    try:
        trainer = boston(strategy, precision=precision, max_epochs=20)
        return dict(trainer.fit())
    finally:
        strategy.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_on_ranks(precision):
    metrics = DDP(accelerator="cuda").launch(fit_in_half_precision, precision)
    whole = boston(started(SingleGPU(accelerator="cuda")), precision="32", max_epochs=20)
    assert metrics["val/loss"] == pytest.approx(whole.fit()["val/loss"], rel=0.2)


# The hot path


class NoWaiting(Callback):
    """Any wait for the GPU between the first and the last steps of an epoch is an error."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == self.first:
            torch.cuda.set_sync_debug_mode("error")
        if trainer.global_step == self.last:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def sync_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"accumulate": 2},
        {"clip_norm": 1.0},
        {"clip_value": 1.0},
        {"precision": "bf16"},
        {"precision": "64"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [SingleGPU, DataParallel])
def test_nothing_waits_for_the_gpu_between_log_steps(sync_debug_mode, kind, given):
    settings = {"max_epochs": 1, "log_every": 1000, **given}
    watch = NoWaiting(2, 12)
    trainer = boston(
        started(kind(accelerator="cuda")), batch_size=16, callbacks=[watch], **settings
    )
    trainer.fit()
    assert trainer.global_step > 12  # else the watch would have ended by accident


def test_nothing_waits_for_the_gpu_where_a_task_gives_weights(sync_debug_mode):
    trainer = Trainer(
        test_parity.Pixels(lambda parameters: Adam(parameters, lr=0.01)),
        test_parity.Table(200, 9),
        strategy=started(SingleGPU(accelerator="cuda")),
        settings=TrainerSettings(max_epochs=1, log_every=1000),
        callbacks=[NoWaiting(2, 20)],
    )
    trainer.fit()
    assert trainer.global_step > 20


class Waits(Boston):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        return {**output, "seen": output["loss"].item()}


def test_the_watch_for_waits_sees_one(sync_debug_mode):
    trainer = boston(
        started(SingleGPU(accelerator="cuda")), batch_size=16, callbacks=[NoWaiting(2, 12)]
    )
    trainer.task.__class__ = Waits
    with pytest.raises(RuntimeError, match="synchroniz"):
        trainer.fit()


# Checkpoints


def test_a_loss_that_is_no_number_is_named_at_the_next_log_step_and_never_saved(tmp_path):
    step, rows = test_guard.met_in(0, shuffle=True)
    keeper = Checkpoint(every_n_steps=2)
    with pytest.raises(Failure, match=f"^step {step}: the loss is nan, rows {rows};"):
        fitted(
            data=test_guard.Bad(),
            strategy=started(SingleGPU(accelerator="cuda")),
            callbacks=[keeper],
            directory=tmp_path,
            log_every=5,
        )
    for path in (tmp_path / "checkpoints").iterdir():
        assert checkpoint.load(path)["progress"]["global_step"] < step


@pytest.mark.parametrize("kind", [SingleGPU, DataParallel])
def test_a_checkpoint_of_a_gpu_loads_on_a_machine_without(tmp_path, kind):
    trained = boston(started(kind(accelerator="cuda")), max_epochs=3, precision="64")
    trained.fit()
    checkpoint.save(trained.state_dict(), tmp_path / "gpu.ckpt")
    state = checkpoint.load(tmp_path / "gpu.ckpt")
    assert {tensor.device.type for tensor in tensors_in(state)} == {"cpu"}
    here = boston(started(CPU()), max_epochs=3, precision="64")
    here.task.load_state_dict(state["task"])
    metrics = here.validate()
    assert metrics["val/loss"] == pytest.approx(trained.metrics["val/loss"], rel=1e-12)


def test_a_run_begun_on_a_gpu_goes_on_as_on_the_cpu(tmp_path: Path):
    begun = boston(started(SingleGPU(accelerator="cuda")), max_epochs=3, precision="64")
    begun.fit()
    checkpoint.save(begun.state_dict(), tmp_path / "gpu.ckpt")
    resumed = boston(started(CPU()), max_epochs=6, precision="64")
    resumed.fit(checkpoint.load(tmp_path / "gpu.ckpt"))
    whole = boston(started(CPU()), max_epochs=6, precision="64")
    assert resumed.metrics["val/loss"] == pytest.approx(whole.fit()["val/loss"], rel=1e-12)
