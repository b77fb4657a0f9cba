"""Data for a GPU, its streams played by a list: what is kept there, and what is copied when."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import Given, Rows, Small, fitted, is_same, loader_of, trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from dpframe import DataModule, Strategy, Trainer, TrainerSettings, UserError
from dpframe.data import Loader, move, prefetch, split
from dpframe.data.loader import copied
from dpframe.data.prefetch import Prefetch
from dpframe.data.reading import TensorTable
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer import evaluation, feed
from dpframe.trainer.feed import evaluated


class Noted:
    """In place of SideStreams: writes down what is asked of it."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.copies = 0

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.copies += 1
        self.seen.append(f"copy {self.copies}")
        yield

    def mark(self) -> int:
        return self.copies

    def hand_over(self, shares: Any, events: int | None) -> None:
        self.seen.append(f"hand over {events}")

    def pace(self) -> None:
        self.seen.append("pace")


class Listed(Dataset):
    """Rows that are read one by one, and draw from this process's generator."""

    def __init__(self, rows: int = 20) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(3) + row / self.rows
        return x, x.sum()


Drawn = partial(Given, Listed)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefetched(loader: Loader, to_device: Any, devices: Any) -> Any:
        prefetch = Prefetch(loader, to_device, Noted())  # type: ignore[arg-type]
        return prefetch.epoch, prefetch.begin

    for module in (feed, evaluation):
        monkeypatch.setattr(module, "prefetched", prefetched)


def used(dataset: Dataset, **given: Any) -> list[str]:
    loader = loader_of(dataset, batch_size=10, **given)
    side = Noted()
    prefetch = Prefetch(loader, Strategy().to_device, side)  # type: ignore[arg-type]
    for number, batch in enumerate(prefetch.epoch(), 1):
        prefetch.begin(batch.shares)
        side.seen.append(f"step {number}")
    return side.seen


def test_a_copy_begins_before_the_batch_in_front_of_it_is_handed_over():
    assert used(Rows(30).train) == [
        *("copy 1", "copy 2", "hand over 1", "pace", "step 1"),
        *("copy 3", "hand over 2", "pace", "step 2"),
        *("hand over 3", "pace", "step 3"),
    ]


def test_rows_that_draw_here_are_not_read_before_they_are_asked_for():
    one = "copy {0}", "hand over {0}", "pace", "step {0}"
    assert used(Listed(20)) == [line.format(n) for n in (1, 2) for line in one]


class Opaque:
    """Moves itself, to memory that nobody else knows of."""

    def to(self, device: torch.device) -> "Opaque":
        return self


@pytest.mark.parametrize(
    "batch", [Opaque(), pack_sequence([torch.zeros(2)]), [torch.zeros(2), {"net": nn.Linear(1, 1)}]]
)
def test_a_batch_that_moves_itself_is_not_copied_on_the_side(batch):
    one = "hand over None", "pace", "step {0}"
    seen = used(Listed(20), collate=lambda rows: batch)
    assert seen == [line.format(n) for n in (1, 2) for line in one]


def state_of(made: Trainer) -> dict[str, Any]:
    counts = made.global_step, made.epoch, made.progress.batches_done, made.progress.rows_seen
    return {"weights": made.task.state_dict(), "metrics": made.metrics, "counts": counts}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"accumulate": 2},
        {"limit_train_batches": 3, "limit_eval_batches": 2},
        {"max_steps": 7},
        {"strategy": "data_parallel"},
        {"data": Drawn},
    ],
    ids=lambda given: next(iter(given), "plain"),
)
def test_reading_ahead_changes_no_number(monkeypatch, given):
    def trained() -> dict[str, Any]:
        settings = dict(given)
        data = settings.pop("data", Rows)(batch_size=3)
        strategy = None
        if settings.pop("strategy", None):
            strategy = DataParallel(3, "cpu")
            strategy.setup()
        return state_of(fitted(Small(dropout=0.5), data, strategy=strategy, **settings))

    torch.manual_seed(0)
    plain = trained()
    as_on_a_gpu(monkeypatch)
    torch.manual_seed(0)
    assert is_same(trained(), plain)


@pytest.mark.parametrize("data", [Rows, Drawn])
def test_a_run_that_reads_ahead_resumes_within_an_epoch_to_the_bit(monkeypatch, data):
    as_on_a_gpu(monkeypatch)

    def made() -> tuple[Small, DataModule]:
        torch.manual_seed(0)
        return Small(dropout=0.5), data(batch_size=3)

    whole = fitted(*made(), max_epochs=2)
    begun = fitted(*made(), max_epochs=2, max_steps=4)
    assert begun.progress.batches_done == 4
    state = begun.state_dict()  # before `made` seeds anew
    resumed = fitted(*made(), max_epochs=2, resume=state)
    assert is_same(resumed.task.state_dict(), whole.task.state_dict())


def test_on_the_cpu_there_is_nothing_between_the_loader_and_the_step():
    made = trainer()
    made.prepare()
    loader, to_device = made.feed.train, made.strategy.to_device
    given = loader, to_device, [made.strategy.device]
    assert prefetch.prefetched(*given) == (loader.epoch, to_device)


def test_a_process_has_its_own_devices_and_no_other_s():
    several = DataParallel(2, "cpu")
    several.setup()
    rank = Strategy()
    rank.world_size = rank.replicas = 2
    assert several.local_devices == rank.local_devices == [torch.device("cpu")]


# The streams themselves, played


class Stream:
    """Notes what is asked of it; its events are numbered."""

    seen: list[str] = []
    device = torch.device("cpu")

    def __init__(self, name: Any = "copies") -> None:
        self.name = name if isinstance(name, str) else "copies"
        self.events = 0

    def record_event(self) -> Any:
        self.events += 1
        name = f"{self.name} {self.events}"
        note = lambda: self.seen.append(f"host waits for {name}")  # noqa: E731
        return SimpleNamespace(name=name, synchronize=note)

    def wait_event(self, event: Any) -> None:
        self.seen.append(f"{self.name} waits for {event.name}")


class OnAGPU(Tensor):
    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        stream.seen.append(f"memory is used by {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    steps = Stream("steps")
    monkeypatch.setattr(Stream, "seen", [])
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: steps)
    return Stream.seen


def test_a_step_waits_for_its_own_copy_and_its_memory_is_kept_from_the_next(streams):
    side = prefetch.SideStreams([torch.device("cpu")])
    first = side.mark()
    side.mark()
    side.hand_over([torch.zeros(2).as_subclass(OnAGPU), 3], first)
    assert streams == ["steps waits for copies 1", "memory is used by steps"]
    side.hand_over([torch.zeros(2).as_subclass(OnAGPU)], None)  # made on the steps' own stream
    assert len(streams) == 2


def test_a_wait_for_the_gpu_is_no_wait_for_data(monkeypatch):
    """A clock that goes on while the host waits for the GPU, and at no other time."""
    now = [0.0]
    monkeypatch.setattr(Noted, "pace", lambda self: now.append(now.pop() + 1.0))
    monkeypatch.setattr(feed.time, "perf_counter", lambda: now[0])
    as_on_a_gpu(monkeypatch)
    one = fitted(max_epochs=1)
    assert (one.progress.data_seconds, one.progress.seconds) == (0.0, 10.0)


def test_the_host_is_at_most_three_steps_in_front(streams):
    side = prefetch.SideStreams([torch.device("cpu")])
    for _ in range(5):
        side.pace()
    assert streams == ["host waits for steps 1", "host waits for steps 2"]


# Data that is kept on the GPU

MiB = 2**20
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("data_on_device", "free", "dtype", "expected"),
    [
        ("auto", 10 * MiB, None, True),
        ("auto", 10 * MiB - 10, None, False),
        ("auto", 10 * MiB, torch.float64, False),  # twice as much
        ("auto", 20 * MiB, torch.float64, True),
        (True, MiB, None, True),
        (False, 99 * MiB, None, False),
    ],
)
def test_tensors_are_kept_on_the_gpu_if_they_take_a_tenth_of_what_is_free(
    monkeypatch, data_on_device, free, dtype, expected
):
    moves = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    monkeypatch.setattr(prefetch, "move", lambda tensors, *where: moves.append(where))
    table = TensorTable((torch.zeros(2**17), torch.zeros(2**17)))  # of one MiB together
    half = TensorTable((torch.zeros(2**19),), torch.arange(2**18))
    for each in (table, half):
        kept = prefetch.keep_on(GPU, each, dtype=dtype, data_on_device=data_on_device)
        assert moves == ([(GPU, dtype)] if expected else [])
        assert expected or kept is each
        moves.clear()


def test_more_than_the_gpu_has_free_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (99, 80 * 2**30))
    line = "trainer.data_on_device=true but the data takes 1,048,576 bytes and cuda:0 has 99 free"
    with pytest.raises(UserError, match=f"^{line}; use"):
        prefetch.keep_on(GPU, TensorTable((torch.zeros(2**18),)), dtype=None, data_on_device=True)


def test_data_that_can_not_be_kept_on_the_gpu_is_refused_only_if_that_was_asked_for():
    def on_the_gpu(replicas: int) -> Strategy:
        strategy = Strategy()
        strategy.device, strategy.replicas = GPU, replicas
        return strategy

    def loaded(data: DataModule, strategy: Strategy, data_on_device: Any) -> Loader:
        settings = TrainerSettings(data_on_device=data_on_device)
        return evaluated("val", data, strategy, settings, seed=0)[""]

    for data, strategy, line in (
        (Given(None, Listed), on_the_gpu(1), "the data set is not a plain TensorDataset"),
        (Rows(10), on_the_gpu(2), "Strategy has several devices in one process"),
    ):
        loaded(data, strategy, "auto")
        loaded(data, Strategy(), True)
        with pytest.raises(UserError, match=f"^trainer.data_on_device=true but {line}"):
            loaded(data, strategy, True)


def test_a_batch_is_made_where_the_data_is():
    """The meta device is one that is not the CPU: rows and data have to meet there."""

    def place(table: TensorTable) -> TensorTable:
        return TensorTable(tuple(tensor.to("meta") for tensor in table.tensors))

    loader = loader_of(
        Rows(10).train,
        batch_size=4,
        shares=partial(split, replicas=2),
        shuffle=True,
        place=place,
    )
    assert loader.device.type == "meta"
    batches = list(loader.epoch(skip=1))
    assert [[tuple(x.shape) for (x, _), *_ in batch.shares] for batch in batches] == [
        [(2, 3), (2, 3)],
        [(1, 3), (1, 3)],
    ]
    assert {t.device.type for b in batches for share in b.shares for t in share.batch} == {"meta"}


def test_the_rows_of_an_epoch_are_the_same_after_their_one_copy():
    batches = list(torch.arange(11).flip(0).split(4))
    assert is_same(list(copied(batches, torch.device("cpu"))), batches)


def test_a_packed_sequence_moves_itself_and_leaves_its_sizes_on_the_host():
    moved = move([pack_sequence([torch.zeros(2)])], torch.device("meta"))[0]
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_a_word_that_is_not_auto_true_or_false_is_refused(given):
    with pytest.raises(
        UserError, match=f"^trainer.data_on_device={given} is not one of auto, true"
    ):
        TrainerSettings(data_on_device=given)
