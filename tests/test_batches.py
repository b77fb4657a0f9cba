"""Ready batches: each rank iterates its own, every row counts once, a run goes on to the bit."""

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import in_turn, on
from recorded import once, weights, weights_apart
from small import SGD, Given, Hooks, Small, trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from dpframe import Batches, DataModule, Strategy, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU

SIZES = [5, 3, 7, 1, 4, 6, 2]  # rows of each batch
OF_RANKS = {1: [range(7)], 2: [range(4), range(4, 7)], 3: [range(4), range(0), range(4, 7)]}
EPOCHS = 2


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SIZES[number], 3, generator=torch.Generator().manual_seed(number))
    return x, x.sum(dim=1)


def order(numbers: Any, epoch: int) -> list[int]:
    """Of a rank's batches: another one in each epoch."""
    shift = epoch % max(1, len(numbers))
    return [*numbers[shift:], *numbers[:shift]]


class Loader:
    """Of the batches of a rank, with noise of this process's generator."""

    def __init__(self, numbers: Any, noise: float) -> None:
        self.numbers, self.noise, self.epoch = numbers, noise, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, order(self.numbers, self.epoch))

    def read(self, number: int) -> Any:
        x, y = batch_of(number)
        return x + self.noise * torch.rand(len(x), 1), y


class Keeps:
    """Has a state, as torchdata's loaders have: it counts the epochs, and one that is loaded at the
    end of an epoch begins another one."""

    def __init__(self, numbers: Any, noise: float) -> None:
        self.loader = Loader(numbers, noise)
        self.epoch, self.at = -1, 0
        self.loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        loaded, self.loaded = self.loaded, None
        if loaded is not None and loaded["at"] < len(self.loader.numbers):
            self.epoch, self.at = loaded["epoch"], loaded["at"]
        else:
            self.epoch = (self.epoch if loaded is None else loaded["epoch"]) + 1
            self.at = 0
        return self._rest(order(self.loader.numbers, self.epoch))

    def _rest(self, numbers: list[int]) -> Iterator[Any]:
        while self.at < len(numbers):
            self.at += 1
            yield self.loader.read(numbers[self.at - 1])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


class Data(DataModule):
    """Batches to train on, and those in the first order to validate, test and predict on."""

    def __init__(self, strategy: Strategy, make: Any = Loader, noise: float = 0.0) -> None:
        super().__init__()
        self.make = partial(make, OF_RANKS[strategy.world_size][strategy.rank], noise)

    def train_dataset(self) -> Any:
        return Batches(self.make())

    def val_dataset(self) -> Any:
        return Batches(Loader(*self.make.args[-2:]))

    test_dataset = val_dataset


class Shown(Small):
    """Predicts the first number of each row."""

    def predict_step(self, batch: Any) -> Tensor:
        return batch[0][:, 0]


def made(strategy: Strategy, data: Any, callbacks: Any = (), **settings: Any) -> Any:
    settings = {"max_epochs": EPOCHS, "precision": "64", "log_every": 1, **settings}
    return trainer(make=Shown, data=data, strategy=strategy, callbacks=callbacks, **settings)


# ---- every row once


def trained(strategy: Strategy, accumulate: int) -> dict[str, Any]:
    run = made(strategy, Data(strategy), accumulate=accumulate)
    run.fit()
    found = {"weights": weights(run.task), "metrics": dict(run.metrics), "how": run.feed.train.how}
    found |= {"rows": run.progress.rows_seen, "test": run.test()["test/loss"]}
    predictions = made(strategy, Given(None, run.data.val_dataset())).predict()
    return found | {"predicted": predictions and predictions.joined()}


@once
def results(where: str, accumulate: int) -> dict[str, Any]:
    return on(WHERE[where][0], trained, accumulate)


def by_hand(ranks: int, accumulate: int) -> dict[str, Any]:
    """A step has the rows of all ranks' next batches."""
    torch.manual_seed(0)
    task = Shown().double()
    optimizer = SGD(task.parameters())
    for epoch in range(EPOCHS):
        orders = [order(numbers, epoch) for numbers in OF_RANKS[ranks]]
        steps = [
            [own[at] for own in orders if at < len(own)] for at in range(max(map(len, orders)))
        ]
        total = rows = 0.0
        for first in range(0, len(steps), accumulate):
            numbers = sum(steps[first : first + accumulate], [])
            x, y = (torch.cat(c).double() for c in zip(*map(batch_of, numbers), strict=True))
            loss = task.training_step([x, y])["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, rows = total + loss.item() * len(x), rows + len(x)
    whole = [torch.cat(c).double() for c in zip(*map(batch_of, range(7)), strict=True)]
    task.eval()
    val = task.training_step(whole)["loss"].item()
    return {"weights": weights(task), "train": total / rows, "val": val}


WHERE = {
    "cpu": (CPU(), 1),
    "data_parallel-3": (DataParallel(3, "cpu"), 1),
    "ddp-2": (DDP(2, "cpu"), 2),
    "ddp-3": (DDP(3, "cpu"), 3),
    "fsdp-3": (FSDP(3, "cpu"), 3),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("where", WHERE)
def test_ready_batches_train_as_a_loop_by_hand_over_the_rows_of_all_ranks(where, accumulate):
    """The ranks end after 4, 3 and no batches."""
    ranks = WHERE[where][1]
    mine, wanted = results(where, accumulate), by_hand(ranks, accumulate)
    assert weights_apart(mine["weights"], wanted["weights"]) <= 1e-12
    assert mine["rows"] == EPOCHS * sum(SIZES)
    assert mine["metrics"]["train/loss"] == pytest.approx(wanted["train"], abs=1e-12)
    assert mine["metrics"]["val/loss"] == pytest.approx(wanted["val"], abs=1e-12)
    assert mine["test"] == pytest.approx(wanted["val"], abs=1e-12)
    of = f", by each of {ranks} ranks its own" if ranks > 1 else ""
    assert mine["how"] == f"ready batches of a Loader{of}"


@pytest.mark.parametrize("where", WHERE)
def test_predictions_come_batch_by_batch_and_of_each_rank_in_turn(where):
    columns = OF_RANKS[WHERE[where][1]]
    numbers = [own[at] for at in range(7) for own in columns if at < len(own)]
    wanted = torch.cat([batch_of(number)[0][:, 0] for number in numbers])
    assert torch.equal(results(where, 1)["predicted"], wanted.double())


# ---- resumed


def all_resumed(strategy: Strategy, make: Any, limit: int | None) -> list[str]:
    """The steps after which a resumed run was another one, in its weights or its numbers."""
    apart: list[str] = []
    states: dict[str, Any] = {}
    keep = Hooks(
        on_step_end=lambda t: states.update({f"step {t.global_step}": deepcopy(t.state_dict())}),
        on_epoch_end=lambda t: states.update({f"epoch {t.epoch}": deepcopy(t.state_dict())}),
    )
    run = partial(made, strategy, limit_train_batches=limit)
    plain = run(Data(strategy, make, 0.1))
    plain.fit()
    whole = run(Data(strategy, make, 0.1), [keep])
    whole.fit()
    assert weights_apart(weights(whole.task), weights(plain.task)) == 0  # a look changes nothing
    assert len(states) > EPOCHS
    names = [name for name in states if name != f"epoch {EPOCHS}"]
    last = max(index for index, name in enumerate(names) if name.startswith("epoch"))
    for name in names if strategy.world_size == 1 else names[last - 2 : last + 2]:
        kept = states[name]
        again = run(Data(strategy, make, 0.1))
        again.fit(deepcopy(strategy.collectives.broadcast(kept)))
        if (
            weights_apart(weights(again.task), weights(whole.task))
            or again.metrics != whole.metrics
        ):
            apart.append(name)
    return apart


@pytest.mark.parametrize("where", ["cpu", "ddp-3"])
def test_a_run_on_ready_batches_goes_on_to_the_bit(where):
    """After each step, the last ones of an epoch as well, and after each epoch, one that a limit
    has ended as well; by the state of the loader or by reading again."""
    strategy = WHERE[where][0]
    cases = [(kind, limit) for kind in (Keeps, Loader) for limit in (None, 2)]
    found = (
        in_turn([(strategy, all_resumed, *case) for case in cases])
        if "ddp" in where
        else [on(strategy, all_resumed, *case) for case in cases]
    )
    assert found == [[]] * len(cases)


def test_a_loader_without_a_state_says_how_many_batches_are_skipped(caplog):
    caplog.set_level(logging.INFO, logger="dpframe")
    for make, said in ((Loader, 1), (Keeps, 0)):
        states: list[Any] = []
        keep = Hooks(on_step_end=lambda t, states=states: states.append(deepcopy(t.state_dict())))
        made(CPU(), Data(CPU(), make), [keep], max_steps=3).fit()
        caplog.clear()
        made(CPU(), Data(CPU(), make), max_steps=5).fit(states[2])
        line = f"{make.__name__} reads 3 batches of this epoch again, which are skipped"
        assert [record.getMessage() for record in caplog.records].count(line) == said


def on_other_ranks(strategy: Strategy, file: str) -> str:
    with pytest.raises(UserError) as caught:
        made(strategy, Data(strategy)).fit(torch.load(file))
    return str(caught.value)


def test_ready_batches_are_not_resumed_on_another_number_of_ranks(tmp_path):
    states: list[Any] = []
    keep = Hooks(on_step_end=lambda t: states.append(deepcopy(t.state_dict())))
    made(CPU(), Data(CPU()), [keep], max_steps=3).fit()
    torch.save(states[1], tmp_path / "state")
    said = on(DDP(2, "cpu"), on_other_ranks, str(tmp_path / "state"))
    assert "the stream=nothing there, what each of 2 ranks has" in said


# ---- what the loader is told


class Sampler:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Own(DataLoader):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_samplers_and_data_sets_of_a_loader_are_told_the_epoch():
    sampler = Sampler()
    rows = TensorDataset(torch.ones(8, 3), torch.ones(8))
    made(CPU(), Given(Batches(Own(rows, 4, sampler=sampler)))).fit()
    assert sampler.epochs == [*range(EPOCHS)]


# ---- refused in a line


@pytest.mark.parametrize(
    "batch, why",
    [
        (["a", "b"], "can't tell how many rows a list has; pass rows=, e.g. rows=lambda batch: "),
        ((torch.ones(2, 3), torch.ones(3)), "has, in which tensors have 2 and 3; pass rows="),
        (torch.ones(()), "can't tell how many rows a Tensor has; pass rows="),
    ],
)
def test_rows_that_can_not_be_told_are_asked_for(batch, why):
    with pytest.raises(UserError, match="^dpframe.Batches can't tell how many") as caught:
        made(CPU(), Given(Batches([batch]))).fit()
    assert why in str(caught.value)


def test_rows_are_counted_as_the_user_says():
    assert Batches([], rows=lambda batch: torch.tensor(batch)).rows(3) == 3
    for wrong in (1.5, None, -1):
        with pytest.raises(UserError, match=f"returned {wrong} for a list; return how many rows"):
            Batches([], rows=lambda batch, wrong=wrong: wrong).rows([])


def test_batches_without_rows_are_left_out():
    x = torch.ones(4, 3), torch.ones(4)
    nothing = torch.ones(0, 3), torch.ones(0)
    run = made(CPU(), Given(Batches([nothing, x, nothing, x])))
    run.fit()
    assert run.global_step == 2 * EPOCHS and run.progress.rows_seen == 8 * EPOCHS


def test_what_ends_with_the_first_epoch_is_refused():
    with pytest.raises(UserError, match="^dpframe.Batches got a generator, which ends with the fi"):
        Batches(x for x in [])
    with pytest.raises(UserError, match="^dpframe.Batches got a int; pass an iterable of batches$"):
        Batches(3)  # type: ignore[arg-type]


def test_a_batch_that_can_not_be_cut_for_replicas_of_one_process_is_refused():
    for more, what in ((torch.ones(2, 5), "a tensor of shape (2, 5)"), ("name", "a str")):
        batches = Batches([[*batch_of(0), more]], rows=lambda batch: len(batch[0]))
        with pytest.raises(UserError) as caught:
            made(DataParallel(2, "cpu"), Given(batches)).fit()
        assert str(caught.value) == (
            f"a ready batch of 5 rows has {what} in it, which can't be cut for several replicas in "
            "one process: leave it out, or use strategy=ddp"
        )


def refused(strategy: Strategy, settings: dict[str, Any]) -> str:
    data = Data(strategy)
    with pytest.raises(UserError) as caught:
        trainer(Small(dropout=0.5), data, strategy=strategy, **settings).fit()
    return str(caught.value)


def test_what_needs_the_rows_of_other_ranks_is_refused():
    said = on(DDP(2, "cpu"), refused, {"dropout": "row"})
    assert said.startswith("trainer.dropout=row with dpframe.Batches: which rows make a")


# ---- all ranks with the same batches


def copies(strategy: Strategy, predicts: bool) -> Any:
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dpframe").addHandler(handler)
    same = Batches([batch_of(0), batch_of(1)])
    if predicts:
        with pytest.raises(UserError) as caught:
            made(strategy, Given(None, same)).predict()
        return str(caught.value)
    made(strategy, Given(same)).fit()
    return [line for line in lines if "first batch" in line]


def test_ranks_that_all_read_the_same_batches_are_told_so():
    """Predictions would have each row several times."""
    warned, refusal = in_turn([(DDP(2, "cpu"), copies, each) for each in (False, True)])
    line = (
        "is the same on all 2 ranks, so that each row is probably read once for each of them: "
        "divide the data where the loader is made, e.g. by nodesplitter=webdataset.split_by_node"
    )
    assert warned == [f"the first batch of Given.train_dataset() {line}"]
    assert refusal == f"the first batch of Given.predict_dataset() {line}"


# ---- of other packages


class Numbered(Dataset):
    """Rows of one batch after another, with noise of this process's generator."""

    def __init__(self, numbers: Any, noise: float) -> None:
        x = [batch_of(number)[0] for number in numbers] or [torch.ones(0, 3)]
        self.x, self.noise = torch.cat(x), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row] + self.noise * torch.rand(1), self.x[row].sum()


def stateful(workers: int, numbers: Any, noise: float) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = Numbered(numbers, 0.0 if workers else noise)
    return StatefulDataLoader(rows, 9, sampler=RandomSampler(rows), num_workers=workers)


class Shifted:
    """A sampler of another order in each epoch."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order(range(self.rows), self.epoch))


def nodes(numbers: Any, noise: float) -> Any:
    from torchdata import nodes as tn

    rows = Numbered(numbers, 0.0)  # it reads a batch as soon as it has loaded a state
    batches = tn.Batcher(tn.SamplerWrapper(Shifted(len(rows))), 9, drop_last=False)

    def read(places: list[int]) -> list[Tensor]:
        return list(map(torch.stack, zip(*map(rows.__getitem__, places), strict=True)))

    return tn.Loader(tn.Mapper(batches, read))


@pytest.mark.parametrize("where, workers", [("cpu", (0, 2)), ("ddp-2", (0,))])
def test_loaders_of_torchdata_go_on_to_the_bit(where, workers):
    """Where workers of theirs read, there is no noise: its numbers are in no state."""
    pytest.importorskip("torchdata")
    makes = [*(partial(stateful, count) for count in workers), nodes]
    cases = [(WHERE[where][0], all_resumed, make, limit) for make in makes for limit in (None, 2)]
    run: Any = in_turn if "ddp" in where else (lambda cases: [on(*case) for case in cases])
    assert run(cases) == [[]] * len(cases)


class Shards(DataModule):
    """As docs/data.md has it."""

    def __init__(self, folder: str, workers: int) -> None:
        super().__init__()
        self.folder, self.workers = folder, workers

    def train_dataset(self) -> Any:
        import webdataset

        shuffle = webdataset.detshuffle(1000, seed=0)

        class Loader(webdataset.WebLoader):
            def set_epoch(self, epoch: int) -> None:
                shuffle.epoch = epoch - 1

        rows = webdataset.DataPipeline(
            webdataset.SimpleShardList(self.folder + "/{0..5}.tar"),
            shuffle,
            webdataset.split_by_node,
            webdataset.split_by_worker,
            webdataset.tarfile_to_samples(),
            webdataset.decode(),
            webdataset.to_tuple("x.json", "y.json"),
            webdataset.batched(4, collation_fn=tensors),
        )
        return Batches(Loader(rows, batch_size=None, num_workers=self.workers))


def tensors(rows: list[Any]) -> list[Tensor]:
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


def from_shards(strategy: Strategy, folder: str, workers: int) -> list[Any]:
    seen: list[list[float]] = []
    states: list[Any] = []
    keep = Hooks(
        on_step_end=lambda t: states.append(deepcopy(t.state_dict())),
    )
    keep.on_batch_end = lambda t, batch, outputs: seen.append(  # type: ignore[attr-defined]
        [share.batch[1].tolist() for share in batch.shares]
    )
    whole = made(strategy, Shards(folder, workers), [keep])
    whole.fit()
    again = made(strategy, Shards(folder, workers))
    again.fit(strategy.collectives.broadcast(states[-2]))
    return [whole.progress.rows_seen, seen, weights_apart(weights(whole.task), weights(again.task))]


@pytest.mark.parametrize("where, workers", [("cpu", 0), ("cpu", 2), ("ddp-3", 2)])
def test_each_row_of_shards_of_webdataset_counts_once_in_an_order_of_each_epoch(
    where, workers, tmp_path
):
    webdataset = pytest.importorskip("webdataset")
    for shard in range(6):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for row in range(5 + shard):
                number = 100.0 * shard + row
                x = json.dumps([number / 500, 1.0, 0.0]).encode()
                tar.write({"__key__": f"{row}", "x.json": x, "y.json": str(number).encode()})
    rows, seen, apart = on(WHERE[where][0], from_shards, str(tmp_path), workers)
    assert rows == EPOCHS * sum(range(5, 11)) and apart == 0
    assert seen[: len(seen) // 2] != seen[len(seen) // 2 :]


def test_graphs_of_pyg_are_counted_by_rows_and_read_through_its_own_loaders():
    data = pytest.importorskip("torch_geometric.data")
    loader = pytest.importorskip("torch_geometric.loader")
    graphs = [
        data.Data(x=torch.full((1 + n % 3, 3), n / 7), y=torch.tensor([n / 2])) for n in range(7)
    ]

    class Graphs(Small):
        def training_step(self, batch: Any) -> dict[str, Any]:
            sums = torch.zeros(batch.num_graphs, 1, dtype=batch.x.dtype)
            out = sums.index_add(0, batch.batch, self.net(batch.x))[:, 0]
            return {"loss": (out - batch.y).square().mean()}

    own = loader.PrefetchLoader(loader.DataLoader(graphs, batch_size=3), device=torch.device("cpu"))
    run = trainer(Graphs(), Given(Batches(own, rows=lambda batch: batch.num_graphs)))
    run.fit()
    assert run.progress.rows_seen == 14
    with pytest.raises(
        UserError, match="^dpframe.Batches can't tell how many rows a DataBatch has"
    ):
        trainer(Graphs(), Given(Batches(own))).fit()
