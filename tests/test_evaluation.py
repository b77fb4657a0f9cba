"""Validation, test and prediction see every row exactly once, for every size and every strategy."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recorded import once
from small import fitted
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dpframe import DataModule, Strategy, Task, Trainer
from dpframe.strategies.cpu import CPU
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

SIZES = range(1, 18)
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
        return {"tensors": TensorDataset, "rows": Rows, "stream": Stream}[self.kind](ids)

    def test_dataset(self) -> Dataset:
        return self.val_dataset()


class Rows(Dataset):
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Tensor:
        return self.ids[row]


class Stream(IterableDataset):
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.ids)


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


def in_a_rank() -> dict[tuple[str, int], Any]:
    strategy = DDP()
    strategy.setup()
    try:
        return results_on(strategy)
    finally:
        strategy.close()


@once
def results(where: str) -> dict[tuple[str, int], Any]:
    name, replicas = where.split("-")
    if name == "ddp":
        return DDP(int(replicas), "cpu").launch(in_a_rank)
    strategy = DataParallel(int(replicas), "cpu") if name == "data_parallel" else CPU()
    strategy.setup()
    return results_on(strategy)


@pytest.mark.parametrize("kind", ["tensors", "rows", "stream"])
@pytest.mark.parametrize("where", WHERE)
def test_validation_and_test_see_every_row_once(where, kind):
    for size in SIZES:
        everywhere, _ = results(where)[kind, size]
        for metrics in everywhere:  # every process has the same numbers
            for prefix in ("val", "test"):
                bits = round(metrics[f"{prefix}/code"] * size * 2**16)
                assert bits == sum(2 ** (16 - row) for row in range(size)), (size, f"{bits:b}")
                assert metrics[f"{prefix}/loss"] == pytest.approx((size - 1) / 2, rel=1e-12)
        assert len(everywhere) == (int(where[-1]) if where.startswith("ddp") else 1)


@pytest.mark.parametrize("where", WHERE)
def test_validation_weighs_by_the_weight_of_the_task(where):
    for size in SIZES:
        wanted = sum(row * (row + 1) for row in range(size)) / sum(row + 1 for row in range(size))
        for kind in ("tensors", "rows", "stream"):
            everywhere, _ = results(where)[kind, size]
            assert everywhere[0]["weighted"] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", ["tensors", "rows", "stream"])
@pytest.mark.parametrize("where", WHERE)
def test_predictions_are_all_rows_in_the_order_of_the_data_set(where, kind):
    for size in SIZES:
        _, predictions = results(where)[kind, size]
        assert predictions["id"] == list(range(size))
        assert predictions["pair"] == [[row, -row] for row in range(size)]


def test_an_epoch_of_training_and_validation_is_reduced_at_once():
    class Counts(Strategy):
        reductions = 0

        def reduce(self, tensor):
            self.reductions += 1
            return tensor

    strategy = Counts()
    fitted(strategy=strategy, max_epochs=5, log_every=1000)
    assert strategy.reductions == 1 + 5  # one more, as the names are news once
