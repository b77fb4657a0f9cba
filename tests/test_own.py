"""What a task has that is each replica's own is one line, before the first step."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from command import attempts, write
from forked import on
from small import SGD, Given, Hooks, Rows, Small, fitted, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from dpframe import DataModule, ShardedStream, Strategy, Task, UserError
from dpframe.callbacks.progress import Progress
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU

TWO = partial(DataParallel, 2, "cpu")
SEES = "{} each replica's rows alone: "
NORM, DROP = "trainer.batch_norm=global", "trainer.dropout=row"


class Layers(Task):
    """A network of three features with these layers, by name; and a step around it."""

    def __init__(self, step: Callable[..., Any] | None = None, **layers: nn.Module) -> None:
        super().__init__(nn.Linear(3, 8), SGD)
        self.step = step
        self.own = nn.ModuleDict(layers)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = self.net(batch[0]), batch[1]
        for layer in self.own.values():
            x = layer(x)
        if self.step is not None:
            x = self.step(self, x)
        return {"loss": (self.head(x)[:, 0] - y).square().mean()}


class DropPath(nn.Module):
    """As timm's: it drops whole rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(0.9) if self.training else x


class Codebook(nn.Module):
    """As a VQ codebook, whose running means are those of the rows that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Unbatched(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(*[x[:, None]] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))
        return y[0][:, 0]


def lstm() -> nn.Module:
    return Unbatched(nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True))


def attention() -> nn.Module:
    return Unbatched(nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True))


def drawing(task: Any, x: Tensor) -> Tensor:
    return x + torch.rand(()) if task.training else x


def dropping(task: Any, x: Tensor) -> Tensor:
    return functional.dropout(x, 0.2, task.training)


def seeding(task: Any, x: Tensor) -> Tensor:
    torch.manual_seed(task.global_step)
    return x + 1


def forking(task: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
    return x + 1


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True)


def later(task: Any, x: Tensor) -> Tensor:
    return x * torch.rand(len(x), 1) if task.epoch > 0 else x + 1


OWN = "of each replica's own: "
CASES: dict[str, tuple[Callable[[], Task], str]] = {
    "nothing": (Layers, ""),
    "one BatchNorm": (
        lambda: Layers(norm=nn.BatchNorm1d(8)),
        f"1 BatchNorm {SEES.format('layer sees')}{NORM}",
    ),
    "several of both": (
        lambda: Layers(
            a=nn.Dropout(0.1), b=nn.BatchNorm1d(8), c=nn.AlphaDropout(0.1), d=nn.BatchNorm1d(8)
        ),
        f"2 Dropout and 2 BatchNorm {SEES.format('layers see')}{DROP} {NORM}",
    ),
    "what does nothing": (
        lambda: Layers(
            a=nn.Dropout(0.0), b=nn.BatchNorm1d(8).eval(), c=nn.Dropout(0.5).eval(), d=nn.Tanh()
        ),
        "",
    ),
    "what needs nothing": (lambda: Layers(a=nn.LayerNorm(8), b=nn.GroupNorm(2, 8)), ""),
    "an LSTM": (lambda: Layers(rnn=lstm()), f"{OWN}own.rnn.layer (LSTM's own dropout)"),
    "an attention": (
        lambda: Layers(heads=attention()),
        f"{OWN}own.heads.layer (MultiheadAttention's own dropout)",
    ),
    "DropPath": (lambda: Layers(path=DropPath()), f"{OWN}own.path (bernoulli_)"),
    "a number drawn in a step": (lambda: Layers(drawing), f"{OWN}the step (rand)"),
    "a seed that a step sets": (lambda: Layers(seeding), ""),
    "a state that a step puts back": (lambda: Layers(forking), ""),
    "a draw that torch's functions don't show": (
        lambda: Layers(lambda task, x: scripted(x) + 1),
        f"{OWN}the step (a call outside of torch's functions)",
    ),
    "a draw from the second epoch on": (lambda: Layers(later), f"{OWN}the step (rand)"),
    "functional dropout": (lambda: Layers(dropping), f"{OWN}the step (dropout)"),
    "a codebook": (lambda: Layers(book=Codebook()), f"{OWN}own.book (statistics of its rows)"),
    "a layer and a draw": (
        lambda: Layers(drawing, a=nn.Dropout(0.1)),
        f"1 Dropout {SEES.format('layer sees')}{DROP}; {OWN}the step (rand)",
    ),
}


def own(task: Task, data: Any = None, **settings: Any) -> str:
    given = {"strategy": TWO(), **settings}
    return trainer(task, data or Rows(20, 10, val=False), **given).prepare().own


@pytest.mark.parametrize("case", CASES)
def test_the_line_names_what_is_each_replicas_own_with_counts_and_keys(case):
    make, line = CASES[case]
    assert own(make()) == line
    assert own(make(), strategy=None) == "", "one replica has nothing of its own"


@pytest.mark.parametrize("case", [name for name, (_, line) in CASES.items() if OWN not in line])
def test_with_both_keys_the_line_is_gone(case):
    assert own(CASES[case][0](), exact_layers=True) == ""


def test_what_no_key_mends_stays():
    task = Layers(drawing, a=nn.Dropout(0.1), rnn=lstm())
    line = f"{OWN}own.rnn.layer (LSTM's own dropout), the step (rand)"
    assert own(task, exact_layers=True) == line


def unused(task: Any, x: Tensor) -> Tensor:
    return x


class Unused(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.later = nn.Dropout(0.2)


class Turned(Layers):
    """Its dropout sees rows in no order that the trial can find."""

    def __init__(self) -> None:
        super().__init__(self.mixed)
        self.drop = nn.Dropout(0.2)

    @staticmethod
    def mixed(task: Any, x: Tensor) -> Tensor:
        return x + task.drop((x - x.mean()).T @ x).sum()


def test_a_dropout_layer_whose_rows_are_not_known_is_named_by_row_and_counted_without():
    assert own(Unused()) == f"1 Dropout {SEES.format('layer sees')}{DROP}"
    line = own(Turned(), dropout="row", share_check="off")  # which refuses its loss
    assert line == f"{OWN}drop (dropout: its rows were not found)"


class Late(Unused):
    is_later = False

    def on_epoch_start(self, trainer: Any) -> None:
        self.is_later = trainer.epoch > 0

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.step = (lambda task, x: task.later(x)) if self.is_later else None
        return super().training_step(batch)


def test_a_dropout_layer_that_the_trial_has_not_called_says_so_once_when_it_is(caplog):
    line = "later: its dropout is each replica's own, as the trial before the run has not called it"
    for task, lines in ((Unused(), []), (Late(), [line])):
        made = fitted(task, strategy=TWO(), dropout="row", max_epochs=3)
        assert made.training.own == ""
        assert [each.getMessage() for each in caplog.records] == lines


class Repeated(Late):
    """From the second epoch on it sees each row twice, in turns."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        times = 2 if self.is_later else 1
        self.step = lambda task, x: task.later(x.repeat(times, 1))[: len(x)]
        return Layers.training_step(self, batch)


def test_rows_that_come_several_times_as_they_did_not_in_the_trial_are_told_once(caplog):
    fitted(Repeated(), strategy=TWO(), dropout="row", max_epochs=3)
    assert [each.getMessage() for each in caplog.records] == [
        "later: its dropout is each replica's own, as the trial before the run has not given it "
        "several of a row"
    ]


def deepen(trainer: Any) -> None:
    trainer.task.rnn.dropout = 0.5 * (trainer.epoch > 0)


def test_dropout_that_a_hook_turns_on_within_a_layer_is_named_once(caplog):
    task = Layers(lambda task, x: task.rnn(x[None])[0][0])
    task.rnn = nn.LSTM(8, 8, num_layers=2)
    deep = [Hooks(on_epoch_start=deepen)]
    made = fitted(task, strategy=TWO(), max_epochs=4, exact_layers=True, callbacks=deep)
    assert made.training.own == ""
    line = f"from epoch 2 on: {OWN}rnn (LSTM's own dropout); this changes the curve"
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [line]


def thaw(trainer: Any) -> None:
    if trainer.epoch == 1:
        trainer.task.own["norm"].train()
        trainer.task.own["drop"].p = 0.5


@pytest.mark.parametrize("exact", [False, True])
def test_layers_that_a_hook_turns_on_are_named_when_it_does_or_are_the_batchs(exact, caplog):
    task = Layers(norm=nn.BatchNorm1d(8).eval(), drop=nn.Dropout(0.0))
    given: dict[str, Any] = {"exact_layers": exact, "callbacks": [Hooks(on_epoch_start=thaw)]}
    made = fitted(task, strategy=TWO(), max_epochs=3, **given)
    assert made.training.own == ""
    line = f"1 BatchNorm and 1 Dropout {SEES.format('layers see')}{NORM} {DROP}"
    said = [f"from epoch 2 on: {line}; this changes the curve"] if not exact else []
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == said


class Replacing(Layers):
    """Gets another head for its second epoch."""

    def on_epoch_start(self, trainer: Any) -> None:
        if trainer.epoch == 1:
            self.own["norm"] = nn.BatchNorm1d(8).to(self.device, torch.float64)


def test_a_layer_that_a_hook_replaces_is_the_batchs_too():
    states = []
    for strategy in (CPU(), TWO()):
        torch.manual_seed(0)
        given: dict[str, Any] = {"exact_layers": True, "precision": "64", "max_epochs": 3}
        made = fitted(Replacing(norm=nn.BatchNorm1d(8)), strategy=strategy, **given)
        states.append(made.task.state_dict())
    one, two = states
    assert all(torch.allclose(two[key], one[key], rtol=0, atol=1e-12) for key in one)


def test_without_the_share_check_layers_are_named_all_the_same():
    task = Layers(drawing, a=nn.Dropout(0.1), rnn=lstm())
    line = f"1 Dropout {SEES.format('layer sees')}{DROP}; {OWN}own.rnn.layer (LSTM's own dropout)"
    assert own(task, share_check="off") == line


def test_a_program_that_shows_no_banner_is_warned(caplog, capfd):
    """Over a pipe, a line at INFO is nowhere."""
    caplog.set_level("INFO", "dpframe")
    given: dict[str, Any] = {"strategy": TWO(), "max_steps": 1}
    fitted(Layers(drawing, a=nn.Dropout(0.1)), Rows(4, 4, val=False), **given)
    line = f"1 Dropout {SEES.format('layer sees')}{DROP}"
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warned[0].startswith(line) and warned[0].endswith("; this changes the curve")
    assert warned[1].startswith("the share check has not compared the loss: ")
    caplog.clear()
    given["callbacks"] = [Progress()]
    fitted(Layers(drawing, a=nn.Dropout(0.1)), **given)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"layers     {line}; {OWN}the step (rand)\n" in capfd.readouterr().out


NORMED = """
import torch
from dpframe.recipes.boston import Boston

class Normed(Boston):
    def __init__(self, net, optimizer, scheduler=None):
        super().__init__(net, optimizer, scheduler)
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(13), net)
"""
WORDS = ["recipe=boston", "task._target_=normed.Normed", "trainer.max_steps=1"]
WORDS += ["strategy=data_parallel", "trainer.gpus=2", "trainer.accelerator=cpu"]


def test_the_command_says_it_and_a_strict_check_ends_it_in_one_line(tmp_path):
    folder = write(tmp_path, {"normed.py": NORMED})
    strict = [*WORDS, "trainer.share_check=strict"]
    lines = [WORDS, strict, [*strict, "trainer.batch_norm=global"]]
    plain, refused, exact = attempts(lines, folder)
    line = f"1 BatchNorm {SEES.format('layer sees')}{NORM}"
    assert plain.code == 0 and f"layers     {line}\n" in plain.out
    assert refused.code == 2
    assert refused.err.splitlines()[-1] == (
        f"dpframe: {line}; trainer.share_check=on trains all the same"
    )
    assert exact.code == 0 and "layers     " not in exact.out


# Random numbers of rows, of collates and of evaluations

MODULES_OWN = numpy.random.default_rng(0)
MIXES = {
    "torch": lambda data: torch.rand(()),
    "numpy": lambda data: numpy.random.beta(0.4, 0.4),
    "python": lambda data: random.random(),
    "its own": lambda data: data.draw.random(),
}


class Mixed(Rows):
    """Rows that are mixed with the batch turned by one, which the loss of a share can't know."""

    def __init__(self, by: str) -> None:
        super().__init__(20, 10)
        self.by, self.draw = by, numpy.random.default_rng(0)

    def collate(self, rows: Any) -> Any:
        x, y = super().collate(rows)
        share = MIXES[self.by](self)
        return [share * x + (1 - share) * x.roll(1, 0), y]


class Rough(Layers):
    """Noise in all that is evaluated."""

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return super().training_step([batch[0] + torch.randn_like(batch[0]), batch[1]])

    def test_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        return super().training_step([x + numpy.random.rand(), y])


class Unseeded(Rows):
    """Rows that draw from a generator of their module."""

    def train_dataset(self) -> Any:
        return Unseedable(self.train)

    def val_dataset(self) -> Any:
        return {"near": self.train_dataset(), "far": self.held_out}


class Unseedable(Dataset):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self) -> Any:
        return MODULES_OWN.random()

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows[row]
        return x + self.draw(), y


class Seeded(Rows):
    def train_dataset(self) -> Any:
        return Drawing(self.train)


class Drawing(Unseedable):
    def draw(self) -> Any:
        return torch.rand(())


CANT = "they draw from a generator that dpframe can't seed"
DRAWN: dict[str, tuple[Callable[[], Task], Callable[[], Rows], str]] = {
    **{
        f"a collate by {by}": (
            Layers,
            partial(Mixed, by),
            "collate (it draws for each replica's rows)",
        )
        for by in MIXES
    },
    "an evaluation": (Rough, Rows, "validation_step (randn_like)"),
    "rows by their module": (Layers, Unseeded, f"the rows ({CANT}), the rows of val near ({CANT})"),
}


def prepared(strategy: Strategy, case: str, check: str) -> Any:
    task, data, _ = DRAWN[case]
    try:
        made = trainer(task(), data(), strategy=strategy, share_check=check).prepare()
    except UserError as error:
        return str(error)
    return made.own, made.notes


@pytest.mark.parametrize("case", DRAWN)
@pytest.mark.parametrize("make", [TWO, partial(DDP, 2, "cpu")], ids=["data_parallel", "ddp"])
def test_what_draws_for_the_rows_of_a_replica_is_named_and_a_strict_check_ends_it(make, case):
    line = OWN + DRAWN[case][2]
    said, notes = on(make(), prepared, case, "on")
    assert said == line
    compared = "the share check has not compared the loss: its collate draws random numbers"
    assert (compared in notes) == ("collate" in case)
    assert on(make(), prepared, case, "strict") == (
        f"{line}; trainer.share_check=on trains all the same"
    )


def test_rows_that_draw_from_global_generators_are_not_named():
    assert own(Layers(), Seeded(), share_check="strict") == ""


def test_a_test_alone_says_that_its_step_draws(caplog):
    line = f"{OWN}test_step (Python's or NumPy's random numbers)"
    trainer(Rough(), strategy=TWO()).test()
    assert [each.getMessage() for each in caplog.records] == [line]
    with pytest.raises(UserError) as caught:
        trainer(Rough(), strategy=TWO(), share_check="strict").test()
    assert str(caught.value) == f"{line}; trainer.share_check=on evaluates all the same"


def notes(strategy: Strategy, check: str) -> Any:
    given: dict[str, Any] = {"precision": "bf16", "share_check": check}
    try:
        made = trainer(Layers(a=nn.Dropout(0.1)), strategy=strategy, **given).prepare()
    except UserError as error:
        return str(error)
    return made.notes


@pytest.mark.skipif(torch.__version__ < "2.13", reason="strategy=fsdp needs torch 2.13")
def test_fsdp_says_what_it_has_not_compared_and_a_strict_check_ends_it_all_the_same():
    rounding = FSDP(2, "cpu", param_dtype="bf16")
    why = "the share check has not compared the loss: strategy.param_dtype rounds the weights"
    assert why in on(rounding, notes, "on")
    line = (
        f"1 Dropout {SEES.format('layer sees')}{DROP}; what else a step has of each replica's own"
    )
    unknown = "is unknown: strategy.param_dtype rounds the weights"
    wanted = f"{line} {unknown}; trainer.share_check=on trains all the same"
    assert on(rounding, notes, "strict") == wanted


# What can't be computed at all is refused


def pictures(rows: int) -> DataModule:
    """2x4x4 numbers each, in batches of four."""
    x = torch.randn(rows, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    return Given(TensorDataset(x, x.sum((1, 2, 3))))


def convolved(*after: nn.Module) -> Task:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), *after, nn.Flatten(), nn.LazyLinear(1))
    net(torch.zeros(2, 2, 4, 4))
    return Small(net=net)


def normed_rows() -> Task:
    return convolved(nn.Flatten(), nn.BatchNorm1d(12))


ONE_ROW = "BatchNorm can't normalise one row, and {} has one; use "
OTHERS = "data.drop_last=true, or another data.batch_size"


def test_a_share_of_one_row_under_batch_norm_is_refused_before_the_first_step():
    of_a_share = ONE_ROW.format("a replica's share of a batch") + f"{NORM}, {OTHERS}"
    of_a_batch = ONE_ROW.format("a batch") + OTHERS
    for settings, rows, said in (
        ({}, 10, of_a_share),  # the last batch has two rows
        ({"strategy": DataParallel(4, "cpu")}, 8, of_a_share),
        ({"strategy": None}, 9, of_a_batch),
        ({"batch_norm": "global"}, 9, of_a_batch),
    ):
        with pytest.raises(UserError) as refused:
            own(normed_rows(), pictures(rows), **settings)
        assert str(refused.value) == said


def test_one_row_of_several_places_and_one_that_does_not_come_are_not_refused():
    own(convolved(nn.BatchNorm2d(3)), pictures(10))
    own(convolved(nn.BatchNorm2d(3)), pictures(9), strategy=None)
    own(normed_rows(), pictures(8))
    own(normed_rows(), pictures(10), limit_train_batches=2)
    own(normed_rows(), pictures(10), batch_norm="global")
    own(convolved(nn.Flatten(), nn.BatchNorm1d(12).eval()), pictures(9))
    fitted(normed_rows(), pictures(10), strategy=TWO(), batch_norm="global", max_epochs=1)


class Shards(ShardedStream):
    def shards(self) -> range:
        return range(4)

    def read(self, shard: int) -> Any:
        x, y = Rows(20).train.tensors
        return zip(x[shard * 5 :][:5], y[shard * 5 :][:5], strict=True)


class Divided(Rows):
    """Each rank has rows of its own."""

    def __init__(self, *, by_rank: bool) -> None:
        super().__init__(20, 10, val=False)
        self.divided = "by_rank" if by_rank else None
        self.divide_streams = not by_rank

    def train_dataset(self) -> Any:
        return self.train if self.divided else Shards()


def refusals(strategy: Strategy) -> list[str]:
    said = []
    for layer, key in ((nn.BatchNorm1d(8), "batch_norm"), (nn.Dropout(), "dropout")):
        for by_rank in (True, False):
            value = "row" if key == "dropout" else "global"
            with pytest.raises(UserError) as refused:
                own(Layers(a=layer), Divided(by_rank=by_rank), strategy=strategy, **{key: value})
            said.append(str(refused.value))
    own(Layers(a=nn.Dropout(0.0)), Divided(by_rank=True), strategy=strategy, batch_norm="global")
    whole = Rows(20, 10, val=False)
    whole.divide_streams = True  # which does nothing to rows that are no stream
    own(Layers(a=nn.Dropout()), whole, strategy=strategy, dropout="row")
    return said


def test_ranks_with_rows_of_their_own_have_no_exact_layers():
    keys = {"BatchNorm": NORM, "Dropout": DROP}
    assert on(DDP(2, "cpu"), refusals) == [
        f"{key} with {how}: which rows make a batch depends on the number of ranks, so no "
        f"{kind} can be the same on all; use {key.partition('=')[0]}=replica, or give all ranks "
        "the same data"
        for kind, key in keys.items()
        for how in ("data.divided=by_rank", "data.divide_streams=true")
    ]
