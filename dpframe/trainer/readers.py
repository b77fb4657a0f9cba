"""How many data workers are worth having, where `data.workers=auto` leaves that to us."""

import os
import time
from typing import TYPE_CHECKING, Any

from dpframe import seeding
from dpframe.data import Choose
from dpframe.errors import UserError, suggestion
from dpframe.reading import Together, read
from dpframe.workers import Chosen

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

SLOW_SECONDS = 0.005  # of reading a batch; what a worker's batch costs to hand over is about 0.002
MOST = 8


def workers_of(trainer: "Trainer") -> "int | Choose":
    given = trainer.data.workers
    if isinstance(given, int):
        return given
    if given != "auto":
        near = suggestion(given, ["auto"])
        raise UserError(f"data.workers={given} is neither a whole number nor auto; {near}")

    def choose(dataset: Any, together: Together) -> Chosen:
        """The main process's choice, in every process."""
        is_main = trainer.strategy.is_main
        return Chosen(*trainer.strategy.share(_chosen(trainer, dataset, together, is_main)))

    return choose


def _chosen(trainer: "Trainer", dataset: Any, together: Together, is_main: bool) -> Any:
    if not is_main:
        return None
    batch_size = trainer.data.batch_size
    rows = max(1, sum(map(len, trainer.strategy.shares(range(batch_size)))))
    with seeding.seeded(trainer.seed):
        before = seeding.random_state()
        seconds = _seconds(dataset, together, rows)
        draws = not _is_same(before, seeding.random_state())
    return tuple(choice(seconds, cores(trainer.strategy.world_size), draws=draws))


def choice(seconds: float, cores: int, *, draws: bool) -> Chosen:
    """Rows that draw random numbers have workers on every machine: there they draw by the share,
    whatever the number of workers, and so the choice never decides what they draw."""
    count = min(cores, MOST)
    takes = f"a batch takes {1e3 * seconds:.2g} ms to read"
    if draws:
        count = max(1, count if seconds > SLOW_SECONDS else 1)
        return Chosen(count, f"{takes}, and draws random numbers", draws_apart=True)
    return Chosen(count if seconds > SLOW_SECONDS and count > 1 else 0, takes, draws_apart=False)


def cores(world_size: int) -> int:
    """To each rank of this machine."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    # Set by torchrun and by our own supervisor alike; unknown: as if all ranks were here.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size) if world_size > 1 else 1
    return count // ranks


def _seconds(dataset: Any, together: Together, rows: int) -> float:
    """Of the second batch: a first one opens files and imports what it needs."""
    seconds = 0.0
    for start in (0, rows if len(dataset) >= 2 * rows else 0):
        numbers = list(range(start, min(start + rows, len(dataset))))
        began = time.perf_counter()
        try:
            together(read(dataset, numbers), numbers)
        except Exception:  # training will meet it, and tell of it as it does of any other
            return 0.0
        seconds = time.perf_counter() - began
    return seconds


def _is_same(one: Any, other: Any) -> bool:
    """Of random states; a generator that was imported in between has drawn nothing yet."""
    if isinstance(one, dict):
        return all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one.equal(other) if hasattr(one, "equal") else bool(one == other)
