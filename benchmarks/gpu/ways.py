"""The ways to train one thing: by a tuned loop, in dpframe, in Lightning. Each returns a Turn.

All train the same task with the same weights and rows in the same order. Data lies on the GPU,
but where Lightning reads it by a DataLoader.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from benchmarks.gpu.contests import LIGHTNING, RESIDENT, TUNED, Contest
from dpframe import Callback, RunInfo, Strategy, Trainer
from dpframe.data.order import permutation
from dpframe.trainer.optim.step import fuse
from dpframe.trainer.settings import CUDA_GRAPH_MODES, TrainerSettings

OURS = "dpframe"
BARE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Turn(NamedTuple):
    step_seconds: float
    peak_bytes: int
    losses: list[float]  # of training, the mean of each epoch


class Clock:
    """Seconds a step, from the end of one to the end of another, the device's work included."""

    def __init__(self, contest: Contest, device: torch.device) -> None:
        self.first = contest.warm_steps
        self.last = contest.warm_steps + contest.steps
        self.device = device
        self.losses: list[float] = []
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def note(self, step: int) -> None:
        if step not in (self.first, self.last):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if step == self.first:
            self.began = now
        else:
            self.seconds = (now - self.began) / (self.last - self.first)

    def turn(self) -> Turn:
        is_cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if is_cuda else 0
        return Turn(self.seconds, peak, self.losses)


def set_switches(settings: TrainerSettings) -> None:
    """Those of the process, whatever the turn before has set."""
    torch.set_float32_matmul_precision(settings.matmul_precision or "highest")
    torch.backends.cudnn.benchmark = bool(settings.cudnn_benchmark)


# By hand


def tuned(contest: Contest, device: torch.device) -> Turn:
    """Fused optimizers, rows by index_select on the device, and no number read within an epoch."""
    problem = contest.problem()
    task, data, settings = problem
    set_switches(settings)
    clock = Clock(contest, device)
    task.to(device).train()
    if settings.channels_last:
        task.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = task.configure_optimizer()
    fuse(optimizer, task)
    weights = list(task.parameters())
    tensors = [tensor.to(device) for tensor in columns(data.train_dataset())]
    held_out = data.val_dataset()
    records = settings.compile_mode in CUDA_GRAPH_MODES
    compute = task.training_step
    if settings.compile_mode is not None:
        compute = torch.compile(compute, mode=settings.compile_mode)
    autocast: Callable[[], Any] = nullcontext
    if settings.precision == "bf16":
        autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)
    step = epoch = 0
    while step < clock.last:
        losses: list[Tensor] = []
        sizes: list[int] = []
        order = permutation(len(tensors[0]), seed=0, epoch=epoch).to(device, non_blocking=True)
        for rows in order.split(data.batch_size):
            if records:
                torch.compiler.cudagraph_mark_step_begin()
            with autocast():
                loss = compute([tensor.index_select(0, rows) for tensor in tensors])["loss"]
            loss.backward()
            if settings.clip_norm is not None:
                nn.utils.clip_grad_norm_(weights, settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone() if records else loss.detach())
            sizes.append(len(rows))
            step += 1
            clock.note(step)
        epoch += 1
        counts = torch.tensor(sizes, dtype=torch.float64)
        clock.losses.append(float(torch.stack(losses).cpu().double() @ counts / counts.sum()))
        if held_out is not None:
            validate(task, [t.to(device) for t in columns(held_out)], data.batch_size, autocast)
    return clock.turn()


def validate(
    task: nn.Module, tensors: list[Tensor], size: int, autocast: Callable[[], Any]
) -> float:
    task.eval()
    with torch.no_grad(), autocast():
        batches = zip(*(tensor.split(size) for tensor in tensors), strict=True)
        losses = [task.validation_step(list(b))["loss"] * len(b[0]) for b in batches]
    task.train()
    return torch.stack(losses).sum().item() / len(tensors[0])


def columns(dataset: Any) -> tuple[Tensor, ...]:
    assert isinstance(dataset, TensorDataset)
    return dataset.tensors


# dpframe


class Timed(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, trainer: Trainer) -> None:
        self.clock.note(trainer.global_step)

    def on_epoch_end(self, trainer: Trainer) -> None:
        self.clock.losses.append(trainer.metrics["train/loss"])


def ours(
    contest: Contest,
    device: torch.device,
    *,
    strategy: Strategy | None = None,
    callbacks: Iterable[Callback] = (),
    directory: str = "",
) -> Turn:
    task, data, settings = contest.problem()
    clock = Clock(contest, device)
    settings = replace(
        settings,
        max_epochs=None,
        max_steps=clock.last,
        sanity_batches=0,
        accelerator=device.type,
    )
    set_switches(settings)
    trainer = Trainer(
        task,
        data,
        strategy=strategy,
        settings=settings,
        callbacks=[*callbacks, Timed(clock)],
        run=RunInfo(directory=directory),
    )
    with trainer:
        trainer.fit()
    return clock.turn()


# Lightning


def in_lightning(contest: Contest, device: torch.device, *, has_loader: bool) -> Turn:
    """With torch's own choice of the optimizer's kernels, as its users have."""
    import lightning

    task, data, settings = contest.problem()
    set_switches(settings)
    clock = Clock(contest, device)
    records = settings.compile_mode in CUDA_GRAPH_MODES
    rows = data.train_dataset()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = task
            self.compute = task.training_step
            if settings.compile_mode is not None:
                self.compute = torch.compile(self.compute, mode=settings.compile_mode)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if records:
                torch.compiler.cudagraph_mark_step_begin()
            loss = self.compute(batch)["loss"]
            loss = loss.clone() if records else loss
            self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            loss = self.task.validation_step(batch)["loss"]
            self.log("val/loss", loss, batch_size=len(batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.configure_optimizer()

    class Notes(lightning.pytorch.callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            clock.note(trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            clock.losses.append(trainer.callback_metrics["loss"].item())

    def loader(dataset: Any, *, shuffles: bool) -> Any:
        if not has_loader:
            return Resident(dataset, data.batch_size, device, shuffles=shuffles)
        sampler = Shuffle(len(dataset)) if shuffles else None
        pins = device.type == "cuda"
        return DataLoader(dataset, data.batch_size, sampler=sampler, pin_memory=pins)

    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if settings.channels_last:
        task.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    held_out = data.val_dataset()
    trainer = lightning.Trainer(
        max_steps=clock.last,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
        gradient_clip_val=settings.clip_norm,
        callbacks=[Notes()],
        **BARE,
    )
    validation = None if held_out is None else loader(held_out, shuffles=False)
    trainer.fit(Module(), loader(rows, shuffles=True), validation)
    return clock.turn()


class Shuffle(Sampler[int]):
    """The order of dpframe's epochs, one after the other."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epoch = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        order = permutation(self.rows, seed=0, epoch=self.epoch)
        self.epoch += 1
        return iter(order.tolist())


class Resident:
    """The batches of each epoch, from tensors that lie on the device."""

    def __init__(
        self, dataset: TensorDataset, size: int, device: torch.device, *, shuffles: bool
    ) -> None:
        self.tensors = [tensor.to(device) for tensor in columns(dataset)]
        self.size, self.shuffles, self.epoch = size, shuffles, 0

    def __len__(self) -> int:
        return -(-len(self.tensors[0]) // self.size)

    def __iter__(self) -> Iterator[list[Tensor]]:
        rows, device = len(self.tensors[0]), self.tensors[0].device
        order = torch.arange(rows)
        if self.shuffles:
            order = permutation(rows, seed=0, epoch=self.epoch)
            self.epoch += 1
        for batch in order.to(device, non_blocking=True).split(self.size):
            yield [tensor.index_select(0, batch) for tensor in self.tensors]


def ways(contest: Contest, *, has_lightning: bool) -> dict[str, Callable[..., Turn]]:
    found: dict[str, Callable[..., Turn]] = {TUNED: tuned, OURS: ours}
    if has_lightning and contest.has_loader:
        found[LIGHTNING] = partial(in_lightning, has_loader=True)
    if has_lightning:
        found[RESIDENT] = partial(in_lightning, has_loader=False)
    return found
