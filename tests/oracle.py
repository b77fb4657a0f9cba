"""A short run with everything that a resume can get wrong, to be killed after each of its steps."""

import json
import multiprocessing
import os
import signal
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from small import Adam, Small
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, TensorDataset

from dpframe import Callback, DataModule, Strategy, Trainer, TrainerSettings, seeding
from dpframe import checkpoint as checkpoints
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.checkpoint import seal
from dpframe.launch.local import allow_fork
from dpframe.loggers.csv import CSV
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.strategies.ddp import DDP
from dpframe.trainer import RunInfo
from dpframe.trainer.progress import Progress
from dpframe.util import files

STEPS = 12  # three epochs of seven batches, two to a step
ROWS = 26


class Noisy(Dataset):
    """Every row has noise from the worker's generator, and every read is written down."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> list[torch.Tensor]:
        with self.file.open("a") as file:
            file.write(f"{row}\n")
        x = torch.arange(3.0) * row / ROWS + torch.randn(3)
        return [x, x.sum()]


class Data(DataModule):
    def __init__(self, file: Path) -> None:
        super().__init__(batch_size=4, workers=2)
        self.file = file

    def train_dataset(self) -> Dataset:
        return Noisy(self.file)

    def val_dataset(self) -> Dataset:
        x = torch.linspace(-1, 1, 27).reshape(9, 3)
        return TensorDataset(x, x.sum(dim=1))


class Kills(Callback):
    """Ends the whole job as `kill -9` would: before this step's checkpoint, or after it."""

    def __init__(self, step: int, *, is_after: bool) -> None:
        self.step = step
        self.runs_last = is_after

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step and trainer.strategy.is_main:
            if trainer.strategy.world_size > 1:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def run(directory: str, kill: list[Any] | None, strategy: Strategy) -> None:
    """To the end, or to the kill; from the newest good checkpoint, if there is one."""
    strategy.setup()
    try:
        folder = Path(directory)
        newest = seal.newest_good(folder / "checkpoints")
        resume = None if newest is None else checkpoints.load(newest)
        seeding.seed_everything(0 if resume is None else 99)  # the checkpoint decides
        if resume is not None and strategy.is_main:
            (folder / "resumed-at").write_text(str(resume["progress"]["global_step"]))
        has_begun = (folder / "began").exists()
        reads = folder / f"reads-{'to-the-end' if kill is None else 'killed'}-{strategy.rank}"
        kills = [] if kill is None else [Kills(kill[0], is_after=kill[1])]
        trainer = Trainer(
            Small(Adam, partial(OneCycleLR, max_lr=0.1), dropout=0.4),
            Data(reads),
            strategy=strategy,
            settings=TrainerSettings(
                max_epochs=3,
                accumulate=2,
                scheduler_every="step",
                validate_every_steps=3,
                log_every=2,
                threads=1,
                share_check="off",  # it reads rows, which are counted
            ),
            callbacks=[Checkpoint(every_n_steps=1, keep=2, seconds_between=0), *kills],
            loggers=[CSV(), TensorBoard()],
            # A run that was killed before its first checkpoint begins again.
            run=RunInfo(directory=directory, is_repeated=resume is None and has_begun),
        )
        (folder / "began").touch()
        trainer.fit(resume)
        if strategy.is_main:
            (folder / "done.json").write_text(json.dumps(trainer.metrics))
    finally:
        strategy.close()


def begin(ranks: int, directory: str, kill: list[Any] | None, bug: str) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a new interpreter
    allow_fork()
    plant(bug)
    strategy = Strategy() if ranks == 1 else DDP(ranks, "cpu")
    strategy.launch(run, directory, kill, strategy)


def saves(folder: Path, begun: Connection) -> None:
    """Saves for ever, on from the last state, and tells of its first save."""
    writer = checkpoints.Writer()
    last, best = folder / "last.ckpt", folder / "best.ckpt"
    files.remove_leftovers(folder)
    first = 1 + (checkpoints.load(last)["n"] if last.exists() else 0)
    for n in count(first):
        weights = torch.full((50_000,), float(n))
        writer.save({"task": {"w": weights}, "n": n}, [best, last] if n % 2 else [last])
        weights.zero_()  # what is saved is a copy
        if n == first:
            begun.send(n)


def plant(bug: str) -> None:
    """What the oracle has to notice."""
    if bug == "no random state":
        seeding.restore_random_state = lambda *saved: None
    if bug == "two batches skipped":
        load = Progress.load_state_dict

        def forgetful(progress: Progress, saved: dict[str, Any]) -> None:
            load(progress, {**saved, "batches_done": saved["batches_done"] + 2})

        Progress.load_state_dict = forgetful
