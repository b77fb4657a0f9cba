"""A step gets rows of its replica's share, and is not called where there is none."""

from collections import Counter
from typing import Any

import pytest
import torch
from forked import on
from recorded import once, weights, weights_apart
from small import Hooks, Listed, Small, Stream, fitted
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpframe import DataModule, Strategy, Task, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU

EXACT = 1e-12
BATCH_SIZES = (1, 2, 3, 4, 5)
KINDS = {"tensors": (TensorDataset, 0), "rows": (Listed, 0), "workers": (Listed, 1)}
KINDS["stream"] = (Stream, 0)

# What user code sees


class Sees(Small):
    """Counts the rows that each of its steps is called with, as a metric of its own would."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Counter[int]] = {kind: Counter() for kind in ("fit", "val", "predict")}

    def training_step(self, batch: Any) -> dict[str, Any]:
        return self._seen("fit", batch)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return self._seen("val", batch)

    def predict_step(self, batch: Any) -> Tensor:
        self._seen("predict", batch)
        return numbers(batch)

    def _seen(self, kind: str, batch: Any) -> dict[str, Any]:
        self.seen[kind].update(numbers(batch).int().tolist())
        x = numbers(batch)[:, None].expand(-1, 3) / 10.0
        return {"loss": self.net(x).square().mean()}


def numbers(batch: Any) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch[0]


class Numbers(DataModule):
    def __init__(self, kind: str, batch_size: int) -> None:
        super().__init__(batch_size, shuffle=False)
        self.kind, self.workers = KINDS[kind]

    def train_dataset(self) -> Dataset:
        return self.kind(torch.arange(11.0))

    val_dataset = predict_dataset = train_dataset


def seen_on(strategy: Strategy) -> dict[Any, Any]:
    """By the kind of data and the size of a batch: the rows that all processes' steps saw."""
    results = {}
    for kind in KINDS:
        for size in BATCH_SIZES if kind != "workers" else (3,):
            one = fitted(make=Sees, data=Numbers(kind, size), strategy=strategy, precision="64")
            one.predict()
            everywhere = strategy.gather((one.task.seen, weights(one.task)))
            results[kind, size] = everywhere
    return results


@once
def seen(place: str) -> dict[Any, Any]:
    return on({"ddp": DDP, "data_parallel": DataParallel}[place](4, "cpu"), seen_on)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["ddp", "data_parallel"])
def test_a_step_sees_every_row_once_and_no_other_where_batches_are_smaller_than_replicas(
    place, kind
):
    for (its, size), processes in seen(place).items():
        for step in ("fit", "val", "predict"):
            rows = sum((seen_[step] for seen_, _ in processes), Counter())
            times = 1 if step == "predict" else 2  # epochs
            assert its != kind or rows == Counter(dict.fromkeys(range(11), times)), (size, step)


@pytest.mark.parametrize("place", ["ddp", "data_parallel"])
def test_all_processes_end_with_the_weights_of_one_process(place):
    wanted = {key: processes[0][1] for key, processes in seen_on(CPU()).items()}
    for key, processes in seen(place).items():
        for _, mine in processes:
            assert weights_apart(mine, wanted[key]) <= EXACT


# Ranks without a row in a backward


class Routed(Task):
    """Rows below 0 take one head, others the other; a third parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        self.unused = nn.Parameter(torch.ones(2))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        (x,) = batch
        parts = [self.heads[0](x[x[:, 0] < 0]), self.heads[1](x[x[:, 0] >= 0])]
        return {"loss": sum(part.square().sum() for part in parts if len(part)) / len(x)}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class Together(Routed):
    """All of its rows take both heads."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": sum(head(batch[0]).square().mean() for head in self.heads)}


class Used(Together):
    def __init__(self) -> None:
        super().__init__()
        del self.unused


class Masked(Used):
    """The rows below 0 count nothing, so that a share's mean may be 0/0."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        (x,) = batch
        mask = x[:, 0] >= 0
        errors = self.heads[0](x) + self.heads[1](x)
        return {"loss": (errors[:, 0] * mask).sum() / mask.sum(), "weight": mask.sum()}


class Table(DataModule):
    """9 rows; of each four in a row the second half is below 0."""

    def train_dataset(self) -> Dataset:
        x = torch.rand(9, 3, generator=torch.Generator().manual_seed(2)) + 0.1
        x[torch.arange(9) % 4 > 1] *= -1
        return TensorDataset(x)


FREE = {"find_unused_parameters": True}
TRAINED: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "plain": (Used, {}),
    "routed": (Routed, FREE),
    "unused": (Together, FREE),
    "weights": (Masked, {}),
    "weights, found": (Masked, FREE),
    "static": (Used, {"static_graph": True}),
    "bucket copies": (Used, {"gradient_as_bucket_view": False}),
}
WAYS = [(size, accumulate) for size in (1, 3, 4) for accumulate in (1, 3)]


def trained_on(strategy: Strategy) -> dict[Any, Any]:
    results = {}
    for name, (task, options) in TRAINED.items():
        if isinstance(strategy, DDP):
            strategy.options = DDP(**options).options
        for size, accumulate in WAYS:
            one = fitted(
                make=task,
                data=Table(size, shuffle=False),
                strategy=strategy,
                accumulate=accumulate,
                log_every=1,
                precision="64",
                max_epochs=3,
                on_nonfinite="skip" if name == "plain" else "stop",
            )
            results[name, size, accumulate] = strategy.gather((weights(one.task), one.metrics))
    return results


@once
def trained(place: str) -> dict[Any, Any]:
    return on(CPU() if place == "cpu" else DDP(4, "cpu"), trained_on)


@pytest.mark.parametrize(("size", "accumulate"), WAYS)
@pytest.mark.parametrize("name", TRAINED)
def test_ranks_without_a_row_train_as_one_process_does(name, size, accumulate):
    [(wanted, metrics)] = trained("cpu")[name, size, accumulate]
    for mine, reported in trained("ddp")[name, size, accumulate]:
        assert weights_apart(mine, wanted) <= EXACT
        assert reported == pytest.approx(metrics, rel=EXACT)


FEW = {  # a task, the size of its batches, whether statistics are shared, and what is said
    "left out at first": (Together, 3, False, "static_graph=true with a batch of 3 rows"),
    "left out later": (Together, 4, False, "static_graph=true with a batch of 1 rows"),
    "statistics": (Used, 3, True, "sync_batchnorm=true with a batch of 3 rows"),
}


def refused_on(strategy: DDP) -> list[dict[str, str]]:
    said = {}
    for name, (task, size, shares_statistics, _) in FEW.items():
        strategy.options = DDP(static_graph=True).options
        strategy.sync_batchnorm = False
        # As if the device were a GPU: torch has no SyncBatchNorm for the CPU.
        hooks = Hooks(
            on_fit_start=lambda trainer, value=shares_statistics: setattr(
                trainer.strategy, "sync_batchnorm", value
            )
        )
        with pytest.raises(UserError) as caught:
            data = Table(size, shuffle=False)
            fitted(task(), data, strategy=strategy, callbacks=[hooks], precision="64")
        said[name] = str(caught.value)
    return strategy.gather(said)


def test_what_needs_a_row_of_every_rank_is_refused_by_all_ranks_where_one_has_none():
    for said in on(DDP(4, "cpu"), refused_on):
        for name, (*_, line) in FEW.items():
            assert said[name].startswith(f"strategy.{line} on 4 ranks, of which the last has none")
