"""On real GPUs: the same numbers, no waiting between log steps, checkpoints that travel."""

import gc
import inspect
import math
import os
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import test_evaluation
import test_loss_guard
import test_parity
import test_strategies
import torch
from forked import on
from recorded import once, weights_apart
from small import Given, Rows, Small, fitted, is_same, trainer
from test_prefetch import Drawn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from dpframe import (
    Callback,
    Strategy,
    Trainer,
    TrainerSettings,
    UserError,
    checkpoint,
)
from dpframe.callbacks.banner import banner
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.data import Share
from dpframe.data.loader import pinned
from dpframe.data.module import leaves, tensors_of
from dpframe.data.stream import ShardedStream
from dpframe.devices.accelerator import cores
from dpframe.errors import Failure
from dpframe.recipes.boston import Boston, BostonData
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU, SingleGPU

pytestmark = pytest.mark.gpu(1)  # `gpu` for those of several

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.5)
Adam = partial(torch.optim.Adam, lr=0.01)
AdamW = partial(torch.optim.AdamW, lr=0.01)
KINDS = [SingleGPU, pytest.param(DataParallel, marks=pytest.mark.gpu)]
OPTIMIZERS = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def started(strategy: Strategy) -> Strategy:
    strategy.setup()
    return strategy


def boston(strategy: Strategy, **given: Any) -> Trainer:
    torch.manual_seed(0)
    batch_size = given.pop("batch_size", 128)
    return Trainer(
        Boston(test_parity.perceptron(13), Adam),
        BostonData(batch_size),
        strategy=strategy,
        callbacks=given.pop("callbacks", ()),
        settings=TrainerSettings(**given),
    )


def one_gpu(**given: Any) -> Trainer:
    """Of Small on Rows, with what may be given to `fitted`."""
    strategy = started(given.pop("kind", SingleGPU)(accelerator="cuda"))
    task = given.pop("task", None) or partial(Small, SGD, dropout=0.5)
    data = given.pop("data", None) or Rows(40, 6)
    return fitted(make=task, data=data, strategy=strategy, **given)


def outcome(**given: Any) -> dict[str, Any]:
    made = one_gpu(**given)
    counts = made.global_step, made.epoch, made.progress.rows_seen
    return {"weights": made.task.state_dict(), "metrics": made.metrics, "counts": counts}


HALVES = ("bf16", "fp16")
EPOCHS = 8

# The same numbers


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((SingleGPU, name) for name in test_parity.CASES),
        *(pytest.param(DataParallel, name, marks=pytest.mark.gpu) for name in test_parity.SOME),
    ],
)
def test_all_gpus_of_a_process_equal_the_hand_written_loop_on_the_cpu(kind, name):
    strategy = started(kind(accelerator="cuda"))
    test_parity.check(test_parity.trained(strategy, name, "64"), name, "64")


@once
def fitted_in(precision: str, kind: type[Strategy]) -> Trainer:
    trainer = boston(started(kind(accelerator="cuda")), precision=precision, max_epochs=EPOCHS)
    trainer.fit()
    return trainer


def on_all_gpus(strategy: DDP) -> dict[str, Any]:
    halves = {half: boston(strategy, precision=half, max_epochs=EPOCHS) for half in HALVES}
    return {
        "parity": {name: test_parity.trained(strategy, name, "64") for name in test_parity.SOME},
        "evaluation": test_evaluation.results_on(strategy),
        "halves": {half: trainer.fit()["val/loss"] for half, trainer in halves.items()},
    }


@pytest.mark.gpu
def test_ranks_on_all_gpus():
    """One test, as each of pytest's processes would start them anew: they equal the hand-written
    loop, see each row once, and train in half precision."""
    ranks = on(DDP(accelerator="cuda"), on_all_gpus)
    for name, trained in ranks["parity"].items():
        test_parity.check(trained, name, "64")
    each_row_was_seen_once(ranks["evaluation"])
    whole = fitted_in("32", SingleGPU).metrics["val/loss"]
    assert ranks["halves"] == dict.fromkeys(HALVES, pytest.approx(whole, rel=0.2))


@pytest.mark.gpu
def test_evaluation_on_all_gpus_of_a_process_sees_every_row_once_and_in_order():
    strategy = started(DataParallel(accelerator="cuda"))
    each_row_was_seen_once(test_evaluation.results_on(strategy))


def each_row_was_seen_once(results: dict[tuple[str, int], Any]) -> None:
    for (kind, size), (everywhere, predictions) in results.items():
        for metrics in everywhere:
            bits = round(metrics["val/code"] * size * 2**16)
            assert bits == sum(2 ** (16 - row) for row in range(size)), (kind, size)
        assert predictions["id"] == list(range(size))


# Optimizers


def matrices(optimizer: Any) -> Small:
    """For Muon, which takes nothing else."""
    layers = nn.Linear(3, 8, bias=False), nn.Linear(8, 1, bias=False)
    return Small(optimizer, net=nn.Sequential(*layers))


OPTIONS = {"LBFGS": {"max_iter": 2}}
TORCHS = {  # all but SparseAdam: fake GPUs have no sparse tensors
    name: partial(
        matrices if name == "Muon" else Small, partial(kind, **OPTIONS.get(name, {}), lr=0.01)
    )
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer)
    if kind not in (Optimizer, torch.optim.SparseAdam)
}
IN_32_BITS = {"rtol": 1e-5, "atol": 1e-6}  # some count and average in these, whatever the weights


def close(one: Trainer, other: Trainer) -> None:
    states = [made.task.state_dict() for made in (one, other)]
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), **IN_32_BITS)


@pytest.mark.parametrize("name", TORCHS)
def test_every_optimizer_of_torch_trains_and_resumes_on_a_gpu_as_on_the_cpu(tmp_path, name):
    make, given = TORCHS[name], {"data": Rows(40, 6), "max_epochs": 2, "precision": "64"}
    here = fitted(make=make, strategy=started(CPU()), **given)
    close(one_gpu(task=make, **given), here)
    for begins, goes_on in ((CPU, SingleGPU), (SingleGPU, CPU)):
        begun = fitted(make=make, strategy=started(begins()), max_steps=10, **given)
        checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
        state = checkpoint.load(tmp_path / "begun.ckpt")
        close(fitted(make=make, strategy=started(goes_on()), resume=state, **given), here)


@pytest.mark.parametrize("name", TORCHS)
def test_every_optimizer_of_torch_resumes_on_a_gpu_to_the_bit(tmp_path, name):
    make = TORCHS[name]
    whole = one_gpu(task=make)
    begun = one_gpu(task=make, max_steps=10)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    resumed = one_gpu(task=make, resume=checkpoint.load(tmp_path / "begun.ckpt"))
    assert is_same(resumed.task.state_dict(), whole.task.state_dict())


@pytest.mark.parametrize("how", ["foreach", "fused", "capturable"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_an_implementation_that_the_user_chose_is_kept_on_a_gpu(tmp_path, kind, how):
    if how not in inspect.signature(kind).parameters:
        pytest.skip(f"{kind.__name__} has no such one")
    if (kind, how) == (torch.optim.Adagrad, "fused") and torch.__version__ < "2.13":
        pytest.skip("has no fused kernel on GPUs before torch 2.13")
    make, plain = (partial(Small, partial(kind, lr=0.01, **more)) for more in ({how: True}, {}))
    whole = one_gpu(task=make)
    assert whole.update.optimizer.param_groups[0][how]
    close(whole, one_gpu(task=plain))
    begun = one_gpu(task=make, max_steps=10)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    state = checkpoint.load(tmp_path / "begun.ckpt")
    assert is_same(one_gpu(task=make, resume=state).task.state_dict(), whole.task.state_dict())


def test_a_run_goes_on_on_a_gpu_by_another_implementation(tmp_path):
    """Its state has another place for the count of steps."""
    make = partial(Small, partial(torch.optim.Adagrad, lr=0.01, foreach=True))
    begun = fitted(make=make, data=Rows(40, 6), strategy=started(CPU()), max_steps=10)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    resumed = trainer(
        make=TORCHS["Adagrad"], data=Rows(40, 6), strategy=started(SingleGPU(accelerator="cuda"))
    )
    resumed.fit(checkpoint.load(tmp_path / "begun.ckpt"), resume_anyway=True)
    is_fused = bool(resumed.update.optimizer.param_groups[0]["fused"])
    assert is_fused == (torch.__version__ >= "2.13")
    close(resumed, fitted(make=make, data=Rows(40, 6), strategy=started(CPU())))


# The GPUs


@pytest.mark.gpu
def test_the_gpu_that_was_asked_for_is_taken():
    last = torch.cuda.device_count() - 1
    strategy = started(SingleGPU([last], "cuda"))
    trainer = boston(strategy, max_steps=1)
    trainer.fit()
    device = torch.device("cuda", last)
    assert strategy.devices == [f"cuda:{last}"]
    assert {parameter.device for parameter in trainer.task.parameters()} == {device}
    assert torch.cuda.current_device() == last


@pytest.mark.gpu(2)
def test_data_parallel_takes_the_gpus_in_the_order_of_the_list():
    strategy = started(DataParallel([1, 0], "cuda"))
    assert strategy.devices == ["cuda:1", "cuda:0"]
    trainer = boston(strategy, max_steps=3)
    trainer.fit()
    assert all(math.isfinite(value) for value in trainer.metrics.values())
    assert {str(parameter.device) for parameter in trainer.task.parameters()} == {"cuda:1"}


def facts_of_the_ranks(strategy: Strategy) -> tuple[list[str], list[str], list[int]]:
    gather = strategy.collectives.gather
    current = gather(str(torch.cuda.current_device()))
    return strategy.devices, current, gather(torch.get_num_threads())


@once
def facts() -> tuple[list[str], list[str], list[int]]:
    return on(DDP([1, 0], "cuda"), facts_of_the_ranks)


@pytest.mark.gpu(2)
def test_ranks_take_the_gpus_in_the_order_of_the_list():
    devices, current, _ = facts()
    assert (devices, current) == (["cuda:1", "cuda:0"], ["1", "0"])


@pytest.mark.gpu(2)
def test_the_processes_of_gpus_divide_the_cores():
    *_, threads = facts()
    assert all(count <= max(1, cores() // 2) for count in threads), threads


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [DataParallel, DDP])
def test_one_gpu_more_than_there_is_is_refused(strategy):
    there_are = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"trainer.gpus={there_are + 1} but this machine has"):
        asked = strategy(there_are + 1)
        asked.launch(asked.setup)


# Precision


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_trains_about_as_well(kind, precision):
    half, whole = fitted_in(precision, kind), fitted_in("32", SingleGPU)
    assert {parameter.dtype for parameter in half.task.parameters()} == {torch.float32}
    assert half.metrics["val/loss"] == pytest.approx(whole.metrics["val/loss"], rel=0.2)


# The hot path


class NoWaiting(Callback):
    """Any wait for the GPU between the first and the last steps of an epoch is an error."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == self.first:
            torch.cuda.set_sync_debug_mode("error")
        if trainer.global_step == self.last:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def sync_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


WATCHED: list[dict[str, Any]] = [
    {},
    {"accumulate": 2, "rows": 400},
    {"clip_norm": 1.0},
    {"clip_norm": 1.0, "data_on_device": False},
    {"clip_value": 1.0},
    {"precision": "bf16"},
    {"precision": "64"},
    {"precision": "fp16", "optimizer": Adam},
    {"precision": "fp16", "optimizer": AdamW},
    {"optimizer": Adam, "data_on_device": False},
    {"optimizer": AdamW},
    {"optimizer": Adam, "scheduler": partial(CosineAnnealingLR, T_max=20)},
]


@pytest.mark.parametrize("given", WATCHED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_gpu_between_log_steps(sync_debug_mode, kind, given):
    given = dict(given)
    parts = given.pop("optimizer", SGD), given.pop("scheduler", None)
    made = one_gpu(
        kind=kind,
        task=partial(Small, *parts, dropout=0.5),
        data=Rows(given.pop("rows", 200), 10),
        callbacks=[NoWaiting(8, 18)],
        max_epochs=1,
        log_every=1000,
        scheduler_every="step",
        **given,
    )
    assert made.global_step == 20  # else the watch would have ended by accident
    assert all(weight.isfinite().all() for weight in made.task.parameters())


def test_nothing_waits_for_the_gpu_where_a_task_gives_weights(sync_debug_mode):
    trainer = Trainer(
        test_parity.Pixels(Adam),
        test_parity.Table(200, 9),
        strategy=started(SingleGPU(accelerator="cuda")),
        settings=TrainerSettings(max_epochs=1, log_every=1000),
        callbacks=[NoWaiting(2, 20)],
    )
    trainer.fit()
    assert trainer.global_step > 20


class Waits(Boston):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        return {**output, "seen": output["loss"].item()}


def test_the_watch_for_waits_sees_one(sync_debug_mode):
    trainer = boston(
        started(SingleGPU(accelerator="cuda")), batch_size=16, callbacks=[NoWaiting(2, 12)]
    )
    trainer.task.__class__ = Waits
    with pytest.raises(RuntimeError, match="synchroniz"):
        trainer.fit()


# Checkpoints


def test_a_loss_that_is_no_number_is_named_at_the_next_log_step_and_never_saved(tmp_path):
    step, rows = test_loss_guard.met_in(0, shuffle=True)
    keeper = Checkpoint(every_n_steps=2)
    with pytest.raises(Failure, match=f"^step {step}: the loss is nan, rows {rows};"):
        fitted(
            data=test_loss_guard.Bad(),
            strategy=started(SingleGPU(accelerator="cuda")),
            callbacks=[keeper],
            directory=tmp_path,
            log_every=5,
        )
    for path in (tmp_path / "checkpoints").iterdir():
        assert checkpoint.load(path)["progress"]["global_step"] < step


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_a_gpu_loads_on_a_machine_without(tmp_path, kind):
    trained = boston(started(kind(accelerator="cuda")), max_epochs=3, precision="64")
    trained.fit()
    checkpoint.save(trained.state_dict(), tmp_path / "gpu.ckpt")
    state = checkpoint.load(tmp_path / "gpu.ckpt")
    assert {tensor.device.type for tensor in tensors_of(state)} == {"cpu"}
    here = boston(started(CPU()), max_epochs=3, precision="64")
    here.task.load_state_dict(state["task"])
    metrics = here.validate()
    assert metrics["val/loss"] == pytest.approx(trained.metrics["val/loss"], rel=1e-12)


def test_a_run_begun_on_a_gpu_goes_on_as_on_the_cpu(tmp_path: Path):
    begun = boston(started(SingleGPU(accelerator="cuda")), max_epochs=3, precision="64")
    begun.fit()
    checkpoint.save(begun.state_dict(), tmp_path / "gpu.ckpt")
    resumed = boston(started(CPU()), max_epochs=6, precision="64")
    resumed.fit(checkpoint.load(tmp_path / "gpu.ckpt"))
    whole = boston(started(CPU()), max_epochs=6, precision="64")
    assert resumed.metrics["val/loss"] == pytest.approx(whole.fit()["val/loss"], rel=1e-12)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", [SingleGPU, DataParallel])
def test_a_run_begun_on_one_gpu_goes_on_to_the_bit_on_another(tmp_path, kind):
    def trained(gpu: int, steps: int, state: Any = None) -> Trainer:
        strategy = started(kind([gpu], "cuda"))
        torch.manual_seed(0)
        task, settings = Small(SGD, dropout=0.5), TrainerSettings(max_steps=steps)
        made = Trainer(task, Rows(40, 6), strategy=strategy, settings=settings)
        made.fit(state)
        return made

    begun = trained(0, 3)  # within the first epoch of seven batches
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    gone_on = trained(1, 6, checkpoint.load(tmp_path / "begun.ckpt"))
    whole = trained(0, 6)
    assert is_same(on_host(gone_on), on_host(whole))


def on_host(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in trainer.task.state_dict().items()}


@pytest.mark.gpu(2)
def test_a_strategy_takes_nothing_on_the_gpu_that_it_was_not_given():
    gc.collect()  # what an earlier test left there would be freed meanwhile
    before = torch.cuda.current_device(), torch.cuda.memory_allocated(0)
    strategy = DataParallel([1], "cuda")
    strategy.setup()
    try:
        boston(strategy, max_steps=2).fit()
        there = torch.cuda.current_device(), torch.cuda.memory_allocated(0)
    finally:
        strategy.close()
    assert there == (1, before[1])
    assert torch.cuda.current_device() == before[0]


# The data: resident, or copied by the batch


def test_tensors_that_fit_are_on_the_gpu_and_the_banner_says_so():
    made = boston(started(SingleGPU(accelerator="cuda")), precision="64")
    made.prepare()
    device = made.strategy.device
    assert made.feed.train.device == device
    assert f"data       404 rows on {device}" in banner(made)
    shares = [batch.shares[0].batch for batch in made.feed.train.epoch()]
    kinds = {(tensor.device, tensor.dtype) for batch in shares for tensor in batch}
    assert kinds == {(device, torch.float64)}


@pytest.mark.parametrize("asked", [False, "auto"])
def test_what_is_not_there_is_copied_by_the_batch(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 10**10))
    made = boston(started(SingleGPU(accelerator="cuda")), data_on_device=asked)
    made.prepare()
    assert made.feed.train.device.type == "cpu"
    assert "data       404 rows as tensors, index_select, copied by the batch" in banner(made)
    batch = next(iter(made.feed.train.epoch()))
    assert all(tensor.is_pinned() for tensor in batch.shares[0].batch)


def test_the_order_of_the_rows_is_the_cpu_s():
    there = boston(started(SingleGPU(accelerator="cuda")))
    there.prepare()
    here = boston(started(SingleGPU(accelerator="cuda")), data_on_device=False)
    here.prepare()
    for epoch in range(2):
        pairs = zip(there.feed.train.epoch(epoch), here.feed.train.epoch(epoch), strict=True)
        for one, other in pairs:
            assert is_same([t.cpu() for t in one.shares[0].batch], other.shares[0].batch)


SAME: list[dict[str, Any]] = [
    {},
    {"accumulate": 2},
    {"precision": "64"},
    {"precision": "bf16"},
    {"limit_train_batches": 3},
    {"max_steps": 9},
]


@pytest.mark.parametrize("given", SAME, ids=str)
def test_resident_and_copied_data_give_the_same_numbers(given):
    assert is_same(outcome(**given), outcome(**given, data_on_device=False))


def test_rows_from_workers_give_the_numbers_of_tensors():
    rows = Rows(40, 6)
    one_by_one = Given([*rows.train], [*rows.held_out], 6, workers=2)
    assert is_same(outcome(data=one_by_one), outcome(data=rows))


@pytest.mark.parametrize("data", [partial(Rows, 40), Drawn])
def test_a_run_on_copied_data_resumes_within_an_epoch_to_the_bit(tmp_path, data):
    given = {"data_on_device": False, "max_epochs": 3}
    whole = one_gpu(data=data(batch_size=3), **given)
    begun = one_gpu(data=data(batch_size=3), max_steps=10, **given)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    state = checkpoint.load(tmp_path / "begun.ckpt")
    resumed = one_gpu(data=data(batch_size=3), resume=state, **given)
    assert is_same(resumed.task.state_dict(), whole.task.state_dict())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("given", SAME, ids=str)
def test_data_parallel_computes_on_copied_batches_what_it_computes_on_the_cpu(given):
    given = {**given, "precision": "64", "task": partial(Small, SGD)}
    there = outcome(kind=DataParallel, **given)
    here = fitted(make=given.pop("task"), data=Rows(40, 6), strategy=started(CPU()), **given)
    for mine, other in zip(there["weights"].values(), here.task.state_dict().values(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("gathers", [False, True])
def test_data_parallel_moves_statistics_as_its_rehearsal_on_the_cpu_does(gathers):
    there, metrics = test_strategies.normed(started(DataParallel([0, 1], "cuda")), gathers)
    here, rehearsed = test_strategies.normed(DataParallel(2, "cpu"), gathers)
    assert weights_apart(there, here) <= 1e-12
    assert metrics == pytest.approx(rehearsed, rel=1e-12)


class Pins(SingleGPU):
    """Notes of all that is on its way to the GPU whether it is in pinned memory."""

    def __init__(self) -> None:
        super().__init__(accelerator="cuda")
        self.pinned: list[bool] = []

    def to_device(self, shares: list[Share]) -> Any:
        self.pinned += [leaf.is_pinned() for leaf in leaves(shares) if hasattr(leaf, "is_pinned")]
        return super().to_device(shares)


class Pair:
    """A batch of a type of its own."""

    blocks: list[bool] = []

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y))

    def pin_memory(self) -> "Pair":
        return Pair(self.x.pin_memory(), self.y.pin_memory())

    def is_pinned(self) -> bool:
        return self.x.is_pinned() and self.y.is_pinned()

    def to(self, device: torch.device, non_blocking: bool = False) -> "Pair":
        self.blocks.append(not non_blocking)
        return Pair(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(listed(Rows(40).train))


class Parts(ShardedStream):
    def shards(self) -> list[int]:
        return [0, 20]

    def read(self, shard: int) -> Any:
        return listed(Rows(40).train)[shard : shard + 20]


class Other(Rows):
    """The rows of Rows(40) for training, validation and prediction, read in another way."""

    def __init__(self, make: Callable[[], Any], *, workers: int = 0, collate: Any = None) -> None:
        super().__init__(40, 6, shuffle=False)
        self.make, self.workers, self.divide_streams = make, workers, make is Parts
        if collate is not None:
            self.collate = collate

    def train_dataset(self) -> Any:
        return self.make()

    val_dataset = predict_dataset = train_dataset


def listed(rows: Any) -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for x, y in rows]


def paired(rows: list[tuple[Tensor, Tensor]]) -> Pair:
    return Pair(*default_collate(rows))


def mapping(rows: list[tuple[Tensor, Tensor]]) -> UserDict[str, Tensor]:
    return Encoding(zip("xy", default_collate(rows), strict=True))


class Encoding(UserDict[str, Tensor]):
    """As a tokenizer's BatchEncoding: no dict, and it moves itself."""

    def is_pinned(self) -> bool:
        return all(tensor.is_pinned() for tensor in self.data.values())

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Encoding":
        moved = {k: v.to(device, non_blocking=non_blocking) for k, v in self.data.items()}
        return Encoding(moved)


class Unpacked(Small):
    """Of batches of any of these types."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        return super().training_step(list(batch.values() if isinstance(batch, Encoding) else batch))

    def predict_step(self, batch: Any) -> Tensor:
        return super().predict_step(list(batch.values() if isinstance(batch, Encoding) else batch))


def loader_of(rows: Any, **given: Any) -> Callable[[], DataLoader]:
    return partial(DataLoader, rows, batch_size=6, **given)


WAYS: dict[str, Callable[[], Any]] = {
    "rows": lambda: Other(lambda: listed(Rows(40).train)),
    "rows from workers": lambda: Other(lambda: listed(Rows(40).train), workers=1),
    "a stream": lambda: Other(Stream),
    "a stream from a worker": lambda: Other(Stream, workers=1),
    "a divided stream": lambda: Other(Parts),
    "a DataLoader": lambda: Other(loader_of(listed(Rows(40).train))),
    "a DataLoader with workers": lambda: Other(loader_of(listed(Rows(40).train), num_workers=1)),
    "a DataLoader of a stream": lambda: Other(loader_of(Stream())),
    "a type of its own": lambda: Other(lambda: listed(Rows(40).train), collate=paired),
    "a stream of it": lambda: Other(Stream, collate=paired),
    "a stream of it from a worker": lambda: Other(Stream, workers=1, collate=paired),
    "a mapping": lambda: Other(lambda: listed(Rows(40).train), collate=mapping),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_batch_is_in_pinned_memory_and_copied_without_a_wait(monkeypatch, way):
    monkeypatch.setattr(Pair, "blocks", [])
    strategy = Pins()
    strategy.setup()
    made = fitted(make=partial(Unpacked, SGD), data=WAYS[way](), strategy=strategy, max_epochs=1)
    training = len(strategy.pinned)
    assert training >= 7  # batches
    made.predict()
    assert len(strategy.pinned) > training
    assert all(strategy.pinned)
    assert not any(Pair.blocks)
    plain = fitted(make=partial(Unpacked, SGD), data=WAYS[way](), strategy=CPU(), max_epochs=1)
    close(made, plain)


@pytest.mark.parametrize("way", [*WAYS, "tensors"])
def test_no_batch_is_in_pinned_memory_where_that_is_off(way):
    data = WAYS[way]() if way in WAYS else Rows(40, 6, shuffle=False)
    data.pin_memory = False
    strategy = Pins()
    strategy.setup()
    given = {"make": partial(Unpacked, SGD), "max_epochs": 1, "data_on_device": False}
    made = fitted(data=data, strategy=strategy, **given)
    assert strategy.pinned and not any(strategy.pinned)
    close(made, fitted(data=data, strategy=CPU(), **given))


def test_what_can_not_be_pinned_is_taken_as_it_is():
    there = torch.zeros(2, device="cuda")
    assert pinned({"x": there})["x"] is there
    if torch.version.cuda:  # fake GPUs have no sparse tensors
        sparse = torch.eye(2).to_sparse()
        assert pinned(sparse) is sparse


class Slow(Small):
    """A step that the GPU takes long for, while copies of batches to come are done."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.register_buffer("much", torch.randn(2048, 2048))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        x, y = batch
        product = self.much
        for _ in range(20):
            product = torch.tanh(product @ self.much)
        late = 0 * product.sum()  # so what follows reads the batch after all of that
        error = self.net(x + late)[:, 0] - y
        return {"loss": error.square().mean(), "seen": (x + late).double().sum()}


def big() -> TensorDataset:
    x = torch.randn(30 * 2**18, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1))


@pytest.mark.skipif("FAKECUDA" in os.environ, reason="needs a GPU that is slower than its copies")
def test_no_batch_is_overwritten_while_a_step_reads_it():
    """The copies' memory is used anew: had it not been waited for, a sum would be off."""
    batches = Given(big, batch_size=2**18)  # of 3 MB
    runs = [
        outcome(task=Slow, data=batches, data_on_device=asked, max_epochs=1, log_every=1000)
        for asked in (True, False)
    ]
    assert runs[0]["metrics"]["train/seen"] == runs[1]["metrics"]["train/seen"]
    assert is_same(runs[0]["weights"], runs[1]["weights"])


# CUDA graphs, by torch.compile


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
GRAPHED: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.1},
    {"precision": "bf16"},
    {"data_on_device": False},
    {"accumulate": 2},
    {"validate_every_steps": 5},
]


@needs_triton
@pytest.mark.parametrize("given", GRAPHED, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_as_cuda_graphs_are_steps_one_by_one_but_for_rounding(name, given):
    given = {"task": partial(Small, OPTIMIZERS[name]), "max_epochs": 4, "log_every": 5, **given}
    plain, graphed = outcome(**given), outcome(**given, compile="reduce-overhead")
    assert graphed["counts"] == plain["counts"]
    exactness = {"rtol": 2e-2, "atol": 1e-2} if "precision" in given else {}
    torch.testing.assert_close(graphed["metrics"], plain["metrics"], **exactness)
    torch.testing.assert_close(graphed["weights"], plain["weights"], **exactness)


@needs_triton
def test_a_run_of_cuda_graphs_resumes(tmp_path):
    given = {"task": partial(Small, Adam), "max_epochs": 4}
    whole = one_gpu(**given, compile="reduce-overhead")
    begun = one_gpu(**given, compile="reduce-overhead", max_steps=10)
    checkpoint.save(begun.state_dict(), tmp_path / "begun.ckpt")
    for mode in ("reduce-overhead", False):
        state = checkpoint.load(tmp_path / "begun.ckpt")
        resumed = one_gpu(**given, compile=mode, resume=state)
        torch.testing.assert_close(resumed.task.state_dict(), whole.task.state_dict())
