"""Prints what a step of dpframe costs, as a ratio to one of the tuned loop, in ten seconds.

Both train boston in one process, an epoch of one and an epoch of the other by turns, so that what
slows the machine slows both. What is read is the processor's time of the one thread that trains, so
that waiting for a processor doesn't count; and the training of an epoch, not what comes at its end.
"""

import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch

import dpframe
from benchmarks.performance.process import PROGRAMS
from dpframe.callbacks.progress import Progress
from dpframe.loggers.csv import CSV
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.recipes.boston import Boston, BostonData

sys.path.append(str(PROGRAMS))

import problems  # noqa: E402
import tuned  # noqa: E402
from marks import Marks  # noqa: E402

EPOCHS = 200
WARM_EPOCHS = 10
USUAL = "1.06 to 1.26, by machine; a quarter dearer is 1.30 to 1.51"


class Alternates(dpframe.Callback):
    """After each epoch of dpframe comes one of the tuned loop."""

    runs_last = True

    def __init__(self, epochs: int, directory: Path) -> None:
        self.ours, self.theirs = Marks(time.thread_time), Marks(time.thread_time)
        self.tuned = tuned.epochs(epochs, self.theirs, directory, is_bare=True)

    def on_epoch_start(self, trainer: dpframe.Trainer) -> None:
        self.ours.begin()

    def on_step_end(self, trainer: dpframe.Trainer) -> None:
        self.ours.train()

    def on_epoch_end(self, trainer: dpframe.Trainer) -> None:
        next(self.tuned)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
    ):
        measured = ratio(Path(directory))
    print(f"a step costs {measured:.2f} of the tuned loop's; usual: {USUAL}")


def ratio(directory: Path, *, epochs: int = EPOCHS) -> float:
    """Ours to the tuned loop's."""
    alternates = Alternates(epochs, directory)
    dpframe.Trainer(
        Boston(problems.perceptron(), partial(torch.optim.Adam, lr=0.01)),
        BostonData(),
        settings=dpframe.TrainerSettings(max_epochs=epochs, threads=1),
        callbacks=[Progress(bar=False), alternates],
        loggers=[TensorBoard(), CSV()],
        run=dpframe.RunInfo(directory=str(directory)),
    ).fit()
    next(alternates.tuned, None)  # closes its files
    ours, theirs = (
        [end - begin for begin, end in zip(marks.begun, marks.trained, strict=True)][WARM_EPOCHS:]
        for marks in (alternates.ours, alternates.theirs)
    )
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
