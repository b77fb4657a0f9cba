"""Several training sets in a step: each in its own order, all shares exact, every mean right."""

import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from command import attempts, write
from forked import on
from small import SGD, Hooks, Listed, Stream, fitted, trainer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from dpframe import DataModule, Strategy, Task, UserError
from dpframe.data import permutation
from dpframe.seeding import mix
from dpframe.strategies import CPU, DDP, FSDP, DataParallel

EXACT = 1e-12
SIZES = {"few": 11, "many": 29}
BATCH = {"few": 4, "many": 6}  # the last batches have 3 and 5 rows, for up to three replicas


def tensors(name: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(len(name))
    x = torch.randn(SIZES[name], 3, generator=draw)
    return x, x.sum(dim=1)


class Two(DataModule):
    def __init__(self, batch_size: Any = None, **options: Any) -> None:
        super().__init__(batch_size or BATCH, **options)

    def train_dataset(self) -> Any:
        return {name: TensorDataset(*tensors(name)) for name in SIZES}


class Named(Task):
    """A mean over the rows of each set, of which it may have none."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), SGD)

    def of(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.net(x)[:, 0], y)

    def training_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": {name: (self.of(name, *of), len(of[0])) for name, of in batch.items()}}


class Both(Named):
    """One mean over all rows, in a forward of all, with noise and dropout by row."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.3))
        self.net.insert(2, nn.BatchNorm1d(8))

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = (torch.cat([of[part] for of in batch.values()]) for part in (0, 1))
        error = (self.net(x + 0.1 * self.randn_rows(*x.shape))[:, 0] - y).square()
        is_few = torch.arange(len(x)) < (len(batch["few"][0]) if "few" in batch else 0)
        return {"loss": error.mean(), "few": is_few.double().mean(), "of": self.batch_rows / 10}


def trained(strategy: Strategy, resume: Any = None, kind: str = "named", **options: Any) -> Any:
    states = []
    keep = Hooks(
        on_step_end=lambda t: t.global_step == 7 and states.append(deepcopy(t.state_dict()))
    )
    task, own = KINDS[kind]
    settings: dict[str, Any] = {"precision": "64", "max_epochs": 3, "callbacks": [keep]}
    settings |= own
    data = {name: settings.pop(name) for name in ("length", "workers") if name in settings}
    made = fitted(
        None, Two(**data | options), make=task, strategy=strategy, resume=resume, **settings
    )
    state = made.whole_state_dict(made.task)
    return deepcopy(state), made.metrics, states


BY_ROW = {"dropout": "row", "batch_norm": "global"}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "named": (Named, {}),
    "both": (Both, BY_ROW),
    "accumulated": (Named, {"accumulate": 3}),
    "shortest": (Named, {"length": "shortest"}),
    "workers": (Both, {"workers": 1, **BY_ROW}),
}
PLACES = {
    "data_parallel-2": DataParallel(2, "cpu"),
    "data_parallel-3": DataParallel(3, "cpu"),
    "ddp-2": DDP(2, "cpu"),
    "ddp-3": DDP(3, "cpu"),
    "fsdp-2": FSDP(2, "cpu"),
}


def batches(name: str, length: int, epoch: int) -> list[Any]:
    """Of one epoch of a step's, by hand."""
    place, x, y = [*SIZES].index(name), *tensors(name)
    each = -(-len(x) // BATCH[name])
    found = []
    for number in range(epoch * length, (epoch + 1) * length):
        order = permutation(len(x), seed=mix(0, place), epoch=number // each)
        rows = order.split(BATCH[name])[number % each]
        found.append((x[rows].double(), y[rows].double()))
    return found


def by_hand(length: int) -> dict[str, Tensor]:
    made = trainer(None, Two(), make=Named, precision="64")
    task = deepcopy(made.task).double()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.05)
    for epoch in range(3):
        pairs = zip(*(batches(name, length, epoch) for name in SIZES), strict=True)
        for few, many in pairs:
            optimizer.zero_grad()
            (task.of("few", *few) + task.of("many", *many)).backward()
            optimizer.step()
    return task.state_dict()


@pytest.mark.parametrize(("kind", "length"), [("named", 5), ("shortest", 3)])
def test_a_step_of_two_sets_equals_the_hand_written_loop(kind, length):
    state, wanted = trained(CPU(), kind=kind)[0], by_hand(length)
    assert all(torch.allclose(state[k], wanted[k], rtol=0, atol=EXACT) for k in wanted)


def all_kinds(strategy: Strategy, kept: bytes) -> Any:
    whole = {kind: trained(strategy, kind=kind)[:2] for kind in KINDS}
    return whole | {"resumed": trained(strategy, pickle.loads(kept), kind="named")[:2]}


@pytest.mark.parametrize("place", PLACES)
def test_every_strategy_trains_as_one_replica_and_a_resume_goes_on_on_others(place):
    wanted = {kind: trained(CPU(), kind=kind) for kind in KINDS}
    [kept] = wanted["named"][2]
    wanted["resumed"] = wanted["named"]
    for kind, (state, metrics) in on(PLACES[place], all_kinds, pickle.dumps(kept)).items():
        right, numbers, _ = wanted[kind]
        assert all(torch.allclose(state[k], right[k], rtol=0, atol=EXACT) for k in right), kind
        assert metrics == pytest.approx(numbers, rel=1e-9), kind


# What reads, draws and compares rows


class Pieces(Both):
    def __init__(self) -> None:
        super().__init__()
        del self.net[2]


def in_parts(strategy: Strategy, **own: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"precision": "64", "share_check": "strict", "dropout": "row"}
    return fitted(None, Two(), make=Pieces, strategy=strategy, **settings, **own).task.state_dict()


def test_a_batch_is_the_same_however_it_is_cut():
    states = [
        in_parts(strategy, **own)
        for strategy in (CPU(), DataParallel(2, "cpu"))
        for own in ({}, {"micro_batch": 3})
    ]
    for state in states:
        assert all(torch.allclose(state[k], states[0][k], rtol=0, atol=EXACT) for k in state)


class Noisy(Listed):
    """Rows that draw, read one by one."""

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows[row]
        return x + torch.rand(3), y


class Drawing(Two):
    def train_dataset(self) -> Any:
        return {name: Noisy(rows) for name, rows in super().train_dataset().items()}


def test_rows_that_draw_are_the_same_on_any_replicas_and_with_workers():
    states = [
        fitted(None, Drawing(workers=n), make=Named, strategy=s, precision="64").task.state_dict()
        for s, n in [(CPU(), 0), (CPU(), 2), (DataParallel(3, "cpu"), 0)]
    ]
    for state in states:
        assert all(torch.allclose(state[k], states[0][k], rtol=0, atol=EXACT) for k in state)


class Compares(Named):
    """A row against those that follow it in the whole batch."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        x = torch.cat([of[0] for of in batch.values()])
        own, every = self.net(x), self.all_gather(self.net(x))
        follows = torch.arange(len(every), dtype=every.dtype)
        place = (self.all_gather(x)[None] == x[:, None]).all(2).to(every.dtype) @ follows
        gains = torch.relu(follows[None] - place[:, None]) * (own - every.T).square()
        return {"loss": gains.mean()}


@pytest.mark.parametrize("replicas", [2, 3])
def test_gathered_rows_come_in_the_order_of_the_batch(replicas):
    states = [
        fitted(None, Two(), make=Compares, strategy=s, precision="64").task.state_dict()
        for s in (CPU(), DataParallel(replicas, "cpu"))
    ]
    assert all(torch.allclose(states[0][k], states[1][k], rtol=0, atol=EXACT) for k in states[0])


class Summed(Named):
    """Right where a share has as large a part of each set as of the others, and wrong elsewhere."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": sum(self.of(name, *of) for name, of in batch.items())}


def test_a_sum_of_the_means_of_sets_is_refused_and_told_how_to_return_it():
    fitted(None, Two(), make=Summed)
    with pytest.raises(UserError, match=r"loss of Summed depends on .* \(mean, how_many\)"):
        fitted(None, Two(), make=Summed, strategy=DataParallel(2, "cpu"))


class Loaders(Two):
    def train_dataset(self) -> Any:
        few, many = super().train_dataset().values()
        often = WeightedRandomSampler(torch.arange(11) + 1.0, 9, generator=torch.Generator())
        return {
            "few": DataLoader(few, 3, sampler=often),
            "many": DataLoader(many, 5, shuffle=True, drop_last=True, num_workers=1),
        }


def test_loaders_keep_their_batches_and_orders_through_a_resume():
    made = partial(fitted, make=Named, precision="64", max_epochs=4)
    states: list[Any] = []
    keep = Hooks(
        on_step_end=lambda t: t.global_step == 12 and states.append(deepcopy(t.state_dict()))
    )
    whole = made(None, Loaders(), callbacks=[keep])
    assert whole.feed.batches_per_epoch == 5
    resumed = made(None, Loaders(), strategy=DataParallel(2, "cpu"), resume=states[0])
    wanted = whole.task.state_dict()
    for key, value in resumed.task.state_dict().items():
        assert torch.allclose(value, wanted[key], rtol=0, atol=EXACT)


def test_a_set_with_fewer_rows_than_replicas_is_told(caplog):
    fitted(None, Two({"few": 5, "many": 6}), make=Named, strategy=DataParallel(3, "cpu"))
    line = "3 replicas share the rows of few, of which a batch may have 1: the dict of a share"
    assert line in caplog.text and "rows of many, of which" not in caplog.text


# What can't be had is one line


class Given(Two):
    def __init__(self, sets: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.sets = sets

    def train_dataset(self) -> Any:
        return self.sets or super().train_dataset()


class Splits(dict):
    """As of Hugging Face."""


ROWS = TensorDataset(*tensors("few"))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"length": "mani"}, "data.length=mani is not one of longest, shortest, few, many; did you"),
    ({"batch_size": {"few": 4}}, r"for few, and none for Given.train_dataset\(\)\['many'\]; add"),
    ({"sets": ROWS}, r"for few, many, and none for Given.train_dataset\(\); use one number"),
    ({"batch_size": {"few": 4, "many": 0}}, "data.batch_size.many=0 is out of range; use 1"),
    ({"batch_size": "4"}, "=4 is text; use a whole number or a whole number for each training"),
    (
        {"sets": {"few": Stream(ROWS)}},
        r"\['few'\] is a Stream, and with several sets in a step each",
    ),
    ({"sets": {"few": None}}, r"\['few'\] returned None; return a data set"),
    ({"sets": {"a b": ROWS}}, "has a data set named 'a b'"),
    ({"sets": Splits(train=ROWS)}, "returned a Splits of train; return one"),
    (
        {"batch_size": {"few": 12, "many": 6}, "drop_last": True},
        "drop_last=true leaves no batch of 'few': it has 11 rows, and a batch 12",
    ),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_a_step_can_not_have_together_is_refused_in_one_line(options, said):
    with pytest.raises(UserError, match=said):
        fitted(None, Given(**options), make=Named)


def test_a_resume_with_another_length_or_other_batches_is_refused():
    _, _, [kept] = trained(CPU())
    for other in ({"length": "shortest"}, {"batch_size": {"few": 6, "many": 4}}):
        with pytest.raises(UserError, match="the data=.* there, .* here"):
            trained(CPU(), deepcopy(kept), **other)


RECIPE = """
# @package _global_
task: {_target_: test_together.Named}
data:
  _target_: test_together.Two
  batch_size: {few: 4, many: 6}
trainer: {max_epochs: 2}
"""
LINES = [
    ["recipe=two", "data.length=few", "hydra.run.dir=run"],
    ["resume=run", "trainer.max_epochs=3", "strategy=data_parallel", "trainer.gpus=2"],
    ["recipe=two", "mode=tune"],
    ["recipe=two", "mode=verify"],
    ["recipe=two", "data.batch_size.many=x"],
]


def test_keys_name_the_sets_and_modes_that_know_one_set_refuse_several(tmp_path):
    write(tmp_path, {"conf/recipe/two.yaml": RECIPE})
    done = attempts([["--config-dir", "conf", *line] for line in LINES], tmp_path)
    assert [each.code for each in done] == [0, 0, 2, 2, 2], [each.err for each in done]
    assert "4 of 11 rows of few and 6 of 29 rows of many a step, an epoch of the few" in done[0].out
    assert "step 9" in done[1].out
    said = ("finds one batch size, and a step has rows of few and many; use tune.find=[lr]",)
    said += ("mode=verify trains on one set, and Two.train_dataset() returned few, many",)
    said += ("data.batch_size.many=x is text; use a whole number",)
    for line, each in zip(said, done[2:], strict=True):
        assert line in each.err
