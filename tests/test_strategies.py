"""Where a job runs: which devices, what reaches torch's DDP, when ranks talk, and who logs."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on
from recorded import Recorder, once, weights, weights_apart
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpframe import Callback, DataModule, Strategy, Task, Trainer, TrainerSettings, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import BUFFERS, DDP
from dpframe.strategies.single import CPU, SingleGPU, auto

# Devices, on a machine that has none


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


SEVERAL = [DataParallel, DDP]
REFUSED = [  # which strategies, on how many cards, what they are given, and what is said
    *[
        (SEVERAL, 2, {"gpus": gpus}, f"trainer.gpus={gpus} but this machine has 2 CUDA devices; "
         "use trainer.gpus=2, or trainer.accelerator=cpu to rehearse")
        for gpus in (4, [0, 3])
    ],
    (
        [*SEVERAL, SingleGPU], 0, {"accelerator": "cuda"},
        "trainer.accelerator=cuda but this machine has no CUDA device; "
        "use trainer.accelerator=auto to rehearse on the CPU",
    ),
    (
        [CPU], 2, {"accelerator": "cuda"},
        "trainer.accelerator=cuda but strategy=cpu; use strategy=single_gpu",
    ),
    *[
        ([kind], 2, {"gpus": gpus}, f"trainer.gpus={gpus} but {kind.__name__} is one replica; use "
         "trainer.gpus=1, strategy=ddp or strategy=data_parallel")
        for kind in (Strategy, CPU, SingleGPU) for gpus in (2, [0, 1])
    ],
]  # fmt: skip


@pytest.mark.parametrize("kinds, cards, given, said", REFUSED)
def test_devices_that_can_not_be_had_are_refused_in_one_line(
    monkeypatch, kinds, cards, given, said
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    for kind in kinds:
        strategy = kind(**given)
        with pytest.raises(UserError) as error:
            strategy.launch(strategy.setup)
        assert str(error.value) == said


def test_more_replicas_than_the_cpu_can_bear_are_refused(no_card):
    with pytest.raises(UserError, match="asks for 1000 replicas on"):
        DataParallel(1000).setup()


@pytest.mark.parametrize(
    ("gpus", "accelerator", "devices"),
    [
        (None, "auto", ["cuda:0", "cuda:1"]),
        (2, "cuda", ["cuda:0", "cuda:1"]),
        (1, "auto", ["cuda:0"]),
        ([1], "auto", ["cuda:1"]),
        ([1, 0], "auto", ["cuda:1", "cuda:0"]),
        (3, "cpu", ["cpu", "cpu", "cpu"]),
    ],
)
def test_the_devices_are_those_that_were_asked_for(two_cards, gpus, accelerator, devices):
    for strategy in SEVERAL:
        chosen = strategy(gpus, accelerator).choose_devices(default=None)
        assert [str(device) for device in chosen] == devices
    strategy = DataParallel(gpus, accelerator)
    strategy.setup()
    assert (strategy.devices, strategy.replicas) == (devices, len(devices))


@pytest.mark.parametrize(
    ("cards", "gpus", "accelerator", "kind"),
    [
        (0, None, "auto", CPU),
        (0, 1, "auto", SingleGPU),  # it rehearses, and says so
        (0, 3, "auto", DDP),
        (2, None, "auto", SingleGPU),
        (2, None, "cpu", CPU),
        (2, [1], "auto", SingleGPU),
        (2, [0, 1], "auto", DDP),
        (2, 2, "cpu", DDP),
        (0, None, "cuda", SingleGPU),  # which refuses
    ],
)
def test_auto_takes_the_strategy_that_fits(monkeypatch, cards, gpus, accelerator, kind):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert type(auto(gpus, accelerator)) is kind


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (DataParallel(3), "3 virtual replicas stand in for 3 GPUs"),
        (DataParallel([0, 1, 3]), "3 virtual replicas stand in for 3 GPUs"),
        (DataParallel(), "2 virtual replicas stand in for 2 GPUs"),
        (SingleGPU(1), "1 process stand in for 1 GPU"),
        (DDP(2), "2 gloo ranks stand in for 2 GPUs"),
        (DataParallel(2, "cpu"), ""),
        (CPU(), ""),
    ],
    ids=lambda given: given.name if isinstance(given, Strategy) else "",
)
def test_a_rehearsal_is_announced_in_one_line(no_card, capfd, strategy, said):
    strategy.launch(strategy.setup if strategy.name != "DDP" else int)
    printed = capfd.readouterr()
    line = f"*** REHEARSAL ON THE CPU: this machine has no CUDA device, so {said} ***\n"
    assert (printed.out, printed.err) == ("", line if said else "")


# What reaches torch's DDP


OPTIONS = ("find_unused_parameters", BUFFERS, "static_graph", "gradient_as_bucket_view")


def test_the_options_of_ddp_reach_torch():
    assert results()["options"] == dict.fromkeys(OPTIONS, [True, False])


def test_the_timeout_reaches_torch():
    assert results()["timeout"] == 77


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_of_nothing_is_refused(seconds):
    with pytest.raises(UserError, match=f"strategy.timeout_seconds={seconds}"):
        DDP(timeout_seconds=seconds)


def test_sync_batchnorm_is_refused_on_the_cpu():
    with pytest.raises(UserError, match="strategy.sync_batchnorm=true needs CUDA devices"):
        DDP(sync_batchnorm=True).wrap(nn.Linear(1, 1), training=True)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["routed", "bucket_copies", "static"])
def test_training_with_the_option_equals_one_process(name, accumulate):
    wanted = trained(CPU(), name, accumulate)["weights"]
    assert weights_apart(results()[name, accumulate]["weights"], wanted) <= 1e-12


def test_a_parameter_that_no_rank_uses_keeps_its_value():
    found = results()["routed", 1]["weights"]
    torch.manual_seed(0)
    assert (found["unused"] == Routed().unused.detach().double().numpy()).all()


def test_buffers_are_those_of_the_main_process_only_where_they_are_broadcast():
    # Each rank adds 1 + its rank to the buffer in each of two steps; a broadcast comes before.
    assert results()["buffers", True] == [2.0, 3.0]
    assert results()["buffers", False] == [2.0, 4.0]


@pytest.mark.parametrize("are_broadcast", [True, False])
def test_after_training_all_ranks_have_the_buffers_of_the_main_process(are_broadcast):
    assert results()["final buffers", are_broadcast] == [2.0, 2.0]


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 9), (4, 3)])
def test_ranks_talk_once_an_update_however_many_batches_it_has(accumulate, updates):
    first = 1  # of zeros, after which torch's buckets stay as they are
    assert results()["all_reduces", accumulate] == [first + updates] * 2


def test_only_the_main_process_logs():
    opened, logged = results()["logs"]
    assert opened == [True, False]
    assert logged[0] > 0
    assert logged[1] == 0


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_facade_of_facts_is_the_same_on_every_strategy(replicas):
    strategy = CPU() if replicas == 1 else DataParallel(replicas, "cpu")
    strategy.setup()
    facts = (strategy.rank, strategy.world_size, strategy.replicas, strategy.is_main)
    assert facts == (0, 1, replicas, True)
    assert strategy.devices == ["cpu"] * replicas


def test_the_facts_of_a_rank_are_its_own():
    assert results()["facts"] == [
        {"rank": rank, "world_size": 2, "replicas": 2, "devices": ["cpu", "cpu"]} for rank in (0, 1)
    ]


# What the ranks do


class Routed(Task):
    """Even rows take one head, odd rows the other, and a third parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(3, 1), nn.Linear(3, 1)
        self.unused = nn.Parameter(torch.rand(2))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y, is_odd = batch
        heads = [(self.even, ~is_odd), (self.odd, is_odd)]
        losses = [(h(x[m]) - y[m]).square().sum() for h, m in heads if m.any()]
        return {"loss": torch.stack(losses).sum() / len(x)}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Buffered(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        self.count += 1 + (dist.get_rank() if dist.is_initialized() else 0)
        self.trained_count = float(self.count)
        return {"loss": self.even(batch[0]).square().mean() + 0 * self.odd(batch[0]).sum()}


class Plain(Routed):
    def __init__(self) -> None:
        super().__init__()
        del self.odd, self.unused

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": (self.even(batch[0]) - batch[1]).square().mean()}


class Table(DataModule):
    """Nine batches of four rows: every fifth batch is all even or all odd."""

    def __init__(self) -> None:
        super().__init__(4, shuffle=False)

    def train_dataset(self) -> Dataset:
        draw = partial(torch.rand, generator=torch.Generator().manual_seed(2))
        is_odd = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]] * 3, dtype=torch.bool)
        return TensorDataset(draw(36, 3), draw(36, 1), is_odd.flatten())


TRAINED: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "routed": (Routed, {"find_unused_parameters": True}),
    "bucket_copies": (Plain, {"gradient_as_bucket_view": False}),
    "static": (Plain, {"static_graph": True}),
}


class Counts(Callback):
    """How often the gradients were reduced over the ranks."""

    def __init__(self) -> None:
        self.count = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.strategy.module.register_comm_hook(None, self.hook)

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.count += 1
        reduced = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return reduced.get_future().then(lambda future: future.value()[0])


class Opened(Recorder):
    is_open = False

    def open(self, *args: Any, **kwargs: Any) -> None:
        self.is_open = True


def fitted(strategy: Strategy, task: Task, **given: Any) -> Trainer:
    settings = {"max_epochs": 1, "precision": "64"} | given.pop("settings", {})
    trainer = Trainer(
        task, Table(), strategy=strategy, settings=TrainerSettings(**settings), **given
    )
    trainer.fit()
    return trainer


def trained(strategy: Strategy, name: str, accumulate: int) -> dict[str, Any]:
    torch.manual_seed(0)
    task = TRAINED[name][0]()
    fitted(strategy, task, settings={"max_epochs": 3, "accumulate": accumulate})
    return {"weights": weights(task)}


def in_a_rank(strategy: DDP) -> dict[Any, Any]:
    """All that the tests above ask of two ranks, in one group of them."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    found: dict[Any, Any] = {"timeout": backend.options._timeout.total_seconds()}
    facts = {name: getattr(strategy, name) for name in ("rank", "world_size", "replicas")}
    found["facts"] = strategy.gather(facts | {"devices": strategy.devices})
    found["options"] = {
        name: [seen_by_torch(strategy, name, value) for value in (True, False)] for name in OPTIONS
    }
    for name, (_, options) in TRAINED.items():
        for accumulate in (1, 2):
            strategy.options = DDP(**options).options
            found[name, accumulate] = trained(strategy, name, accumulate)
    for value in (True, False):
        strategy.options = DDP(broadcast_buffers=value, find_unused_parameters=True).options
        task = Buffered()
        fitted(strategy, task, settings={"max_steps": 2})
        found["buffers", value] = strategy.gather(task.trained_count)
        found["final buffers", value] = strategy.gather(float(task.count))
    strategy.options = DDP().options
    for accumulate in (1, 4):
        counts = Counts()
        fitted(strategy, Plain(), settings={"accumulate": accumulate}, callbacks=[counts])
        found["all_reduces", accumulate] = strategy.gather(counts.count)
    logger = Opened()
    fitted(strategy, Plain(), loggers=[logger], settings={"log_every": 2})
    opened, logged = strategy.gather(logger.is_open), strategy.gather(len(logger.log_))
    return found | {"logs": (opened, logged)}


def seen_by_torch(strategy: DDP, name: str, value: bool) -> bool:
    own = "broadcast_buffers" if name == BUFFERS else name
    strategy.options = DDP(**{own: value}).options
    return getattr(strategy.wrap(nn.Linear(1, 1), training=True), name)


@once
def results() -> dict[Any, Any]:
    return on(DDP(2, "cpu", timeout_seconds=77), in_a_rank)


@pytest.mark.parametrize("kind", [Strategy, CPU, SingleGPU, DataParallel])
def test_one_process_refuses_to_be_one_of_torchruns(kind: type, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="one of WORLD_SIZE=2; use strategy=ddp"):
        kind().launch(lambda: None)


def test_auto_joins_the_ranks_that_torchrun_started(monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert type(auto()).__name__ == "DDP"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert type(auto(accelerator="cpu")) is CPU
