"""`callbacks=throughput`: what it counts and divides, and that it changes no number."""

import sys

import pytest
import torch
from command import ROOT
from forked import on
from small import Rows, Small, fitted, is_same, trainer

from dpframe.callbacks import Throughput
from dpframe.callbacks.throughput import model_flops
from dpframe.loggers import Logger
from dpframe.strategies import DDP, FSDP, DataParallel

sys.path.insert(0, str(ROOT))

FORWARD = 2 * (3 * 8 + 8 * 1)  # of a row of Small
FLOPS = 2 * FORWARD + 2 * 8  # and backward: to weights, and to what the second layer gets


class Kept(Logger):
    """The rows that were logged, by their steps."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, scalars, *, step):
        self.rows.setdefault(step, {}).update(scalars)


class Tokens(Small):
    """A row of `x` counts as many as its first number says."""

    def training_step(self, batch):
        x, y = batch
        count = x[:, 0].abs().ceil() + 1
        error = (self.net(x)[:, 0] - y).square()
        return {"loss": (error * count).sum() / count.sum(), "weight": count.sum()}


def counted(strategy, settings) -> tuple[float, dict[int, dict[str, float]]]:
    throughput, kept = Throughput(peak_tflops=1e-6), Kept()
    with trainer(
        *(None, Rows(rows=10, batch_size=5)),
        callbacks=[throughput],
        loggers=[kept],
        strategy=strategy,
        log_every=1,
        **settings,
    ) as made:
        made.fit()
    return throughput.flops_per_row, kept.rows


def here(strategy, call, settings):
    return call(strategy, settings)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (None, {}),
        (None, {"accumulate": 2}),
        (None, {"micro_batch": 2}),
        (DDP(gpus=2, accelerator="cpu"), {}),
        (FSDP(gpus=2, accelerator="cpu"), {}),
    ],
    ids=["one process", "accumulated", "in pieces", "ddp", "fsdp"],
)
def test_operations_of_a_row_are_those_of_its_products_on_each_strategy(strategy, settings):
    per_row, rows = (
        counted(strategy, settings) if strategy is None else on(strategy, counted, settings)
    )
    replicas = 1 if strategy is None else 2
    assert per_row == FLOPS
    for numbers in rows.values():
        flops = FLOPS * numbers["step/samples_per_second"] / replicas
        assert numbers["step/tflops_per_device"] == pytest.approx(flops / 1e12)
        assert numbers["step/mfu"] == pytest.approx(flops / 1e6)
        assert not {"step/tokens_per_second", "step/memory_gib"} & numbers.keys()


def test_replicas_that_compute_in_threads_are_not_counted(caplog):
    caplog.set_level("INFO")
    per_row, rows = counted(DataParallel(gpus=2, accelerator="cpu"), {})
    assert per_row == 0 and not any("step/mfu" in numbers for numbers in rows.values())
    assert "needs a process for each replica to count operations" in caplog.text


def test_what_is_computed_again_is_use_of_the_hardware():
    _, rows = counted(None, {"checkpoint_activations": ["net.0"]})
    assert all("step/hfu" in numbers and "step/mfu" not in numbers for numbers in rows.values())


@pytest.mark.parametrize("log_every", [2, 3])
def test_tokens_are_the_sum_of_weights_over_epochs_and_a_resume(log_every):
    """A window of 2 ends in the next epoch, and one of 3 in the resumed run."""
    x = Rows().train.tensors[0]
    data = lambda: Rows(shuffle=False)  # noqa: E731
    settings = {"make": Tokens, "log_every": log_every}
    first, kept = Kept(), Kept()
    before = fitted(
        None, data(), callbacks=[Throughput()], loggers=[first], max_steps=7, **settings
    )
    fitted(
        *(None, data()),
        callbacks=[Throughput()],
        loggers=[kept],
        resume=before.state_dict(),
        max_epochs=3,
        **settings,
    )
    counts = (x[:, 0].abs().ceil() + 1).view(5, 4).sum(1).tolist() * 3  # of each step
    logged = first.rows | kept.rows
    steps = [step for step in range(1, 16) if step % log_every == 0]
    for step in steps:
        begin = max(step - log_every, (step - 1) // 5 * 5)  # means begin again with an epoch
        numbers = logged[step]
        ratio = numbers["step/tokens_per_second"] / numbers["step/samples_per_second"]
        assert ratio == pytest.approx(sum(counts[begin:step]) / (4 * (step - begin))), step


def test_weights_are_those_without_it_to_the_bit():
    without, beside = fitted(), fitted(callbacks=[Throughput()])
    assert is_same(without.task.state_dict(), beside.task.state_dict())


def test_the_operations_of_a_gpt_are_those_of_the_formula_of_the_benchmark():
    from benchmarks.gpu.contests import Tokens, flops_per_row, gpt2

    problem = gpt2(1, "task.layers=2", "task.block=128", epoch_steps=1)
    throughput = Throughput()
    with trainer(
        *(problem.task, Tokens(1, 1, 128, 50304)), callbacks=[throughput], max_steps=1
    ) as made:
        made.fit()
    assert throughput.flops_per_row == pytest.approx(flops_per_row(problem), rel=0.01)


def test_scores_that_attention_computes_again_in_its_backward_do_not_count():
    aten = torch.ops.aten
    forward, backward = aten._flash_attention_forward, aten._flash_attention_backward
    assert model_flops({aten.mm: 7, forward: 20, backward: 50, aten.addmm: 1}) == 7 + 20 + 40 + 1


def test_a_step_that_torch_can_not_count_is_told_by_what_to_leave_out():
    class Penalized(Small):
        def training_step(self, batch):
            x = batch[0].requires_grad_()
            loss = self.net(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return {"loss": loss + gradient.square().mean()}

    settings = {"make": Penalized, "share_check": "off"}
    with pytest.raises(RuntimeError) as raised:
        fitted(None, Rows(val=False), callbacks=[Throughput()], **settings)
    assert "count_flops=false leaves that out" in raised.value.__notes__[0]
    fitted(None, Rows(val=False), callbacks=[Throughput(count_flops=False)], **settings)
