"""A recipe whose every draw shows in its weights, and that breaks once, when and where it is told.

What happens is in the environment, not in the config: a run that goes on has to have the same one.
"""

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import forked
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpframe
from dpframe import checkpoint
from dpframe.launch.signals import PREEMPTION

CONFIG = """
# @package _global_
recipe: injected
task:
  _target_: injector.Injected
data:
  _target_: injector.Data
  workers: 0
trainer:
  max_epochs: 3
  accelerator: cpu
callbacks:
  progress: null
  checkpoint:
    seconds_between: 0
"""
STEPS = 24  # in all
DEVICE_ERRORS = {
    "assert": "device-side assert triggered",
    "ecc": "uncorrectable ECC error encountered",
    "launch": "unspecified launch failure",
}


def fail_at(rank: int | str, step: int, kind: str, *, after: str = "") -> dict[str, str]:
    """For the environment of a job; `has_fired` says whether it came to that. `after`: once the
    run has this file."""
    return {"INJECTED": f"{kind} {rank} {step}", "INJECTED_AFTER": after}


def has_fired(folder: Path) -> bool:
    return (folder / "fired").exists()


def _is_due(place: str, step: int) -> bool:
    """Once for each rank in all of a job, over its restarts too; but for `always`."""
    kind, rank, at = os.environ.get("INJECTED", "none 0 0").split()
    here = os.environ.get("RANK", "0")
    due_place = next((p for p in ("data", "validation", "start") if kind.endswith(p)), "code")
    is_here = rank in (here, "all") and place == due_place
    if not is_here or int(at) != step:
        return False
    try:
        Path(f"fired-{here}").touch(exist_ok=False)
    except FileExistsError:
        return kind == "always"
    Path("fired").touch()
    return True


def _fail() -> None:
    while not Path(os.environ.get("INJECTED_AFTER", "")).exists():
        time.sleep(0.01)
    kind, rank = os.environ["INJECTED"].split()[0], os.environ.get("RANK")
    if kind in ("raise", "always", "raise-data"):
        raise ValueError(f"broken in rank {rank}")
    if kind == "preempt":
        os.kill(os.getpid(), PREEMPTION)
        return
    if kind.startswith("oom"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if kind in DEVICE_ERRORS:
        raise torch.AcceleratorError(f"CUDA error: {DEVICE_ERRORS[kind]}\nCompile with …")
    if kind == "refuse":
        raise dpframe.UserError("the data is wrong; fix it")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit0":
        os._exit(0)
    if kind == "spin":
        sum(repeat(0))  # in C, and it never gives its GIL away
    if kind == "lock":  # in C, which gives its GIL away, but waits on after a signal
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    if kind == "collective":
        dist.barrier()
    if kind == "ignore":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what torch has the parent's death send
    time.sleep(600)


class HangsAtTheEnd(dpframe.Callback):
    """On rank 0."""

    def on_fit_end(self, trainer: dpframe.Trainer) -> None:
        if os.environ.get("RANK") == "0":
            time.sleep(600)


class Rows(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor([row / 32, 1.0]) + random.random() / 10


class Data(dpframe.DataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__(4, workers)
        self.collated = 0

    def setup(self) -> None:
        _note("starting", 3)
        time.sleep(float(os.environ.get("SETUP_SECONDS", 0)))

    def train_dataset(self) -> Dataset:
        return Rows()

    def val_dataset(self) -> Dataset:
        return Rows()

    def collate(self, rows: list) -> Any:
        self.collated += 1
        if _is_due("data", self.collated):
            _fail()
        return super().collate(rows)


class Injected(dpframe.Task):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.4), nn.Linear(8, 1)))
        self.steps = self.validations = 0
        if _is_due("start", 0):
            _fail()

    def training_step(self, batch: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        _note("training", self.steps)
        if self.steps >= 3:
            _pause()
        if _is_due("code", self.steps):
            _fail()
        return {"loss": (self.net(batch)[:, 0] - batch[:, 0]).square().mean()}

    def validation_step(self, batch: Tensor) -> dict[str, Tensor]:
        _note("validating", 3)
        self.validations += 1
        if _is_due("validation", self.validations):
            _fail()
        time.sleep(float(os.environ.get("VALIDATION_SECONDS", 0)))
        random.random()
        noise = torch.rand(())  # a validation that was broken off must not move what comes next
        return {"loss": (self.net(batch)[:, 0] - batch[:, 0]).square().mean() + 0 * noise}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _pause() -> None:
    """Until the test has what it waits for, and writes this file."""
    if not Path(os.environ.get("HURRY", "never")).exists():
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))


class Pauses(dpframe.Callback):
    """After each step of another recipe."""

    def on_step_end(self, trainer: dpframe.Trainer, *rest: Any) -> None:
        _pause()


class TellsParts(dpframe.Callback):
    """Of the first weight, what each rank keeps under strategy=fsdp."""

    def on_fit_end(self, trainer: dpframe.Trainer) -> None:
        weight = trainer.update.optimizer.param_groups[0]["params"][0]
        Path(f"part-{trainer.strategy.rank}").write_text(
            str(trainer.strategy.sharding.local(weight))
        )


def _note(what: str, step: int) -> None:
    if step == 3:
        Path(f"{what}-{os.environ.get('RANK', 0)}").touch()


# ---- jobs of it


def words(folder: Path, *overrides: str) -> list[str]:
    (folder / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "recipe" / "injected.yaml").write_text(CONFIG)
    return [f"--config-dir={folder}", "recipe=injected", "hydra.run.dir=run", *overrides]


def run(folder: Path, *overrides: str, **variables: str) -> subprocess.CompletedProcess:
    return forked.run(words(folder, *overrides), folder, **variables)


@contextmanager
def started(folder: Path, *overrides: str, **variables: str) -> Iterator[forked.Job]:
    """In a group of its own, so that it can be signalled; in this session, so that it can stop."""
    folder.mkdir(exist_ok=True)
    with forked.started(words(folder, *overrides), folder, **variables) as job:
        yield job


def last(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "run" / "checkpoints" / "last.ckpt")


def weights(folder: Path) -> dict[str, Tensor]:
    return last(folder)["task"]
