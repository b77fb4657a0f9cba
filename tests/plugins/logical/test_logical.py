"""trainer.logical_replicas: the same bits on 1, 2, 3 and 4 ranks, on virtual replicas, and after
resumes onto other counts."""

import io
import math
import os
import random
import re
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import cycle
from typing import Any

import injector
import pytest
import torch
import torchmetrics
from command import attempts
from forked import fresh, on
from recorded import Recorder, once
from small import SGD, Adam, Hooks, Listed, Rows, Small, Stream, fitted, is_same, trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpframe import ShardedStream, Strategy, Task, Trainer, UserError, checkpoint
from dpframe.callbacks.banner import banner
from dpframe.data import DataModule
from dpframe.data.module import mapped
from dpframe.plugins.logical.exact import Exact
from dpframe.plugins.logical.strategy import Logical
from dpframe.plugins.logical.sums import ExactSums
from dpframe.plugins.logical.tree import add_up, halves, parts, spans
from dpframe.strategies.collectives import Collectives
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU, SingleGPU
from dpframe.trainer.settings import TrainerSettings

COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20)
AdamW = partial(torch.optim.AdamW, lr=0.01)
Momentum = partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)
RMSprop = partial(torch.optim.RMSprop, lr=0.002)

# What is trained


class Images(Task):
    """Convolutions, BatchNorm over them, dropout."""

    def __init__(self, optimizer: Any = AdamW, scheduler: Any = None) -> None:
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten()
        super().__init__(nn.Sequential(*layers, nn.Linear(144, 3)), optimizer, scheduler)

    def training_step(self, batch: Any) -> dict[str, Any]:
        logits = self.net(batch[0])
        right = (logits.argmax(dim=1) == batch[1]).float().mean()
        return {"loss": nn.functional.cross_entropy(logits, batch[1]), "accuracy": right}

    def predict_step(self, batch: Any) -> Tensor:
        return self.net(batch[0]).softmax(dim=1)


class Words(Task):
    """An embedding, attention, LayerNorm, and a mean over tokens instead of rows."""

    def __init__(self, optimizer: Any = Adam, scheduler: Any = None) -> None:
        super().__init__(None, optimizer, scheduler)
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11)

    def training_step(self, batch: Any) -> dict[str, Any]:
        words, counts = batch
        mask = torch.arange(words.shape[1], device=words.device) < counts[:, None]
        logits = self.head(self.block(self.embedding(words), src_key_padding_mask=~mask))
        losses = nn.functional.cross_entropy(logits[mask], words[mask], reduction="sum")
        return {"loss": losses / counts.sum(), "weight": counts.sum().double() / 7}

    def predict_step(self, batch: Any) -> Tensor:
        return self.head(self.block(self.embedding(batch[0])))


class Branches(Small):
    """Some shares leave out some weights, all of them another, which the optimizer has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extra, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def training_step(self, batch: Any) -> dict[str, Any]:
        output = super().training_step(batch)
        if batch[0][0, 0] > 0:
            output["loss"] = output["loss"] + self.extra(batch[0]).square().mean()
        return output


class Turns(Small):
    """Two optimizers in turn."""

    def __init__(self) -> None:
        super().__init__(None)
        self.other = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def configure_optimizer(self) -> Any:
        return {"net": Adam(self.net.parameters()), "other": SGD(self.other.parameters())}

    def training_step(self, batch: Any, turn: str) -> dict[str, Any]:
        x, y = batch
        net = self.net if turn == "net" else self.other
        return {"loss": (net(x)[:, 0] + torch.rand_like(y) - y).square().mean()}

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": (self.net(batch[0])[:, 0] - batch[1]).square().mean()}


class Bursts(Small):
    """The loss of the rows of one batch is NaN."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        output = super().training_step(batch)
        output["loss"] = torch.where(batch[1].min() < -3, math.nan, output["loss"])
        return output


class Turned(Small):
    """Buffers of other kinds: a complex one that changes, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(3).bool())

    def training_step(self, batch: Any) -> dict[str, Any]:
        if self.training:
            self.turn += torch.complex(batch[0].mean(), batch[1].mean())
        return super().training_step([batch[0] * self.mask, batch[1]])


class Thaws(Small):
    def on_epoch_start(self, trainer: Trainer) -> None:
        self.net[0].requires_grad_(trainer.epoch > 0)


class Shaken(Small):
    """Draws outside of shares: at the start of an epoch and of a batch, and before an update."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        if trainer.progress.batches_done == 0:  # else it is resumed within the epoch
            self._shake(0.1)

    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        self._shake(0.01)

    def on_before_step(self, trainer: Trainer) -> None:
        self._shake(0.001)

    @torch.no_grad()
    def _shake(self, size: float) -> None:
        for weight in self.parameters():
            weight += size * torch.randn_like(weight)


class Apart(Small):
    """Each rank would begin with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.net[0].weight, std=1 + int(os.environ.get("RANK", 0)))


class FreezesApart(Small):
    def on_epoch_start(self, trainer: Trainer) -> None:
        self.net[0].requires_grad_(trainer.strategy.rank == 0)


class Norms(Small):
    """BatchNorm before a dropout; its buffers are part of what is compared."""

    def __init__(self, optimizer: Any = SGD, scheduler: Any = None, width: int = 8) -> None:
        super().__init__(optimizer, scheduler, width=width)
        layers = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2)
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))


class Judged(Norms):
    """Holds metrics whose states are sums of floats, lists, and what both are not."""

    def __init__(self, optimizer: Any = SGD) -> None:
        super().__init__(optimizer)
        self.squares = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()
        several = torchmetrics.AUROC("binary"), torchmetrics.AveragePrecision("binary")
        self.several = torchmetrics.MetricCollection(list(several))

    def training_step(self, batch: Any) -> dict[str, Any]:
        scores, y = self.net(batch[0])[:, 0], batch[1]
        self.squares.update(scores, y)
        self.largest.update(scores)
        if y[0] > 0:  # some shares leave it out
            self.mean.update(y.exp())
        self.several.update(scores.sigmoid(), (y > 0).long())
        return {"loss": (scores - y).square().mean()}


class Pictures(Rows):
    def __init__(self, rows: int = 40, batch_size: int = 16) -> None:
        super().__init__(rows, batch_size)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(2 * rows, 1, 8, 8, generator=generator)
        y = torch.randint(3, (2 * rows,), generator=generator)
        self.train, self.held_out = (
            TensorDataset(x[:rows], y[:rows]),
            TensorDataset(x[rows:], y[rows:]),
        )


class Text(Rows):
    def __init__(self, rows: int = 30, batch_size: int = 7) -> None:
        super().__init__(rows, batch_size)
        generator = torch.Generator().manual_seed(6)
        words = torch.randint(11, (rows, 6), generator=generator)
        counts = torch.randint(1, 7, (rows,), generator=generator)
        self.train = self.held_out = TensorDataset(words, counts)


class Augmented(Rows):
    """Rows that are read one by one, with noise; and a collate that draws, too."""

    def __init__(self, workers: int = 0, kind: Any = Listed) -> None:
        super().__init__(20, 9)
        self.workers, self.kind = workers, kind

    def train_dataset(self) -> Any:
        return self.kind(Noisy(self.train))

    def collate(self, rows: list) -> Any:
        x, y = super().collate(rows)
        return x + torch.rand(()), y


class Noisy:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows[row]
        return x + random.random() * torch.randn(3), y


# Each is (task, data, settings)
Case = tuple[Callable[[], Task], Callable[[], DataModule], dict[str, Any]]
CASES: dict[str, Case] = {
    "dropout": (partial(Small, dropout=0.3), partial(Rows, 37, 9), {}),
    "all at once": (
        partial(Norms, Adam, COSINE),
        partial(Rows, 90, 26),
        {"accumulate": 3, "clip_norm": 0.5, "scheduler_every": "step", "log_every": 1},
    ),
    "images": (Images, Pictures, {"clip_value": 0.01}),
    "images in channels_last": (Images, Pictures, {"channels_last": True}),
    "words": (Words, Text, {"accumulate": 2, "precision": "64"}),
    "words in bf16": (Words, Text, {"precision": "bf16", "clip_norm": 1.0}),
    "weights in bf16": (
        partial(Norms, Momentum),
        partial(Rows, 32, 16),
        {"precision": "bf16-true"},
    ),
    "few rows": (partial(Small, Momentum, dropout=0.3), partial(Rows, 14, 3), {}),
    "float64": (partial(Norms, AdamW), partial(Rows, 50, 17), {"precision": "64"}),
    "branches": (partial(Branches, AdamW), partial(Rows, 30, 5), {}),
    "turns": (Turns, partial(Rows, 30, 10), {"accumulate": 2}),
    "LBFGS": (partial(Small, partial(torch.optim.LBFGS, max_iter=3)), partial(Rows, 30, 11), {}),
    "bursts": (Bursts, partial(Rows, 60, 5), {"on_nonfinite": "skip", "accumulate": 2}),
    "turned": (Turned, partial(Rows, 30, 10), {}),
    "thaws": (partial(Thaws, Adam), partial(Rows, 30, 10), {}),
    "checkpointed": (
        partial(Small, dropout=0.3),
        partial(Rows, 30, 10),
        {"checkpoint_activations": "net.0"},
    ),
    "shaken": (partial(Shaken, dropout=0.3), partial(Rows, 30, 10), {"accumulate": 2}),
    "weights apart": (Apart, partial(Rows, 30, 10), {}),
    "augmented": (Small, Augmented, {}),
    "a stream": (Small, partial(Augmented, kind=Stream), {}),
    "torchmetrics": (Judged, partial(Rows, 64, 16), {"accumulate": 3}),
}


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    kinds = (partial(Small, dropout=0.3), Rows), (Branches, Rows), (Images, Pictures), (Words, Text)
    task, data = draw.choice(kinds)
    optimizer = draw.choice((SGD, Momentum, Adam, AdamW, RMSprop))
    settings = {
        "accumulate": draw.randint(1, 4),
        "clip_norm": draw.choice((None, 0.3)),
        "clip_value": draw.choice((None, 0.01)),
        "precision": draw.choice(("32", "64", "bf16")),
        "scheduler_every": draw.choice(("step", "epoch")),
        "log_every": draw.randint(1, 3),
        "logical_replicas": draw.randint(4, 12),
    }
    sizes = draw.randint(1, 40), draw.randint(1, 20)
    return partial(task, optimizer, draw.choice((None, COSINE))), partial(data, *sizes), settings


CASES |= {f"drawn {seed}": drawn(seed) for seed in range(6)}


def result(strategy: Strategy, case: Case, **options: Any) -> dict[str, Any]:
    """All that must be the same."""
    make, data, settings = case
    recorder = Recorder()
    made = trainer(
        data=data(),
        make=make,
        strategy=strategy,
        loggers=[recorder],
        **{"logical_replicas": 8, "log_every": 2, **settings, **options},
    )
    made.fit()
    predictions = made.predict()
    return {
        "task": raw(made.task.state_dict()),
        "optimizers": raw([u.optimizer.state_dict() for u in made.updates.values()]),
        "metrics": made.metrics,
        "log": recorder.log_,
        "predictions": predictions and raw(predictions.joined()),
    }


def raw(nest: Any) -> Any:
    """The bytes of its tensors: -0.0 and 0.0 would pass for equal."""
    return mapped(
        lambda leaf: (
            bytes(leaf.contiguous().view(-1).view(torch.uint8).tolist())
            if isinstance(leaf, Tensor)
            else leaf
        ),
        nest,
    )


def results(
    strategy: Strategy, names: list[str], states: bytes | None = None
) -> dict[str, dict[str, Any]]:
    """Of these cases; and those of ELASTIC go on from these states."""
    ended = {name: result(strategy, CASES[name]) for name in names}
    before = loaded(states) if states else dict.fromkeys(ELASTIC)
    return ended | {"elastic": gone_on(strategy, before)}


def by_ranks(strategy: Strategy, *given: Any) -> dict[str, Any]:
    try:
        trainer(make=FreezesApart, strategy=strategy, logical_replicas=8).fit()
    except UserError as error:  # in all ranks: they go on together
        return results(strategy, *given) | {"refusal": str(error)}
    raise AssertionError("it trained")


@once
def of_ranks(count: int) -> dict[str, Any]:
    """In one group of ranks, which takes seconds to start. What is elastic goes on from count to
    count."""
    before = {2: lambda: None, 3: lambda: of_ranks(2), 4: lambda: of_one()}[count]()
    names = [name for ranks, name in ON_RANKS if ranks == count]
    return on(DDP(count, "cpu"), by_ranks, names, before and before["elastic"])


@once
def of_one() -> dict[str, Any]:
    return results(CPU(), list(CASES), of_ranks(3)["elastic"])


# The same bits

# 3 ranks have several nodes of the tree each; 2 and 4 have one, and take turns with some.
OTHERS = zip(cycle([2, 4]), list(CASES)[::2])
ON_RANKS = [(3, name) for name in CASES] + list(OTHERS)


@pytest.mark.parametrize(("ranks", "name"), ON_RANKS)
def test_ranks_have_the_bits_of_one_process(ranks, name):
    mine, wanted = of_ranks(ranks)[name], of_one()[name]
    for part in wanted:
        assert is_same(mine[part], wanted[part]), part


@pytest.mark.parametrize(("replicas", "name"), list(zip(cycle([2, 3, 4]), list(CASES)[::3])))
def test_virtual_replicas_have_the_bits_of_one_process(replicas, name):
    strategy = DataParallel(replicas, "cpu")
    assert is_same(result(strategy, CASES[name]), of_one()[name])


def test_without_it_the_bits_differ():
    """Else the tests above would compare what nothing could tell apart."""
    case = CASES["few rows"][0], CASES["float64"][1], {}
    runs = [result(kind, case, logical_replicas=None) for kind in (CPU(), DataParallel(3, "cpu"))]
    assert not is_same(runs[0]["task"], runs[1]["task"])


def test_weights_that_no_share_uses_stay_as_they_were():
    """A gradient of 0 would have AdamW shrink them."""
    made = trainer(make=partial(Branches, AdamW), logical_replicas=8)
    before = deepcopy(made.task.state_dict())
    made.fit()
    after = made.task.state_dict()
    assert is_same(before["unused.weight"], after["unused.weight"])
    assert not is_same(before["extra.weight"], after["extra.weight"])


class Halved(torchmetrics.Metric):
    """It forgets half of what it has seen with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, y: Tensor) -> None:
        self.kept = self.kept / 2 + y.exp().mean()

    def compute(self) -> Tensor:
        return self.kept


class Forgets(Turned):
    def __init__(self) -> None:
        super().__init__()
        self.halved = Halved()

    def training_step(self, batch: Any) -> dict[str, Any]:
        self.halved.update(batch[1])
        return super().training_step(batch)


def test_buffers_and_metrics_of_every_kind_become_what_a_step_makes_of_them():
    ended = [fitted(make=Forgets, logical_replicas=count) for count in (1, None)]
    one, other = (made.metrics["train/halved"] for made in ended)
    assert one == pytest.approx(other)
    logical, plain = (made.task.state_dict() for made in ended)
    assert plain["turn"].imag.abs().min() > 0
    for name in plain:
        torch.testing.assert_close(logical[name], plain[name])


# Replicas that come and go

STOPS = [3, 7, 10, math.inf]  # the steps after which 2 ranks, then 3, then 1, then 4 end
ELASTIC: dict[str, Case] = {
    "all at once": (
        partial(Norms, Adam, COSINE),
        partial(Rows, 90, 26),
        {"clip_norm": 0.5, "scheduler_every": "step", "max_epochs": 3},
    ),
    "augmented": (partial(Small, Momentum), Augmented, {"max_epochs": 5}),
    "shaken": (partial(Shaken, Momentum), partial(Rows, 30, 8), {"max_epochs": 3}),
    "torchmetrics": (Judged, partial(Rows, 64, 16), {"max_epochs": 3}),
    "a stream": (partial(Small, Momentum), partial(Augmented, kind=Stream), {"max_epochs": 5}),
}


def gone_on(strategy: Strategy, states: dict[str, Any]) -> bytes:
    """As a file would hold them."""
    ended = {n: until_its_stop(strategy, ELASTIC[n], state) for n, state in states.items()}
    torch.save(ended, file := io.BytesIO())
    return file.getvalue()


def copied(nest: Any) -> Any:
    """In the memory of the host."""
    return mapped(
        lambda leaf: leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, nest
    )


def loaded(states: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(states))


def until_its_stop(strategy: Strategy, case: Case, state: Any) -> dict[str, Any]:
    """The state at the next of the stops."""
    taken = []
    start = state["progress"]["global_step"] if state else 0
    stop = next(stop for stop in STOPS if stop > start)

    def take(made: Trainer) -> None:
        if made.global_step == stop:
            taken.append(copied(made.state_dict()))
            made.stop("it is enough")

    make, data, settings = case
    hooks = Hooks(on_step_end=take)
    options = {"logical_replicas": 8, "log_every": 2, **settings}
    made = trainer(data=data(), make=make, strategy=strategy, callbacks=[hooks], **options)
    made.fit(state)
    assert bool(taken) == math.isfinite(stop)
    return taken[0] if taken else copied(made.state_dict())


@pytest.mark.parametrize("name", ELASTIC)
def test_a_run_that_goes_on_on_other_counts_has_the_bits_of_the_uninterrupted_one(name):
    make, data, settings = ELASTIC[name]
    options = {"logical_replicas": 8, "log_every": 2, **settings}
    made = trainer(data=data(), make=make, strategy=CPU(), **options)
    made.fit()
    whole, ended = made.state_dict(), loaded(of_ranks(4)["elastic"])[name]
    assert whole["progress"]["global_step"] > STOPS[-2]
    for part in ("task", "optimizer", "scheduler", "metrics"):
        assert is_same(ended[part], whole[part]), part


def test_metrics_of_torchmetrics_are_those_of_all_rows():
    metrics = of_one()["torchmetrics"]["metrics"]
    for kind in ("train", "val"):
        assert metrics[f"{kind}/squares"] == pytest.approx(metrics[f"{kind}/loss"], rel=1e-6)
        assert 0.5 < metrics[f"{kind}/BinaryAUROC"] < 1


# The tree


def test_a_process_has_contiguous_shares_and_the_largest_nodes_of_these():
    assert spans(8, 3) == [(0, 2), (2, 5), (5, 8)]
    assert [parts((0, 8), *span) for span in spans(8, 3)] == [
        [(0, 2)],
        [(2, 4), (4, 5)],
        [(5, 6), (6, 8)],
    ]
    assert halves((0, 6)) == ((0, 4), (4, 6))
    for count in range(1, 20):
        for processes in range(1, count + 1):
            nodes = [node for span in spans(count, processes) for node in parts((0, count), *span)]
            assert [share for node in nodes for share in range(*node)] == list(range(count))


def test_the_sum_of_shares_does_not_depend_on_who_adds_up_which():
    generator = torch.Generator().manual_seed(1)
    leaves = torch.randn(13, 5, generator=generator) * torch.logspace(-6, 6, 13)[:, None]
    sums = set()
    for processes in range(1, 14):
        nodes = {
            node: add_up(node, lambda at: ... if at[1] - at[0] > 1 else [leaves[at[0]].clone()])
            for span in spans(13, processes)
            for node in parts((0, 13), *span)
        }
        (total,) = add_up((0, 13), lambda at, nodes=nodes: nodes.get(at, ...))
        sums.add(tuple(total.tolist()))
    assert len(sums) == 1
    assert sums != {tuple(sum(leaves).tolist())}  # one after the other rounds in another way


def test_of_sums_only_as_many_are_kept_as_the_tree_is_deep():
    alive, most = weakref.WeakSet(), 0

    def give(at: Any) -> Any:
        nonlocal most
        if at[1] - at[0] > 1:
            return ...
        alive.add(leaf := torch.ones(1))
        most = max(most, len(alive))
        return [leaf]

    assert add_up((0, 64), give)[0].item() == 64
    assert most == 7


# Means


def test_totals_are_rounded_once_whatever_the_order():
    numbers = [1e300, 1.0, -1e300, 1e-300, 0.1, -5e-324, 3.0]
    for seed in range(5):
        random.Random(seed).shuffle(numbers)
        split = [sum(map(Exact.of, part), start=Exact()) for part in (numbers[:3], numbers[3:])]
        rows = [one + other for one, other in zip(*(s.spread() for s in split), strict=True)]
        assert float(Exact.join(iter(rows))) == math.fsum(numbers) == 4.1
    assert ExactSums().of_columns([numbers, []], lambda sums: sums) == [4.1, 0.0]


@pytest.mark.parametrize("number", [0.0, -2.5, 5e-324, -1.7e308, math.inf, math.nan])
def test_an_exact_sum_is_saved_and_sent_as_floats(number):
    one = Exact.of(number)
    for again in (Exact.sum(one.floats()), Exact.join(iter(one.spread()))):
        assert float(again) == number or math.isnan(float(again)) == math.isnan(number)
    assert float(Exact.of(1.7e308) + 1.7e308) == math.inf


# The threads of a share


def test_a_share_is_computed_by_one_thread_unless_a_number_is_given():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    for threads, wanted in ((None, 1), (2, 2)):
        torch.set_num_threads(2)
        trainer(make=partial(Small, width=20_000), logical_replicas=8, threads=threads)
        assert torch.get_num_threads() == wanted
    torch.set_num_threads(before)


# What it is told, and what is refused


def test_the_banner_tells_what_has_the_same_bits():
    made = trainer(logical_replicas=8)
    made.prepare()
    assert "\nbits       the same on 1 to 8 replicas: 8 shares of each batch\n" in banner(made)
    plain = trainer()
    plain.prepare()
    assert "bits" not in banner(plain) and type(plain.strategy) is CPU


def test_the_rows_of_a_share_draw_by_the_share_whoever_reads_them():
    assert is_same(result(CPU(), (Small, partial(Augmented, workers=2), {})), of_one()["augmented"])


class Own(DDP):
    """Adds up gradients in a way of its own, for all that is known."""


class Gathers(Small):
    def training_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.all_gather(self.net(batch[0])).square().mean()}


class Sparse(Words):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=True)


class Complex(Small):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Divided(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.divide_streams = True

    def train_dataset(self) -> Any:
        return Shards()


class Shards(ShardedStream):
    def shards(self) -> list[int]:
        return [0, 1]

    def read(self, shard: int) -> list[Any]:
        return []


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"strategy": Own(1, "cpu")},
            "=8 but Own shares gradients in its own way; use strategy=cpu",
        ),
        ({"strategy": DataParallel(9, "cpu")}, "=8 but there are 9 replicas, of which each needs "),
        ({"make": Gathers}, "self.all_gather can't be combined with trainer.logical_replicas=8"),
        (
            {"make": Complex},
            "=8 can't add up the gradients of complex weights; use trainer.logical",
        ),
        ({"make": Sparse}, "logical_replicas=8 can't add up sparse gradients; use nn.Embedding"),
        ({"data": Divided()}, "divide_streams=true with trainer.logical_replicas: which rows meet"),
        (
            {"make": Norms, "data": Rows(9, 9)},
            "a batch of 9 rows has a logical share of 1, and BatchNorm needs 2; use data.drop_last",
        ),
    ],
)
def test_what_can_not_have_the_same_bits_is_refused_in_one_line(options, said, no_group):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        trainer(logical_replicas=8, **options).fit()
    assert "\n" not in str(raised.value)


def test_ranks_that_freeze_other_weights_are_refused_in_one_line():
    assert of_ranks(2)["refusal"] == (
        "net.0.weight is trained on 1 of 2 ranks and frozen on the others; set requires_grad on "
        "all ranks at the same step, e.g. by trainer.global_step"
    )


class TwoModels(Collectives):
    """As one of two ranks would have it, on machines of two kinds."""

    def gather(self, value: str) -> list[str]:
        return [value, "NVIDIA H100"]


def test_ranks_on_devices_of_two_models_are_refused_in_one_line():
    said = r"trainer.logical_replicas=8 but rank 0 computes on .+ and rank 1 on NVIDIA H100, which"
    strategy = CPU()
    strategy.world_size = strategy.replicas = 2
    strategy.collectives = TwoModels()
    with pytest.raises(UserError, match=said):
        Logical(strategy, 8, seed=0)


@pytest.fixture
def no_group(monkeypatch):
    """A strategy of ranks counts as set up."""
    monkeypatch.setattr(Own, "is_set_up", True)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"precision": "fp16"}, "trainer.precision=fp16 with trainer.logical_replicas=8: each "),
        ({"compile": "reduce-overhead"}, "trainer.compile.mode=reduce-overhead with trainer.log"),
        ({"cudnn_benchmark": True}, "trainer.cudnn_benchmark=true with trainer.logical_replicas=8"),
        ({"exact_layers": True}, "trainer.batch_norm=global with trainer.logical_replicas=8"),
        ({"micro_batch": 2}, "trainer.micro_batch=2 with trainer.logical_replicas=8: each"),
        ({"logical_replicas": 0}, "trainer.logical_replicas=0 is out of range; use 1 or more"),
    ],
)
def test_settings_that_go_without_the_same_bits_are_refused(settings, said):
    with pytest.raises(UserError, match=re.escape(said)):
        TrainerSettings(**{"logical_replicas": 8, **settings})


def test_a_checkpoint_goes_on_with_the_same_shares_alone(tmp_path):
    state = trainer(logical_replicas=8)
    state.fit()
    for key, value in (("logical_replicas", 4), ("threads", 2)):
        options = {"logical_replicas": 8, "max_epochs": 3, key: value}
        with pytest.raises(UserError, match=f"trainer.{key}=[18] there, {value} here"):
            trainer(**options).fit(state.state_dict())


def test_a_strategy_is_closed_by_the_trainer_that_has_set_it_up():
    strategy = CPU()
    with trainer(strategy=strategy, logical_replicas=2) as made:
        assert strategy.is_set_up and made.strategy.is_set_up
    assert not strategy.is_set_up


def test_negative_zero_is_zero_whether_others_give_nothing_or_zeros():
    within = CPU()
    with within:
        logical = Logical(within, 2, seed=0)
        own = logical.own_sums(lambda share: None if share else [torch.tensor([-0.0, 1.0])])
        (total,) = logical.total(own, list)
        assert total.signbit().tolist() == [False, False]


# On GPUs

ON_GPUS = ["all at once", "images in channels_last", "words in bf16"]
ELASTIC_ON_GPUS = "all at once"
GPUS = [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (1, 3)]


@once
def of_gpus(count: int) -> dict[str, Any]:
    """On ranks; on 0 GPUs: on the first one, in one process."""
    if not count:
        return fresh(of_one_gpu)
    return on(DDP(count, "cuda"), results, ON_GPUS, of_gpus(0)["elastic"])


def of_one_gpu() -> dict[str, Any]:
    strategy = SingleGPU(accelerator="cuda")
    with strategy:
        before = gone_on(strategy, {ELASTIC_ON_GPUS: None})
        goes_on = gone_on(strategy, loaded(before))
        ended = {name: result(strategy, CASES[name]) for name in ON_GPUS}
    return ended | {"elastic": before, "gone on": goes_on}


@pytest.mark.parametrize("gpus", GPUS)
def test_ranks_on_gpus_have_the_bits_of_one_gpu(gpus):
    for name in ON_GPUS:
        assert is_same(of_gpus(gpus)[name], of_gpus(0)[name]), name


@pytest.mark.parametrize("gpus", GPUS)
def test_a_run_that_goes_on_on_another_number_of_gpus_has_the_bits_of_one_gpu(gpus):
    mine, wanted = loaded(of_gpus(gpus)["elastic"]), loaded(of_gpus(0)["gone on"])
    for part in ("task", "optimizer", "scheduler", "metrics"):
        assert is_same(mine[ELASTIC_ON_GPUS][part], wanted[ELASTIC_ON_GPUS][part]), part


@pytest.mark.gpu(2)
def test_copies_on_several_gpus_are_refused_in_one_line():
    assert "DataParallel computes on copies of the task on 2 devices; use" in fresh(refusal)


def refusal() -> str:
    with pytest.raises(UserError) as raised:
        trainer(strategy=DataParallel(2, "cuda"), logical_replicas=8)
    return str(raised.value)


# From the command line


def test_a_command_goes_on_on_another_count_with_the_same_bits(tmp_path):
    shared = "recipe=boston trainer.logical_replicas=8 data.batch_size=50 trainer.accelerator=cpu"
    on_three = "strategy=data_parallel trainer.gpus=3"
    lines = [
        f"{shared} trainer.max_steps=12 hydra.run.dir=whole",
        f"{shared} trainer.max_steps=5 hydra.run.dir=parts {on_three}",
        "resume=parts trainer.max_steps=12 strategy=cpu trainer.gpus=null",
        "resume=parts trainer.max_steps=14 trainer.logical_replicas=4",
    ]
    *done, refused = attempts([line.split() for line in lines], tmp_path)
    assert [attempt.code for attempt in done] == [0, 0, 0], done[-1].err
    assert "bits       the same on 1 to 8 replicas: 8 shares of each batch" in done[0].out
    files = (tmp_path / run / "checkpoints/last.ckpt" for run in ("whole", "parts"))
    whole, parts = map(checkpoint.load, files)
    assert is_same(whole["task"], parts["task"]) and is_same(whole["metrics"], parts["metrics"])
    assert refused.code == 2 and "trainer.logical_replicas=8 there, 4 here" in refused.err


def test_a_job_that_restarts_itself_ends_with_the_bits_of_one_process(tmp_path, undisturbed):
    shares = "trainer.logical_replicas=4"
    options = ["strategy=ddp", "trainer.gpus=3", "trainer.max_restarts=1", "logger=none"]
    saves = "callbacks.checkpoint.every_n_steps=3"
    killed = injector.fail_at(2, 20, "kill", after="run/checkpoints/last.ckpt")
    done = injector.run(tmp_path, *options, shares, saves, **killed)
    assert done.returncode == 0, done.stderr
    assert "\nrestart 1 of 1 from run/checkpoints/" in done.stderr
    assert is_same(injector.weights(tmp_path), undisturbed("strategy=cpu", shares))
