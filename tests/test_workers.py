"""Data workers: how many are chosen, what they draw, and one line for one that dies or hangs."""

import logging
import multiprocessing.connection
import multiprocessing.synchronize
import os
import random
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import small
import torch
from conftest import descendants
from forked import fresh, stop_forks
from small import Given, Hooks, Stream, fitted, is_same, loader_of, trainer
from test_data import Bad, BadStream
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dpframe import DataModule, Strategy, UserError, seeding
from dpframe.callbacks.banner import banner
from dpframe.data import worker_watch, workers
from dpframe.data.worker_watch import WorkerWatch
from dpframe.data.workers import chosen
from dpframe.errors import Failure
from dpframe.launch import watchdog
from dpframe.strategies.collectives import Collectives
from dpframe.trainer import feed


class Clock:
    """Stands still, but for what a row takes."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


class Rows(Dataset):
    """`slow` seconds a row; `noise` from this generator."""

    def __init__(self, slow: float = 0.0, noise: str = "") -> None:
        self.slow = slow
        self.noise = noise

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        Clock.now += self.slow
        draws = {"torch": lambda: torch.rand(()).item(), "python": random.random, "": lambda: 0.0}
        x = torch.tensor([row / 40, 1.0, draws[self.noise]()])
        return x, x.sum().reshape(1)


def given(dataset: Dataset, workers: int | str = "auto") -> DataModule:
    return Given(dataset, None, 8, workers)


def told(dataset: Dataset, workers: int | str = "auto") -> str:
    made = trainer(data=given(dataset, workers))
    made.prepare()
    found = re.search(r"^data +(.+)$", banner(made), re.MULTILINE)
    assert found
    return found[1]


class Whole(Rows):
    def __getitems__(self, rows: list[int]) -> list:
        return [self[row] for row in rows]


def test_the_banner_says_how_rows_are_read():
    tensors = TensorDataset(torch.rand(1200, 3), torch.rand(1200, 1))
    assert told(tensors) == told(tensors, 0) == "1,200 rows as tensors, index_select"
    assert told(Subset(tensors, range(40)), 2) == "40 rows as tensors, index_select"
    assert told(Rows(), 0) == "40 rows by __getitem__, in this process"
    assert told(Whole(), 2) == "40 rows by __getitems__, 2 workers"
    assert told(Stream([])) == "a stream, in this process"
    assert told(Stream([]), 2) == "a stream, 1 worker: each would read the whole stream"


@pytest.mark.parametrize(
    "rows, said",
    [
        ({"slow": 0.0005}, "in this process: a batch takes 4 ms to read"),
        ({"slow": 0.002}, "2 workers: a batch takes 16 ms to read"),
        ({"noise": "torch"}, "in this process: a batch takes 0 ms to read"),
    ],
)
def test_auto_reads_slow_rows_by_workers(monkeypatch, rows, said):
    monkeypatch.setattr(feed, "cores_per_rank", lambda world_size: 2)
    monkeypatch.setattr(workers, "time", Clock)
    assert told(Rows(**rows)) == f"40 rows by __getitem__, {said}"


@pytest.mark.parametrize(
    "seconds, cores, count",
    [
        (0.001, 16, 0),
        (0.02, 16, 8),
        (0.02, 4, 4),
        (0.02, 1, 0),  # nobody is free to read
    ],
)
def test_the_choice_is_a_fact_of_time_and_cores(seconds, cores, count):
    assert chosen(seconds, cores).processes == count


@pytest.mark.parametrize("noise", ["", "torch"])
def test_what_auto_has_chosen_does_not_decide_the_numbers(monkeypatch, noise):
    """Whether a batch is found to be slow is chance; rows that draw do so by their places."""
    runs = []
    for slow in (0.0, 1e9):
        monkeypatch.setattr(workers, "SLOW_SECONDS", slow)
        monkeypatch.setattr(feed, "cores_per_rank", lambda world_size: 2)
        runs.append(fitted(data=given(Rows(noise=noise))))
    processes = [run.feed.train.workers.processes for run in runs]
    assert processes == [2, 0]
    assert is_same(runs[0].task.state_dict(), runs[1].task.state_dict())
    assert runs[0].training.state.fingerprint == runs[1].training.state.fingerprint


def test_another_rank_takes_the_first_ones_choice_and_reads_nothing_for_it():
    class Second(Collectives):
        def broadcast(self, value: Any) -> Any:
            return 2, "the first one says so"

    class Unread(Rows):
        def __getitem__(self, row: int) -> Any:
            raise AssertionError("it was read")

    strategy = Strategy()
    strategy.rank, strategy.collectives = 1, Second()
    made = trainer(data=given(Unread()), strategy=strategy)
    made.prepare()
    assert made.feed.train.how == "40 rows by __getitem__, 2 workers: the first one says so"


def test_the_look_at_a_batch_draws_nothing_of_the_runs():
    def after(workers: int | str) -> dict:
        made = trainer(data=given(Rows(noise="torch"), workers))
        made.prepare()
        return seeding.random_state()

    assert is_same(after("auto"), after(0))


def test_a_row_that_is_bad_is_left_to_training():
    class Bad(Rows):
        def __getitem__(self, row: int) -> Any:
            raise LookupError("it is broken")

    made = trainer(data=given(Bad()))
    made.prepare()
    with pytest.raises(LookupError) as caught:
        made.fit()
    assert caught.value.__notes__[0].startswith("while reading row ")


def test_another_word_is_refused():
    with pytest.raises(UserError, match="data.workers=all is text; use a whole number or auto"):
        trainer(data=given(Rows(), "all")).prepare()


# Workers that are lost or hang

LOOK: Any = _MultiProcessingDataLoaderIter._try_get_data


@pytest.fixture(autouse=True)
def torch_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its workers live, while it waits for an answer: it does so every five seconds."""
    monkeypatch.setattr(LOOK, "__defaults__", (0.1,))


class Dies(Bad):
    """Twelve rows; the tenth has a fault."""

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def left(self) -> None:
        os._exit(3)

    def hung(self) -> None:
        time.sleep(60)

    def exits(self) -> None:
        sys.exit(0)

    def stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def spins(self) -> None:
        sum(repeat(0))  # in C, and it never gives its GIL away


def failure(dataset: Dataset, **given: Any) -> str:
    """The line that a fault of a worker ends with, after which no worker is left."""
    before, handler = set(descendants()), signal.getsignal(signal.SIGCHLD)
    loader = loader_of(dataset, batch_size=4, workers=2, **given)
    with pytest.raises(Failure) as caught:
        for _ in loader.epoch():
            assert signal.getsignal(signal.SIGCHLD) is handler, "torch's would raise within a step"
    assert not set(descendants()) - before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "dataset, line",
    [
        (Dies("killed"), "was killed by SIGKILL; perhaps for memory: try a smaller data.workers"),
        (BadStream(Dies("left")), "exited with code 3; data.workers=0 may show why"),
    ],
)
def test_a_lost_worker_is_one_line(dataset, line):
    assert re.match(rf"data worker 0 \(pid \d+\) {line}", failure(dataset))


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_while_it_looks_whether_to_end_locks_nothing(monkeypatch):
    def is_set(event: Any) -> bool:
        with event._cond:  # as Event itself
            if os.getpid() != here:
                os.kill(os.getpid(), signal.SIGKILL)
            return bool(event._flag.get_value())

    here = os.getpid()
    monkeypatch.setattr(multiprocessing.synchronize.Event, "is_set", is_set)
    assert " was killed by SIGKILL; " in failure(Dies("killed"))


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_before_all_have_begun_is_told(monkeypatch):
    def killed() -> None:
        info = get_worker_info()
        if info is not None and info.id == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        leave()

    def wait(sentinels: Any, seconds: float) -> Any:
        dead = real(sentinels, seconds)
        while {child.sentinel for child in multiprocessing.active_children()} & {*dead}:
            pass  # it is a child until it is looked for
        return dead

    leave, real = workers.signals.leave_to_parent, multiprocessing.connection.wait
    monkeypatch.setattr(workers.signals, "leave_to_parent", killed)
    monkeypatch.setattr(worker_watch, "connection", SimpleNamespace(wait=wait))
    assert re.match(r"data worker 0 \(pid \d+\) was killed by SIGKILL; ", failure(Rows()))


class Long(Dies):
    """What a row holds does not fit into a pipe at once."""

    def __getitem__(self, row: int) -> Any:
        return super().__getitem__(row), "x" * 100_000


@pytest.mark.timeout(60)
def test_nobody_waits_for_the_rest_of_what_a_killed_worker_sends(monkeypatch):
    def send(pipe: Any, data: Any, write: Any = os.write) -> None:
        if len(data) > select.PIPE_BUF and os.getpid() != here:
            write(pipe.fileno(), data[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        real(pipe, data)

    here, real = os.getpid(), multiprocessing.connection.Connection._send
    monkeypatch.setattr(multiprocessing.connection.Connection, "_send", send)
    assert " was killed by SIGKILL; " in failure(Long("killed"))


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_worker_can_not_send_is_one_line(stream):
    class Unsent(Bad):
        def unsent(self) -> Any:
            return lambda: None

    rows = BadStream(Unsent("unsent")) if stream else Unsent("unsent")
    with pytest.raises(UserError) as caught:
        list(loader_of(rows, 4, workers=1, collate=list).epoch())
    assert re.fullmatch(
        r"a data worker can't send what it read: \w+: Can't .* local object .*<lambda>.*; "
        r"return rows that can be pickled, or set data\.workers=0",
        str(caught.value),
    )


class Refused(UserError):
    """It can't be unpickled: it takes more than its text."""

    exit_code = 3

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"row {row} has {what}")


class Raises(Bad):
    def local(self) -> None:
        class Local(Exception):
            """No pickle can name it."""

        raise Local("a fault of its own")

    def refuses(self) -> None:
        raise Refused(9, "no label")

    def stops(self) -> None:
        next(iter(()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault, said", [("local", "a fault of its own"), ("stops", "in stops")])
def test_an_error_that_can_not_be_sent_as_it_is_ends_the_run_with_its_traceback(fault, said):
    before = set(descendants())
    with pytest.raises(RuntimeError) as caught:
        list(loader_of(Raises(fault), 4, workers=2).epoch())
    assert said in str(caught.value) and "while reading row 9 of Raises" in str(caught.value)
    assert not set(descendants()) - before


def test_a_line_of_the_users_own_class_is_that_line():
    with pytest.raises(UserError, match="^row 9 has no label$") as caught:
        list(loader_of(Raises("refuses"), 4, workers=2).epoch())
    assert caught.value.exit_code == 3


def refuses(number: int) -> None:
    raise UserError("labels.csv is not there")


def hangs(number: int) -> None:
    time.sleep(60)


def test_a_fault_of_worker_init_fn_is_told_as_one_of_a_row():
    def read(begin: Any, seconds: float) -> None:
        options = {"worker_init_fn": begin}
        given = {"workers": 2, "timeout_seconds": seconds, "options": options}
        list(loader_of(Rows(), 4, **given).epoch())

    with pytest.raises(UserError, match=r"^labels\.csv is not there$"):
        read(refuses, 0.0)
    with pytest.raises(Failure, match=r"nothing for 1 s, in hangs \(test_workers\.py, line "):
        read(hangs, 1.0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_worker_init_fn_gets_the_data_set_that_the_worker_reads(is_stream):
    def begin(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.scale = 10.0  # type: ignore[attr-defined]

    class Scaled(Rows):
        scale = 1.0

        def __getitem__(self, row: int) -> Any:
            return torch.tensor([row * self.scale])

    class ScaledStream(IterableDataset):
        scale = 1.0

        def __iter__(self) -> Any:
            return (torch.tensor([row * self.scale]) for row in range(40))

    dataset = ScaledStream() if is_stream else Scaled()
    loader = loader_of(dataset, 20, workers=2, options={"worker_init_fn": begin})
    read = torch.cat([batch.shares[0].batch for batch in loader.epoch()])
    assert read[:, 0].tolist() == [10.0 * row for row in range(40)]


def test_a_hung_worker_is_told_by_where_it_is():
    line = failure(Dies("hung"), timeout_seconds=3.0)  # in which a busy machine starts a worker
    assert re.fullmatch(
        r"data worker 0 \(pid \d+\) has returned nothing for 3 s, in hung \(test_workers\.py, line "
        r"\d+\) in __getitem__ \(test_data\.py, line \d+\); fix that, or raise "
        r"trainer\.data_timeout_seconds",
        line,
    )


def test_a_worker_that_is_stopped_or_keeps_its_gil_is_told_and_ended():
    line = failure(Dies("stopped"), timeout_seconds=1.0)
    assert line.startswith("data worker 0 (pid ")
    assert ") has returned nothing for 1 s: it is stopped, by SIGSTOP or a debugger; " in line
    line = failure(Dies("spins"), timeout_seconds=1.0)
    assert line.startswith("data worker 0 (pid ")
    assert ") has returned nothing for 1 s, in spins (test_workers.py, line " in line


def test_a_worker_that_exits_is_told_by_where():
    assert re.fullmatch(
        r"data worker 0: sys\.exit\(0\) in exits \(test_workers\.py, line \d+\) ended it before "
        r"its work was done; raise an exception instead",
        failure(Dies("exits")),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python's default stays")
@pytest.mark.parametrize(
    "chosen, method", [(None, "fork"), ("forkserver", "fork"), ("spawn", "spawn")]
)
def test_workers_are_forks_on_python_3_14_too_unless_a_program_spawns(monkeypatch, chosen, method):
    """There a forkserver is the default."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: chosen)
    methods = ["forkserver", "fork", "spawn"]
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    assert WorkerWatch(1).context().get_start_method() == method


class Unpicklable(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.scale = lambda x: x


def spawned(make: Callable[[], Dataset], method: str) -> str | dict[str, Tensor]:
    multiprocessing.set_start_method(method, force=True)
    data = small.Rows()
    data.train, data.workers = make(), 1
    try:
        return fitted(data=data, max_epochs=1, share_check="off").task.state_dict()
    except UserError as error:
        return str(error)


def drawing() -> Dataset:
    return Rows(noise="torch")


def test_workers_of_a_forkserver_draw_the_same_rows_and_can_not_get_each_data_set():
    forks, served = (fresh(spawned, drawing, method) for method in ("fork", "forkserver"))
    assert is_same(forks, served)
    said = fresh(spawned, Unpicklable, "spawn")
    assert said.startswith("data workers can't get the data set Unpicklable: AttributeError: Can't")
    assert said.endswith("; make it one that can be pickled, or set data.workers=0")


def begun(hung: int, persistent: bool) -> tuple[list[Any], list[str], str]:
    """Two epochs of rows that draw, what was logged, and the error, if so many tries hang."""
    stop_forks(*range(1, 2 * hung, 2))  # of each try's two workers the second
    LOOK.__defaults__ = (0.1,)
    watchdog.BEGIN_SECONDS = (*(0.2,) * hung, 100.0)[:3]
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dpframe").addHandler(handler)
    loader = loader_of(
        Rows(noise="torch"),
        batch_size=4,
        shuffle=True,
        seed=3,
        workers=2,
        timeout_seconds=100.0 if hung < 4 else 0.5,
        options={"persistent_workers": persistent},
    )
    batches, said = [], ""
    try:
        for epoch in range(2):
            batches += [batch.shares[0].batch for batch in loader.epoch(epoch)]
            watchdog.BEGIN_SECONDS = (100.0,)  # none hangs any more, however busy the machine is
    except Failure as error:
        said = str(error)
    return batches, lines, said


@pytest.mark.parametrize("hung, persistent", [(1, True), (2, False)])
def test_workers_that_do_not_begin_are_started_again_and_read_the_same_rows(hung, persistent):
    whole, said, _ = fresh(begun, 0, persistent)
    assert len(whole) == 20 and not said
    again, said, _ = fresh(begun, hung, persistent)
    assert is_same(again, whole)
    line = (
        r"data worker [01] \(pid \d+\) has not begun in 0\.2 s; all data workers are started again"
    )
    assert len(said) == hung and all(re.fullmatch(line, one) for one in said)


def test_a_worker_that_never_begins_is_told_once_its_tries_are_used_up():
    _, said, error = fresh(begun, 4, True)
    assert len(said) == 3
    assert re.fullmatch(
        r"data worker [01] \(pid \d+\) has returned nothing for 0\.5 s: it has not begun; see what "
        r"mode=doctor finds, or raise trainer\.data_timeout_seconds",
        error,
    )


def test_a_loader_whose_workers_were_lost_starts_others(tmp_path):
    class Once(Dies):
        def killed(self) -> Any:
            if not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                super().killed()
            return self[0]

    loader = loader_of(Once("killed"), batch_size=4, workers=1)
    with pytest.raises(Failure):
        list(loader.epoch())
    assert len(list(loader.epoch())) == 3


# What reaches the workers of a data set


class Curriculum(Dataset):
    """Its rows are what is set on it, in several ways; `told` is the epoch that it was told."""

    told = -1

    def __init__(self) -> None:
        self.options = SimpleNamespace(level=0.0)
        self.tensor, self.array, self.list = torch.zeros(40), numpy.zeros(40), [0.0] * 40
        self.set = {0}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Tensor:
        seen = self.options.level, self.tensor[row], self.array[row], self.list[row], *self.set
        return torch.tensor([float(value) for value in [*seen, self.told]])


class Told(Curriculum):
    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


def is_set(dataset: Any, change: str, epoch: int) -> None:
    if change == "an attribute":
        dataset.options.level = epoch
    elif change == "a tensor in place":
        dataset.tensor.fill_(epoch)
    elif change == "a tensor":
        dataset.tensor = torch.full((40,), epoch)
    elif change == "an array in place":
        dataset.array[37:] = epoch
    elif change == "a list":
        dataset.list = [float(epoch)] * 40
    elif change == "a set":
        dataset.set = {epoch}


def seen(dataset: Any, change: str, workers: int, **options: Any) -> list[set[float]]:
    """What the last row of each epoch had, and the processes that read."""
    loader = loader_of(dataset, 10, workers=workers, options=options)
    column = ["an attribute", "a tensor", "an array", "a list", "a set", "the epoch"]
    place = next(n for n, name in enumerate(column) if change.startswith(name))
    values = []
    for epoch in range(3):
        is_set(dataset, change, epoch)
        *_, last = loader.epoch(epoch)
        values.append(last.shares[0].batch[-1, place].item())
    return values


CHANGES = ["an attribute", "a tensor in place", "a tensor", "an array in place", "a list", "a set"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_set_on_a_data_set_before_an_epoch_reaches_its_workers(change, caplog):
    assert seen(Curriculum(), change, 2, persistent_workers=True) == [0, 0, 0]
    assert seen(Curriculum(), change, 0) == seen(Curriculum(), change, 2) == [0, 1, 2]
    (line,) = {record.getMessage() for record in caplog.records}
    assert len(caplog.records) == 1
    name = {"an attribute": "options.level", "a list": "list[0]"}.get(change, change.split()[1])
    assert line == (
        f"data workers begin again before each epoch where the data set has changed, as "
        f"Curriculum.{name} has; data.persistent_workers=true keeps them as they are"
    )


def pids(persistent: bool | str) -> int:
    """How many processes have read in three epochs of an attribute that changes in each."""

    class Here(Curriculum):
        def __getitem__(self, row: int) -> Tensor:
            return torch.tensor(os.getpid())

    loader, dataset = None, Here()
    loader = loader_of(dataset, 10, workers=1, options={"persistent_workers": persistent})
    found = set()
    for epoch in range(3):
        dataset.options.level = epoch if persistent is True else 0
        for batch in loader.epoch(epoch):
            found |= {*batch.shares[0].batch.tolist()}
    return len(found)


def test_workers_stay_where_nothing_has_changed_or_as_it_is_said():
    assert [pids(persistent) for persistent in ("auto", True, False)] == [1, 1, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_is_told_to_a_data_set_here_and_in_workers_which_stay(workers, caplog):
    assert seen(Told(), "the epoch", workers) == [0, 1, 2]
    wrapped = Subset(ConcatDataset([Curriculum(), Told()]), range(80))
    assert seen(wrapped, "the epoch", workers) == [0, 1, 2]
    assert not caplog.records


def test_a_validation_tells_no_epoch_to_a_data_set_that_may_be_trainings_too():
    dataset = Told()
    trains, validates = (loader_of(Subset(dataset, range(20)), 10) for _ in range(2))
    batches = trains.epoch(3)
    next(batches)
    assert len(list(validates.epoch())) == 2
    assert next(batches).shares[0].batch[0, -1] == 3


def test_what_changes_within_an_epoch_is_told_as_workers_have_it_from_the_next_one_on(caplog):
    dataset = Curriculum()
    loader = loader_of(dataset, 10, workers=1)
    values = []
    for epoch in range(2):
        for number, batch in enumerate(loader.epoch(epoch)):
            values.append(batch.shares[0].batch[0, 0].item())
            if number == 1:
                dataset.options.level += 1
    assert values == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [record.getMessage() for record in caplog.records][0] == (
        "Curriculum.options.level has changed within an epoch: data workers have it from the next "
        "one on; data.workers=0 has it at once"
    )


@pytest.mark.parametrize(
    "key, known", [("persistent_workers", "true or false or auto"), ("pin_memory", "true or false")]
)
def test_a_key_of_the_data_takes_what_it_knows(key, known):
    made = trainer(data=given(Rows(), 2))
    setattr(made.data, key, "sometimes")
    with pytest.raises(UserError) as refusal:
        made.prepare()
    assert str(refusal.value) == f"data.{key}=sometimes is text; use {known}"


def test_auto_does_not_decide_whether_a_curriculum_is_seen(monkeypatch):
    """A hook sets what the rows of the next epoch have."""

    class Level(Rows):
        level = 0.0

        def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(row)
            return x, y + self.level

    def raised(made: Any) -> None:
        made.data.train.level = float(made.epoch)

    runs = []
    for slow in (0.0, 1e9):
        monkeypatch.setattr(workers, "SLOW_SECONDS", slow)
        monkeypatch.setattr(feed, "cores_per_rank", lambda world_size: 2)
        runs.append(fitted(data=given(Level()), callbacks=[Hooks(on_epoch_start=raised)]))
    assert [run.feed.train.workers.processes for run in runs] == [2, 0]
    assert is_same(runs[0].task.state_dict(), runs[1].task.state_dict())
