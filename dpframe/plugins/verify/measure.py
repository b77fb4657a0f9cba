"""What runs in every process of the job: small Trainers on one strategy, and what they gave."""

import copy
import faulthandler
import os
import pickle
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpframe import Callback, Logger, Strategy, Task, Trainer, TrainerSettings, UserError
from dpframe.plugin import call_prepare_data, checkpoint, leaves, memory, seeding
from dpframe.plugins.verify.course import (
    CONTRASTIVE,
    EXACT_LAYERS,
    Course,
    Frozen,
    Numbers,
    Recipe,
    Squares,
    courses,
)
from dpframe.plugins.verify.distance import Log, Weights, nests_apart
from dpframe.plugins.verify.reference import copy_weights
from dpframe.strategies import CPU, SingleGPU
from dpframe.strategies.base import NO_GATHER

EVALUATED_SIZES = range(1, 18)
SIZES = (*EVALUATED_SIZES, 33, 64, 100, 257)
OTHER_REPLICAS = range(1, 9)
OTHER_SIZES = (1, 7, 8, 9, 30, 64, 257)
KINDS: dict[str, Callable[[int], Any]] = {  # of rows, as the Loader passes them
    "tensor": torch.arange,
    "list": lambda count: list(range(count)),  # a stream's
    "range": range,
}
EVALUATED_BATCH = 10
PREPARING_SECONDS = 24 * 3600.0  # of the recipe's `prepare_data`, e.g. a download
CLOSING_SECONDS = 30.0
SUFFIX = ".notes"  # one file a process: no part of the strategy carries what is measured
GRACE_SECONDS = 2.0  # for what is about to end
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
HELPERS = ("resource_tracker", "forkserver")  # multiprocessing's own, which stay
PROC = Path("/proc")  # Linux alone has it
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
    before = list_resources()
    _exit_after(plan.give_up_seconds, plan)
    with plan.strategy() as strategy:
        try:
            _measure_all(strategy, plan)
        finally:
            _exit_after(CLOSING_SECONDS, plan)
    is_caller = os.getpid() == plan.caller  # which looks for itself
    write(plan.directory, "leftovers", [] if is_caller else find_leftovers(before))
    return os.getpid()


def _measure_all(strategy: Strategy, plan: Plan) -> None:
    if plan.recipe is not None and plan.recipe.settings.logical_replicas is not None:
        seeding.fix_workspaces(strategy.device)  # of all courses: the first one's stay
    write(plan.directory, "facts", facts(strategy))
    data = None if plan.recipe is None else plan.recipe.data()
    if data is not None and data.has_preparation:
        _exit_after(PREPARING_SECONDS, plan)
        call_prepare_data(data, strategy.collectives.once)
        _exit_after(plan.give_up_seconds, plan)
    all_courses = courses(plan.recipe, strategy.replicas)
    for name in plan.measures:
        write(plan.directory, "began", name)
        with memory.explain(strategy.device, f"mode=verify, {name}", "take a smaller task"):
            if name in CALLS:
                write(plan.directory, name, CALLS[name](strategy))
            else:
                path = plan.directory / f"{name}.ckpt"
                write(plan.directory, name, run(strategy, all_courses.get(name), path))
    write(plan.directory, "began", "close")


def _exit_after(seconds: float, plan: Plan) -> None:
    """A rank that hangs prints where, and exits; the caller stays."""
    if os.getpid() != plan.caller:
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def facts(strategy: Strategy) -> dict[str, Any]:
    names = ("rank", "world_size", "replicas", "is_main", "devices", "name")
    known = {name: getattr(strategy, name) for name in names}
    return {"pid": os.getpid(), "shards_weights": strategy.sharding.cuts, **known}


# ---- trainings


@dataclass
class Run:
    """What one process knows of a course that it took part in."""

    steps: int = 0
    log: Log = field(default_factory=dict)
    validated: Log = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)  # empty where another process has them
    read: list[int] = field(default_factory=list)  # the rows, in their order
    seen: dict[str, list] = field(default_factory=dict)  # by the kit's own tasks
    unlike: str = ""  # what a resumed run does not begin with as it was saved
    resumed: "Run | None" = None
    predicted: Any = None
    refusal: str = ""  # of rows that other replicas gather
    traces: dict[str, int] = field(default_factory=dict)  # of logical shares


def run(strategy: Strategy, course: Course | None, path: Path) -> Run:
    """A course that `is_saved` is resumed from within the second epoch, too."""
    if course is None:
        return Run()
    results, (task, data) = Run(), course.build()
    if task.has_own("training_step"):
        try:
            results, task = _fit(strategy, course, path)
        except UserError as error:  # in every process, at the first step
            if NO_GATHER not in str(error) or course.recipe not in (CONTRASTIVE, EXACT_LAYERS):
                raise
            return Run(refusal=str(error))
        if course.is_saved:
            results.resumed, _ = _fit(strategy, course, path, checkpoint.load(path))
    if task.has_own("predict_step") and not task.adapter.needs_trainer:
        data.setup()
        if data.predict_dataset() is not None:
            trainer = Trainer(task, data, strategy=strategy, settings=course.settings)
            results.predicted = _join(trainer.predict())
    return results


def _join(predictions: Any) -> Any:
    if isinstance(predictions, dict):
        return {name: _join(each) for name, each in predictions.items()}
    return None if predictions is None else predictions.joined()


def _fit(strategy: Strategy, course: Course, path: Path, state: Any = None) -> tuple[Run, Any]:
    task, data = course.build()
    curves, saves = Curves(), Saves(path)
    traces = Traces(task) if course.logical_replicas else None
    trainer = Trainer(
        task,
        data,
        strategy=strategy,
        settings=course.settings,
        callbacks=[saves] if course.is_saved else [],
        loggers=[curves],
        seed=course.recipe.seed,
    )
    metrics, step = trainer.fit(state), trainer.global_step
    rows: Any = data.train_dataset()
    weights = strategy.sharding.whole(task.state_dict(), for_all=course.is_small)
    results = Run(
        steps=step,
        log=curves.points,
        validated={k: [(step, v)] for k, v in metrics.items() if k.startswith("val/")},
        weights=copy_weights(weights) if strategy.is_main or course.is_small else {},
        read=rows.read if isinstance(rows, Frozen) else [],
        seen=getattr(task, "seen", {}),
        unlike=saves.unlike,
        traces=traces.sums if traces is not None else {},
    )
    return results, task


def run_alone(course: Course, device: str, path: Path) -> Run:
    """The course on one process, here."""
    strategy = CPU() if device == "cpu" else SingleGPU()
    with strategy:
        return _fit(strategy, course, path)[0]


class Curves(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.points: Log = {}

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        for name, value in scalars.items():
            self.points.setdefault(name, []).append((step, value))


class Traces:
    """Checksums of what each module gives, and of each gradient, in the shares of the first update.

    By "the forward of net.0 (Linear) on share 3", in the order in which they are computed."""

    def __init__(self, task: Task) -> None:
        self.sums: dict[str, int] = {}
        self._task = task
        for name, module in task.named_modules():
            whose = f"{name} ({type(module).__name__})" if name else type(module).__name__
            module.register_forward_hook(partial(self._note_output, f"the forward of {whose}"))
        for name, weight in task.named_parameters():
            if weight.requires_grad:
                weight.register_hook(partial(self._note, f"the gradient of {name}"))

    def _note_output(self, what: str, module: Any, inputs: Any, output: Any) -> None:
        for tensor in leaves(output):
            if isinstance(tensor, Tensor):
                self._note(what, tensor)

    def _note(self, what: str, tensor: Tensor) -> None:
        attached = self._task.run_context
        strategy: Any = attached.strategy
        if not self._task.training or attached.progress is None or attached.progress.global_step:
            return
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        key = f"{what} on share {strategy.share_at}"
        self.sums[key] = zlib.crc32(data.numpy().tobytes(), self.sums.get(key, 0))


class Saves(Callback):
    """Saves a checkpoint after the first step of the second epoch; compares what a resumed run
    begins with and what was saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unlike = ""

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.global_step:
            parts = ("task", "optimizer", "scheduler")
            saved, read = checkpoint.load(self.path), trainer.state_dict()
            if trainer.strategy.is_main or not trainer.strategy.sharding.cuts:
                self.unlike = nests_apart({p: read[p] for p in parts}, {p: saved[p] for p in parts})

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == trainer.steps_per_epoch + 1:
            state = trainer.state_dict()
            if trainer.strategy.is_main:
                checkpoint.save(state, self.path)


# ---- single calls


def shares(strategy: Strategy) -> dict[tuple[int, str, int], Shares]:
    """By replicas, kind and number of rows: 0 replicas are those of this process, and 1 to 8 are
    tried where shares follow from the strategy's numbers alone."""
    results = {
        (0, kind, count): _cut(strategy, rows(count))
        for kind, rows in KINDS.items()
        for count in SIZES
    }
    with suppress(Exception):  # it can't be given other numbers
        two, four = (_cut_on(n, strategy, range(24)) for n in (2, 4))
        if (len(two), len(four)) == (2, 4) and two[0] not in (two[1], four[0]):
            results |= {
                (replicas, kind, count): _cut_on(replicas, strategy, rows(count))
                for replicas in OTHER_REPLICAS
                for kind, rows in KINDS.items()
                for count in OTHER_SIZES
            }
    return results


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
    return [torch.as_tensor(share).tolist() for share in strategy.split_rows(rows)]


def collectives(strategy: Strategy) -> list[str]:
    """What they give in this process that they should not."""
    rank, count, together = strategy.rank, strategy.world_size, strategy.collectives
    numbers, total = [rank + 1.0, 1.0], [count * (count + 1) / 2, count]
    vector = torch.tensor(numbers, dtype=torch.float64)
    results: dict[str, tuple[Any, Any]] = {
        "sum": (together.sum(vector).tolist(), total),
        "sum_numbers": (together.sum_numbers(numbers), total),
    }
    for kind, value in {
        "a number": lambda rank: rank,
        "a list of numbers": lambda rank: [rank, 7],  # as a sampler's rows are shared
        "a list of names": lambda rank: [f"rank {rank}"],
        "a dict": lambda rank: {"rank": rank, "state": bytes([rank % 256])},
    }.items():
        values = [value(other) for other in range(count)]
        results[f"gather of {kind}"] = together.gather(values[rank]), [] if rank else values
        results[f"broadcast of {kind}"] = together.broadcast(values[rank]), values[0]
    return [
        f"{name} gave {actual} in rank {rank}, not {expected}"
        for name, (actual, expected) in results.items()
        if actual != expected
    ]


def evaluate(strategy: Strategy) -> dict[int, tuple[float, list[int]]]:
    """By the number of rows: the mean of their squares, and in which order they are predicted."""
    results, settings = {}, TrainerSettings(precision="64")
    for rows in EVALUATED_SIZES:
        data = Numbers(rows, EVALUATED_BATCH)
        trainer = Trainer(Squares(), data, strategy=strategy, settings=settings)
        with suppress(UserError):  # it says that there were no rows
            trainer.validate()
        predicted = _join(trainer.predict())
        order = [] if predicted is None else predicted.tolist()
        results[rows] = trainer.metrics.get("val/loss", float("nan")), order
    return results


CALLS: dict[str, Callable[[Strategy], Any]] = {
    "shares": shares,
    "collectives": collectives,
    "evaluated": evaluate,
}


# ---- how it comes back


def write(directory: Path, name: str, value: Any) -> None:
    """Appends a value to this process's file at once, in case the process ends next."""
    with (directory / f"{os.getpid()}{SUFFIX}").open("ab") as file:
        pickle.dump((name, value), file)


def read(directory: Path) -> list[Note]:
    """The values of each process that joined the job by name, in the order of the ranks."""
    notes = [dict(_values(path)) for path in directory.glob(f"*{SUFFIX}")]
    return sorted(
        (note for note in notes if "facts" in note), key=lambda note: note["facts"]["rank"]
    )


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    # It ends anywhere where the process was killed while it wrote.
    with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(file)


# ---- what a process has beside its work


def find_leftovers(before: set[str], *, with_ports: bool = False) -> list[str]:
    """What has come since `before` was `list_resources`, and stays."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (new := list_resources(with_ports=with_ports) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(new)


def list_resources(*, with_ports: bool = False) -> set[str]:
    """In a rank without ports: torch's DDP keeps its group's until the rank ends."""
    things = set(_descendants("self"))
    things |= {f"thread {thread.name}" for thread in threading.enumerate()}
    things |= {f"environment variable {name}" for name in RANK_VARIABLES if name in os.environ}
    distributed = sys.modules.get("torch.distributed")  # not imported: not used
    if distributed and distributed.is_available() and distributed.is_initialized():
        things.add("process group")
    return things | ({f"port {port}" for port in _ports()} if with_ports else set())


def _descendants(pid: str) -> Iterator[str]:
    """The processes below this one, with their command lines; a zombie has none."""
    for path in PROC.glob(f"{pid}/task/*/children"):
        for child in _text(path).split():
            command = _text(PROC / child / "cmdline").replace("\0", " ").strip()
            if command and not any(helper in command for helper in HELPERS):
                yield f"process {child}: {command[:80]}"
            yield from _descendants(child)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # the process ended in between


def _ports() -> Iterator[int]:
    """The TCP ports that this process listens at."""
    for entry in PROC.glob("self/fd/*"):
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as twin:
                if twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    address = twin.getsockname()
                    yield address[1] if isinstance(address, tuple) else address
        except OSError:
            continue  # it was closed in between
