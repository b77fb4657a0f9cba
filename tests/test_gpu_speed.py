"""What makes a GPU fast does not change a number: resident data, copies ahead, recorded steps."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from small import Hooks, Rows, Small, fitted, is_same, trainer
from test_ahead import Drawn
from test_gpu import NoWaiting, boston, started
from test_gpu import sync_debug_mode as sync_debug_mode  # a fixture
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import Dataset, TensorDataset

from dpframe import DataModule, Trainer, UserError, checkpoint
from dpframe.callbacks.progress import banner
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.single_gpu import SingleGPU
from dpframe.trainer.graphs import Recorder

pytestmark = pytest.mark.gpu

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.5)
Adam = partial(torch.optim.Adam, lr=0.01)
AdamW = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def one_gpu(**given: Any) -> Trainer:
    """Of Small on Rows, with what may be given to `fitted`."""
    strategy = started(given.pop("kind", SingleGPU)(accelerator="cuda"))
    task = given.pop("task", None) or partial(Small, SGD, dropout=0.5)
    data = given.pop("data", None) or Rows(40, 6)
    return fitted(make=task, data=data, strategy=strategy, **given)


def outcome(**given: Any) -> dict[str, Any]:
    made = one_gpu(**given)
    counts = made.global_step, made.epoch, made.rows_seen
    return {"weights": made.task.state_dict(), "metrics": made.metrics, "counts": counts}


# The data


def test_tensors_that_fit_are_on_the_gpu_and_the_banner_says_so():
    made = boston(started(SingleGPU(accelerator="cuda")), precision="64")
    made.prepare()
    device = made.strategy.device
    assert made.train_loader.device == device
    assert f"data       404 rows on {device}" in banner(made)
    shares = [batch.shares[0].batch for batch in made.train_loader.epoch()]
    kinds = {(tensor.device, tensor.dtype) for batch in shares for tensor in batch}
    assert kinds == {(device, torch.float64)}


@pytest.mark.parametrize("asked", [False, "auto"])
def test_what_is_not_there_is_copied_by_the_batch(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 10**10))
    made = boston(started(SingleGPU(accelerator="cuda")), data_on_device=asked)
    made.prepare()
    assert made.train_loader.device.type == "cpu"
    assert "data       404 rows as tensors, index_select, copied by the batch" in banner(made)
    batch = next(iter(made.train_loader.epoch()))
    assert all(tensor.is_pinned() for tensor in batch.shares[0].batch)


def test_the_order_of_the_rows_is_the_cpu_s():
    there = boston(started(SingleGPU(accelerator="cuda")))
    there.prepare()
    here = boston(started(SingleGPU(accelerator="cuda")), data_on_device=False)
    here.prepare()
    for epoch in range(2):
        pairs = zip(there.train_loader.epoch(epoch), here.train_loader.epoch(epoch), strict=True)
        for one, other in pairs:
            assert is_same([t.cpu() for t in one.shares[0].batch], other.shares[0].batch)


SAME: list[dict[str, Any]] = [
    {},
    {"accumulate": 2},
    {"precision": "64"},
    {"precision": "bf16"},
    {"limit_train_batches": 3},
    {"max_steps": 9},
]


@pytest.mark.parametrize("given", SAME, ids=str)
def test_resident_and_copied_data_give_the_same_numbers(given):
    assert is_same(outcome(**given), outcome(**given, data_on_device=False))


class ByWorkers(DataModule):
    """The rows of Rows(40), read one by one in two processes."""

    def __init__(self) -> None:
        super().__init__(6, workers=2)

    def train_dataset(self) -> Any:
        return [(x, y) for x, y in Rows(40).train]

    def val_dataset(self) -> Any:
        return [(x, y) for x, y in Rows(40).held_out]


def test_rows_from_workers_give_the_numbers_of_tensors():
    assert is_same(outcome(data=ByWorkers()), outcome(data=Rows(40, 6)))


@pytest.mark.parametrize("data", [partial(Rows, 40), Drawn])
def test_a_run_on_copied_data_resumes_within_an_epoch_to_the_bit(tmp_path, data):
    given = {"data_on_device": False, "max_epochs": 3}
    whole = one_gpu(data=data(batch_size=3), **given)
    begun = one_gpu(data=data(batch_size=3), max_steps=10, **given)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    state = checkpoint.load(tmp_path / "begun.ckpt")
    resumed = one_gpu(data=data(batch_size=3), resume=state, **given)
    assert is_same(resumed.task.state_dict(), whole.task.state_dict())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("given", SAME, ids=str)
def test_data_parallel_computes_on_copied_batches_what_it_computes_on_the_cpu(given):
    given = {**given, "precision": "64", "task": partial(Small, SGD)}
    there = outcome(kind=DataParallel, **given)
    here = fitted(make=given.pop("task"), data=Rows(40, 6), **given)
    for mine, other in zip(there["weights"].values(), here.task.state_dict().values(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-10, atol=1e-12)


class Slow(Small):
    """A step that the GPU takes long for, while copies of batches to come are done."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.register_buffer("much", torch.randn(2048, 2048))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        x, y = batch
        product = self.much
        for _ in range(20):
            product = torch.tanh(product @ self.much)
        late = 0 * product.sum()  # so what follows reads the batch after all of that
        error = self.net(x + late)[:, 0] - y
        return {"loss": error.square().mean(), "seen": (x + late).double().sum()}


class Big(DataModule):
    """Batches of 3 MB."""

    def __init__(self) -> None:
        super().__init__(2**18)

    def train_dataset(self) -> Dataset:
        x = torch.randn(30 * 2**18, 3, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1))


def test_no_batch_is_overwritten_while_a_step_reads_it():
    """The copies' memory is used anew: had it not been waited for, a sum would be off."""
    runs = [
        outcome(task=Slow, data=Big(), data_on_device=asked, max_epochs=1, log_every=1000)
        for asked in (True, False)
    ]
    assert runs[0]["metrics"]["train/seen"] == runs[1]["metrics"]["train/seen"]
    assert is_same(runs[0]["weights"], runs[1]["weights"])


# Waits


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("data_on_device", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_waits_between_log_steps(
    sync_debug_mode, name, clip_norm, data_on_device, cuda_graph
):
    watch = NoWaiting(8, 18)  # a recording, which waits, is behind it then
    made = one_gpu(
        task=partial(Small, OPTIMIZERS[name], dropout=0.5),
        data=Rows(200, 10),
        callbacks=[watch],
        max_epochs=1,
        log_every=1000,
        clip_norm=clip_norm,
        data_on_device=data_on_device,
        cuda_graph=cuda_graph,
    )
    assert made.global_step == 20


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_half_precision_s_scaler_waits_for_nothing(sync_debug_mode, name):
    made = one_gpu(
        task=partial(Small, OPTIMIZERS[name]),
        data=Rows(200, 10),
        callbacks=[NoWaiting(2, 18)],
        max_epochs=1,
        log_every=1000,
        precision="fp16",
    )
    assert made.global_step == 20
    assert all(weight.isfinite().all() for weight in made.task.parameters())


def test_a_schedule_by_steps_waits_for_nothing(sync_debug_mode):
    for cuda_graph in (False, True):
        one_gpu(
            task=partial(Small, Adam, partial(CosineAnnealingLR, T_max=20)),
            data=Rows(200, 10),
            callbacks=[NoWaiting(8, 18)],
            max_epochs=1,
            log_every=1000,
            scheduler_every="step",
            cuda_graph=cuda_graph,
        )


# Graphs


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each launch of a recorded step."""
    seen: list[int] = []
    launch = Recorder.replay

    def replay(self: Recorder) -> None:
        seen.append(1)
        launch(self)

    monkeypatch.setattr(Recorder, "replay", replay)
    return seen


GRAPHED: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.1},
    {"clip_value": 0.1},
    {"precision": "64"},
    {"precision": "bf16"},
    {"data_on_device": False},
    {"validate_every_steps": 5},
    {"max_steps": 17},
]


@pytest.mark.parametrize("given", GRAPHED, ids=str)
def test_recorded_steps_of_sgd_are_steps_one_by_one_to_the_bit(replays, given):
    given = {"task": partial(Small, SGD), "max_epochs": 4, "log_every": 5, **given}
    plain = outcome(**given)
    assert replays == []
    assert is_same(outcome(**given, cuda_graph=True), plain)
    assert len(replays) > 8


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("schedule", [None, partial(StepLR, step_size=3, gamma=0.5)])
def test_recorded_steps_of_adam_are_steps_one_by_one_but_for_rounding(replays, name, schedule):
    given: dict[str, Any] = {"task": partial(Small, OPTIMIZERS[name], schedule), "max_epochs": 4}
    given |= {"scheduler_every": "step"}
    plain, recorded = outcome(**given), outcome(**given, cuda_graph=True)
    assert len(replays) > 8
    for one, other in zip(recorded["weights"].values(), plain["weights"].values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Noise(Small):
    """Measures what its dropout has drawn."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        drawn = nn.functional.dropout(torch.ones(64, device=batch[0].device), 0.5)
        places = torch.arange(64, device=drawn.device)
        return {**super().training_step(batch), "drawn": (drawn * places).sum()}


def test_each_replay_of_a_dropout_draws_anew(replays):
    drawn: list[float] = []

    def note(made: Trainer) -> None:
        drawn.append(float(made.means._kept[-1][0]["drawn"]))

    one_gpu(
        task=partial(Noise, SGD),
        data=Rows(120, 6),
        max_epochs=1,
        cuda_graph=True,
        callbacks=[Hooks(on_step_end=note)],
    )
    assert len(replays) > 10
    assert len(set(drawn)) == len(drawn) == 20


class Reads(Small):
    """Waits for the GPU in its step, which can't be recorded."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        assert output["loss"].item() >= 0
        return output


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_recording_that_fails_leaves_a_line_and_the_numbers_as_they_are(caplog, replays, name):
    task = partial(Reads, OPTIMIZERS[name], dropout=0.5)  # the draws go on as if nothing had been
    plain = outcome(task=task)
    assert is_same(outcome(task=task, cuda_graph=True), plain)
    assert replays == []
    warnings = [line.message for line in caplog.records if line.levelno == logging.WARNING]
    assert [line[:37] for line in warnings] == ["no CUDA graph, as recording one failed"[:37]]


def test_a_recorded_run_resumes_and_its_checkpoint_is_one_like_others(tmp_path, replays):
    given = {"task": partial(Small, Adam), "max_epochs": 4}
    whole = one_gpu(**given, cuda_graph=True)
    begun = one_gpu(**given, cuda_graph=True, max_steps=10)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    for cuda_graph in (True, False):
        state = checkpoint.load(tmp_path / "begun.ckpt")
        resumed = one_gpu(**given, cuda_graph=cuda_graph, resume=state)
        pairs = zip(resumed.task.parameters(), whole.task.parameters(), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_can_not_be_recorded_is_refused_before_the_first_step():
    with pytest.raises(UserError, match="^trainer.cuda_graph=true but a step is"):
        trainer(
            strategy=started(SingleGPU(accelerator="cuda")), cuda_graph=True, accumulate=2
        ).prepare()
