"""Data sets of Hugging Face's `datasets` are read as any other: exactly, divided, and resumed."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from recorded import weights, weights_apart
from small import Given, Hooks, fitted, loader_of
from torch import Tensor, nn

from dpframe import Task, UserError
from dpframe.data.stream import Division
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.single import CPU

ROWS = 22
COLUMNS = {"x": [[row / ROWS, 1.0] for row in range(ROWS)], "row": list(range(ROWS))}


class StandIn:
    """Of the shape of a `datasets.Dataset`: columns, read many rows at a time."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        at = rows if isinstance(rows, list) else [rows]
        columns = {name: [column[row] for row in at] for name, column in COLUMNS.items()}
        return columns if isinstance(rows, list) else {n: c[0] for n, c in columns.items()}

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        columns = self[rows]
        return [
            {"x": torch.tensor(x), "row": torch.tensor(row)}
            for x, row in zip(columns["x"], columns["row"], strict=True)
        ]


def library() -> Any:
    datasets = pytest.importorskip("datasets", reason="needs `pip install datasets`")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # else its bars leave a thread behind
    return datasets


def real() -> Any:
    return library().Dataset.from_dict(COLUMNS).with_format("torch")


def stream(*, shuffled: bool = False) -> Any:
    made = real().to_iterable_dataset(num_shards=5)
    return made.shuffle(seed=1, buffer_size=6) if shuffled else made


class Line(Task):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1))

    def training_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        error = self.net(batch["x"])[:, 0] - batch["row"] / 10
        return {"loss": error.square().mean()}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trained(
    dataset: Any, state: Any = None, *, strategy: Any = None, callbacks: Any = (), **reading: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    data, settings = Given(dataset, None, 5, **reading), {"precision": "64", "resume": state}
    made = fitted(Line(), data, strategy=strategy, callbacks=callbacks, **settings)
    return weights(made.task)


class Listed(StandIn):
    """The same rows one by one."""

    __getitems__ = None

    def __getitem__(self, row: Any) -> dict[str, Any]:
        return {name: torch.tensor(column[row]) for name, column in COLUMNS.items()}


@pytest.mark.parametrize("make", [StandIn, real])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_of_columns_trains_as_its_rows(make, workers):
    wanted = trained(Listed())
    for strategy in (CPU(), DataParallel(3, "cpu")):
        mine = trained(make(), strategy=strategy, workers=workers)
        assert weights_apart(mine, wanted) <= 1e-12


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_row_of_a_divided_stream_is_read_once(ranks, workers):
    seen = []
    for rank in range(ranks):
        division = Division(stream(), ranks, workers)
        assert division.workers == workers
        loader = loader_of(
            stream(),
            batch_size=4,
            shares=lambda rows, ranks=ranks: [rows[: -(-len(rows) // ranks)]],
            workers=workers,
            rank=rank,
            division=division,
        )
        batches = [batch.shares[0].batch for batch in loader.epoch(0)]
        seen += [int(row) for batch in batches for row in batch["row"]]
    assert sorted(seen) == list(range(ROWS))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("workers, divided", [(0, False), (1, False), (2, True)])
def test_a_stream_is_resumed_to_the_bit_even_if_its_state_leaves_out_a_buffer(
    workers, divided, shuffled
):
    states: dict[int, Any] = {}
    takes = Hooks(on_step_end=lambda t: states.update({t.global_step: deepcopy(t.state_dict())}))
    reading = {"workers": workers, "divide_streams": divided}
    whole = trained(stream(shuffled=shuffled), callbacks=[takes], **reading)
    for step in (2, 7):
        for place in states[step]["stream"]:
            assert all((part["stream"] is None) == shuffled for part in place["workers"])
        again = trained(stream(shuffled=shuffled), states[step], **reading)
        assert weights_apart(again, whole) == 0, step


def test_all_splits_at_once_are_refused():
    datasets = library()
    with pytest.raises(UserError) as caught:
        trained(datasets.DatasetDict({"train": real(), "test": real()}))
    line = "Given.train_dataset() returned a DatasetDict of train, test; return one"
    assert str(caught.value) == line
