"""Reading ahead of a GPU, its streams played by a list: order, equal numbers, no early draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small import Rows, Small, fitted, is_same
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from dpframe import DataModule, Strategy, Trainer
from dpframe.data import Loader
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer import ahead
from dpframe.trainer.ahead import Ahead


class Noted:
    """In place of ahead.Side: writes down what is asked of it."""

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


class Drawn(DataModule):
    def train_dataset(self) -> Dataset:
        return Listed()


def as_on_a_gpu(loader: Loader, strategy: Strategy) -> Any:
    return Ahead(loader, strategy, Noted()).epoch, ahead.as_it_is  # type: ignore[arg-type]


def used(loader: Loader) -> list[str]:
    side = Noted()
    for number, _ in enumerate(Ahead(loader, Strategy(), side).epoch(), 1):  # type: ignore[arg-type]
        side.seen.append(f"step {number}")
    return side.seen


def loader_of(dataset: Dataset) -> Loader:
    return Loader(dataset, batch_size=10, shares=lambda rows: [rows])


def test_a_copy_begins_before_the_batch_in_front_of_it_is_handed_over():
    data = Rows(30)
    assert used(loader_of(data.train)) == [
        *("copy 1", "copy 2", "hand over 1", "step 1", "pace"),
        *("copy 3", "hand over 2", "step 2", "pace"),
        *("hand over 3", "step 3", "pace"),
    ]


def test_rows_that_draw_here_are_not_read_before_they_are_asked_for():
    one = "copy {0}", "hand over {0}", "step {0}", "pace"
    assert used(loader_of(Listed(20))) == [line.format(n) for n in (1, 2) for line in one]


def state_of(made: Trainer) -> dict[str, Any]:
    counts = made.global_step, made.epoch, made.batches_done, made.rows_seen
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
    monkeypatch.setattr(ahead, "reader", as_on_a_gpu)
    torch.manual_seed(0)
    assert is_same(trained(), plain)


@pytest.mark.parametrize("data", [Rows, Drawn])
def test_a_run_that_reads_ahead_resumes_within_an_epoch_to_the_bit(monkeypatch, data):
    monkeypatch.setattr(ahead, "reader", as_on_a_gpu)

    def made() -> tuple[Small, DataModule]:
        torch.manual_seed(0)
        return Small(dropout=0.5), data(batch_size=3)

    whole = fitted(*made(), max_epochs=2)
    begun = fitted(*made(), max_epochs=2, max_steps=4)
    assert begun.batches_done == 4
    state = begun.state_dict()  # before `made` seeds anew
    resumed = fitted(*made(), max_epochs=2, resume=state)
    assert is_same(resumed.task.state_dict(), whole.task.state_dict())


def test_on_the_cpu_there_is_nothing_between_the_loader_and_the_step():
    loader, strategy = loader_of(Rows(30).train), Strategy()
    assert ahead.reader(loader, strategy) == (loader.epoch, strategy.to_device)


def test_what_is_not_all_tensors_in_sight_is_left_to_the_step_s_own_stream():
    plain = {"x": [torch.zeros(2)], "name": "a"}, 3
    packed = pack_sequence([torch.zeros(2)])
    assert ahead.is_plain(plain)
    assert ahead.is_plain(packed)
    assert not ahead.is_plain([plain, nn.Linear(1, 1)])
    assert len(list(ahead.tensors_in(plain))) == 1


class Opaque:
    """Moves itself, to memory that nobody else knows of."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def to(self, device: torch.device) -> "Opaque":
        return self


def test_a_batch_that_moves_itself_is_not_copied_on_the_side():
    loader = Loader(Listed(20), batch_size=10, shares=lambda rows: [rows], collate=Opaque)
    assert used(loader) == [
        f"{what}" for n in (1, 2) for what in ("hand over None", f"step {n}", "pace")
    ]


def test_a_process_has_its_own_devices_and_no_other_s():
    several = DataParallel(2, "cpu")
    several.setup()
    rank = Strategy()
    rank.world_size = rank.replicas = 2
    assert ahead.places(several) == ahead.places(rank) == [torch.device("cpu")]


# The streams themselves, played


class Event:
    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def synchronize(self) -> None:
        self.seen.append(f"host waits for {self.name}")


class Stream:
    """Notes what is asked of it; its events are numbered."""

    seen: list[str] = []
    device = torch.device("cpu")

    def __init__(self, name: Any = "copies") -> None:
        self.name = name if isinstance(name, str) else "copies"
        self.events = 0

    def record_event(self) -> Event:
        self.events += 1
        return Event(f"{self.name} {self.events}", self.seen)

    def wait_event(self, event: Event) -> None:
        self.seen.append(f"{self.name} waits for {event.name}")


class OnACard(Tensor):
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        stream.seen.append(f"memory is used by {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    steps = Stream("steps")
    monkeypatch.setattr(Stream, "seen", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    return Stream.seen


def test_a_step_waits_for_its_own_copy_and_its_memory_is_kept_from_the_next(streams):
    side = ahead.Side([torch.device("cpu")])
    first = side.mark()
    side.mark()
    side.hand_over([torch.zeros(2).as_subclass(OnACard), 3], first)
    assert streams == ["steps waits for copies 1", "memory is used by steps"]
    side.hand_over([torch.zeros(2).as_subclass(OnACard)], None)  # made on the steps' own stream
    assert len(streams) == 2


def test_the_host_is_at_most_three_steps_in_front(streams):
    side = ahead.Side([torch.device("cpu")])
    for _ in range(5):
        side.pace()
    assert streams == ["host waits for steps 1", "host waits for steps 2"]
