"""What runs in every process of the job: small Trainers on one strategy, and what they gave."""

import copy
import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpframe import checkpoint, lean
from dpframe.data import DataModule, Loader
from dpframe.errors import UserError
from dpframe.loggers import Logger
from dpframe.strategies.base import Strategy
from dpframe.task import Task, TrainStep
from dpframe.testing import course
from dpframe.testing.course import Counted, Course, Drawing, Numbers, Recipe, Squares
from dpframe.testing.leftovers import Leftovers
from dpframe.testing.reference import Curve, Log, unlike, weights_of
from dpframe.trainer import Trainer
from dpframe.trainer.settings import TrainerSettings

SIZES = range(1, 18)
LARGE_SIZES = (33, 64, 100, 257)
OTHER_NUMBERS = range(1, 9)  # of replicas
OTHER_SIZES = (1, 7, 8, 9, 30, 64, 257)
KINDS: dict[str, Callable[[int], Any]] = {  # of rows, as the Loader gives them
    "tensor": torch.arange,
    "list": lambda count: list(range(count)),  # a stream's
    "range": range,
}
VALIDATED_BATCH = 10
PREDICTED_BATCH = 4
COUNTED = ((12, 4, True), (11, 4, False))  # rows, batch size, shuffled
CLOSING_SECONDS = 30.0
CHECKPOINT = "kit.ckpt"
SUFFIX = ".notes"  # a file a process: nothing of the strategy carries what it measured
Note = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """All that a process has to know; it may have to travel there."""

    strategy: Callable[[], Strategy]
    recipe: Recipe | None
    measures: tuple[str, ...]
    directory: Path
    caller: int  # the process that asked for all this
    give_up_seconds: float


def measure(plan: Plan) -> int:
    """The process's number: the main one's is what `launch` has to give back."""
    leftovers = Leftovers(with_ports=False)  # torch's DDP keeps its group's until the rank ends
    _end_after(plan.give_up_seconds, plan)
    strategy = plan.strategy()
    strategy.open()
    try:
        write(plan.directory, "facts", facts(strategy))
        for name in plan.measures:
            write(plan.directory, "began", name)
            write(plan.directory, name, MEASURES[name](strategy, plan))
        write(plan.directory, "began", "close")
    finally:
        _end_after(CLOSING_SECONDS, plan)
        strategy.shut()
    is_caller = os.getpid() == plan.caller  # which looks for itself
    write(plan.directory, "leftovers", [] if is_caller else leftovers.found())
    return os.getpid()


def facts(strategy: Strategy) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "strategy": strategy.name,
        "rank": strategy.rank,
        "world_size": strategy.world_size,
        "replicas": strategy.replicas,
        "is_main": strategy.is_main,
        "devices": list(strategy.devices),
    }


def _end_after(seconds: float, plan: Plan) -> None:
    """A rank that hangs says where, and ends; the caller is not ours to end."""
    if os.getpid() != plan.caller:
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


# ---- what is measured


def shares(strategy: Strategy, plan: Plan) -> dict[str, dict[int, list[list[int]]]]:
    """By kind and number of rows: which of them this process's replicas get."""
    return {
        kind: {count: _cut(strategy, rows(count)) for count in (*SIZES, *LARGE_SIZES)}
        for kind, rows in KINDS.items()
    }


def other_numbers(strategy: Strategy, plan: Plan) -> dict[int, dict[str, dict[int, list]]]:
    """The shares on 1 to 8 replicas, where the strategy cuts by nothing but its numbers."""
    if not strategy.is_main:
        return {}
    for of in (_cuts_of_processes, _cuts_of_one_process):
        with suppress(Exception):  # it can't be given other numbers
            two, four = (of(copy.copy(strategy), n, range(24)) for n in (2, 4))
            if two[0] not in (two[1], four[0]):
                return {
                    replicas: {
                        kind: {n: of(copy.copy(strategy), replicas, rows(n)) for n in OTHER_SIZES}
                        for kind, rows in KINDS.items()
                    }
                    for replicas in OTHER_NUMBERS
                }
    return {}


def _cuts_of_processes(strategy: Any, replicas: int, rows: Any) -> list[list[int]]:
    found = []
    strategy.world_size = strategy.replicas = replicas
    for strategy.rank in range(replicas):
        (share,) = _cut(strategy, rows)
        found.append(share)
    return found


def _cuts_of_one_process(strategy: Any, replicas: int, rows: Any) -> list[list[int]]:
    strategy.replicas = replicas
    return _cut(strategy, rows)


def _cut(strategy: Strategy, rows: Any) -> list[list[int]]:
    shares: list[Any] = strategy.shares(rows)  # type: ignore[assignment]
    return [share.tolist() if isinstance(share, torch.Tensor) else list(share) for share in shares]


def collectives(strategy: Strategy, plan: Plan) -> dict[str, Any]:
    rank = strategy.rank
    numbers = torch.tensor([rank + 1.0, 1.0], dtype=torch.float64)
    found: dict[str, Any] = {
        "reduce": strategy.reduce(numbers).tolist(),
        "tally": strategy.tally([rank + 1.0, 1.0]),
    }
    for kind, value in values_of(rank).items():
        found[f"gather of {kind}"] = strategy.gather(value)
        found[f"share of {kind}"] = strategy.share(value)
    return found


def values_of(rank: int) -> dict[str, Any]:
    """Of each rank its own; a sampler's rows are shared as a list of numbers."""
    return {
        "a number": rank,
        "a list of numbers": [rank, 7],
        "a list of names": [f"rank {rank}"],
        "a dict": {"rank": rank, "state": bytes([rank % 256])},
    }


def kit(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.kit_course())


def accumulation(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.accumulating())


def few_rows(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.few_rows(strategy.replicas))


def weighted(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.weighted())


def float32(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.large())


def tried(strategy: Strategy, plan: Plan) -> dict[str, Any]:
    return _tried(strategy, course.drawing(strategy.replicas), plan.directory / "tried.ckpt")


def recipe(strategy: Strategy, plan: Plan) -> dict[str, Any]:
    if plan.recipe is None:
        return {}
    its_course = course.of(plan.recipe, strategy.replicas)
    return _tried(strategy, its_course, plan.directory / "recipe.ckpt")


def _tried(strategy: Strategy, its_course: Course, path: Path) -> dict[str, Any]:
    """A run, its checkpoint, which another Trainer takes over, and what that predicts.

    Weights are in the checkpoint alone: a recipe's may be large.
    """
    recorder = Recorder()
    loggers: list[Logger] = [] if its_course.is_even else [recorder]  # a graph reads rows, too
    trainer = _course_trainer(strategy, its_course, loggers)
    found: dict[str, Any] = {}
    if course.trains(trainer.task):
        trainer.fit()
        train = trainer.data.train_dataset()
        found = {
            "log": recorder.kept if strategy.is_main else [],
            "validated": {k: v for k, v in trainer.metrics.items() if k.startswith("val/")},
            "read": train.read if isinstance(train, course.Frozen) else [],
            "drawn": getattr(trainer.task, "drawn", []),
            "modes": getattr(trainer.task, "modes", set()),
            "weights": weights_of(trainer.task) if its_course.recipe is course.DRAWING else [],
        }
        state = trainer.state_dict()
        found["error"] = _saved(strategy, state, path)
        if not found["error"]:
            trainer = _course_trainer(strategy, its_course)
            trainer.fit(checkpoint.load(path))
            again = trainer.state_dict()
            parts = ("task", "optimizer", "scheduler")
            read, saved = ({part: one[part] for part in parts} for one in (again, state))
            found["unlike"] = unlike(read, saved)
    if course.predicts(trainer.task) and trainer.data.predict_dataset() is not None:
        predictions = trainer.predict()
        found["predicted"] = None if predictions is None else predictions.joined()
    return found


def counted(strategy: Strategy, plan: Plan) -> list[list[float]]:
    """How far an epoch has moved the weight of each row."""
    found = []
    for rows, batch_size, shuffle in COUNTED:
        task, data = Counted(rows), Numbers(rows, batch_size, shuffle)
        _trainer(strategy, task, data, max_epochs=1).fit()
        found.append(task.seen.tolist())
    return found


def validation(strategy: Strategy, plan: Plan) -> dict[int, float]:
    found = {}
    for rows in SIZES:
        trainer = _trainer(strategy, Squares(), Numbers(rows, VALIDATED_BATCH))
        with suppress(UserError):  # it says that there were no rows
            trainer.validate()
        found[rows] = trainer.metrics.get("val/loss", float("nan"))
    return found


def predicted(strategy: Strategy, plan: Plan) -> dict[int, list[int]]:
    found = {}
    for rows in SIZES:
        predictions = _trainer(strategy, Squares(), Numbers(rows, PREDICTED_BATCH)).predict()
        if predictions is not None:
            found[rows] = [int(row) for part in predictions.joined() for row in part.reshape(-1)]
    return found


def gradients(strategy: Strategy, plan: Plan) -> list[list[float]]:
    """All of this process's gradients after each of the micro-batches of one update."""
    task, data = course.accumulating().build()
    data.setup()
    strategy.dtype = torch.float64
    task.to(strategy.device, torch.float64)
    with lean.no_dynamo_in_ddp():
        step = strategy.wrap(TrainStep(task), training=True)
    train: Any = data.train_dataset()
    batches = list(Loader(train, batch_size=4, shares=strategy.shares).epoch(limit=3))
    found = []
    for batch in batches:
        strategy.grad_sync(batch is batches[-1])
        rows = sum(one.rows for one in batches)
        loss, _ = step(strategy.to_device(batch.shares), rows / strategy.averaged_over)
        loss.backward()
        found.append(_gradient(task))
    return found


def logged(strategy: Strategy, plan: Plan) -> None:
    """Each process has the logger; its file says which of them wrote."""
    its_course = course.kit_course()
    line = Line(plan.directory / "logged.txt")
    _course_trainer(strategy, its_course, [line]).fit()


def resumed(strategy: Strategy, plan: Plan) -> dict[str, Any]:
    """Stopped within the second of two epochs; a checkpoint of that; and the rest from there."""
    path = plan.directory / CHECKPOINT
    its_course = course.drawing(strategy.replicas)
    first = _course_trainer(strategy, its_course, max_steps=4)
    first.fit()
    state = first.state_dict()
    found: dict[str, Any] = {"weights": weights_of(first.task)}
    found["error"] = _saved(strategy, state, path)
    if not found["error"] and state["task"].keys() == Drawing().state_dict().keys():
        second = _course_trainer(strategy, its_course)
        second.fit(checkpoint.load(path))
        found |= {"resumed": weights_of(second.task), "drawn": second.task.drawn}
    return found


def _saved(strategy: Strategy, state: dict[str, Any], path: Path) -> str:
    """What went wrong, in every process."""
    error = ""
    if strategy.is_main:
        try:
            checkpoint.save(state, path)
        except Exception as caught:
            error = str(caught)
    return strategy.share(error)


MEASURES: dict[str, Callable[[Strategy, Plan], Any]] = {
    "shares": shares,
    "other_numbers": other_numbers,
    "collectives": collectives,
    "kit": kit,
    "recipe": recipe,
    "float32": float32,
    "tried": tried,
    "accumulation": accumulation,
    "few_rows": few_rows,
    "weighted": weighted,
    "counted": counted,
    "validation": validation,
    "predicted": predicted,
    "gradients": gradients,
    "logged": logged,
    "resumed": resumed,
}


# ---- with what


class Recorder(Logger):
    """Keeps what it is told, but for the one number that no two runs share."""

    def __init__(self) -> None:
        self.kept: Log = []

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        known = {k: v for k, v in scalars.items() if k != "step/samples_per_second"}
        self.kept.append((step, known))


class Line(Logger):
    """Writes down who logged which numbers at which step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        with self.path.open("a") as file:
            file.write("".join(f"{os.getpid()} {step} {name}\n" for name in scalars))


def _trained(strategy: Strategy, its_course: Course) -> Curve:
    recorder = Recorder()
    trainer = _course_trainer(strategy, its_course, [recorder])
    trainer.fit()
    return Curve(recorder.kept, weights_of(trainer.task))


def _course_trainer(
    strategy: Strategy,
    its_course: Course,
    loggers: list[Logger] | None = None,
    max_steps: int | None = None,
) -> Trainer:
    task, data = its_course.build()
    return Trainer(
        task,
        data,
        strategy=strategy,
        settings=its_course.settings(max_steps),
        loggers=loggers or [],
        seed=its_course.recipe.seed,
    )


def _trainer(strategy: Strategy, task: Task, data: DataModule, **settings: Any) -> Trainer:
    kept = TrainerSettings(precision="64", **settings)
    return Trainer(task, data, strategy=strategy, settings=kept)


def _gradient(task: Task) -> list[float]:
    known = [p.grad for p in task.parameters() if p.grad is not None]
    return torch.cat([g.detach().cpu().flatten() for g in known]).tolist() if known else []


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
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the end, or killed while it wrote
                return
