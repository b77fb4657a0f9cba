"""Prints what a step of dpframe costs, as a ratio to one of the tuned loop, in fifteen seconds.

Both train the same in one process, an epoch of each by turns, so that what slows the machine slows
both. What is read is the processor's time of the one thread that trains, so that waiting for a
processor doesn't count. A step is boston's: the training of an epoch, not what comes at its end.
Two more rows are of growth.py's task: a step that measures 200 names, and an epoch of one step and
ten sets to validate on, of a batch each.

The tuned loop calls the optimizer's step without the wrapper that torch puts around it, which calls
the hooks of a step and names it in a profile. dpframe needs both, so it calls `optimizer.step()`. A
second tuned loop of boston does so, too.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dpframe
from benchmarks.performance.process import PROGRAMS
from dpframe.callbacks.progress import Progress
from dpframe.loggers.csv import CSV
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.recipes.boston import Boston, BostonData

sys.path.append(str(PROGRAMS))

import growth  # noqa: E402
import measures  # noqa: E402
import problems  # noqa: E402
import tuned  # noqa: E402
from marks import Marks  # noqa: E402

EPOCHS = 200
WARM_EPOCHS = 10


class Alternates(dpframe.Callback):
    """After each epoch of dpframe comes one of each loop."""

    runs_last = True

    def __init__(self, loops: list[Callable[[Marks], Iterator[Any]]]) -> None:
        self.ours, *self.theirs = (Marks(time.thread_time) for _ in range(1 + len(loops)))
        self.loops = [loop(marks) for loop, marks in zip(loops, self.theirs, strict=True)]

    def on_epoch_start(self, trainer: dpframe.Trainer) -> None:
        self.ours.begin()

    def on_step_end(self, trainer: dpframe.Trainer) -> None:
        self.ours.train()

    def on_epoch_end(self, trainer: dpframe.Trainer) -> None:
        self.ours.end()
        for loop in self.loops:
            next(loop)

    def ratios(self, *, is_whole: bool = False) -> list[float]:
        """Ours to each loop's: of training alone, or of whole epochs."""
        ours, *theirs = (
            [
                end - begin
                for begin, end in zip(
                    marks.begun, marks.ended if is_whole else marks.trained, strict=True
                )
            ][WARM_EPOCHS:]
            for marks in (self.ours, *self.theirs)
        )
        return [
            statistics.median(one / other for one, other in zip(ours, each, strict=True))
            for each in theirs
        ]


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
    ):
        to_tuned, to_plain = ratios(Path(directory))
        names, sets = of_names(200), of_sets(10)
    print(
        f"a step costs {to_tuned:.2f} of the tuned loop's, and {to_plain:.2f} of one that calls "
        f"optimizer.step(); with 200 names {names:.2f} of the tuned loop's; an epoch of a step and "
        f"ten validation sets {sets:.2f}"
    )


def ratios(directory: Path, *, epochs: int = EPOCHS) -> list[float]:
    """Of boston: ours to each tuned loop's."""

    def loop(by_torch: bool, marks: Marks) -> Iterator[Any]:
        folder = Path(tempfile.mkdtemp(dir=directory))
        return tuned.epochs(epochs, marks, folder, is_bare=True, steps_by_torch=by_torch)

    alternates = Alternates([partial(loop, by_torch) for by_torch in (False, True)])
    dpframe.Trainer(
        Boston(problems.perceptron(), partial(torch.optim.Adam, lr=0.01)),
        BostonData(),
        settings=dpframe.TrainerSettings(max_epochs=epochs, threads=1),
        callbacks=[Progress(bar=False), alternates],
        loggers=[TensorBoard(), CSV()],
        run=dpframe.RunInfo(directory=str(directory)),
    ).fit()
    for loop in alternates.loops:
        next(loop, None)  # closes its files
    return alternates.ratios()


def of_names(names: int, *, epochs: int = WARM_EPOCHS + 40) -> float:
    """Of a step that measures so many: ours to the tuned loop's. They are read once in 50 steps."""
    data = growth.Rows(rows=50 * 128)
    return _of_growth(data, names, epochs).ratios(is_whole=True)[0]


def of_sets(sets: int, *, epochs: int = EPOCHS) -> float:
    """Of an epoch of one step and so many sets to validate on: ours to the tuned loop's."""
    data = growth.Rows(rows=128, sets=sets)
    return _of_growth(data, 0, epochs).ratios(is_whole=True)[0]


def _of_growth(data: growth.Rows, names: int, epochs: int) -> Alternates:
    train, held_out = data.train_dataset(), data.val_dataset() or {}
    loop = partial(measures.epochs, train=train, held_out=held_out, names=names)
    alternates = Alternates([loop])
    task = growth.Measures([13, 16, 32, 1], partial(torch.optim.Adam, lr=0.01), names)
    settings = dpframe.TrainerSettings(max_epochs=epochs, threads=1, share_check="off")
    dpframe.Trainer(task, data, settings=settings, callbacks=[alternates]).fit()
    return alternates


if __name__ == "__main__":
    main()
