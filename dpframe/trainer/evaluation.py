"""Validation, test and prediction: every row once, whatever the strategy."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpframe import checkpoint, files, seeding
from dpframe.data import Batch, Loader, placed
from dpframe.data.prefetch import prefetched
from dpframe.errors import Failure, Interrupted, UserError
from dpframe.floats import making
from dpframe.launch.signals import Interruption
from dpframe.launch.watchdog import beat
from dpframe.metrics import Means, pooled
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.feed import local_devices
from dpframe.trainer.outputs import Measured
from dpframe.trainer.placement import Precision
from dpframe.trainer.progress import StopPoll
from dpframe.trainer.spool import Spool, fitting, size_of
from dpframe.trainer.step import EvalStep
from dpframe.trainer.task_metrics import TaskMetrics

CELLS = (int, float, str, bool)
WANTED = "return tensors, or lists, tuples and dicts of them"
ALIKE = "return the same parts for all"
NO_ROWS = "the data set gave no rows; check its stream"


AfterBatch = Callable[[Batch, list[Any]], None]
"""Called with each batch, placed, and what the steps returned."""
STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}


class Evaluation:
    """One of the task's steps over the `val`, `test` or `predict` data set."""

    def __init__(
        self,
        task: Task,
        kind: str,
        loader: Loader,
        strategy: Strategy,
        *,
        name: str = "",
        precision: Precision,
        limit_batches: int | None,
        task_metrics: TaskMetrics,
        interruption: Interruption | None = None,
    ) -> None:
        self.task = task
        self.kind = kind
        self.name = name
        self.prefix = f"{kind}/{name}" if name else kind
        self.loader = loader
        self.read, self.to_device = prefetched(loader, strategy.to_device, local_devices(strategy))
        self.strategy = strategy
        self.limit_batches = limit_batches
        self.task_metrics = task_metrics
        step = EvalStep(task, STEPS[kind], precision.autocast, name)
        self.step = strategy.wrap(step, training=False)
        self.forward: Callable[..., Any] = self.step
        if precision.dtype is not None:
            self.forward = making(precision.dtype, self.step)
        self.sums = means_over(strategy)
        self.stop_poll = StopPoll(strategy, interruption)

    @torch.no_grad()
    def means(
        self, *others: Means, after_batch: AfterBatch | None = None, at_most: int | None = None
    ) -> dict[str, float]:
        """The exact means over all rows, as `val/loss`, or `val/clean/loss` of the set `clean`, and
        the task's metrics; `others` share the all-reduce. With `at_most` only so many batches are
        read, for the names of what they measure."""
        with self.task_metrics.apart(is_part=self.name != ""):
            means = self._means(others, after_batch, at_most)
            return means | self.task_metrics.results(self.prefix, means)

    def _means(
        self, others: Iterable[Means], after_batch: AfterBatch | None, at_most: int | None
    ) -> dict[str, float]:
        self.sums.reset()
        seen = 0
        for rows, measured in self._batches(after_batch, at_most):
            self.sums.add(measured if at_most is None else map(unweighted, measured))
            seen += rows
        total = self.sums.total(*others)
        if not total:
            why = f"the weights of all {seen} rows add up to 0: there is no mean over them"
            raise UserError(f"{self.prefix}: {why if seen else NO_ROWS}")
        means = self.task.summarize(total)
        return {f"{self.prefix}/{name}": value for name, value in means.items()}

    @torch.no_grad()
    def predictions(
        self, spool: str | Path | None = None, *, after_batch: AfterBatch | None = None
    ) -> "Predictions | None":
        """Every row's output in the order of the data set, on the main process; None elsewhere.
        Large outputs are kept on disk, in the directory `spool`, if it is set."""
        name = f"{type(self.task).__name__}.{STEPS[self.kind]}"
        here = (
            [by_rows(output, rows, f"{name} returned") for rows, output in part]
            for _, part in self._counted(after_batch)
        )
        batches: Any = [] if spool is None else Spool(spool)
        count = 1
        self.rows = 0
        while some := list(islice(here, count)):
            batches.extend(collected(self.strategy.collectives.gather(some)))
            [held] = self.strategy.collectives.sum_numbers([float(size_of(some))])
            count = fitting(count, held)
        if not self.strategy.is_main:
            return None
        if not batches:
            raise UserError(f"predict: {NO_ROWS}")
        return Predictions(batches, self.name, rows=self.rows)

    def _counted(
        self, after_batch: AfterBatch | None
    ) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        for rows, part in self._batches(after_batch):
            self.rows += rows
            yield rows, part

    def _batches(
        self, after_batch: AfterBatch | None = None, at_most: int | None = None
    ) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        to_device = self.to_device
        self.step.eval()
        self.strategy.begin_pass(self.step)
        look_at = 0 if at_most else self.stop_poll.begin(0)
        batches = self.loader.batches
        may_look = batches is None or batches >= look_at
        random_state = seeding.random_state() if may_look else {}
        limits = [limit for limit in (self.limit_batches, at_most) if limit is not None]
        limit = min(limits, default=None)
        self.task.run_context.batches = min(filter(None, (batches, limit)), default=None)
        for done, batch in enumerate(self.read(limit=limit), 1):
            beat()
            self.task.run_context.batch_index = done - 1
            shares = to_device(batch.shares)
            outputs = self.forward(shares)
            yield batch.rows, outputs
            if after_batch is not None:
                seen = placed(batch, shares)._replace(name=self.name)
                after_batch(seen, [output for _, output in outputs])
            if done >= look_at and at_most is None:
                look_at = self._look(done, random_state)

    def _look(self, done: int, random_state: dict[str, Any]) -> int:
        try:
            return self.stop_poll.poll(done)[0]
        except Interrupted:  # a resumed run draws all of it again
            seeding.restore_random_state(random_state)
            raise


def means_of(
    evaluations: dict[str, Evaluation],
    *others: Means,
    after_batch: AfterBatch | None = None,
    at_most: int | None = None,
) -> dict[str, float]:
    """The means of each data set, and if there are several, also over the rows of all."""
    first = next(iter(evaluations.values()))
    first.task.begin_pass(first.kind)
    if set(evaluations) == {""}:
        return first.means(*others, after_batch=after_batch, at_most=at_most)
    random_state = seeding.random_state()
    means: dict[str, float] = {}
    with first.task_metrics.apart():
        try:
            for evaluation in evaluations.values():
                means |= evaluation.means(*others, after_batch=after_batch, at_most=at_most)
        except Interrupted:  # a resumed run draws all of it again
            seeding.restore_random_state(random_state)
            raise
        total = pooled([evaluation.sums for evaluation in evaluations.values()])
        over_all = first.task.summarize(total)
        means |= {f"{first.kind}/{name}": value for name, value in over_all.items()}
        return means | first.task_metrics.results(first.kind, means)


@contextmanager
def restore_modes(task: Task) -> Iterator[None]:
    """A module that was in evaluation mode before, e.g. a frozen backbone, is so afterwards."""
    modes = [(module, module.training) for module in task.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def unweighted(measured: Measured) -> Measured:
    """Without the weight: in the few batches of a sanity check all weights may be 0."""
    rows, output = measured
    return rows, {name: value for name, value in output.items() if name != "weight"}


def means_over(strategy: Strategy) -> Means:
    def agree(names: list[str]) -> list[str]:
        return strategy.collectives.broadcast(
            sorted(set().union(*strategy.collectives.gather(names)))
        )

    reduce = strategy.collectives.sum if strategy.world_size > 1 else None
    return Means(reduce, agree, is_exact=strategy.logical_shares > 0)


class Predictions:
    """`batches` holds, for each global batch, what each replica returned, in replica order: every
    tensor has a first dimension of rows, every list an entry a row."""

    def __init__(self, batches: Sequence[list[Any]], name: str = "", *, rows: int = 0) -> None:
        self.batches = batches
        self.name = name  # of the data set, where there are several
        self.rows = rows

    def joined(self) -> Any:
        """One value over all rows: a tensor, or a tuple or dict of them; a list with an entry a
        row where the rows' tensors have several shapes."""
        return join(list(chain.from_iterable(self.batches)))

    def save(self, directory: Path) -> Path:
        """`predictions.csv` for numbers in rows and columns, else `predictions.pt`, or the folder
        `predictions` with one such file for each piece of those that memory might not hold; the
        data set's name follows, where there are several."""
        stem = f"predictions-{self.name}" if self.name else "predictions"
        try:
            directory.mkdir(parents=True, exist_ok=True)  # it may have been deleted meanwhile
            try:
                path = directory / f"{stem}.csv"
                with files.atomic_write(path) as part:
                    _write_table(self._pieces(), part)
            except NoTable:
                is_folder = isinstance(self.batches, Spool) and self.batches.is_on_disk
                path = directory / (stem if is_folder else f"{stem}.pt")
                with files.atomic_write(path) as part:
                    _write_objects(self._pieces(), part, is_folder=is_folder)
        except OSError as error:
            raise Failure(f"{path} can't be written: {error.strerror}") from error
        return path

    def _pieces(self) -> Iterator[Any]:
        """Joined: all at once, or of those that are on disk some at a time."""
        pieces = self.batches.pieces() if isinstance(self.batches, Spool) else [self.batches]
        first = None
        for batches in pieces:
            piece = join(list(chain.from_iterable(batches)))
            first = head(piece) if first is None else first
            join([first, head(piece)])  # refuses other parts than before
            yield piece


class NoTable(Exception):
    """The predictions, or a piece of them, have no columns of numbers or texts."""


def _write_table(pieces: Iterable[Any], part: Path) -> None:
    columns = None
    with part.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text)
        for piece in pieces:
            table = as_table(piece)
            if table is None or columns not in (None, [*table]):
                raise NoTable
            if columns is None:
                columns = [*table]
                writer.writerow(columns)
            writer.writerows(zip(*table.values(), strict=True))


def _write_objects(pieces: Iterable[Any], part: Path, *, is_folder: bool) -> None:
    if is_folder:
        part.mkdir()
    for number, piece in enumerate(pieces):
        _refuse_objects(piece)
        with (part / f"{number:05}.pt" if is_folder else part).open("wb") as file:
            checkpoint.dump(piece, file)


def head(value: Any) -> Any:
    """The first row, in the same structure."""
    if isinstance(value, dict):
        return {name: head(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(head, value))
    is_uneven = isinstance(value, list) and isinstance(value[0], Tensor)  # as `join` left them
    return value[0][None] if is_uneven else value[:1]


def by_rows(value: Any, rows: int, told: str) -> Any:
    """A share's output on the CPU. A part without an entry a row is refused: what is joined would
    depend on the number of replicas."""
    if isinstance(value, dict) and value:
        return {name: by_rows(part, rows, _at(told, name)) for name, part in value.items()}
    if isinstance(value, tuple) and value:
        return tuple(by_rows(part, rows, _at(told, at)) for at, part in enumerate(value))
    if isinstance(value, dict | tuple) or value is None:
        what = "None" if value is None else f"an empty {type(value).__name__}"
        raise UserError(f"{told} {what}; {WANTED}")
    value = on_cpu(value)
    of = f"for a batch of {rows} rows"
    if isinstance(value, Tensor):
        if not value.ndim or len(value) != rows:
            shape = tuple(value.shape)
            raise UserError(
                f"{told} a tensor of shape {shape} {of}; make the rows its first dimension"
            )
    elif not isinstance(value, list):
        raise UserError(f"{told} a {type(value).__name__} {of}; return an entry a row")
    elif len(value) != rows:
        raise UserError(
            f"{told} a list of {len(value)} {of}; a list is an entry a row, a tuple several parts"
        )
    return value


def _at(told: str, name: Any) -> str:
    return f"{told.removesuffix(' as')}[{name!r}] as"


def on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: on_cpu(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_cpu(part) for part in value]
    if hasattr(value, "__array__"):  # NumPy's: a file of tensors loads without running code
        return torch.as_tensor(value)
    return value


def collected(processes: list[list[list[Any]]]) -> list[list[Any]]:
    """Joins the processes' batches: each batch gets the outputs of all replicas, in their order."""
    return [list(chain.from_iterable(parts)) for parts in zip(*processes, strict=True)]


def join(parts: list[Any]) -> Any:
    """One value over all rows, of what `by_rows` returned for the shares."""
    first = parts[0]
    names = {type(part).__name__ for part in parts}
    if len(names) > 1:
        some, others = sorted(names, key=str.lower)[:2]
        raise UserError(
            f"predict_step returned a {some} for some batches and a {others} for others; {ALIKE}"
        )
    if isinstance(first, Tensor):
        is_even = len({part.shape[1:] for part in parts}) == 1
        return torch.cat(parts) if is_even else [row for part in parts for row in part]
    if isinstance(first, list):
        return list(chain.from_iterable(parts))
    if isinstance(first, dict):
        if odd := set().union(*parts) - set.intersection(*map(set, parts)):
            raise UserError(
                f"predict_step returned other parts for some batches ({_listed(odd)}); {ALIKE}"
            )
        return {name: join([part[name] for part in parts]) for name in first}
    if len({len(part) for part in parts}) > 1:
        raise UserError(f"predict_step returned tuples of several lengths; {ALIKE}")
    return tuple(join(list(column)) for column in zip(*parts, strict=True))


def _listed(names: set[Any]) -> str:
    return ", ".join(sorted(map(str, names)))


def as_table(joined: Any) -> dict[str, list] | None:
    """Columns by name, with an entry a row; None if the outputs are not a table."""
    if isinstance(joined, tuple):
        joined = {f"output_{index}": part for index, part in enumerate(joined)}
    elif not isinstance(joined, dict):
        joined = {"output": joined}
    table: dict[str, list] = {}
    for name, value in joined.items():
        if isinstance(value, Tensor) and value.ndim in (1, 2):
            columns = value.T.tolist() if value.ndim == 2 else [value.tolist()]
        elif isinstance(value, list) and all(isinstance(cell, CELLS) for cell in value):
            columns = [value]
        else:
            return None
        names = [name] if len(columns) == 1 else [f"{name}_{i}" for i in range(len(columns))]
        table |= dict(zip(names, columns, strict=True))
    return table if len({len(column) for column in table.values()}) == 1 else None


def _refuse_objects(joined: Any) -> None:
    """Refuses to write what torch.load(weights_only=True) can't load."""
    parts = joined.values() if isinstance(joined, dict) else joined
    if isinstance(joined, (dict, list, tuple)):
        for part in parts:
            _refuse_objects(part)
    elif joined is not None and not isinstance(joined, (Tensor, *CELLS)):
        raise UserError(
            f"predict_step returned a {type(joined).__name__}; return tensors, numbers, text, "
            "or lists and dicts of them"
        )
