"""Nothing waits for a GPU between log points, whatever a run has switched on."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from small import SGD, Rows, Small, Streamed, fitted
from test_gpu import NoWaiting, started
from test_parity import Pixels, Table
from test_turns import Pair
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from dpframe import Callback, Task, Trainer
from dpframe.callbacks import progress
from dpframe.callbacks.averages import EMA, SWA
from dpframe.callbacks.progress import Progress
from dpframe.callbacks.screen import Screen
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.single import SingleGPU

pytestmark = pytest.mark.gpu(1)  # `gpu` for those of several

Adam = partial(torch.optim.Adam, lr=0.01)
ROWS, BATCH = 240, 12  # steps of an epoch: 20, or 10 of two batches each


@pytest.fixture(autouse=True)
def sync_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


class Deep(Task):
    """Blocks that may be computed again, norms, attention and a flattened picture."""

    def __init__(self, optimizer: Any = Adam) -> None:
        super().__init__(None, optimizer)
        self.grow = nn.Linear(3, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))
            for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64, 1)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        x = self.grow(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]
        return {"loss": (self.head(self.image(x.view(-1, 1, 4, 4)))[:, 0] - y).square().mean()}


class Gathers(Small):
    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        rows = self.all_gather(self.net(batch[0]))
        return {"loss": (rows.mean() - batch[1].mean()).square()}


class Scored(Small):
    """With metrics of torchmetrics; their checks of what they are given would wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        super().__init__(*args, **options)
        binary = torchmetrics.classification.BinaryF1Score
        self.f1 = binary(validate_args=False)
        self.mean = torchmetrics.MeanSquaredError()

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        scores = self.net(x)[:, 0]
        self.f1.update(scores.sigmoid(), (y > 0).long())
        self.mean.update(scores, y)
        return {"loss": (scores - y).square().mean()}


class Clips(Small):
    """Weights and means of its own kind, as a WGAN and a summary have them."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        with torch.no_grad():
            for weight in self.parameters():
                weight.clamp_(-2, 2)
        output = super().training_step(batch)
        return {**output, "rows": float(len(batch[0])), "norm": self.net[0].weight.norm().detach()}


class Looks(Callback):
    """At all that hooks see, without reading it."""

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any) -> None:
        self.seen = [output["loss"] for output in outputs]

    def on_before_step(self, trainer: Any) -> None:
        self.norm = sum(weight.grad.norm() for weight in trainer.task.parameters())


CASES: dict[str, dict[str, Any]] = {
    "several optimizers": {"task": Pair},
    "several optimizers, clipped": {"task": Pair, "clip_norm": {"critic": 1.0}},
    "several optimizers, accumulation": {"task": Pair, "accumulate": 2},
    "weights and accumulation": {
        "task": partial(Pixels, Adam), "data": Table(ROWS, BATCH), "accumulate": 2
    },
    "weights and clipping": {
        "task": partial(Pixels, SGD), "data": Table(ROWS, BATCH), "clip_norm": 1.0
    },
    "weights that are numbers": {
        "task": partial(Pixels, SGD, kind=lambda total: 7.0), "data": Table(ROWS, BATCH)
    },
    "bf16 and weights": {
        "task": partial(Pixels, Adam), "data": Table(ROWS, BATCH), "precision": "bf16"
    },
    "bf16": {"task": Deep, "precision": "bf16"},
    "bf16-true": {"task": Deep, "precision": "bf16-true"},
    "fp16, clipped": {"task": partial(Small, Adam), "precision": "fp16", "clip_norm": 1.0},
    "activations again": {"task": Deep, "checkpoint_activations": True},
    "channels_last": {"task": Deep, "channels_last": True},
    "clipped twice": {"task": Deep, "clip_norm": 1.0, "clip_value": 0.5, "accumulate": 2},
    "a matmul precision": {"task": Deep, "matmul_precision": "high"},
    "EMA": {"task": Deep, "callbacks": [EMA(decay=0.9)]},
    "SWA": {"task": Deep, "callbacks": [SWA(start_epoch=0, every_n_steps=1)]},
    "hooks": {"task": Deep, "callbacks": [Looks()]},
    "a schedule": {
        "task": partial(Small, Adam, partial(OneCycleLR, max_lr=0.1)), "scheduler_every": "step"
    },
    "SGD with momentum": {
        "task": partial(Deep, partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True))
    },
    "all_gather": {"task": partial(Gathers, Adam)},
    "a step with numbers and clamped weights": {"task": partial(Clips, Adam)},
    "a stream": {"task": Deep, "data": Streamed(ROWS, BATCH)},
    "copied batches": {"task": Deep, "data_on_device": False, "accumulate": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_between_log_points(name):
    trained(SingleGPU, **CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["several optimizers", "weights and accumulation", "EMA", "bf16", "copied batches"]
)
def test_nothing_waits_for_one_of_several_gpus(name):
    trained(DataParallel, **CASES[name])


def test_metrics_of_torchmetrics_wait_for_nothing():
    trained(SingleGPU, task=partial(Scored, Adam))


def trained(kind: Any, *, task: Any, data: Any = None, callbacks: Any = (), **given: Any) -> None:
    last = 9 if given.get("accumulate") else 18
    made = fitted(
        make=task,
        data=data or Rows(ROWS, BATCH),
        strategy=started(kind(accelerator="cuda")),
        callbacks=[*callbacks, NoWaiting(4, last)],
        **{"max_epochs": 1, "log_every": 1000, **given},
    )
    assert made.global_step > last  # else the watch would have ended by accident
    assert all(weight.isfinite().all() for weight in made.task.parameters())


@pytest.mark.parametrize("kind", [SingleGPU, pytest.param(DataParallel, marks=pytest.mark.gpu)])
def test_a_bar_shows_losses_of_steps_and_waits_for_none(monkeypatch, kind):
    frames = []
    monkeypatch.setattr(Screen, "draw", lambda *_, metrics, **more: frames.append({**metrics}))
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(progress, "PAUSE", 0)
    trained(kind, task=Pair, callbacks=[Progress(bar=True)])
    assert len(frames) >= 20
    assert {"critic/loss", "generator/loss"} <= frames[-2].keys()


class NoWaitingInValidation(Callback):
    """Between the second batch and the last but one."""

    def __init__(self) -> None:
        self.watched = 0

    def on_validation_start(self, trainer: Trainer) -> None:
        self.batches = 0

    def on_validation_batch_end(self, trainer: Trainer, batch: Any, outputs: Any) -> None:
        self.batches += 1
        self.watched += torch.cuda.get_sync_debug_mode() == 2
        torch.cuda.set_sync_debug_mode("error" if 2 <= self.batches < 19 else "default")


@pytest.mark.parametrize(
    "kind, task, on_device",
    [
        (SingleGPU, Deep, "auto"),
        (SingleGPU, Deep, False),
        (SingleGPU, partial(Scored, Adam), "auto"),
        pytest.param(DataParallel, Deep, "auto", marks=pytest.mark.gpu),
    ],
)
def test_a_validation_waits_for_nothing_between_its_batches(kind, task, on_device):
    watch = NoWaitingInValidation()
    fitted(
        make=task,
        data=Rows(ROWS, BATCH),
        strategy=started(kind(accelerator="cuda")),
        callbacks=[watch],
        max_epochs=1,
        data_on_device=on_device,
    )
    assert watch.watched == 17
