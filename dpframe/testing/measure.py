"""What runs in every process of the job: small Trainers on one strategy, and what they gave."""

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
from dpframe.testing.course import Counted, Course, Numbers, Recipe, Small, Squares
from dpframe.testing.leftovers import Leftovers
from dpframe.testing.reference import Curve, Log, weights_of
from dpframe.trainer import Trainer
from dpframe.trainer.settings import TrainerSettings

SIZES = range(1, 18)
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


def shares(strategy: Strategy, plan: Plan) -> dict[int, list[list[int]]]:
    """By the number of rows: which of them this process's replicas get."""
    found = {}
    for count in SIZES:
        rows: Any = torch.arange(count)  # as the Loader gives them
        found[count] = [[int(row) for row in share] for share in strategy.shares(rows)]
    return found


def collectives(strategy: Strategy, plan: Plan) -> dict[str, Any]:
    number = torch.tensor([strategy.rank + 1.0], dtype=torch.float64)
    return {
        "reduce": strategy.reduce(number).tolist(),
        "tally": strategy.tally([strategy.rank + 1.0]),
        "gather": strategy.gather(strategy.rank),
        "share": strategy.share(strategy.rank),
    }


def kit(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.kit_course())


def accumulation(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.accumulating())


def few_rows(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.few_rows(strategy.replicas))


def weighted(strategy: Strategy, plan: Plan) -> Curve:
    return _trained(strategy, course.weighted())


def recipe(strategy: Strategy, plan: Plan) -> Curve | None:
    """Only the main process's: a recipe's weights may be large."""
    if plan.recipe is None:
        return None
    its_course = course.of(plan.recipe)
    if course.why_not(its_course.build()[0]):
        return None
    curve = _trained(strategy, its_course)
    return curve if strategy.is_main else None


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
    """An epoch, a checkpoint of it, and a second epoch from there."""
    path = plan.directory / CHECKPOINT
    first = _course_trainer(strategy, Course(course.KIT, epochs=1))
    first.fit()
    state = first.state_dict()
    weights, error = weights_of(first.task), ""
    if strategy.is_main:
        try:
            checkpoint.save(state, path)
        except Exception as caught:
            error = str(caught)
    if strategy.share(error) or state["task"].keys() != Small().state_dict().keys():
        return {"weights": weights, "error": error, "resumed": None}
    second = _course_trainer(strategy, course.kit_course())
    second.fit(checkpoint.load(path))
    return {"weights": weights, "error": error, "resumed": weights_of(second.task)}


MEASURES: dict[str, Callable[[Strategy, Plan], Any]] = {
    "shares": shares,
    "collectives": collectives,
    "kit": kit,
    "recipe": recipe,
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
    strategy: Strategy, its_course: Course, loggers: list[Logger] | None = None
) -> Trainer:
    task, data = its_course.build()
    return Trainer(
        task,
        data,
        strategy=strategy,
        settings=its_course.settings(),
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
