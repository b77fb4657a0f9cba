"""A step gets rows of its replica's share, and is not called where there is none."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import fresh, on
from recorded import once, weights, weights_apart
from small import Given, Hooks, Listed, Rows, Small, Stream, fitted, is_same, trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpframe import DataModule, Strategy, Task, Trainer, UserError
from dpframe.strategies.data_parallel import SEAT, DataParallel, Meeting
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU

EXACT = 1e-12
# How rows are read, and by batches of which sizes: they are split alike, however they are read.
KINDS: dict[str, tuple[Any, int, tuple[int, ...]]] = {
    "tensors": (TensorDataset, 0, (1, 2, 3, 5)),
    "rows": (Listed, 0, (1,)),
    "workers": (Listed, 1, (3,)),
    "stream": (Stream, 0, (1, 3)),
}

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


def seen_on(strategy: Strategy) -> dict[Any, Any]:
    """By the kind of data and the size of a batch: the rows that all processes' steps saw."""
    results = {}
    for kind, (made, workers, sizes) in KINDS.items():
        for size in sizes:
            rows = partial(made, torch.arange(11.0))
            data = Given(rows, rows, size, workers, shuffle=False)
            one = fitted(make=Sees, data=data, strategy=strategy, precision="64")
            one.predict()
            everywhere = strategy.collectives.gather((one.task.seen, weights(one.task)))
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


def table() -> TensorDataset:
    """9 rows; of each four in a row the second half is below 0."""
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
    "bucket copies": (Used, {"gradient_as_bucket_view": False}),
}
WAYS = [("plain", size, accumulate) for size in (1, 3, 4) for accumulate in (1, 3)]
WAYS += [(name, *way) for name in TRAINED if name != "plain" for way in ((1, 3), (3, 1), (4, 3))]


def trained_on(strategy: Strategy) -> dict[Any, Any]:
    results = {}
    for name, size, accumulate in WAYS:
        task, options = TRAINED[name]
        if isinstance(strategy, DDP):
            strategy.options = DDP(**options).options
        one = fitted(
            make=task,
            data=Given(table, None, size, shuffle=False),
            strategy=strategy,
            accumulate=accumulate,
            log_every=1,
            precision="64",
            max_epochs=2,
            on_nonfinite="skip" if name == "plain" else "stop",
        )
        results[name, size, accumulate] = strategy.collectives.gather(
            (weights(one.task), one.metrics)
        )
    return results


@once
def trained(place: str) -> dict[Any, Any]:
    return on(CPU() if place == "cpu" else DDP(4, "cpu"), trained_on)


@pytest.mark.parametrize(("name", "size", "accumulate"), WAYS)
def test_ranks_without_a_row_train_as_one_process_does(name, size, accumulate):
    [(wanted, metrics)] = trained("cpu")[name, size, accumulate]
    for mine, reported in trained("ddp")[name, size, accumulate]:
        assert weights_apart(mine, wanted) <= EXACT
        assert reported == pytest.approx(metrics, rel=EXACT)


# Rows of other replicas


class Pairs(Task):
    """Symmetric cross entropy of this share's rows against all rows, as CLIP has it. Some numbers
    are drawn, some rows come twice, and the scale is learnt."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4))
        self.other = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y, number = batch
        with torch.no_grad():  # for this gather alone
            numbers = self.all_gather(number)
        mine, other = self.net(x), self.other(y)
        twice = self.all_gather(torch.stack([mine, other], 1).reshape(-1, 4))
        target = (numbers[None] == number[:, None]).int().argmax(1)
        return contrasted(mine, other, twice[::2], twice[1::2], target, self.scale)

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def contrasted(
    mine: Tensor, other: Tensor, all_mine: Tensor, all_other: Tensor, target: Tensor, scale: Tensor
) -> dict[str, Tensor]:
    there = nn.functional.cross_entropy(scale * mine @ all_other.T, target)
    back = nn.functional.cross_entropy(scale * other @ all_mine.T, target)
    return {"loss": (there + back) / 2}


class Heavy(Pairs):
    """Its mean is over weights, of which some shares have none, and shares one weight with all."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y, number = batch
        mine, all_other = self.net(x), self.all_gather(self.other(y))
        weight = (number % 9 > 1).to(x.dtype)
        losses = (mine @ all_other.T * self.scale).logsumexp(1) * weight
        return {"loss": losses.sum() / weight.sum(), "weight": weight.sum()}


PAIRS = 17


def columns() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(PAIRS, 3, generator=draw) for _ in "xy")
    return TensorDataset(x, y, torch.arange(PAIRS))


def of_columns(size: int, **options: Any) -> DataModule:
    return Given(columns(), TensorDataset(*columns()[:7]), size, **options)


def by_hand(task: type[Pairs], size: int, accumulate: int) -> tuple[dict[str, Any], list[float]]:
    """Torch alone, a batch at a time; and the loss of each epoch, and of the validation."""
    torch.manual_seed(0)
    net = task().double()
    optimizer = net.configure_optimizer()
    given = [c.double() if c.is_floating_point() else c for c in columns().tensors]

    def loss_of(rows: Tensor) -> tuple[Tensor, float]:
        x, y, number = (column[rows] for column in given)
        mine, other = net.net(x), net.other(y)
        if task is Pairs:
            target = torch.arange(len(rows))
            return contrasted(mine, other, mine, other, target, net.scale)["loss"], len(rows)
        weight = (number % 9 > 1).double()
        losses = (mine @ other.T * net.scale).logsumexp(1) * weight
        return losses.sum(), float(weight.sum())

    def mean_of(batches: list[Tensor]) -> Tensor:
        parts = [loss_of(rows) for rows in batches]
        whole = sum(weight for _, weight in parts)
        return sum(loss * (weight if task is Pairs else 1) for loss, weight in parts) / whole

    batches = list(torch.arange(PAIRS).split(size))
    for _ in range(2):
        for start in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            mean_of(batches[start : start + accumulate]).backward()
            optimizer.step()
    return weights(net), [mean_of(list(torch.arange(7).split(size))).item()]


GATHERED = [(size, accumulate) for size in (5, 8) for accumulate in (1, 3)]


def gathered_on(strategy: Strategy) -> dict[Any, Any]:
    results = {}
    for task in (Pairs, Heavy):
        for size, accumulate in GATHERED:
            one = fitted(
                make=task,
                data=of_columns(size, shuffle=False),
                strategy=strategy,
                accumulate=accumulate,
                precision="64",
            )
            state = weights(one.task), [one.metrics["val/loss"]]
            results[task, size, accumulate] = strategy.collectives.gather(state)
    return results


PLACES = {"cpu": CPU(), **{f"ddp-{n}": DDP(n, "cpu") for n in (2, 4)}}
PLACES |= {f"data_parallel-{n}": DataParallel(n, "cpu") for n in (2, 3, 4)}


@once
def gathered(place: str) -> dict[Any, Any]:
    return on_four_ranks()["gathered"] if place == "ddp-4" else on(PLACES[place], gathered_on)


@pytest.mark.parametrize(("size", "accumulate"), GATHERED)
@pytest.mark.parametrize("task", [Pairs, Heavy])
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_over_the_rows_of_all_replicas_is_the_one_of_one_process(
    place, task, size, accumulate
):
    wanted, numbers = by_hand(task, size, accumulate)
    for mine, reported in gathered(place)[task, size, accumulate]:
        assert weights_apart(mine, wanted) <= EXACT
        assert reported == pytest.approx(numbers, rel=EXACT)


class Gathers(Small):
    """Calls `gather` in each of its steps."""

    def __init__(self, gather: Any) -> None:
        super().__init__()
        self.gather = gather
        self.seen: list[int] = []

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.gather(self, batch[0])
        return super().training_step(batch)


def first_only(task: Any, x: Tensor) -> None:
    task.seen.append(len(x))  # a list is the same one for all replicas
    if len(task.seen) == 1:
        task.all_gather(x)


def but_first(task: Any, x: Tensor) -> None:
    task.seen.append(len(x))
    if len(task.seen) > 1:
        task.all_gather(x)


ALONE = (
    "has ended its step without the self.all_gather, or the BatchNorm of "
    "trainer.batch_norm=global, in which another replica waits; call it equally often on all "
    "replicas, whatever their rows"
)
REFUSED = {
    "a list": (
        lambda task, x: task.all_gather([x]),
        "Gathers.all_gather got a list; pass a tensor",
    ),
    "no rows": (
        lambda task, x: task.all_gather(x.sum()),
        "got a tensor of shape () for a share of 2",
    ),
    "some rows": (
        lambda task, x: task.all_gather(x[1:]),
        "got a tensor of shape (1, 3) for a share",
    ),
    "none of them": (lambda task, x: task.all_gather(x[:0]), "got a tensor of shape (0, 3) for a"),
    "the first alone": (first_only, f"replica 1 {ALONE}"),
    "all but the first": (but_first, f"replica 0 {ALONE}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_can_not_be_gathered_are_refused(name):
    gather, line = REFUSED[name]
    with pytest.raises(UserError) as caught:
        fitted(Gathers(gather), strategy=DataParallel(2, "cpu"))
    assert line in str(caught.value)


def test_a_strategy_of_several_replicas_that_can_not_gather_says_so():
    class Plain(DataParallel):
        gather_rows = Strategy.gather_rows

    with pytest.raises(UserError) as caught:
        fitted(Gathers(Task.all_gather), strategy=Plain(3, "cpu"))
    assert str(caught.value) == (
        "Plain can't gather the rows of its 3 replicas for self.all_gather: it has no gather_rows; "
        "use strategy=ddp or strategy=data_parallel"
    )


def test_replicas_in_one_process_do_not_gather_in_compiled_steps():
    one = trainer(Gathers(Task.all_gather), strategy=DataParallel(2, "cpu"), compile=True)
    with pytest.raises(UserError, match="^Gathers.all_gather can't be compiled for several rep"):
        one.validate()  # whose steps are not compiled


def test_an_error_of_one_replica_ends_the_others_and_is_the_one_that_is_raised():
    def fails(task: Task, x: Tensor) -> None:
        task.all_gather(x)
        task.steps = getattr(task, "steps", 0) + 1
        if task.steps == 2:
            raise ZeroDivisionError("in the second replica")

    with pytest.raises(ZeroDivisionError, match="^in the second replica$"):
        fitted(Gathers(fails), strategy=DataParallel(3, "cpu"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


TYPES = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.complex64)


def gathers_anything(strategy: Strategy) -> list[Any]:
    """What a step gathers of each type, and what is said outside of a step."""
    rows: list[Any] = []

    def keep(task: Task, x: Tensor) -> None:
        rows.append([task.all_gather(x > 0).tolist()])
        for dtype in TYPES:
            rows[-1].append(task.all_gather((9 * x.T).contiguous().T.to(dtype)).tolist())

    def keep_column(task: Task, x: Tensor) -> None:
        rows.append(task.all_gather(x[:, 0]).tolist())

    options = {"strategy": strategy, "max_steps": 1, "max_epochs": 1, "share_check": "off"}
    one = fitted(Gathers(keep), Rows(21, 7), **options)
    fitted(Gathers(keep_column), Rows(4, 4, val=False), **options)  # of each rank one row
    with pytest.raises(UserError) as caught:
        one.task.all_gather(torch.ones(2))
    return strategy.collectives.gather((rows, str(caught.value)))


def test_any_type_of_rows_is_gathered_in_the_order_of_the_batch():
    ranks = on_four_ranks()["of any type"]
    for rows, said in ranks:
        assert rows == ranks[0][0]
        assert said.startswith("self.all_gather was called outside of a step, where ranks have no")
    one = trainer(data=Rows(21, 7))
    one.prepare()
    batch, *_ = one.feed.train.epoch()
    x = batch.shares[0].batch[0]
    wanted = [(x > 0).tolist(), *((9 * x).to(dtype).tolist() for dtype in TYPES)]
    assert ranks[0][0][0] == wanted
    one = trainer(data=Rows(4, 4, val=False))
    one.prepare()
    batch, *_ = one.feed.train.epoch()
    assert ranks[0][0][-1] == batch.shares[0].batch[0][:, 0].tolist()


def test_replicas_of_one_process_gather_rows_in_the_order_of_the_batch():
    rows: list[Any] = []
    one = Gathers(lambda task, x: rows.append(task.all_gather(x).tolist()))
    fitted(
        one,
        Rows(20, 5),
        strategy=DataParallel(3, "cpu"),
        max_steps=1,
        max_epochs=1,
        share_check="off",
    )
    whole = trainer(data=Rows(20, 5))
    whole.prepare()
    batch, *_ = whole.feed.train.epoch()
    assert rows[:3] == [batch.shares[0].batch[0].tolist()] * 3  # then it validates


def gathers_by_turns(strategy: Strategy) -> list[list[float]]:
    """Of batches of these rows, one a rank: the ranks with a row gather, and the others don't."""
    mine, found = torch.full((1,), strategy.rank), []
    for rows in (2, 4, 3, 2):
        if strategy.rank < rows:
            found.append(strategy.gather_rows(mine, rows).tolist())
    return strategy.collectives.gather(found)


def test_ranks_gather_rows_whatever_batches_they_have_had_no_row_of():
    found = on_four_ranks()["by turns"]
    wanted = [[0, 1], [0, 1, 2, 3], [0, 1, 2], [0, 1]]
    assert found == [wanted, wanted, wanted[1:3], wanted[1:2]]


def resumed_on(strategy: Strategy) -> list[bool]:
    """Whether a run ends to the bit as the process's first: a second one, and one that is resumed
    within its second epoch."""

    def run(resume: Any = None) -> Trainer:
        keep = Hooks(on_step_end=lambda one: states.append(deepcopy(one.state_dict())))
        given = {"make": Pairs, "data": of_columns(5), "strategy": strategy, "callbacks": [keep]}
        return fitted(**given, accumulate=2, max_epochs=3, resume=resume)

    states: list[Any] = []
    whole = run()
    others = [run(), run(resume=strategy.collectives.broadcast(states[2]))]
    return strategy.collectives.gather(
        [is_same(one.task.state_dict(), whole.task.state_dict()) for one in others]
    )


@pytest.mark.parametrize("place", ["data_parallel-4", "ddp-4"])
def test_a_run_that_gathers_rows_ends_and_is_resumed_to_the_bit(place):
    here = on_four_ranks()["resumed"] if place == "ddp-4" else fresh(on, PLACES[place], resumed_on)
    for is_same_to_the_bit in here:
        assert is_same_to_the_bit == [True, True]


def looked_at(strategy: DDP) -> dict[str, Any]:
    return {
        "resumed": resumed_on(strategy),  # before all others: it is about the process's first run
        "by turns": gathers_by_turns(strategy),
        "of any type": gathers_anything(strategy),
        "gathered": gathered_on(strategy),
    }


@once
def on_four_ranks() -> dict[str, Any]:
    return on(DDP(4, "cpu", timeout_seconds=100), looked_at)


def test_replicas_take_turns_only_where_a_step_gathers():
    """A first training step begins in a thread: nobody knows yet whether it gathers."""
    threads: list[list[str]] = []

    def look(task: Task, x: Tensor) -> None:
        threads[-1].append(threading.current_thread().name)
        if task.gathers:
            task.all_gather(x)

    for gathers in (False, True):
        task = Gathers(look)
        task.gathers = gathers
        threads.append([])
        fitted(
            task,
            Rows(8, 4, val=False),
            strategy=DataParallel(2, "cpu"),
            max_epochs=1,
            share_check="off",
        )
    assert threads == [["replica"] * 2 + ["MainThread"] * 2, ["replica"] * 4]


@pytest.mark.parametrize("fails", [False, True])
def test_replicas_that_run_at_once_meet_in_the_order_of_the_batch(fails):
    """As on several GPUs."""
    seen: dict[int, list[Any]] = {}

    def step(replica: int) -> None:
        seen[replica] = [
            [int(rows) for rows in SEAT.meeting.exchange(torch.tensor(replica + 10 * time))]
            for time in range(3)
            if not (fails and replica == 1 and time == 2)
        ]

    meeting = Meeting([partial(step, replica) for replica in range(3)])
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(meeting.run, replica) for replica in (2, 0, 1)]
    if fails:
        assert f"replica 1 {ALONE}" in {str(call.exception()) for call in calls}
    else:
        assert seen == dict.fromkeys(range(3), [[0, 1, 2], [10, 11, 12], [20, 21, 22]])


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", [DataParallel, DDP])
def test_gpus_gather_rows_as_one_process_does(kind):
    for (task, *way), states in on(kind(2, "cuda"), gathered_on).items():
        wanted, numbers = by_hand(task, *way)
        assert weights_apart(states[0][0], wanted) <= 1e-9
        assert states[0][1] == pytest.approx(numbers, rel=1e-9)
