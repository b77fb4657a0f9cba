"""What decides a run's numbers: precision, seeds, deterministic kernels, compilation."""

import os
import random
import shutil
from functools import partial
from typing import Any

import numpy
import pytest
import small
import torch
from forked import fresh, on
from small import SGD, Grabbed, Hooks, Listed, Rows, Small, fitted, gradients, is_same, trainer
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpframe import seeding
from dpframe.data import permutation
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU
from dpframe.trainer.compute.placement import DTYPES, process_settings_restored

# Precision


class Typed(Small):
    def training_step(self, batch):
        output = self.net(batch[0])
        self.types = batch[0].dtype, self.net[0].weight.dtype, output.dtype
        return {"loss": (output[:, 0] - batch[1]).square().mean()}


@pytest.mark.parametrize(
    "precision, rows, weights, output",
    [
        ("32", torch.float32, torch.float32, torch.float32),
        ("64", torch.float64, torch.float64, torch.float64),
        ("bf16", torch.float32, torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("16-true", torch.float16, torch.float16, torch.float16),
    ],
)
def test_precision_decides_the_types(precision, rows, weights, output):
    one = fitted(make=Typed, precision=precision, max_epochs=8)
    assert one.task.types == (rows, weights, output)
    assert one.metrics["val/loss"] < 0.5  # of 3: it learns


class Makes(Small):
    """Each of its steps notes the types of what it makes; with `ends`, training then fails."""

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self.ends = ends
        self.made: set[tuple[str, torch.dtype]] = set()

    def _note(self, step):
        made = torch.zeros(1) + torch.tensor([0.1]) + torch.randn(1)
        self.made.add((step, made.dtype))

    def training_step(self, batch):
        self._note("training" if self.training else "validation")
        if self.ends and self.training:
            raise EOFError
        return super().training_step(batch)

    def test_step(self, batch):
        self._note("test")
        return super().training_step(batch)

    def predict_step(self, batch):
        self._note("predict")
        return super().predict_step(batch)


class Reads(Rows):
    """Its rows are made where they are read, here or by a worker."""

    def train_dataset(self):
        return MadeRows()

    val_dataset = test_dataset = train_dataset


class MadeRows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        made = torch.ones(3)
        assert made.dtype == torch.float32
        return made * row, made[0]


@pytest.mark.parametrize("precision", ["64", "bf16-true", "16-true", "32", "bf16"])
@pytest.mark.parametrize("strategy", [None, DataParallel(2, "cpu")])
def test_floats_that_a_step_makes_have_the_type_of_the_weights(precision, strategy):
    hooks = Hooks(**dict.fromkeys(("on_epoch_start", "on_batch_start", "on_epoch_end"), is_plain))
    settings = {"precision": precision, "max_epochs": 1, "strategy": strategy}
    one = fitted(Makes(), Reads(), callbacks=[hooks], **settings)
    one.test()
    one.predict()
    wanted = DTYPES.get(precision, torch.float32)
    assert one.task.made == {(s, wanted) for s in ("training", "validation", "test", "predict")}
    assert hooks.steps("on_batch_start")
    with pytest.raises(EOFError):
        fitted(Makes(ends=True), Reads(), **settings)
    is_plain()


def is_plain(trainer: Any = None) -> None:
    assert torch.get_default_dtype() == torch.float32


def test_data_workers_make_floats_as_ever_while_steps_make_others():
    data = Reads()
    data.workers = 1
    fitted(Makes(), data, precision="64", max_epochs=2)


class Tokens(Small):
    """Integers in, and running statistics."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.05, momentum=0.9))
        layers = nn.Embedding(5, 4), nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(0.2)
        self.net = nn.Sequential(*layers, nn.Linear(12, 1))


class Words(Rows):
    def __init__(self) -> None:
        super().__init__(20, batch_size=8)
        for part in (self.train, self.held_out):
            x, y = part.tensors
            part.tensors = x.abs().mul(3).long().clamp(max=4), y


def by_hand(precision: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """Torch alone; the mean of the last epoch's losses, over rows in 64 bits."""
    seeding.seed_everything(0)
    task, data = Tokens().to(precision), Words()
    x, y = data.train.tensors
    optimizer = torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        total = 0.0
        seeding.reseed(seeding.mix(0, 0, epoch))
        for rows in permutation(len(x), seed=0, epoch=epoch).split(data.batch_size):
            optimizer.zero_grad()
            loss = (task.net(x[rows])[:, 0] - y[rows].to(precision)).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
    return task.state_dict(), total / len(x)


def trained(strategy: Any, precision: str, make: Any, **given: Any) -> tuple[dict, float]:
    data = Words() if make is Tokens else Rows()
    one = fitted(make=make, data=data, strategy=strategy, precision=precision, **given)
    assert one.update.scaler is None
    return one.task.state_dict(), one.metrics["train/loss"]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_true_half_is_torchs_own_loop_to_the_bit_and_goes_on_to_the_bit(precision):
    weights, mean = trained(CPU(), precision, Tokens)
    wanted, loss = by_hand(DTYPES[precision])
    assert is_same(weights, wanted) and mean == loss
    assert {w.dtype for w in weights.values()} == {DTYPES[precision], torch.int64}
    half = fitted(make=Tokens, data=Words(), precision=precision, max_epochs=1).state_dict()
    assert is_same(trained(CPU(), precision, Tokens, resume=half)[0], weights)


@pytest.mark.parametrize("kind", [DataParallel, DDP])
def test_a_true_half_differs_between_numbers_of_replicas_by_its_rounding_alone(kind):
    one, several = (on(s, trained, "bf16-true", Small) for s in (CPU(), kind(2, "cpu")))
    assert several[1] == pytest.approx(one[1], rel=0.01)
    torch.testing.assert_close(several[0], one[0], rtol=0.02, atol=0.02)


def test_float32_products_have_the_precision_that_is_set_and_a_sweeps_next_run_has_the_default():
    before = torch.get_float32_matmul_precision()
    with process_settings_restored():
        one = trainer(matmul_precision="medium")
        assert torch.get_float32_matmul_precision() == "medium"
        trainer()
        assert torch.get_float32_matmul_precision() == "medium"  # as the program has it
        one.prepare()
        assert one.training.state.fingerprint["trainer.matmul_precision"] == "medium"
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_cudnn_looks_for_fast_kernels_where_that_is_set_and_not_in_a_sweeps_next_run():
    before = torch.backends.cudnn.benchmark
    with process_settings_restored():
        trainer(cudnn_benchmark=not before)
        assert torch.backends.cudnn.benchmark is not before
        trainer()
        assert torch.backends.cudnn.benchmark is not before  # as the program has it
    assert torch.backends.cudnn.benchmark is before


def test_fp16_scales_the_loss_and_the_optimiser_sees_it_unscaled():
    batch = {"data": Rows(4, shuffle=False), "max_epochs": 6}
    one = fitted(make=lambda: Small(Grabbed), precision="fp16", **batch)
    scale = one.update.scaler.get_scale()
    assert 1024 < scale < 65536  # the first updates overflowed and were skipped
    scaled, plain = one.update.optimizer.seen[0], gradients(**batch)[0]
    assert torch.allclose(scaled, plain, rtol=0.02, atol=0.02)


def test_fp16_clips_the_gradient_that_is_unscaled():
    made = fitted(
        make=lambda: Small(Grabbed), precision="fp16", data=Rows(4), max_epochs=6, clip_norm=0.5
    )
    assert made.update.optimizer.seen[0].norm() == pytest.approx(0.5, rel=1e-3)


def test_fp16_skips_an_update_whose_gradient_overflows():
    class Overflows(Small):
        def training_step(self, batch):
            return {"loss": super().training_step(batch)["loss"] * 1e36}

    task = Overflows()
    before = [p.clone() for p in task.parameters()]
    one = fitted(task, precision="fp16", max_steps=1)
    assert all(map(torch.equal, task.parameters(), before))
    assert one.update.scaler.get_scale() == 32768


@pytest.mark.parametrize("chosen", [{}, {"fused": True}])
def test_a_momentum_that_begins_with_an_overflow_begins_again(chosen):
    """Torch's fused kernel would leave it in memory that nobody has written: NaN here."""

    def trained(**given: Any) -> dict[str, torch.Tensor]:
        make = partial(Small, partial(torch.optim.SGD, lr=0.01, momentum=0.5, **given))
        made = fitted(make=make, precision="fp16", data=Rows(4, shuffle=False), max_epochs=6)
        assert made.update.scaler.get_scale() < 65536  # the first updates overflowed
        return made.task.state_dict()

    torch.use_deterministic_algorithms(True)  # which fills such memory
    try:
        torch.testing.assert_close(trained(**chosen), trained(foreach=True))
    finally:
        torch.use_deterministic_algorithms(False)


# Seeds


class Noisy(Listed):
    """Rows with noise from all three generators, drawn in the workers."""

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + torch.randn(3) + random.random() + numpy.random.rand(), y


class NoisyRows(Rows):
    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        self.train = Noisy(self.train)


def weights_of(seed: int, workers: int) -> dict[str, Tensor]:
    make = lambda: Small(small.Adam, dropout=0.5)  # noqa: E731
    return fitted(make=make, data=NoisyRows(workers), seed=seed, max_epochs=2).task.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_one_seed_gives_the_same_weights_twice_and_another_gives_others(workers):
    first, again, other = (weights_of(seed, workers) for seed in (0, 0, 1))
    assert is_same(first, again)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_seed_decides_all_three_generators_whatever_was_drawn_before():
    def drawn(seed: int, before: int = 1) -> list[float]:
        draws: list[float] = []

        def draw(trainer):
            draws.extend([random.random(), numpy.random.rand(), float(torch.rand(()))])

        one = trainer(seed=seed, max_steps=1, callbacks=[Hooks(on_fit_start=draw)])
        for _ in range(before):
            draw(one)
        one.fit()
        return draws[-3:]

    first, again, other = drawn(0), drawn(0, before=2), drawn(1)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_an_epoch_draws_the_same_numbers_whatever_was_drawn_before_it():
    """So a checkpoint between two epochs needs no random state, nor the processes that drew it."""
    draws: list[list[float]] = []

    def draw(_):
        draws.append([random.random(), numpy.random.rand(), float(torch.rand(()))])

    for more in (0, 3):
        wasteful = Hooks(on_epoch_start=draw, on_epoch_end=lambda _, n=more: torch.rand(n + 1))
        trainer(max_epochs=2, callbacks=[wasteful]).fit()
    assert draws[:2] == draws[2:]
    assert not set(draws[0]) & set(draws[1])


def test_an_epoch_is_seeded_as_torch_does_it_less_its_stack_trace(monkeypatch):
    """Torch makes one at each manual_seed, 0.3 ms, while CUDA isn't used."""
    seeding.seed_everything(7)
    drawn = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
    monkeypatch.setattr("traceback.format_stack", lambda: pytest.fail("a stack trace"))
    seeding.reseed(7)
    assert drawn == [torch.rand(3).tolist(), random.random(), numpy.random.rand()]


def test_deterministic_refuses_kernels_that_are_not():
    class Scatters(Small):
        def training_step(self, batch):
            torch.zeros(3).put_(torch.tensor([1, 1]), torch.ones(2))
            return super().training_step(batch)

    try:
        fitted(Scatters(), max_steps=1)
        with pytest.raises(RuntimeError, match="deterministic"):
            fitted(Scatters(), max_steps=1, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


# torch.compile


def compiled_and_plain() -> tuple[list[dict[str, Tensor]], int, int]:
    options = {"mode": "default", "dynamic": False, "fullgraph": True}
    runs = [fitted(compile=given, max_steps=3) for given in (options, False)]
    counters = torch._dynamo.utils.counters
    breaks = sum(counters["graph_break"].values())
    return [run.state_dict()["task"] for run in runs], counters["stats"]["unique_graphs"], breaks


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiled_task_is_one_graph_and_trains_alike_under_the_same_names():
    # In a process of its own: the compiler's stay on.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    (mine, plain), graphs, breaks = fresh(compiled_and_plain, environment=environment)
    assert (graphs, breaks) == (1, 0)
    assert list(mine) == ["net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"]
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("optimizer", [SGD, partial(SGD, momentum=0.9)])
def test_weights_of_16_bits_are_updated_whatever_their_number(precision, optimizer):
    """Torch's fused SGD for the CPU leaves out whole vectors of them."""
    ends = [
        fitted(
            make=partial(
                Small, partial(optimizer, fused=fused) if fused is False else optimizer, width=64
            ),
            precision=precision,
            max_steps=3,
        ).task.state_dict()
        for fused in (None, False)
    ]
    for ours, theirs in zip(*(end.values() for end in ends), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.002)
