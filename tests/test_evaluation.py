"""Validation, test and prediction see every row exactly once, for every size and every strategy."""

import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import small
import torch
from forked import fresh, on
from recorded import once
from small import Hooks, Listed, Small, Stream, fitted, is_same, strategy_of
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpframe import DataModule, Strategy, Task, Trainer, UserError
from dpframe.strategies.collectives import Collectives
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.trainer import predictions as spooled
from dpframe.trainer.evaluation import means_over
from dpframe.trainer.predictions import Predictions, as_table, join

# Up to two batches and a bit; rows that are read one by one are split as tensors are.
SIZES = {"tensors": range(1, 12), "rows": (1, 4, 11), "stream": (1, 4, 5, 6, 10, 11)}
BATCH_SIZE = 5  # on four replicas 2 2 1 0
WHERE = ["cpu-1", "data_parallel-2", "data_parallel-3", "data_parallel-4", "ddp-3", "ddp-4"]


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


def means_of_different_sets(strategy: Strategy) -> set[float]:
    """Of what each rank measures alike under one name alone, and under many."""
    found = set()
    for count in (1, 7, 100):
        means = means_over(strategy)
        means.add([(1, {f"{number:03}": 0.1 * (strategy.rank + 1) for number in range(count)})])
        found |= set(means.total().values())
    return found


def test_a_mean_over_ranks_has_the_same_bits_whatever_is_measured_beside_it():
    assert on(DDP(3, "cpu"), means_of_different_sets) == {(0.1 + 0.2 + 0.1 * 3) / 3}


def results_on(strategy: Strategy) -> dict[tuple[str, int], Any]:
    found = {}
    for kind, sizes in SIZES.items():
        for size in sizes:
            trainer = Trainer(Ids(), Numbers(kind, size), strategy=strategy)
            predictions = trainer.predict()
            joined = {k: v.tolist() for k, v in predictions.joined().items()} if predictions else {}
            metrics = {**trainer.validate(), **trainer.test()}
            weighted = Trainer(Ids(is_weighted=True), Numbers(kind, size), strategy=strategy)
            metrics["weighted"] = weighted.validate()["val/loss"]
            found[kind, size] = strategy.collectives.gather(metrics), joined
    return found


@once
def results(where: str) -> dict[tuple[str, int], Any]:
    return on(strategy_of(where), results_on)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("where", WHERE)
def test_validation_and_test_see_every_row_once_with_the_weight_of_the_task(where, kind):
    for size in SIZES[kind]:
        weighted = sum(row * (row + 1) for row in range(size)) / sum(range(size + 1))
        everywhere, _ = results(where)[kind, size]
        for metrics in everywhere:  # every process has the same numbers
            for prefix in ("val", "test"):
                bits = round(metrics[f"{prefix}/code"] * size * 2**10)
                assert bits == sum(2 ** (10 - row) for row in range(size)), (size, f"{bits:b}")
                assert metrics[f"{prefix}/loss"] == pytest.approx((size - 1) / 2, rel=1e-12)
            assert metrics["weighted"] == pytest.approx(weighted, rel=1e-12)
        assert len(everywhere) == (int(where[-1]) if where.startswith("ddp") else 1)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("where", WHERE)
def test_predictions_are_all_rows_in_the_order_of_the_data_set(where, kind):
    for size in SIZES[kind]:
        _, predictions = results(where)[kind, size]
        assert predictions["id"] == list(range(size))
        assert predictions["pair"] == [[row, -row] for row in range(size)]


def test_an_epoch_of_training_and_validation_is_reduced_at_once():
    class Counts(Collectives):
        world_size = 2
        reductions = 0

        def sum(self, tensor):
            self.reductions += 1
            return tensor

    strategy = Strategy()
    strategy.world_size = 2
    strategy.collectives = counts = Counts()
    fitted(strategy=strategy, max_epochs=5, log_every=1000)
    assert counts.reductions == 1 + 5  # one more, as the names are news once


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


def test_parts_whose_columns_share_a_name_are_all_written(tmp_path, caplog):
    parts = {"a": torch.zeros(3, 2), "a_0": torch.ones(3, 1)}
    path = Predictions([[parts]]).save(tmp_path)
    assert path.name == "predictions.pt" and is_same(torch.load(path), parts)
    (record,) = caplog.records
    assert record.message.startswith("predictions.csv would have two columns a_0;")


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
            "different parts for some batches (id, number); return the same parts for all",
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
    everywhere = strategy.collectives.gather(
        [buffer.double().sum().item() for buffer in run.task.buffers()]
    )
    assert all(other == everywhere[0] for other in everywhere)
    return pairs


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), DataParallel(2, "cpu"), DDP(3, "cpu")],
    ids=["cpu-1", "data_parallel-2", "ddp-3"],
)
def test_what_a_validation_reports_is_what_its_checkpoint_gives(strategy):
    pairs = on(strategy, reported_and_kept)
    assert len(pairs) == 5  # at steps 3 6 9, and at the ends of the epochs of 5 steps
    assert all(abs(difference) <= 1e-12 for pair in pairs for difference in pair)


# Predictions to disk


def saved(strategy: Strategy, folder: str) -> dict[str, list[str]]:
    """What mode=predict writes of each kind of outputs, in enough memory and in too little."""
    found: dict[str, list[str]] = {name: [] for name in OF_ROWS}
    for name, output in OF_ROWS.items():
        for held in (spooled.HELD, 100):
            with patch.object(spooled, "HELD", held):
                path = Path(folder, name, str(held))
                trainer = Trainer(Returns(output), Numbers("tensors", 100), strategy=strategy)
                predictions = trainer.predict(spool=path)
                found[name] += [str(predictions.save(path))] if predictions else []
    return found


@pytest.mark.parametrize("strategy", [CPU(), DDP(3, "cpu")], ids=["cpu", "ddp"])
def test_predictions_that_memory_does_not_hold_are_those_that_it_holds(strategy, tmp_path):
    for name, (whole, large) in on(strategy, saved, str(tmp_path)).items():
        assert [str(path) for path in Path(large).parent.iterdir()] == [large], name
        if whole.endswith(".csv"):
            assert Path(large).read_text() == Path(whole).read_text(), name
            continue
        assert (Path(whole).name, Path(large).name) == ("predictions.pt", "predictions")
        pieces = [torch.load(path, weights_only=True) for path in sorted(Path(large).iterdir())]
        assert len(pieces) > 1
        assert is_same(rows_of(pieces), rows_of([torch.load(whole)])), name


def rows_of(pieces: list[Any]) -> Any:
    """A piece whose rows have one shape is one tensor, any other a list of them."""
    has_rows = isinstance(pieces[0], Tensor | list)
    return [row for piece in pieces for row in piece] if has_rows else join(pieces)


class Returned(Small):
    def predict_step(self, batch: Any) -> Tensor:
        return batch["x"]


class Dicts(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([float(row)])}


class ReadByWorkers(DataModule):
    def predict_dataset(self) -> Dataset:
        return Dicts()


def test_predictions_keep_no_file_open_of_the_batches_that_a_worker_has_read():
    made = small.trainer(Returned(), ReadByWorkers(batch_size=1, workers=1))
    before = len(os.listdir("/proc/self/fd"))
    kept = made.predict()
    assert kept.joined().flatten().tolist() == [*range(40)]
    assert len(os.listdir("/proc/self/fd")) < before + 40


def test_large_predictions_are_read_again_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(spooled, "HELD", 100)
    kept = Trainer(Ids(), Numbers("rows", 200)).predict(spool=tmp_path)
    wanted = Trainer(Ids(), Numbers("rows", 200)).predict()
    assert kept.batches.is_on_disk and list(tmp_path.iterdir()) == []
    assert len(kept.batches) == len(wanted.batches) == 40
    assert is_same(list(kept.batches), wanted.batches) and is_same(
        kept.batches[7], kept.batches[-33]
    )
    assert is_same(kept.batches[38:], wanted.batches[38:]) and is_same(
        kept.joined(), wanted.joined()
    )


def test_other_parts_in_a_later_piece_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(spooled, "HELD", 100)
    odd = Returns(lambda ids: {"a": ids} if ids[0] < 150 else {"b": ids})
    kept = Trainer(odd, Numbers("rows", 200)).predict(spool=tmp_path)
    with pytest.raises(UserError, match=r"different parts for some batches \(a, b\)"):
        kept.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


class Wide(Numbers):
    """Rows of one number; a megabyte is predicted for each."""

    def predict_dataset(self) -> Dataset:
        return Listed(torch.arange(self.size, dtype=torch.float64))


def peak_of_wide(folder: str, rows: int) -> int:
    """The bytes that the largest memory of this process grew by."""
    spooled.HELD = 8 << 20
    wide = Returns(lambda ids: ids[:, None, None].expand(-1, 128, 1024).contiguous())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    predictions = Trainer(wide, Wide("rows", rows)).predict(spool=folder)
    assert predictions.save(Path(folder)).is_dir()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_a_prediction_larger_than_its_memory_is_written(tmp_path):
    rows = 300
    assert fresh(peak_of_wide, str(tmp_path), rows) < rows * 2**20 / 2
    written = sum(path.stat().st_size for path in (tmp_path / "predictions").iterdir())
    assert written > rows * 2**20


def killed_at(folder: str, row: int) -> None:
    spooled.HELD = 100

    def die(ids: Tensor) -> Tensor:
        if row in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return ids

    Trainer(Returns(die), Numbers("rows", 200)).predict(spool=folder).save(Path(folder))


def test_a_killed_prediction_leaves_nothing(tmp_path):
    with pytest.raises(BrokenProcessPool):
        fresh(killed_at, str(tmp_path), 180)
    assert list(tmp_path.iterdir()) == []


# The sanity pass


class Collecting(Small):
    """Collects its outputs, as Lightning's modules do, to read and clear them in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.passes: list[int] = []
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.outputs.append(batch[1])
        self.rows += len(batch[1])
        return super().training_step(batch)

    def on_validation_end(self, trainer: Trainer) -> None:
        self.passes.append(len(torch.cat(self.outputs)))
        self.outputs.clear()


def collected(strategy: Strategy) -> Any:
    torch.manual_seed(0)
    whole = fitted(Collecting(), strategy=strategy, sanity_batches=2, max_epochs=2)
    torch.manual_seed(0)
    half = fitted(Collecting(), strategy=strategy, sanity_batches=2, max_epochs=1)
    own = {"strategy": strategy, "sanity_batches": 2, "max_epochs": 2}
    resumed = fitted(Collecting(), resume=half.state_dict(), **own)
    return [(made.task.passes, made.task.state_dict()) for made in (whole, resumed)]


@pytest.mark.parametrize("strategy", [CPU(), DataParallel(2, "cpu"), DDP(2, "cpu")])
def test_the_sanity_pass_leaves_nothing_in_the_task(strategy):
    whole, resumed = on(strategy, collected)
    rows = 20 if strategy.launches_ranks is False else 10
    assert whole[0] == resumed[0] == [rows, rows]
    assert is_same(whole[1], resumed[1])
