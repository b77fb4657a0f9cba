"""What runs in every process of the job: small Trainers on one strategy, and what they gave."""

import copy
import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpframe import checkpoint
from dpframe.callbacks import Callback
from dpframe.errors import UserError
from dpframe.loggers import Logger
from dpframe.strategies import Strategy
from dpframe.task import Task
from dpframe.testing.compare import Log, Weights, nests_apart
from dpframe.testing.course import (
    Course,
    FirstRows,
    Frozen,
    Numbers,
    Recipe,
    Squares,
    courses,
    predicts,
    trains,
)
from dpframe.testing.leftovers import Leftovers
from dpframe.testing.reference import weights_of
from dpframe.trainer import Trainer
from dpframe.trainer.settings import TrainerSettings

SIZES = range(1, 18)
LARGE_SIZES = (33, 64, 100, 257)
OTHER_REPLICAS = range(1, 9)
OTHER_SIZES = (1, 7, 8, 9, 30, 64, 257)
KINDS: dict[str, Callable[[int], Any]] = {  # of rows, as the Loader passes them
    "tensor": torch.arange,
    "list": lambda count: list(range(count)),  # a stream's
    "range": range,
}
EVALUATED_BATCH = 10
CLOSING_SECONDS = 30.0
SUFFIX = ".notes"  # one file a process: no part of the strategy carries what is measured
Note = dict[str, Any]
Shares = list[list[int]]


@dataclass(frozen=True)
class Plan:
    """All that a process needs to know; it is pickled for processes that are spawned."""

    strategy: Callable[[], Strategy]
    recipe: Recipe | None
    measures: tuple[str, ...]
    directory: Path
    caller: int  # the process id of the program that runs the kit
    give_up_seconds: float


def measure(plan: Plan) -> int:
    """Returns the process id: `launch` has to return the main process's."""
    leftovers = Leftovers(with_ports=False)  # torch's DDP keeps its group's until the rank ends
    _exit_after(plan.give_up_seconds, plan)
    strategy = plan.strategy()
    strategy.open()
    try:
        write(plan.directory, "facts", facts(strategy))
        known = courses(plan.recipe, strategy.replicas)
        for name in plan.measures:
            write(plan.directory, "began", name)
            if name in CALLS:
                write(plan.directory, name, CALLS[name](strategy))
            else:
                path = plan.directory / f"{name}.ckpt"
                write(plan.directory, name, run(strategy, known.get(name), path))
        write(plan.directory, "began", "close")
    finally:
        _exit_after(CLOSING_SECONDS, plan)
        strategy.shut()
    is_caller = os.getpid() == plan.caller  # which looks for itself
    write(plan.directory, "leftovers", [] if is_caller else leftovers.new())
    return os.getpid()


def _exit_after(seconds: float, plan: Plan) -> None:
    """A rank that hangs prints where, and exits; the caller stays."""
    if os.getpid() != plan.caller:
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def facts(strategy: Strategy) -> dict[str, Any]:
    names = ("rank", "world_size", "replicas", "is_main", "devices", "name")
    return {"pid": os.getpid(), **{name: getattr(strategy, name) for name in names}}


# ---- trainings


@dataclass
class Run:
    """What one process knows of a course that it took part in."""

    steps: int = 0
    log: Log = field(default_factory=list)
    validated: dict[str, float] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)  # empty where another process has them
    read: list[int] = field(default_factory=list)  # the rows, in their order
    seen: dict[str, list] = field(default_factory=dict)  # by the kit's own tasks
    error: str = ""  # of a checkpoint that can't be saved
    unlike: str = ""  # what was not in the resumed run as it was saved
    resumed: "Run | None" = None
    predicted: Any = None


def run(strategy: Strategy, course: Course | None, path: Path) -> Run:
    """A course that `is_saved` is resumed from within the second epoch, too."""
    if course is None:
        return Run()
    done, (task, data) = Run(), course.build()
    if trains(task):
        saves, resumes = Saves(path), Resumes(path)
        done, task, data = _fitted(strategy, course, [saves] if course.is_saved else [])
        done.error = saves.error
        if course.is_saved and not saves.error:
            state = checkpoint.load(path)
            done.resumed, _, _ = _fitted(strategy, course, [resumes], state)
            done.unlike = resumes.unlike
    if predicts(task) and data.predict_dataset() is not None:
        trainer = Trainer(task, data, strategy=strategy, settings=course.settings)
        predictions = trainer.predict()
        done.predicted = None if predictions is None else predictions.joined()
    return done


def _fitted(
    strategy: Strategy, course: Course, callbacks: list[Callback], state: Any = None
) -> tuple[Run, Task, FirstRows]:
    task, data = course.build()
    recorder = Recorder()
    trainer = Trainer(
        task,
        data,
        strategy=strategy,
        settings=course.settings,
        callbacks=callbacks,
        loggers=[] if course.is_even else [recorder],  # a logger's graph reads rows, too
        seed=course.recipe.seed,
    )
    metrics = trainer.fit(state)
    rows: Any = data.train_dataset()
    done = Run(
        steps=trainer.global_step,
        log=recorder.kept,
        validated={k: v for k, v in metrics.items() if k.startswith("val/")},
        weights=weights_of(task) if strategy.is_main or course.is_small else {},
        read=rows.read if isinstance(rows, Frozen) else [],
        seen=getattr(task, "seen", {}),
    )
    return done, task, data


class Recorder(Logger):
    """Keeps what it is told, except the one number that no two runs share."""

    def __init__(self) -> None:
        self.kept: Log = []

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        known = {k: v for k, v in scalars.items() if k != "step/samples_per_second"}
        self.kept.append((step, known))


class Saves(Callback):
    """Saves a checkpoint after the first step of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step != trainer.steps_per_epoch + 1:
            return
        state = trainer.state_dict()
        if trainer.strategy.is_main:
            try:
                checkpoint.save(state, self.path)
            except Exception as error:
                self.error = str(error)
        self.error = trainer.strategy.share(self.error)


class Resumes(Callback):
    """Compares what a resumed run begins with and what was saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unlike = ""

    def on_fit_start(self, trainer: Trainer) -> None:
        read, saved = trainer.state_dict(), checkpoint.load(self.path)
        for part in ("task", "optimizer", "scheduler"):
            self.unlike = self.unlike or nests_apart({part: read[part]}, {part: saved[part]})


# ---- single calls


def shares(strategy: Strategy) -> dict[str, dict[int, Shares]]:
    """By kind and number of rows: which of them this process's replicas get."""
    return {
        kind: {count: _cut(strategy, rows(count)) for count in (*SIZES, *LARGE_SIZES)}
        for kind, rows in KINDS.items()
    }


def other_shares(strategy: Strategy) -> dict[int, dict[str, dict[int, Shares]]]:
    """The shares on 1 to 8 replicas, where they follow from the strategy's numbers alone."""
    with suppress(Exception):  # it can't be given other numbers
        two, four = (_cut_on(n, strategy, range(24)) for n in (2, 4))
        if (len(two), len(four)) == (2, 4) and two[0] not in (two[1], four[0]):
            return {
                replicas: {
                    kind: {n: _cut_on(replicas, strategy, rows(n)) for n in OTHER_SIZES}
                    for kind, rows in KINDS.items()
                }
                for replicas in OTHER_REPLICAS
            }
    return {}


def _cut_on(replicas: int, strategy: Strategy, rows: Any) -> Shares:
    twin = copy.copy(strategy)
    twin.replicas = replicas
    if strategy.world_size == 1:
        return _cut(twin, rows)
    twin.world_size, results = replicas, []
    for twin.rank in range(replicas):
        results += _cut(twin, rows)
    return results


def _cut(strategy: Strategy, rows: Any) -> Shares:
    return [torch.as_tensor(share).tolist() for share in strategy.shares(rows)]


def collectives(strategy: Strategy) -> dict[str, Any]:
    rank = strategy.rank
    numbers = torch.tensor([rank + 1.0, 1.0], dtype=torch.float64)
    results: dict[str, Any] = {
        "reduce": strategy.reduce(numbers).tolist(),
        "tally": strategy.tally([rank + 1.0, 1.0]),
    }
    for kind, value in values_of(rank).items():
        results[f"gather of {kind}"] = strategy.gather(value)
        results[f"share of {kind}"] = strategy.share(value)
    return results


def values_of(rank: int) -> dict[str, Any]:
    """Different ones in each rank; a sampler's rows are shared as a list of numbers."""
    return {
        "a number": rank,
        "a list of numbers": [rank, 7],
        "a list of names": [f"rank {rank}"],
        "a dict": {"rank": rank, "state": bytes([rank % 256])},
    }


def evaluated(strategy: Strategy) -> dict[int, tuple[float, list[int]]]:
    """By the number of rows: the mean of their squares, and in which order they are predicted."""
    results = {}
    settings = TrainerSettings(precision="64")
    for rows in SIZES:
        trainer = Trainer(
            Squares(), Numbers(rows, EVALUATED_BATCH), strategy=strategy, settings=settings
        )
        with suppress(UserError):  # it says that there were no rows
            trainer.validate()
        predictions = trainer.predict()
        parts = [] if predictions is None else predictions.joined()
        order = [int(row) for part in parts for row in part.reshape(-1)]
        results[rows] = trainer.metrics.get("val/loss", float("nan")), order
    return results


CALLS: dict[str, Callable[[Strategy], Any]] = {
    "shares": shares,
    "other_shares": other_shares,
    "collectives": collectives,
    "evaluated": evaluated,
}


# ---- how it comes back


def write(directory: Path, name: str, value: Any) -> None:
    """At once, so that it is there even if this process ends in the next moment."""
    with (directory / f"{os.getpid()}{SUFFIX}").open("ab") as file:
        pickle.dump((name, value), file)


def read(directory: Path) -> list[Note]:
    """Each process's values by name, in the order of the ranks."""
    notes = [dict(_values(path)) for path in directory.glob(f"*{SUFFIX}")]
    return sorted(notes, key=lambda note: note.get("facts", {}).get("rank", -1))


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    # It ends anywhere where the process was killed while it wrote.
    with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(file)
