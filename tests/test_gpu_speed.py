"""What makes a GPU fast does not change a number: resident data, prefetch, CUDA graphs."""

from functools import partial
from typing import Any

import pytest
import torch
from small import Rows, Small, fitted, is_same
from test_gpu import NoWaiting, boston, started
from test_gpu import sync_debug_mode as sync_debug_mode  # a fixture
from test_prefetch import Drawn
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset, TensorDataset

from dpframe import DataModule, Trainer, checkpoint
from dpframe.callbacks.progress import banner
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.single import CPU, SingleGPU

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
    counts = made.global_step, made.epoch, made.progress.rows_seen
    return {"weights": made.task.state_dict(), "metrics": made.metrics, "counts": counts}


# The data


def test_tensors_that_fit_are_on_the_gpu_and_the_banner_says_so():
    made = boston(started(SingleGPU(accelerator="cuda")), precision="64")
    made.prepare()
    device = made.strategy.device
    assert made.feed.train.device == device
    assert f"data       404 rows on {device}" in banner(made)
    shares = [batch.shares[0].batch for batch in made.feed.train.epoch()]
    kinds = {(tensor.device, tensor.dtype) for batch in shares for tensor in batch}
    assert kinds == {(device, torch.float64)}


@pytest.mark.parametrize("asked", [False, "auto"])
def test_what_is_not_there_is_copied_by_the_batch(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 10**10))
    made = boston(started(SingleGPU(accelerator="cuda")), data_on_device=asked)
    made.prepare()
    assert made.feed.train.device.type == "cpu"
    assert "data       404 rows as tensors, index_select, copied by the batch" in banner(made)
    batch = next(iter(made.feed.train.epoch()))
    assert all(tensor.is_pinned() for tensor in batch.shares[0].batch)


def test_the_order_of_the_rows_is_the_cpu_s():
    there = boston(started(SingleGPU(accelerator="cuda")))
    there.prepare()
    here = boston(started(SingleGPU(accelerator="cuda")), data_on_device=False)
    here.prepare()
    for epoch in range(2):
        pairs = zip(there.feed.train.epoch(epoch), here.feed.train.epoch(epoch), strict=True)
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
    here = fitted(make=given.pop("task"), data=Rows(40, 6), strategy=started(CPU()), **given)
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


@pytest.mark.parametrize("data_on_device", [True, False])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_waits_between_log_steps(sync_debug_mode, name, clip_norm, data_on_device):
    watch = NoWaiting(8, 18)
    made = one_gpu(
        task=partial(Small, OPTIMIZERS[name], dropout=0.5),
        data=Rows(200, 10),
        callbacks=[watch],
        max_epochs=1,
        log_every=1000,
        clip_norm=clip_norm,
        data_on_device=data_on_device,
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
    one_gpu(
        task=partial(Small, Adam, partial(CosineAnnealingLR, T_max=20)),
        data=Rows(200, 10),
        callbacks=[NoWaiting(8, 18)],
        max_epochs=1,
        log_every=1000,
        scheduler_every="step",
    )


# CUDA graphs, by torch.compile


GRAPHED: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.1},
    {"precision": "bf16"},
    {"data_on_device": False},
    {"accumulate": 2},
    {"validate_every_steps": 5},
]


@pytest.mark.parametrize("given", GRAPHED, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_as_cuda_graphs_are_steps_one_by_one_but_for_rounding(name, given):
    given = {"task": partial(Small, OPTIMIZERS[name]), "max_epochs": 4, "log_every": 5, **given}
    plain, graphed = outcome(**given), outcome(**given, compile="reduce-overhead")
    assert graphed["counts"] == plain["counts"]
    exactness = {"rtol": 2e-2, "atol": 1e-2} if "precision" in given else {}
    torch.testing.assert_close(graphed["metrics"], plain["metrics"], **exactness)
    torch.testing.assert_close(graphed["weights"], plain["weights"], **exactness)


def test_a_run_of_cuda_graphs_resumes(tmp_path):
    given = {"task": partial(Small, Adam), "max_epochs": 4}
    whole = one_gpu(**given, compile="reduce-overhead")
    begun = one_gpu(**given, compile="reduce-overhead", max_steps=10)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    for mode in ("reduce-overhead", False):
        state = checkpoint.load(tmp_path / "begun.ckpt")
        resumed = one_gpu(**given, compile=mode, resume=state)
        torch.testing.assert_close(resumed.task.state_dict(), whole.task.state_dict())
