"""A ready DataLoader, and the data sets of other libraries, are read as a DataModule's own are."""

from typing import Any

import pytest
import torch
from small import Rows, Small, Stream, fitted, is_same, trainer
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from dpframe import DataModule, Trainer, UserError
from dpframe.data import permutation
from dpframe.data.source import Source
from dpframe.trainer.feed import evaluated

NUMBERS = TensorDataset(torch.arange(10.0))


class Ready(DataModule):
    """All its data sets are one DataLoader."""

    def __init__(self, loader: Any, sampler: Any = None) -> None:
        super().__init__(batch_size=7, workers=3)
        self.loader, self.sampler = loader, sampler

    def train_dataset(self) -> Any:
        return self.loader

    val_dataset = predict_dataset = train_dataset

    def train_sampler(self, dataset: Any) -> Any:
        return self.sampler


def source_of(loader: Any) -> Source:
    return Source.of(loader, Ready(loader), "Ready.train_dataset()", kind="train")


def batches_of(loader: DataLoader, *, trains: bool) -> list[list[float]]:
    """Of the first epoch."""
    made = trainer(data=Ready(loader))
    made.prepare()
    read = made.feed.train
    if not trains:
        read = evaluated("predict", made.data, made.strategy, made.settings, seed=0)[""]
    batches = read.epoch(0)
    return [batch.shares[0].batch[0].tolist() for batch in batches]


def test_batch_size_order_and_tail_are_those_of_the_loader():
    in_order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shuffled = permutation(10, seed=0, epoch=0).tolist()
    for options, trained, evaluated_ in [
        ({}, in_order, in_order),
        ({"drop_last": True}, in_order[:2], in_order[:2]),
        ({"shuffle": True}, [shuffled[:4], shuffled[4:8], shuffled[8:]], in_order),
    ]:
        loader = DataLoader(NUMBERS, 4, **options)
        assert batches_of(loader, trains=True) == trained
        assert batches_of(loader, trains=False) == evaluated_


def test_a_shuffle_by_a_generator_or_of_some_rows_is_the_samplers_own():
    for sampler in (
        RandomSampler(NUMBERS, generator=torch.Generator()),
        RandomSampler(NUMBERS, num_samples=3),
        RandomSampler(NUMBERS, replacement=True),
    ):
        source = source_of(DataLoader(NUMBERS, 4, sampler=sampler))
        assert not source.shuffle and source.sampler.sampler is sampler


def test_a_loader_with_a_sampler_and_drop_last_leaves_out_its_last_batch():
    loader = DataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, num_samples=6), drop_last=True)
    assert [len(rows) for rows in batches_of(loader, trains=True)] == [4]
    data = Ready(DataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, num_samples=6)))
    data.drop_last = True
    with pytest.raises(UserError, match="^data.drop_last=true, and Ready.train_dataset.. returned"):
        trainer(data=data).prepare()


def test_what_the_workers_are_told_is_kept():
    def begin(worker: int) -> None: ...

    loader = DataLoader(
        NUMBERS, 4, num_workers=2, worker_init_fn=begin, persistent_workers=True, timeout=9
    )
    source = source_of(loader)
    assert (source.workers, source.timeout_seconds) == (2, 9)
    assert source.options == {
        "worker_init_fn": begin,
        "prefetch_factor": 2,
        "persistent_workers": True,
    }


class Own(DataLoader):
    def __iter__(self) -> Any:
        return iter([])


class Named(DataLoader):
    """As libraries have them: with a collate of its own."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, collate_fn=self.combine, **options)

    def combine(self, rows: list) -> Any:
        return default_collate(rows)


def test_a_subclass_that_reads_as_a_dataloader_does_is_one():
    mine = batches_of(Named(NUMBERS, batch_size=4), trains=True)
    assert mine == batches_of(DataLoader(NUMBERS, batch_size=4), trains=True)


class Stateful(Own):
    """As torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict:
        return {}


class Filters(DataLoader):
    """As PyG's NodeLoader, where its graph is on a GPU: what it does with a batch is not kept."""

    filter_per_worker = False

    def _get_iterator(self) -> Any:
        return map(str, super()._get_iterator())


class FiltersPerWorker(Filters):
    """As a NodeLoader on the CPU: it has a collate_fn for that."""

    filter_per_worker = True


REFUSED = {
    "each row alone": (
        DataLoader(NUMBERS, None),
        "batch_size=None, so what it gives has no known number of rows; return "
        "dpframe.Batches(loader) if these are ready batches, else give it the global batch_size",
    ),
    "its own state": (
        Stateful(NUMBERS),
        "a method __iter__ of its own, Stateful's; return dpframe.Batches(loader), of which each "
        "rank iterates its own",
    ),
    "its own iterator": (
        Filters(NUMBERS),
        "a method _get_iterator of its own, Filters's; set filter_per_worker=True, which does that "
        "in its collate_fn, or return dpframe.Batches(loader), of which each rank iterates its own",
    ),
    "its own context": (
        DataLoader(NUMBERS, 2, num_workers=1, multiprocessing_context="fork"),
        "a multiprocessing_context, which dpframe chooses itself; leave it out",
    ),
    "its own way": (
        Own(NUMBERS),
        "a method __iter__ of its own, Own's; return dpframe.Batches(loader), of which each rank",
    ),
    "divided": (
        DataLoader(NUMBERS, 2, sampler=DistributedSampler(NUMBERS, 2, 0)),
        "a DistributedSampler, which pads and splits by itself; return the plain sampler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_kept_of_a_loader_is_refused_in_one_line(name):
    loader, reason = REFUSED[name]
    with pytest.raises(UserError) as caught:
        trainer(data=Ready(loader)).prepare()
    line = str(caught.value)
    assert line.startswith(f"Ready.train_dataset() returned a DataLoader with {reason}"), line


class Nodes:
    """As torchdata.nodes.Loader."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(4, 3)])


class Counted(Nodes):
    def __len__(self) -> int:
        return 1


class Bare(Dataset):
    def __getitem__(self, row: int) -> Tensor:
        return torch.zeros(3)


class WebLoader(Stream):
    __module__ = "webdataset.compat"


READY = {
    "an iterator": (
        Nodes(),
        "a Nodes, which can only be iterated over; return dpframe.Batches(loader) if it gives "
        "ready batches, else make it an IterableDataset of single rows",
    ),
    "one with a length": (Counted(), "a Counted, which can only be iterated over; return dpframe"),
    "webdataset's": (
        WebLoader([torch.zeros(4, 3)]),
        "a WebLoader, whose batches are ready; return dpframe.Batches(loader), or the WebDataset "
        "that it reads, without batched()",
    ),
    "no length": (
        Bare(),
        "a Bare without __len__; give it one, or make it an IterableDataset",
    ),
}


@pytest.mark.parametrize("name", READY)
def test_a_loader_of_ready_batches_is_refused_by_what_it_is(name):
    loader, reason = READY[name]
    with pytest.raises(UserError) as caught:
        trainer(data=Ready(loader)).prepare()
    line = str(caught.value)
    assert line.startswith(f"Ready.train_dataset() returned {reason}"), line


def test_a_loader_that_filters_in_its_collate_is_read():
    assert source_of(FiltersPerWorker(NUMBERS, 4)).batch_size == 4


def test_a_sampler_beside_a_loader_is_refused():
    with pytest.raises(UserError, match="train_sampler another; keep one of them"):
        trainer(data=Ready(DataLoader(NUMBERS, 2), sampler=[[0]])).prepare()


def test_a_loader_trains_and_resumes_as_the_same_data_set_by_itself():
    class Loaded(Rows):
        def train_dataset(self) -> Any:
            return DataLoader(self.train, batch_size=4, shuffle=True)

    mine, wanted = fitted(data=Loaded(batch_size=9)), fitted(data=Rows())
    assert is_same(mine.task.state_dict(), wanted.task.state_dict())
    assert mine.training.state.fingerprint["data.batch_size"] == 4
    assert "batches and order by its DataLoader" in mine.feed.train.how


def test_a_loader_over_a_stream_has_its_batches():
    class Numbers(Small):
        def predict_step(self, batch: Tensor) -> Tensor:
            return batch

    stream = Stream([float(n) for n in range(10)])
    for drop_last, rows in ((False, 10), (True, 8)):
        data = Ready(DataLoader(stream, 4, drop_last=drop_last, num_workers=1))
        predictions = Trainer(Numbers(), data).predict()
        assert predictions is not None
        assert predictions.joined().tolist() == list(range(rows))
