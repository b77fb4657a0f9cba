"""Prints what a step of dpframe costs, as a ratio to one of the tuned loop, in ten seconds.

All train boston in one process, an epoch of each by turns, so that what slows the machine slows
all. What is read is the processor's time of the one thread that trains, so that waiting for a
processor doesn't count; and the training of an epoch, not what comes at its end.

The tuned loop calls the optimizer's step without the wrapper that torch puts around it, which calls
the hooks of a step and names it in a profile. dpframe needs both, so it calls `optimizer.step()`. A
second tuned loop does so, too.
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


class Alternates(dpframe.Callback):
    """After each epoch of dpframe comes one of each tuned loop."""

    runs_last = True

    def __init__(self, epochs: int, directory: Path) -> None:
        self.ours, *self.theirs = (Marks(time.thread_time) for _ in range(3))
        self.tuned = []
        for marks, by_torch in zip(self.theirs, (False, True), strict=True):
            folder = Path(tempfile.mkdtemp(dir=directory))
            loop = tuned.epochs(epochs, marks, folder, is_bare=True, steps_by_torch=by_torch)
            self.tuned.append(loop)

    def on_epoch_start(self, trainer: dpframe.Trainer) -> None:
        self.ours.begin()

    def on_step_end(self, trainer: dpframe.Trainer) -> None:
        self.ours.train()

    def on_epoch_end(self, trainer: dpframe.Trainer) -> None:
        for loop in self.tuned:
            next(loop)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
    ):
        to_tuned, to_plain = ratios(Path(directory))
    print(
        f"a step costs {to_tuned:.2f} of the tuned loop's, and {to_plain:.2f} of one that calls "
        "optimizer.step()"
    )


def ratios(directory: Path, *, epochs: int = EPOCHS) -> list[float]:
    """Ours to each tuned loop's."""
    alternates = Alternates(epochs, directory)
    dpframe.Trainer(
        Boston(problems.perceptron(), partial(torch.optim.Adam, lr=0.01)),
        BostonData(),
        settings=dpframe.TrainerSettings(max_epochs=epochs, threads=1),
        callbacks=[Progress(bar=False), alternates],
        loggers=[TensorBoard(), CSV()],
        run=dpframe.RunInfo(directory=str(directory)),
    ).fit()
    for loop in alternates.tuned:
        next(loop, None)  # closes its files
    ours, *theirs = (
        [end - begin for begin, end in zip(marks.begun, marks.trained, strict=True)][WARM_EPOCHS:]
        for marks in (alternates.ours, *alternates.theirs)
    )
    pairs = (zip(ours, each, strict=True) for each in theirs)
    return [statistics.median(one / other for one, other in pair) for pair in pairs]


if __name__ == "__main__":
    main()
