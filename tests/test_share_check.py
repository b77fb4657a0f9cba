"""The share check: a loss that depends on how rows are shared is noticed before the first step."""

import random
import re
import resource
from collections import deque
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from forked import fresh, on
from share_fuzz import fuzz
from small import SGD, Rows, Small, fitted, is_same, trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from dpframe import DataModule, Strategy, Task, UserError
from dpframe.callbacks import Checkpoint, EarlyStopping
from dpframe.devices import memory
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU
from dpframe.trainer.checks import share_check, trial
from dpframe.trainer.checks.share_check import judge
from dpframe.trainer.checks.trial import Trial
from dpframe.trainer.progress import Progress

TWO = partial(DataParallel, 2, "cpu")


@pytest.fixture(autouse=True)
def whatever_it_takes(monkeypatch):
    """A note of how long the check took would be one of how busy the machine is."""
    monkeypatch.setattr(share_check, "SLOW_SECONDS", float("inf"))
    monkeypatch.setattr(trial, "FORWARD_SECONDS", float("inf"))


class Made(DataModule):
    """Rows of numbers, targets, and labels of which some don't count."""

    def train_dataset(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(1)
        x, y = torch.randn(40, 6, generator=draw), torch.randn(40, 1, generator=draw)
        return TensorDataset(x, y, torch.randint(-1, 4, (40, 7), generator=draw))


class Step(Task):
    """A step by a function of the task, the rows, their targets and labels."""

    def __init__(self, of: Any, precision: torch.dtype = torch.float32) -> None:
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)
        super().__init__(nn.Sequential(*layers), SGD)
        self.of = of
        self.center = torch.ones(())
        self.register_buffer("seen", torch.ones(()))
        self.to(precision)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        output = self.of(self, *batch)
        return output if isinstance(output, dict) else {"loss": output}


def error(task, x, y):
    return (task.net(x) - y).square()


def tokens(task, x, y, labels):
    logits = task.net(x)[:, :, None] * torch.arange(4.0).to(x)[None, :, None]
    return logits.expand(-1, 4, 7), labels


def token_mean(task, x, y, labels):
    return functional.cross_entropy(*tokens(task, x, y, labels), ignore_index=-1)


def token_weight(task, x, y, labels):
    return {"loss": token_mean(task, x, y, labels), "weight": (labels >= 0).sum()}


def two_denominators(task, x, y, labels):
    return token_mean(task, x, y, labels) + error(task, x, y).mean()


def advantages(task, x, y, labels):
    scores = task.net(x)
    return ((y - y.mean()) / (y.std() + 1e-8) * scores).mean()


def contrasts(task, x, y, labels):
    a, b = functional.normalize(x + task.net(x), dim=1), functional.normalize(x, dim=1)
    return functional.cross_entropy(5 * a @ b.T, torch.arange(len(a)))


def contrasts_gathered(task, x, y, labels):
    a = task.all_gather(functional.normalize(x + task.net(x), dim=1))
    b = task.all_gather(functional.normalize(x, dim=1))
    return functional.cross_entropy(5 * a @ b.T, torch.arange(len(a)))


def follows(task, x, y, labels):
    """The mean of the gathered rows of the step before; in a replica's own attribute and buffer."""
    before = task.center + task.seen
    task.center = task.all_gather(task.net(x)).mean().detach()
    task.seen.add_(1)
    return ((task.net(x) - y).square() * before).mean()


def vae(task, x, y, labels):
    noise = torch.randn_like(x[:, :1]) + torch.distributions.Normal(0.0, 1.0).rsample((len(x), 1))
    return (functional.dropout(task.net(x), 0.3) + noise - y).square().sum(dim=1).mean()


def slope(task, x, y, labels):
    scores = task.net(x.requires_grad_()).sum()
    return torch.autograd.grad(scores, x, create_graph=True)[0].square().mean()


NOTICED = {
    "a sum": lambda task, x, y, labels: error(task, x, y).sum(),
    "divided once more": lambda task, x, y, labels: error(task, x, y).mean() / len(x),
    "a mean over tokens": token_mean,
    "two denominators": two_denominators,
    "advantages normalised by share": advantages,
    "contrasted within a share": contrasts,
    "a NaN of few rows": lambda t, x, y, labels: error(t, x, y).mean() / float(len(x) != 2),
}
HONEST = {
    "a mean": lambda task, x, y, labels: error(task, x, y).mean(),
    "a sum for the whole batch": lambda t, x, y, _: error(t, x, y).sum() * t.batch_rows / len(x),
    "tokens with their weight": token_weight,
    "gathered rows": contrasts_gathered,
    "gathered rows in attributes": follows,
    "noise of rows": lambda t, x, y, _: (t.net(x) * t.randn_rows(len(x), 1).to(x) - y).mean(),
    "two means by name": lambda t, x, y, labels: {
        "loss": {
            "tokens": (token_mean(t, x, y, labels), (labels >= 0).sum()),
            "rows": (error(t, x, y).mean(), len(x)),
        }
    },
    "a small difference of large means": lambda t, x, y, _: (
        t.net(x).mean() - t.net(x + 1e-5).mean()
    ),
    "a slope": lambda t, x, y, _: (
        torch.autograd.grad(t.net(x.requires_grad_()).sum(), x, create_graph=True)[0]
        .square()
        .mean()
    ),
}
NOT_COMPARED = {
    "it draws by torch's randperm; self.randn_rows makes it comparable": lambda t, x, y, _: error(
        t, x, y
    )[torch.randperm(len(x))].mean(),
    "it draws by torch's randn_like; self.randn_rows makes it comparable": vae,
    "it draws by torch's rand; self.randn_rows makes it comparable": lambda t, x, y, _: (
        error(t, x, y) * torch.rand((), generator=torch.Generator())
    ).mean(),
    "it draws by torch's scaled_dot_product_attention; self.randn_rows makes it comparable": (
        lambda t, x, y, _: (
            t.net(functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)) - y
        ).mean()
    ),
    "it draws by Python's or NumPy's random numbers": lambda t, x, y, _: (
        error(t, x, y).mean() * random.random() * np.random.rand()
    ),
    "on the rows that it looks at the loss is 0 or NaN, or counts nothing": lambda t, x, y, _: (
        error(t, x, y * float("nan")).mean()
    ),
    "in evaluation mode, a step of a few rows says: an even number of rows": lambda t, x, y, _: (
        uneven()
    ),
}


def uneven() -> Tensor:
    raise ValueError("an even number of rows")


def judged(of: Any, mode: str = "on", dtype: torch.dtype = torch.float32) -> Any:
    strategy = TWO()
    strategy.setup()
    strategy.dtype = dtype
    source = type("Source", (), {})()
    source.dataset, source.collate = Made().train_dataset(), Made().collate
    torch.manual_seed(0)
    return judge([(Trial(Step(of, dtype), strategy, Progress()), source)], mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NOTICED)
def test_a_loss_that_is_no_mean_over_rows_is_noticed(name, dtype):
    assert judged(NOTICED[name], dtype=dtype).refusal.startswith(
        "the loss of Step depends on how its rows are shared ("
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HONEST)
def test_one_that_is_passes_without_a_word(name, dtype):
    assert judged(HONEST[name], "strict", dtype) == ("", (), ())


@pytest.mark.parametrize("why", NOT_COMPARED)
def test_what_can_not_be_compared_is_said_with_its_reason(why):
    note = f"the share check has not compared the loss: {why}"
    assert judged(NOT_COMPARED[why]) == ("", (), (note,))


def numbers(task, x, y, labels):
    return {"loss": error(task, x, y).mean(), "most": y.max(), "mean": y.mean()}


def test_another_number_that_is_no_mean_is_a_warning_and_refused_if_wished():
    verdict = judged(numbers)
    (warning,) = verdict.warnings
    assert warning.startswith("most of Step is no mean over rows (") and not verdict.refusal
    assert judged(numbers, "strict").refusal.startswith("most of Step is no mean over rows (")


def test_the_line_says_how_far_it_is_off_and_what_to_write():
    line = judged(NOTICED["a sum"]).refusal
    assert ", so 2 replicas would train by another loss than one; " in line
    for way in ('"weight"', "self.batch_rows", "self.all_gather", "trainer.share_check=warn"):
        assert way in line
    assert "\n" not in line


# In a run


class Summed(Small):
    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        return {"loss": (self.net(x)[:, 0] - y).square().sum()}


def test_a_run_ends_before_it_writes_anything_or_warns_or_is_left_alone(tmp_path, caplog):
    with pytest.raises(UserError, match="the loss of Summed depends on how its rows are shared"):
        fitted(Summed(), strategy=TWO(), directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    fitted(Summed(), strategy=TWO(), share_check="off", max_steps=1)
    assert caplog.records == []
    fitted(Summed(), strategy=TWO(), share_check="warn", max_steps=1)
    (record,) = caplog.records
    assert record.message.startswith("the loss of Summed depends on how its rows are shared")
    fitted(Summed(), max_steps=1)  # one replica


class Pair(Summed):
    def configure_optimizer(self) -> Any:
        return {"first": SGD(self.net[0].parameters()), "last": SGD(self.net[3].parameters())}

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:  # type: ignore[override]
        step = Small.training_step if turn == "first" else Summed.training_step
        return step(self, batch)

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return Small.training_step(self, batch)


def test_each_turn_is_tried_and_named():
    with pytest.raises(UserError, match="the loss of Pair of turn last depends on how its rows"):
        fitted(Pair(), strategy=TWO())


# In training mode


class InTraining(Task):
    """A step by a function, with layers that are exact by their keys."""

    def __init__(self, of: Any, *layers: nn.Module) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 1)), SGD)
        self.of = of
        self.register_buffer("center", torch.zeros(1))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.of(self, *batch)}


def mean(task, x, y, labels):
    return error(task, x, y).mean()


def detached_rows(task, x, y, labels):
    """The right loss with a wrong gradient: of the other shares' rows there is none."""
    scores = task.net(x)
    if task.run_context.strategy.world_size > 1 or task.run_context.strategy.replicas > 1:
        all_scores = task.all_gather(scores).detach()
    else:
        all_scores = scores
    return (scores - y).square().mean() + all_scores.mean().square()


def by_rank(task, x, y, labels):
    return error(task, x, y).mean() * (1 + task.rank)


def by_replicas(task, x, y, labels):
    return error(task, x, y).mean() * task.run_context.strategy.replicas


def by_world_size(task, x, y, labels):
    return error(task, x, y).mean() / task.run_context.strategy.world_size


def sum_in_training(task, x, y, labels):
    return error(task, x, y).sum() if task.training else error(task, x, y).mean()


def centered(task, x, y, labels):
    """By rows that are gathered, in a buffer that is the same for all shares."""
    rows = task.all_gather(task.net(x))
    task.center.lerp_(rows.detach().mean(0), 0.5)
    return (task.net(x) - y - task.center).square().mean()


DEPENDS = "the loss of InTraining depends on how its rows are shared ("
SEEN = {
    "a sum in training alone": (sum_in_training, DEPENDS),
    "a gradient without the others' rows": (detached_rows, "the gradient of net."),
    "its rank": (by_rank, DEPENDS),
    "the number of replicas": (by_replicas, DEPENDS),
    "the number of processes": (by_world_size, DEPENDS),
}


def of_ranks(strategy: Strategy) -> dict[str, Any]:
    """What a run says before its first step, by what its loss depends on."""
    said = {}
    for name, (of, _) in SEEN.items():
        with pytest.raises(UserError) as refused:
            trainer(InTraining(of), Made(8), strategy=strategy, max_steps=1).fit()
        said[name] = str(refused.value)
    return said


def test_what_training_mode_alone_shows_is_refused_before_the_first_step():
    for name, line in on(DDP(2, "cpu"), of_ranks).items():
        assert line.startswith(SEEN[name][1]) and "\n" not in line, (name, line)
        assert "so 2 replicas would train by another loss than one; return its" in line


@pytest.mark.parametrize("name", SEEN)
def test_it_is_refused_on_virtual_replicas_if_it_trains_otherwise_there(name):
    """These are one process of rank 0."""
    of, said = SEEN[name]
    made = trainer(InTraining(of), Made(8), strategy=TWO())
    if name in ("its rank", "the number of processes"):
        assert made.prepare().notes == []
        return
    with pytest.raises(UserError) as refused:
        made.prepare()
    assert str(refused.value).startswith(said)


class Gan(Task):
    """Turns of two networks with BatchNorm and dropout, whose noise is that of rows."""

    def __init__(self) -> None:
        super().__init__(optimizers={"critic": SGD, "generator": SGD})
        layers = nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Dropout(0.3)
        self.generator = nn.Sequential(nn.Linear(2, 8), *layers, nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:
        made = self.generator(self.randn_rows(len(batch[0]), 2).to(batch[0]))
        if turn == "generator":
            return {"loss": functional.softplus(-self.critic(made)).mean()}
        real, fake = self.critic(batch[0]), self.critic(made.detach())
        return {"loss": (functional.softplus(-real) + functional.softplus(fake)).mean()}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.critic(batch[0]).mean()}


class Undetached(Gan):
    """The critic's loss has another gradient of the generator, which is not used in that turn."""

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:
        output = super().training_step(batch, turn)
        if turn == "critic":
            made = self.all_gather(self.generator(batch[0][:, :2]))
            with torch.no_grad():
                mean = made.mean()
            output["loss"] = output["loss"] + (made.mean() - mean) * len(batch[0])
        return output


def with_buffers(task: Task) -> Task:
    for name, buffer in {
        "least": torch.tensor(float("inf")),
        "most": torch.tensor(float("-inf")),
        "none": torch.tensor(float("nan")),
        "edges": torch.eye(3).to_sparse(),
        "kinds": torch.ones(3, dtype=torch.bool),
        "waves": torch.ones(3, dtype=torch.complex64),
    }.items():
        task.register_buffer(name, buffer)
    return task


def again(task, x, y, labels, **contexts):
    contexts = contexts or {"context_fn": task.checkpoint_contexts}
    scores = checkpoint(task.net, x.requires_grad_(), use_reentrant=False, **contexts)
    return (scores - y).square().mean()


SILENT = {
    "a mean": lambda: InTraining(mean),
    "BatchNorm": lambda: InTraining(mean, nn.BatchNorm1d(8), nn.Tanh()),
    "dropout": lambda: InTraining(mean, nn.Dropout(0.5), nn.AlphaDropout(0.2)),
    "both, with gathered rows": lambda: InTraining(centered, nn.BatchNorm1d(8), nn.Dropout(0.1)),
    "gathered rows": lambda: InTraining(contrasts_gathered, nn.BatchNorm1d(8)),
    "turns": Gan,
    "turns with other weights": Undetached,
    "odd buffers": lambda: with_buffers(InTraining(mean)),
    "a block that is computed again": lambda: InTraining(
        again, nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_exact_passes_in_training_mode_without_a_word(name, caplog):
    made = trainer(SILENT[name](), Made(8), strategy=TWO(), exact_layers=True)
    with patch.object(Trial, "compare", autospec=True, side_effect=Trial.compare) as compared:
        training = made.prepare()
    trials = [call.args[0] for call in compared.call_args_list]
    assert all(trial.in_training for trial in trials if trial.trains)
    assert (training.notes, training.own, warned(caplog)) == ([], "", [])


def test_a_block_that_is_computed_again_without_its_contexts_is_told_and_no_wrong_gradient():
    without = partial(again, context_fn=lambda: (nullcontext(), nullcontext()))
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(8)):
        made = trainer(InTraining(without, layer), Made(8), strategy=TWO(), exact_layers=True)
        (note,) = made.prepare().notes
        said = "the share check has not compared the loss in training mode: a step of a few rows"
        assert note.startswith(said) and "needs context_fn=task.checkpoint_contexts" in note


@pytest.mark.parametrize(
    ("name", "most", "why"),
    [
        ("FORWARD_SECONDS", 0.0, "a step of a few rows takes more than 0.0 s"),
        ("MOST_WEIGHTS", 64, "there are more than 64 weights"),
    ],
)
def test_where_gradients_are_not_compared_a_note_says_why(name, most, why, monkeypatch):
    monkeypatch.setattr(trial, name, most)
    notes = trainer(InTraining(mean), Made(8), strategy=TWO()).prepare().notes
    assert notes == [f"the share check has compared no gradients: {why}"]


class Measured(Small):
    """Its validation has numbers that are no means over rows, as has its test."""

    def validation_step(self, batch: list[Tensor], name: str) -> dict[str, Any]:
        error = (self.net(batch[0])[:, 0] - batch[1]).abs()
        far = {"far": error.max()} if name in ("", "far") else {}
        return {"loss": error.square().sum(), "mae": error.mean(), **far}


class TwoSets(Rows):
    def val_dataset(self) -> Any:
        return {"near": self.held_out, "far": self.held_out}


def warned(caplog: Any) -> list[str]:
    lines = [re.sub(r" \(.*?\)", "", record.getMessage()) for record in caplog.records]
    caplog.clear()
    return lines


def test_a_number_of_a_validation_that_is_no_mean_is_told_with_who_reads_it(caplog):
    mean = "on 2 replicas it is the mean of what their shares give"
    way = "; log a torchmetric, or gather the rows"
    callbacks = [Checkpoint(), EarlyStopping(monitor="val/far")]
    made = trainer(Measured(), strategy=TWO(), callbacks=callbacks, max_steps=1)
    made.prepare()
    keys = "callbacks.checkpoint.monitor", "callbacks.early_stopping.monitor"
    assert warned(caplog) == [
        f"val/loss of Measured is no mean over rows: {mean}, which {keys[0]} will read{way}",
        f"val/far of Measured is no mean over rows: {mean}, which {keys[1]} will read{way}",
    ]
    for _ in range(2):
        made.validate()  # which has been looked at
        made.test()
    names = "loss", "far"
    assert warned(caplog) == [
        f"test/{name} of Measured is no mean over rows: {mean}{way}" for name in names
    ]
    trainer(Measured(), TwoSets(), strategy=TWO()).validate()
    names = "near/loss", "far/loss", "far/far"
    assert warned(caplog) == [
        f"val/{name} of Measured is no mean over rows: {mean}{way}" for name in names
    ]
    with pytest.raises(UserError, match=r"^val/loss of Measured .* trainer.share_check=on warns"):
        trainer(Measured(), strategy=TWO(), share_check="strict").validate()
    trainer(Small(), strategy=TWO(), share_check="strict").validate()
    trainer(Measured()).validate()
    assert warned(caplog) == []


LATER: dict[str, tuple[Any, int]] = {
    "from the second epoch on": (lambda task: task.epoch >= 1, 5),
    "in the last epoch": (lambda task: task.epoch == 3, 19),
    "as the steps go on": (lambda task: task.global_step / 1000, 5),
}


@pytest.mark.parametrize("when", LATER)
def test_a_loss_that_depends_on_the_shares_later_on_is_refused_at_once(when):
    how_much, step = LATER[when]

    class Warming(Small):
        def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
            output = super().training_step(batch)
            return {"loss": output["loss"] * (1 + how_much(self) * len(batch[0]))}

    said = rf"the loss of Warming depends on how its rows are shared at step {step} \("
    with pytest.raises(UserError, match=said):
        fitted(Warming(), strategy=TWO(), max_epochs=4)


def test_a_step_that_can_not_be_tried_later_on_is_said():
    class Ending(Small):
        def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
            if self.epoch:
                raise ValueError("the curriculum has one epoch")
            return super().training_step(batch)

    made = trainer(Ending(), strategy=TWO(), max_epochs=4)
    assert made.prepare().notes == [
        "the share check has not compared the loss at step 5: in training mode, a step of a few "
        "rows says: the curriculum has one epoch"
    ]


def refused_in_ranks(strategy: Strategy) -> str:
    with pytest.raises(UserError) as refused:
        fitted(Summed(), strategy=strategy)
    fitted(Small(), strategy=strategy, max_steps=1)
    return str(refused.value)


def test_all_ranks_are_told_alike():
    said = on(DDP(3, "cpu"), refused_in_ranks)
    assert said.startswith("the loss of Summed depends on") and "so 3 replicas would train" in said


def judged_in_ranks(strategy: Strategy) -> tuple[str, Any]:
    """What a run with a sum says, and the notes of one with dropout."""
    honest = fitted(Small(dropout=0.5), strategy=strategy, max_steps=1)
    return refused_in_ranks(strategy), honest.training.notes


def test_fsdp_computes_the_rows_in_all_ranks_at_once():
    said, notes = on(FSDP(2, "cpu"), judged_in_ranks)
    why = "each rank holds a part of each weight"
    assert said.startswith("the loss of Summed depends on")
    assert notes == [f"the share check has compared no gradients: {why}"]


class Endless(IterableDataset):
    """Goes on where it was; what it reads from is large."""

    def __init__(self) -> None:
        self.read = 0
        self.numbers = torch.arange(float(1 << 24)).view(-1, 4)

    def __iter__(self) -> Any:
        while True:
            self.read += 1
            x = self.numbers[self.read, :3] / self.read
            yield x, x.sum()


class Streamed(DataModule):
    batch_size = 4

    def setup(self) -> None:
        self.stream = Endless()

    def train_dataset(self) -> IterableDataset:
        return self.stream


class Momentum(Small):
    """A slow copy of the network, a little nearer to it after each step."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook
        self.slow = nn.Linear(3, 1).requires_grad_(False)

    def move(self) -> None:
        with torch.no_grad():
            self.slow.weight.lerp_(self.net[0].weight[:1], 0.1)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        if self.hook == "training_step" and self.training:
            self.move()
        return super().training_step(batch)

    def on_batch_start(self, trainer: Any, batch: Any) -> None:
        if self.hook == "on_batch_start":
            self.move()

    def on_step_end(self, trainer: Any) -> None:
        if self.hook == "on_step_end":
            self.move()


def test_a_weight_that_each_replica_of_a_process_would_change_is_refused():
    said = r"Momentum.training_step changes slow.weight, which 2 replicas in one process share"
    with pytest.raises(UserError, match=said):
        fitted(Momentum("training_step"), strategy=TWO(), max_steps=1)
    fitted(Momentum("training_step"), max_steps=1)
    slow = []
    for strategy in (None, TWO()):
        torch.manual_seed(0)
        slow.append(fitted(Momentum("on_step_end"), strategy=strategy).task.slow.weight)
    assert torch.allclose(*slow, rtol=1e-5)


class LateMomentum(Momentum):
    def move(self) -> None:
        if self.global_step >= 4:
            super().move()


def test_a_change_that_a_step_begins_to_make_later_is_refused_too():
    said = r"LateMomentum.training_step changes slow.weight, which 2 replicas in one process share"
    with pytest.raises(UserError, match=said):
        fitted(LateMomentum("training_step"), strategy=TWO())
    fitted(LateMomentum("on_batch_start"), strategy=TWO())  # once a batch, whatever the replicas


def test_a_stream_is_read_by_a_copy_of_it():
    data = Streamed()
    with pytest.raises(UserError, match="the loss of Summed depends on how its rows are shared"):
        fitted(Summed(), data, strategy=TWO(), max_steps=2)
    assert data.stream.read == 0
    curves = []
    for check in ("off", "strict"):
        torch.manual_seed(0)
        trained = fitted(Small(), Streamed(), strategy=TWO(), max_steps=3, share_check=check)
        curves.append(trained.task.state_dict())
    assert is_same(*curves)


class Drawing(Dataset):
    """Rows with noise of generators of its own, in a transform, too."""

    def __init__(self) -> None:
        self.x, self.y = Rows(20).train.tensors
        self.lock, self.read = Lock(), list[int]()
        self.draw = torch.Generator().manual_seed(1)
        self.draws = {"python": random.Random(1), "numpy": np.random.RandomState(1)}
        self.transform = SimpleNamespace(draw=np.random.default_rng(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        self.read.append(row)
        noise = torch.rand(3, generator=self.draw) + self.draws["python"].random()
        noise = noise + self.draws["numpy"].rand() + self.transform.draw.random()
        return self.x[row] + noise, self.y[row]


class DrawingData(Rows):
    def __init__(self) -> None:
        super().__init__(shuffle=False)
        self.train = Subset(Drawing(), range(20))  # type: ignore[assignment]


def drawn(strategy: Strategy, check: str) -> Any:
    torch.manual_seed(0)
    data = DrawingData()
    made = fitted(Small(), data, strategy=strategy, share_check=check, max_steps=3)
    return made.task.state_dict(), made.metrics, data.train.dataset.read


@pytest.mark.parametrize("strategy", [CPU(), TWO(), DDP(2, "cpu")])
def test_what_a_data_set_draws_by_itself_is_the_same_with_it_and_without(strategy):
    checked, free = (on(strategy, drawn, check) for check in ("strict", "off"))
    assert is_same(checked[0], free[0]) and checked[1:] == free[1:]


class Unique(Endless):
    def __deepcopy__(self, memo: dict) -> Any:
        raise TypeError("cannot copy a connection")


def test_a_stream_that_has_no_copy_is_said_to_be_not_compared(monkeypatch):
    data = Streamed()
    monkeypatch.setattr(Streamed, "setup", lambda data: setattr(data, "stream", Unique()))
    trained = fitted(Summed(), data, strategy=TWO(), max_steps=2)
    (note,) = trained.training.notes
    assert note.endswith("the loss: a copy of the stream says: cannot copy a connection")


class Stateful(Small):
    """Changes all that a step may: buffers, attributes, frozen weights, generators."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.mean, self.queue, self.made = 0.0, deque(maxlen=3), {"steps": []}
        self.draw = torch.Generator().manual_seed(3)
        self.slow = nn.Linear(3, 1).requires_grad_(False)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * float(batch[1].mean())
        self.queue.append(batch[0].mean())
        self.made["steps"].append(len(batch[0]))
        self.new = len(batch[0])
        if not self.training:  # replicas in one process may not change what they share
            with torch.no_grad():
                self.slow.weight.mul_(0.9).add_(torch.rand(1, 3, generator=self.draw))
        noise = random.random() + np.random.rand() + torch.rand(())
        return {**output, "loss": output["loss"] + 0 * (noise + self.mean)}


def ended(strategy: Strategy, check: str) -> Any:
    torch.manual_seed(0)
    task = Stateful()
    one = fitted(task, strategy=strategy, share_check=check, max_steps=3)
    own = task.seen, task.mean, list(task.queue), task.made["steps"], task.draw.get_state()
    return one.task.state_dict(), own, one.metrics, torch.get_rng_state(), random.getstate()


@pytest.mark.parametrize("strategy", [CPU, TWO])
def test_a_run_has_the_same_bits_with_it_and_without(strategy):
    checked, free = ended(strategy(), "on"), ended(strategy(), "off")
    assert is_same(checked[0], free[0])
    assert repr(checked[1:]) == repr(free[1:])


class Kept(Small):
    """What it keeps is another object after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("queue", torch.zeros(0, 3))
        self.number, self.array, self.scalar = np.zeros(()), np.zeros(2), np.float32(1)
        self.counter = SimpleNamespace(count=0)
        self.teacher = [nn.Linear(3, 1)]
        self.draws = [torch.Generator().manual_seed(1), np.random.default_rng(0), random.Random(1)]
        self.tensor = torch.ones(3)
        self.view = {"of": self.tensor}
        self.grown = self.net[0].weight.norm()

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        kept = self.mean + float(self.number) + float(self.scalar) + self.counter.count
        kept = kept + self.array.sum() + self.teacher[0].weight.detach().norm() + len(self.queue)
        kept = kept + self.view["of"].sum() + self.grown.detach()
        self.draws[0].manual_seed(self.draws[0].initial_seed() + 1)
        drawn = self.draws[0].initial_seed() + self.draws[1].random()
        output["loss"] = output["loss"] * (kept + drawn + self.draws[2].random())
        self.mean = 0.9 * self.mean + 0.05
        self.queue = torch.cat([self.queue, batch[0].detach()])[-8:]
        self.number = 0.9 * float(self.number) + 0.1
        self.scalar, self.grown = float(self.scalar) * 0.9, self.grown.detach() * 0.9
        self.array += 1
        self.counter.count += 1
        self.tensor.mul_(0.9)
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.9)
        return output


def test_whatever_a_step_keeps_is_as_it_was():
    torch.manual_seed(0)
    task = Kept()
    before = repr([task.state_dict(), vars(task)])
    made = trainer(task, strategy=TWO())
    objects = {name: id(value) for name, value in vars(task).items()}
    assert made.prepare().notes == []
    now = {name: id(vars(task)[name]) for name in objects}
    names = {"number", "array", "scalar", "counter", "teacher", "draws", "tensor", "view", "grown"}
    assert {name: now[name] for name in names} == {name: objects[name] for name in names}
    assert repr([task.state_dict(), vars(task)])[:400] == before[:400]
    assert task.view["of"] is task.tensor and task.counter.count == 0 and len(task.queue) == 0


def test_few_digits_hide_no_loss_that_depends_on_the_shares():
    torch.manual_seed(0)
    with pytest.raises(UserError, match="the loss of Summed depends on how its rows are shared"):
        fitted(Summed(), strategy=TWO(), precision="bf16-true")
    fitted(Small(), strategy=TWO(), precision="bf16-true", share_check="strict", max_steps=1)
    refusal, _, notes = judged(lambda t, x, y, _: error(t, x, y).bfloat16().mean())
    assert refusal == "" and notes[0].endswith("the loss: it is computed in 16 bits")


def test_rows_that_count_nothing_tell_nothing():
    nothing = lambda t, x, y, _: {"loss": error(t, x, y).sum(), "weight": 0.0}  # noqa: E731
    for of in (nothing, lambda t, x, y, _: 0 * error(t, x, y).sum()):
        _, _, (note,) = judged(of)
        assert note.endswith("the loss is 0 or NaN, or counts nothing")
    tiny = lambda t, x, y, _: (t.net(x) - t.net(x).detach()).mean() * 1e-16  # noqa: E731
    assert judged(tiny).refusal == ""


class Penalty(Small):
    """On the slope of a network that sees the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return {"loss": slope.square().sum(dim=1).mean()}


def test_a_gradient_within_a_step_through_what_it_gathers_is_refused_with_its_cause():
    with pytest.raises(UserError, match="it takes a gradient through what it gathers") as error:
        fitted(Penalty(), strategy=TWO(), precision="64", batch_norm="global")
    assert "evaluation mode; trainer.share_check=warn trains anyway" in str(error.value)
    fitted(Penalty(), data=Rows(val=False), strategy=TWO(), precision="64", max_steps=1)


class Attacked(Penalty):
    """Its rows are moved up the slope of the loss, which it takes in evaluation mode."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch[0].requires_grad_(), batch[1]
        self.net.eval()
        (slope,) = torch.autograd.grad(self.off(x, y).sum(), x)
        self.net.train()
        return {"loss": self.off(x + 0.1 * slope.sign(), y).mean()}

    def off(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x)[:, 0] - y).square()


def test_a_step_that_turns_modes_itself_is_the_batchs_by_the_key_and_else_not_compared(caplog):
    given: dict[str, Any] = {"data": Rows(val=False), "precision": "64", "max_epochs": 2}
    states = []
    for strategy in (CPU(), TWO()):
        torch.manual_seed(0)
        made = fitted(Attacked(), strategy=strategy, batch_norm="global", **given)
        states.append(made.task.state_dict())
    assert all(torch.allclose(states[0][k], states[1][k], rtol=0, atol=1e-12) for k in states[0])
    assert warned(caplog) == []
    fitted(Attacked(), strategy=TWO(), **given)
    _, not_compared = warned(caplog)
    assert not_compared.endswith("the loss: the step puts modules into training mode itself")


# On one process


class Squeezed(Small):
    """Its output is [n, 1], and the target [n]."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": (self.net(batch[0]) - batch[1]).square().mean(), "most": batch[1].max()}


ALONE = "depends on which rows are in a batch, so it would change with the batch size and the "
ALONE += "number of replicas; "
OFF = "; trainer.share_check=off leaves this check out"
COMPARES = "that is right for one that compares rows, e.g. a contrastive loss; else return the "
COMPARES += 'mean over rows, or its "weight"'


def test_on_one_process_a_first_fit_warns_of_shapes_that_are_broadcast(caplog):
    made = fitted(Squeezed(), max_steps=1)
    assert warned(caplog) == [
        f"the loss of Squeezed {ALONE}torch's sub broadcasts [5, 1] and [5]: give both one shape"
        f"{OFF}"
    ]
    fitted(Squeezed(), max_steps=2, resume=made.state_dict())
    fitted(Squeezed(), max_steps=1, share_check="off")
    assert warned(caplog) == []
    with pytest.raises(UserError, match=r"one; torch's sub broadcasts \[5, 1\] and \[5\]: give"):
        fitted(Squeezed(), strategy=TWO())


def test_on_one_process_a_sum_and_a_contrast_are_one_warning_and_other_numbers_none(caplog):
    data = Made(batch_size=8)
    for of in (NOTICED["a sum"], contrasts):
        trainer(Step(of), data).prepare()
        assert warned(caplog) == [f"the loss of Step {ALONE}{COMPARES}{OFF}"]
    trainer(Step(numbers), data).prepare()
    assert warned(caplog) == []


class Normed(Step):
    def __init__(self) -> None:
        super().__init__(lambda task, x, y, _: (task.scores(x) - y).square().mean())
        self.norm = nn.BatchNorm1d(6)
        self.rnn, self.head = nn.LSTM(6, 3, batch_first=True), nn.Linear(3, 1)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.norm(x)[:, None])[0][:, -1])


class Slow(Step):
    """Each of its steps takes longer than the check may."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__(NOTICED["a sum"])
        now = count(0.0, 1.0)
        clock = SimpleNamespace(perf_counter=lambda: next(now))
        monkeypatch.setattr(trial, "time", clock)


class Socket:
    """What can't be seen into."""

    __slots__ = ()


def holding(made: Task, value: Any) -> Task:
    made.value = value
    return made


QUIET: dict[str, Any] = {
    **{name: lambda _, of=of: Step(of) for name, of in HONEST.items()},
    "normalised over a batch": lambda _: Normed(),
    "noise and dropout": lambda _: Step(vae),
    "an error": lambda _: Step(lambda *_: uneven()),
    "what takes long": Slow,
    "what has no copy": lambda _: holding(Step(NOTICED["a sum"]), [Socket()]),
    "a lock": lambda _: holding(Step(NOTICED["a sum"]), SimpleNamespace(lock=Lock())),
}


@pytest.mark.parametrize("name", QUIET)
def test_on_one_process_it_says_nothing_where_all_is_well_or_it_can_not_tell(
    name, monkeypatch, caplog
):
    assert trainer(QUIET[name](monkeypatch), Made(batch_size=8)).prepare().notes == []
    trainer(Step(NOTICED["a sum"]), Made(batch_size=1)).prepare()
    trainer(Squeezed(), Streamed(batch_size=8)).prepare()
    assert warned(caplog) == []


# Memory


class Weighty(Small):
    """With 256 MiB of frozen weights, or of trained ones, as a buffer, or in an attribute."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        heavy = torch.ones(2**28 // dtype.itemsize, dtype=dtype)
        self.to(dtype)
        if kind in ("frozen", "trained"):
            self.heavy = nn.Parameter(heavy, requires_grad=kind == "trained")
        elif kind == "buffer":
            self.register_buffer("heavy", heavy)
        else:
            self.heavy = [heavy]

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        output = super().training_step(batch)
        return {"loss": output["loss"] * (len(batch[0]) if self.multiplies else 1)}


def weighed(kind: str, dtype: torch.dtype, multiplies: bool, free: int) -> tuple[Any, float]:
    """The verdict, and by how much of the weights' bytes the process has grown for it; the
    machine's `free` bytes are as told, and 512 MiB more can't be had."""
    torch.manual_seed(0)
    for task in (Small(), Weighty(kind, dtype)):
        task.multiplies = multiplies
        strategy = TWO()
        strategy.setup()
        strategy.dtype = dtype if dtype != torch.float32 else None
        source = SimpleNamespace(dataset=Rows().train, collate=default_collate)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2**29
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with patch.object(memory, "free", return_value=free):
            verdict = judge([(Trial(task, strategy, Progress()), source)], "on")
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return verdict, grown / 2**28


@pytest.mark.parametrize("kind", ["frozen", "trained", "buffer", "attribute"])
def test_no_weight_and_nothing_large_is_copied(kind):
    (refusal, warnings, notes), grown = fresh(weighed, kind, torch.float32, False, 0)
    assert (refusal, warnings) == ("", ()) and grown < 0.05
    assert all("50,000,000 weights" in note for note in notes)
    verdict, grown = fresh(weighed, kind, torch.float32, True, 2**30)  # a quarter is too little
    assert verdict.refusal.startswith("the loss of Weighty depends on how") and grown < 0.05


def test_weights_of_16_bits_are_compared_where_there_is_room_for_64():
    free = {
        2**30: "its weights have 16 bits",
        2**40: "there is not enough memory: [enforce fail",  # which others have taken since
    }
    for room, why in free.items():
        (_, _, (note,)), grown = fresh(weighed, "trained", torch.bfloat16, True, room)
        assert note.startswith(f"the share check has not compared the loss: {why}")
        assert room > 2**30 or grown < 0.05


class Renormed(Small):
    """Changes weights where nothing is in the way: in a function of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink = torch.jit.script(shrunk)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        with torch.no_grad():
            self.shrink(self.net[0].weight)
        return super().training_step(batch)


def shrunk(weight: Tensor) -> Tensor:
    return weight.mul_(0.9)


WRITES: dict[str, Any] = {
    "a method": lambda weight: weight.mul_(0.9),
    "a part": lambda weight: weight[0].zero_(),
    "an entry": lambda weight: weight.__setitem__(0, 1.0),
    "data": lambda weight: weight.data.clamp_(-0.01, 0.01),
    "other data": lambda weight: setattr(weight, "data", weight.data * 0.9),
    "a sum": lambda weight: weight.__iadd__(1),
    "several": lambda weight: torch._foreach_mul_([weight], 0.9),
    "out": lambda weight: torch.neg(weight, out=weight),
    "init": nn.init.zeros_,
    "a norm": lambda weight: functional.embedding(torch.tensor([0]), weight, max_norm=1e-3),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_step_that_changes_a_weight_in_place_is_not_tried(how):
    def step(task: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            WRITES[how](task.net[0].weight)
        return error(task, x, y).sum()

    weights: list[Any] = []
    _, _, (note,) = judged(lambda task, *rest: step(weights.append(task) or task, *rest))
    assert note.endswith("the loss: it changes net.0.weight in place, which can't be taken back")
    torch.manual_seed(0)
    assert torch.equal(weights[0].net[0].weight, Step(None).net[0].weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_one_that_was_not_seen_in_time_ends_the_run():
    with pytest.raises(UserError, match=r"Renormed.training_step changes net.0.weight in place"):
        fitted(Renormed(), strategy=TWO(), max_steps=1)


# Random steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_random_steps_no_honest_one_is_refused_and_no_planted_term_is_missed(dtype):
    wrong, noticed = fuzz(80, dtype)
    assert wrong == [] and noticed > 40
