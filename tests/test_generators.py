"""Rows draw random numbers by their places: alike in any process that reads."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from forked import on
from small import Hooks, Small, is_same, loader_of, trainer
from torch import Tensor
from torch.utils.data import Dataset, Subset, get_worker_info

from dpframe import DataModule, Strategy
from dpframe.data import split
from dpframe.data.generators import Generators
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU

ROWS = 22
DRAWS = {
    "numpy": (numpy.random.default_rng, lambda draw: draw.random()),
    "numpy, as it was": (numpy.random.RandomState, lambda draw: draw.rand()),
    "python": (random.Random, lambda draw: draw.random()),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda draw: torch.rand((), generator=draw),
    ),
}
GLOBAL = {
    "numpy's global one": (int, lambda _: numpy.random.standard_normal()),
    "python's global one": (int, lambda _: random.random()),
    "torch's global one": (int, lambda _: torch.rand(())),
}
DRAWS |= GLOBAL
KINDS = ["numpy", *GLOBAL]


class Noisy(Dataset):
    """Each row with two numbers of transforms that have a generator each, some of their class."""

    def __init__(self, kind: str = "numpy", *, is_of_class: bool = False) -> None:
        make, self.draw = DRAWS[kind]

        class Transform:
            """As MONAI's."""

            R = make(1)

        first, second = Transform(), Transform()
        if not is_of_class:
            first.R, second.R = make(2), make(2)
        self.steps = [SimpleNamespace(step=first), partial(str, second)]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        first, second = self.steps[0].step, self.steps[1].args[0]
        return torch.tensor([row, self.draw(first.R), self.draw(second.R)]), torch.tensor(1.0)


def read(dataset: Dataset, workers: int, *, epoch: int = 0, skip: int = 0, **given: Any) -> Tensor:
    """An epoch's rows, in their order."""
    loader = loader_of(dataset, 8, workers=workers, seed=3, **given)
    return torch.cat([batch.shares[0].batch[0] for batch in loader.epoch(epoch, skip=skip)])


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("is_of_class", [False, True])
def test_any_number_of_workers_draws_alike_and_no_number_comes_twice(kind, is_of_class):
    whole = read(Noisy(kind, is_of_class=is_of_class), 0)
    assert torch.equal(read(Noisy(kind, is_of_class=is_of_class), 2), whole)
    assert len(whole[:, 1:].unique()) == 2 * ROWS


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_those_of_the_epoch_wherever_it_is_begun(kind):
    dataset = Noisy(kind)
    whole = read(dataset, 0, epoch=1)
    assert not torch.equal(read(dataset, 0, epoch=0), whole)
    assert torch.equal(read(dataset, 0, epoch=1), whole)
    for workers in (0, 2):
        assert torch.equal(read(Noisy(kind), workers, epoch=1, skip=1), whole[8:])


class Now(Noisy):
    """Only the last rows draw; how often they were read is counted."""

    def __init__(self) -> None:
        super().__init__("torch's global one")
        self.reads = 0

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return super().__getitem__(row) if row >= 18 else (torch.zeros(3), torch.tensor(1.0))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_notice_any_row_that_draws(workers):
    whole = torch.cat([torch.zeros(18, 3), read(Noisy("torch's global one"), 0)[18:]])
    assert torch.equal(read(Now(), workers), whole)


def test_rows_that_draw_later_are_noticed_at_the_fourth_batch_and_are_then_no_process_s():
    dataset = Now()
    loader = loader_of(dataset, 5, seed=3)
    before = torch.get_rng_state()
    batches = [batch.shares[0].batch[0] for batch in loader.epoch(0)]
    assert torch.equal(torch.get_rng_state(), before)
    by_worker = loader_of(Now(), 5, seed=3, workers=1).epoch(0)
    assert is_same(batches, [batch.shares[0].batch[0] for batch in by_worker])
    assert dataset.reads == ROWS + 5  # those of one batch twice


class Together(Noisy):
    """Draws for all rows that it is asked for."""

    def __getitems__(self, rows: list[int]) -> Any:
        draws = torch.rand(len(rows), 3)
        return [(draw, torch.tensor(1.0)) for draw in draws]


def test_rows_that_are_read_together_draw_one_by_one():
    parts = [
        read(Together(), workers, shares=lambda rows, rank=rank: [split(rows, 2)[rank]])
        for rank, workers in ((0, 0), (1, 2))
    ]
    whole = read(Together(), 0)
    assert torch.equal(torch.cat(parts).sort(dim=0).values, whole.sort(dim=0).values)


def test_rows_to_evaluate_on_draw_the_same_each_time():
    loader = loader_of(Noisy("torch's global one"), 8, seed=3)
    first, second = ([batch.shares[0].batch for batch in loader.epoch()] for _ in range(2))
    assert is_same(first, second)


def test_a_subset_of_rows_that_draw_has_them_row_by_row():
    dataset = Subset(Noisy(), range(ROWS))
    parts = [
        read(dataset, workers, shares=lambda rows, rank=rank: [split(rows, 2)[rank]])
        for rank, workers in ((0, 0), (1, 2))
    ]
    whole = read(Noisy(), 0)
    assert torch.equal(torch.cat(parts).sort(dim=0).values, whole.sort(dim=0).values)


def test_what_can_not_be_seeded_draws_as_it_does():
    draws = [random.SystemRandom(), numpy.random.RandomState(numpy.random.PCG64(1))]
    assert not Generators(SimpleNamespace(draws=draws)).are_own


def test_the_generators_of_this_process_stay_as_they_are():
    dataset = Noisy()
    first = dataset.steps[0].step.R
    before = first.bit_generator.state
    read(dataset, 0)
    assert first.bit_generator.state == before and dataset.steps[0].step.R is first


class Collated(DataModule):
    """Draws for a batch."""

    def __init__(self) -> None:
        super().__init__(8)
        self.mix = numpy.random.default_rng(5)

    def collate(self, rows: list) -> Any:
        return torch.full((len(rows),), self.mix.random()), None


def test_a_generator_of_what_collates_draws_alike_too():
    rows = list(range(ROWS))
    whole = read(rows, 0, collate=Collated().collate)
    assert torch.equal(read(rows, 2, collate=Collated().collate), whole)
    assert len(whole.unique()) == 3


class Data(DataModule):
    def __init__(self, kind: str = "numpy", **options: Any) -> None:
        super().__init__(8, **options)
        self.kind = kind

    def train_dataset(self) -> Dataset:
        return Noisy(self.kind)


class ByRank(Data):
    """Each rank has rows of its own, whose generators begin alike."""

    def __init__(self) -> None:
        super().__init__(divided="by_rank")


def trained(strategy: Strategy, make: Callable[[], DataModule] = Data) -> Any:
    torch.manual_seed(0)
    seen: list[float] = []

    class Keeps(Small):
        def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
            seen.extend(batch[0][:, 1].tolist())
            return super().training_step(batch)

    given = {"precision": "64", "max_epochs": 2, "share_check": "off"}
    made = trainer(Keeps(), make(), strategy=strategy, **given)
    made.fit()
    collectives = made.strategy.collectives
    return made.task.state_dict(), collectives.gather(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_trains_on_the_same_draws(kind):
    wanted, _ = trained(CPU(), partial(Data, kind))
    for strategy, workers in ((DataParallel(3, "cpu"), 0), (DDP(2, "cpu"), 0), (CPU(), 2)):
        state, _ = on(strategy, trained, partial(Data, kind, workers=workers))
        for name, weight in wanted.items():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-12)


def test_ranks_with_rows_of_their_own_draw_numbers_of_their_own():
    _, seen = on(DDP(2, "cpu"), trained, ByRank)
    assert len({*seen[0], *seen[1]}) == len(seen[0]) + len(seen[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_within_an_epoch_draws_as_the_run_that_was_never_stopped(kind):
    runs = {}
    for stop in (None, 4):
        states: list[Any] = []
        keep = lambda made, states=states: states.append(made.state_dict())  # noqa: E731
        hooks = Hooks(on_step_end=keep)
        made = trainer(data=Data(kind), callbacks=[hooks], max_steps=stop)
        made.fit()
        runs[stop] = made, states
    resumed = trainer(data=Data(kind))
    resumed.fit(runs[4][1][-1])
    assert is_same(resumed.task.state_dict(), runs[None][0].task.state_dict())


class Begun(Data):
    def worker_init(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.scale = 10.0 + worker  # type: ignore[attr-defined]

    def train_dataset(self) -> Dataset:
        return Scaled()


class Scaled(Dataset):
    scale = 1.0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.scale, 0.0, 0.0]), torch.tensor(0.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_module_sets_up_its_workers(workers):
    made = trainer(data=Begun(workers=workers))
    made.prepare()
    scales = torch.cat([batch.shares[0].batch[0][:, 0] for batch in made.feed.train.epoch(0)])
    assert {*scales.tolist()} == ({10.0, 11.0} if workers else {1.0})
