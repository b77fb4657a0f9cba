"""A mix: exact proportions of several data sets, in an order that is a fact of seed and epoch."""

import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from small import Hooks, Listed, Rows, Small, Stream, fitted, loader_of
from torch.utils.data import DataLoader, TensorDataset

from dpframe import DataModule, Mix, Strategy, UserError
from dpframe.data import split
from dpframe.strategies import CPU, DDP, DataParallel

EXACT = 1e-12
SIZES = {"web": 9, "code": 8, "maths": 30}
WEIGHTS = {"web": 0.5, "code": 0.3, "maths": 0.2}


def sets(**sizes: int) -> dict[str, Any]:
    return {n: Listed([f"{n} {row}" for row in range(size)]) for n, size in sizes.items()}


def mixed(weights: Any = WEIGHTS, *, epochs: int = 1, rows: int | None = None, **how: Any) -> Any:
    """The rows of each epoch."""
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "collate": list} | how
    mix = Mix(sets(**SIZES), weights, rows)
    loader = loader_of(mix, shares=partial(split, replicas=1), **options)
    return [
        [row for batch in loader.epoch(epoch) for share in batch.shares for row in share.batch]
        for epoch in range(epochs)
    ]


def of(name: str, rows: list[str]) -> list[str]:
    return [row for row in rows if row.startswith(f"{name} ")]


WHOLE = {"web": 3, "code": 1, "maths": 0}
HALVES = {"web": 0.5, "code": 1, "maths": 0.25}


@pytest.mark.parametrize(
    "weights", [WEIGHTS, WHOLE, HALVES, {"web": 1, "code": 2**0.5, "maths": 3}]
)
def test_after_any_row_each_set_has_had_its_part_to_a_row(weights):
    rows = sum(mixed(weights, epochs=3, rows=100), [])
    for name, weight in weights.items():
        part = weight / sum(weights.values())
        for end in range(len(rows)):
            assert abs(len(of(name, rows[:end])) - end * part) < 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("how", [{}, {"rows": 17}, {"rows": 17, "drop_last": True}])
def test_each_set_goes_on_in_the_next_epoch_and_has_another_order_in_each_pass(how, shuffle):
    epochs = mixed(epochs=6, shuffle=shuffle, **how)
    lengths = {len(rows) for rows in epochs}
    assert lengths == {{0: 47, 1: 17, 2: 16}[len(how)]}
    for name, size in SIZES.items():
        rows = of(name, sum(epochs, []))
        passes = [rows[at : at + size] for at in range(0, len(rows) - size + 1, size)]
        in_order = [f"{name} {row}" for row in range(size)]
        assert all(sorted(each) == sorted(in_order) for each in passes)
        if shuffle:
            assert len(set(map(tuple, passes))) == len(passes)
        else:
            assert all(each == in_order for each in passes)


def test_sets_of_one_size_have_orders_of_their_own():
    mix = Mix(sets(a=50, b=50), {"a": 1, "b": 1})
    loader = loader_of(mix, batch_size=100, shuffle=True, collate=list)
    [batch] = loader.epoch(0)
    rows = batch.shares[0].batch
    assert [row[2:] for row in of("a", rows)] != [row[2:] for row in of("b", rows)]


def test_a_part_of_an_epoch_is_that_of_the_whole_and_workers_read_it():
    loader = loader_of(
        Mix(sets(**SIZES), WEIGHTS),
        batch_size=8,
        shuffle=True,
        collate=list,
        workers=1,
    )
    rest = [row for batch in loader.epoch(3, skip=2) for row in batch.shares[0].batch]
    assert rest == mixed(epochs=4)[3][16:]


# Trained on

FEW = {"a": 7, "b": 5}


class Mixed(DataModule):
    """Eleven rows an epoch in batches of four: the last one has three, for up to three replicas."""

    def __init__(self, weights: Any = None, **options: Any) -> None:
        super().__init__(4, **options)
        self.weights = weights or {"a": 2, "b": 1}

    def train_dataset(self) -> Any:
        train = Rows(12).train
        parts = [TensorDataset(*train[:7]), TensorDataset(*train[7:12])]
        return Mix(dict(zip(FEW, parts, strict=True)), self.weights, rows=11)


def trained(strategy: Strategy, resume: Any = None, **options: Any) -> Any:
    states = []
    keep = Hooks(
        on_step_end=lambda t: t.global_step == 5 and states.append(deepcopy(t.state_dict()))
    )
    settings: dict[str, Any] = {"precision": "64", "max_epochs": 4, "callbacks": [keep]}
    made = fitted(None, Mixed(**options), strategy=strategy, resume=resume, **settings)
    return deepcopy(made.task.state_dict()), made.metrics, states


PLACES = {
    "data_parallel-2": DataParallel(2, "cpu"),
    "data_parallel-3": DataParallel(3, "cpu"),
    "ddp-2": DDP(2, "cpu"),
    "ddp-3": DDP(3, "cpu"),
}


def whole_and_resumed(strategy: Strategy, kept: bytes) -> Any:
    return [trained(strategy, resume)[:2] for resume in (None, pickle.loads(kept))]


@pytest.mark.parametrize("place", PLACES)
def test_it_trains_alike_on_any_replicas_and_goes_on_within_an_epoch_on_others(place):
    wanted, numbers, [kept] = trained(CPU())
    for state, metrics in on(PLACES[place], whole_and_resumed, pickle.dumps(kept)):
        assert all(torch.allclose(state[k], wanted[k], rtol=0, atol=EXACT) for k in wanted)
        assert metrics["train/loss"] == pytest.approx(numbers["train/loss"], rel=EXACT)


def test_a_resume_with_other_parts_is_refused():
    _, _, states = trained(CPU())
    with pytest.raises(UserError, match="a mix of 2 a to 1 b, 11 rows an epoch there, a mix"):
        trained(CPU(), states[0], weights={"a": 1, "b": 1})


# What can't be mixed is one line

ROWS = Listed([1, 2])
REFUSED: list[tuple[Any, str]] = [
    (([ROWS], [1]), "got a list of sets; pass a dict of them by their names"),
    (({}, {}), "got a dict of sets"),
    (({"a": Stream([1])}, {"a": 1}), "got a Stream as 'a', which can't be mixed row by row"),
    (({"a": DataLoader(ROWS)}, {"a": 1}), "got a DataLoader as 'a'"),
    (({"a": Listed([])}, {"a": 1}), "got no rows of 'a'; leave it out"),
    (({"a": ROWS}, [1]), r"got the weights \[1\] for a; pass a dict with a weight for each"),
    (({"a": ROWS}, {"b": 1}), "got the weights {'b': 1} for a; "),
    (({"a": ROWS}, {"a": -1}), "got the weights {'a': -1}; pass numbers from 0 on"),
    (({"a": ROWS}, {"a": "1"}), "got the weights {'a': '1'}; pass numbers"),
    (({"a": ROWS}, {"a": 0}), "got the weights {'a': 0}; pass numbers from 0 on, not all 0"),
    (({"a": ROWS, "b": ROWS}, {"a": 1, "b": 1e-9}), "the weight 1e-09 for 'b', less than a milli"),
    (({"a": ROWS}, {"a": 1}, 0), "rows= of dpframe.Mix=0 is out of range; use 1 or more"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_can_not_be_mixed_is_refused_in_one_line(given, said):
    with pytest.raises(UserError, match=said):
        Mix(*given)


class Validated(Mixed):
    def val_dataset(self) -> Any:
        return self.train_dataset()


def test_a_mix_is_no_set_to_evaluate_on():
    with pytest.raises(
        UserError, match=r"val_dataset\(\) returned a dpframe.Mix, which is an orde"
    ):
        fitted(Small(), Validated())


def test_parts_of_its_own_for_each_rank_are_refused():
    with pytest.raises(UserError, match="data.divided=by_rank with a dpframe.Mix, which can't"):
        on(DDP(2, "cpu"), partial(trained, divided="by_rank"))
