"""Validation, test and prediction see every row exactly once, for every size and every strategy."""

from collections.abc import Callable
from typing import Any

import pytest
import small
import torch
from forked import on
from recorded import once
from small import Hooks, Listed, Small, Stream, fitted, is_same
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpframe import DataModule, Strategy, Task, Trainer, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.trainer.evaluation import as_table

SIZES = range(1, 12)  # up to two batches and a bit
BATCH_SIZE = 5  # on four replicas 2 2 1 0
WHERE = ["cpu-1", *(f"{name}-{n}" for name in ("data_parallel", "ddp") for n in (2, 3, 4))]


class Ids(Task):
    """Rows are their own numbers; the sum of 2**-number says which of them were seen."""

    def __init__(self, *, is_weighted: bool = False) -> None:
        super().__init__(nn.Linear(1, 1))
        self.is_weighted = is_weighted

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        ids = numbers(batch)
        weight = ids + 1.0 if self.is_weighted else torch.ones_like(ids)
        means = {"loss": ids, "code": 2.0**-ids}
        means = {k: (v * weight).sum() / weight.sum() for k, v in means.items()}
        return {**means, "weight": weight.sum()} if self.is_weighted else means

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        ids = numbers(batch)
        return {"id": ids, "pair": torch.stack([ids, -ids], dim=1)}


class Numbers(DataModule):
    def __init__(self, kind: str, size: int) -> None:
        super().__init__(BATCH_SIZE)
        self.kind, self.size = kind, size

    def val_dataset(self) -> Dataset:
        ids = torch.arange(self.size, dtype=torch.float64)
        return {"tensors": TensorDataset, "rows": Listed, "stream": Stream}[self.kind](ids)

    def test_dataset(self) -> Dataset:
        return self.val_dataset()


def numbers(batch: Any) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch[0]


def results_on(strategy: Strategy) -> dict[tuple[str, int], Any]:
    found = {}
    for kind in ("tensors", "rows", "stream"):
        for size in SIZES:
            trainer = Trainer(Ids(), Numbers(kind, size), strategy=strategy)
            predictions = trainer.predict()
            joined = {k: v.tolist() for k, v in predictions.joined().items()} if predictions else {}
            metrics = {**trainer.validate(), **trainer.test()}
            weighted = Trainer(Ids(is_weighted=True), Numbers(kind, size), strategy=strategy)
            metrics["weighted"] = weighted.validate()["val/loss"]
            found[kind, size] = strategy.gather(metrics), joined
    return found


@once
def results(where: str) -> dict[tuple[str, int], Any]:
    name, replicas = where.split("-")
    kind = {"cpu": CPU, "data_parallel": DataParallel, "ddp": DDP}[name]
    return on(kind(int(replicas), "cpu"), results_on)


@pytest.mark.parametrize("kind", ["tensors", "rows", "stream"])
@pytest.mark.parametrize("where", WHERE)
def test_validation_and_test_see_every_row_once_with_the_weight_of_the_task(where, kind):
    for size in SIZES:
        weighted = sum(row * (row + 1) for row in range(size)) / sum(range(size + 1))
        everywhere, _ = results(where)[kind, size]
        for metrics in everywhere:  # every process has the same numbers
            for prefix in ("val", "test"):
                bits = round(metrics[f"{prefix}/code"] * size * 2**10)
                assert bits == sum(2 ** (10 - row) for row in range(size)), (size, f"{bits:b}")
                assert metrics[f"{prefix}/loss"] == pytest.approx((size - 1) / 2, rel=1e-12)
            assert metrics["weighted"] == pytest.approx(weighted, rel=1e-12)
        assert len(everywhere) == (int(where[-1]) if where.startswith("ddp") else 1)


@pytest.mark.parametrize("kind", ["tensors", "rows", "stream"])
@pytest.mark.parametrize("where", WHERE)
def test_predictions_are_all_rows_in_the_order_of_the_data_set(where, kind):
    for size in SIZES:
        _, predictions = results(where)[kind, size]
        assert predictions["id"] == list(range(size))
        assert predictions["pair"] == [[row, -row] for row in range(size)]


def test_an_epoch_of_training_and_validation_is_reduced_at_once():
    class Counts(Strategy):
        world_size = 2
        reductions = 0

        def reduce(self, tensor):
            self.reductions += 1
            return tensor

    strategy = Counts()
    fitted(strategy=strategy, max_epochs=5, log_every=1000)
    assert strategy.reductions == 1 + 5  # one more, as the names are news once


class Returns(Ids):
    """Predicts what the test says."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def predict_step(self, batch: Any) -> Any:
        return self.output(numbers(batch))


def joined(output: Callable[[Tensor], Any], replicas: int) -> Any:
    strategy = DataParallel(replicas, "cpu")
    predictions = Trainer(Returns(output), Numbers("tensors", 12), strategy=strategy).predict()
    assert predictions is not None
    return predictions.joined()


OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda ids: (ids, torch.stack([ids, -ids], 1)),
    "list": lambda ids: [torch.arange(int(i)) for i in ids],
    "texts": lambda ids: {"name": [f"row {int(i)}" for i in ids], "nested": ({"id": ids}, ids + 1)},
    "numpy": lambda ids: {"id": ids.numpy()},
    "padded": lambda ids: ids[:, None].expand(-1, int(ids.max()) % 2 + 1),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_predictions_of_any_kind_have_an_entry_a_row_on_any_number_of_replicas(name):
    alone = joined(OF_ROWS[name], 1)
    for replicas in (2, 3):
        assert shape_of(joined(OF_ROWS[name], replicas)) == shape_of(alone)
    if name == "tuple":
        ids, pairs = alone
        assert is_same(pairs, torch.stack([torch.arange(12.0), -torch.arange(12.0)], 1).double())
        assert as_table(alone).keys() == {"output_0", "output_1_0", "output_1_1"}


def shape_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape_of(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(shape_of, value))
    return type(value), len(value)


@pytest.mark.parametrize(
    "output, said",
    [
        (lambda ids: ids.sum(), "of shape () for a batch of 5 rows; make the rows its first"),
        (lambda ids: ids[:3], "of shape (3,) for a batch of 5 rows; make the rows its"),
        (
            lambda ids: {"a": {"b": ids[:2]}},
            "['a']['b'] as a tensor of shape (2,) for a batch",
        ),
        (lambda ids: (ids, 1.0), "[1] as a float for a batch of 5 rows; return an entry a row"),
        (lambda ids: "low", "a str for a batch of 5 rows; return an entry a row"),
        (
            lambda ids: [ids, ids],
            "a list of 2 for a batch of 5 rows; a list is an entry a row, a tuple several parts",
        ),
        (lambda ids: {}, "an empty dict; return tensors, or lists, tuples and dicts of them"),
        (
            lambda ids: ids if 0 in ids else {"id": ids},
            "a dict for some batches and a Tensor for others; return the same parts for all",
        ),
        (
            lambda ids: {"id" if 0 in ids else "number": ids},
            "other parts for some batches (id, number); return the same parts for all",
        ),
    ],
)
def test_predictions_that_are_no_rows_are_refused(output, said):
    with pytest.raises(UserError) as caught:
        joined(output, 1)
    assert said in str(caught.value)
    assert "predict_step returned" in str(caught.value)


class Normed(Small):
    """Has running statistics, a counter, and flags: each rank would have its own of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("positive", torch.zeros(3, dtype=torch.bool))

    def training_step(self, batch: Any) -> dict[str, Any]:
        output = super().training_step(batch)
        if self.training:
            self.positive = batch[0].sum(dim=0) > 0
        return {**output, "positive": self.positive.double().mean()}


def reported_and_kept(strategy: Strategy) -> list[list[float]]:
    """val/ numbers of a run, and what a single process makes of what would be saved then."""
    pairs = []
    data = small.Rows(30, 6)

    def look(trainer: Trainer) -> None:
        state = trainer.state_dict()["task"]
        kept = Normed().double()
        kept.load_state_dict(state)
        again = Trainer(kept, data, settings=trainer.settings).validate()
        pairs.append([trainer.metrics[name] - again[name] for name in ("val/loss", "val/positive")])

    run = fitted(
        make=Normed,
        data=data,
        strategy=strategy,
        callbacks=[Hooks(on_validation_end=look)],
        precision="64",
        validate_every_steps=3,
    )
    everywhere = strategy.gather([buffer.double().sum().item() for buffer in run.task.buffers()])
    assert all(other == everywhere[0] for other in everywhere)
    return pairs


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), DataParallel(2, "cpu"), DDP(2, "cpu"), DDP(3, "cpu")],
    ids=["cpu-1", "data_parallel-2", "ddp-2", "ddp-3"],
)
def test_what_a_validation_reports_is_what_its_checkpoint_gives(strategy):
    pairs = on(strategy, reported_and_kept)
    assert len(pairs) == 5  # at steps 3 6 9, and at the ends of the epochs of 5 steps
    assert all(abs(difference) <= 1e-12 for pair in pairs for difference in pair)
