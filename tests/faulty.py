"""A recipe that breaks on purpose, in the rank and in the way that it is told to."""

import os
import signal
import time
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpframe

CONFIG = """
# @package _global_
recipe: faulty
task:
  _target_: faulty.Faulty
  fault: ""
data:
  _target_: faulty.Data
  fault: ""
  workers: 0
trainer:
  max_epochs: 2
"""


class Rows(Dataset):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Tensor:
        if row == 60 and self.fault == f"worker {os.environ.get('RANK')}":
            note_the_time()
            raise LookupError("row 60 is broken")
        return torch.ones(2)


class Data(dpframe.DataModule):
    def __init__(self, fault: str, workers: int = 0) -> None:
        super().__init__(8, workers, shuffle=False)
        self.fault = fault

    def train_dataset(self) -> Dataset:
        return Rows(self.fault)


class Faulty(dpframe.Task):
    """Breaks in its third step. `fault` is what happens, and the rank that it happens to."""

    def __init__(self, fault: str) -> None:
        super().__init__(nn.Linear(2, 1))
        self.fault, _, self.rank = fault.partition(" ")
        self.steps = 0

    def training_step(self, batch: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        if self.steps == 3 and self.rank in ("all", os.environ.get("RANK")):
            self.fail()
        return {"loss": self.net(batch).square().mean()}

    def fail(self) -> None:
        note_the_time()
        if self.fault == "raise":
            raise ValueError(f"broken in rank {os.environ['RANK']}")
        if self.fault == "refuse":
            raise dpframe.UserError("the data is wrong; mend it")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "leave":
            os._exit(7)
        if self.fault == "ignore":
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what torch has the parent's death send
        if self.fault == "spin":
            spin()
        if self.fault in ("hang", "ignore"):
            time.sleep(600)

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class HangsAtTheEnd(dpframe.Callback):
    def __init__(self, rank: str) -> None:
        self.rank = rank

    def on_fit_end(self, trainer: dpframe.Trainer) -> None:
        if self.rank == os.environ.get("RANK"):
            note_the_time()
            time.sleep(600)


def spin() -> None:
    sum(repeat(0))  # in C, and it never gives its GIL away


def note_the_time() -> None:
    """Whole or not at all: the test may be looking."""
    part = Path(f"part-{os.getpid()}")
    part.write_text(str(time.time()))
    part.rename(f"fault-{os.environ.get('RANK', 0)}")
