"""Several optimizers that take turns, and steps that compute their gradients more than once."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from forked import on
from recorded import Recorder, once, weights, weights_apart
from small import SGD, Hooks, Rows, Small, Streamed, fitted, is_same, trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from dpframe import Callback, Strategy, Task, UserError
from dpframe.data import permutation
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU

MAKE = {
    "critic": partial(torch.optim.Adam, lr=0.01),
    "generator": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}
SCHEDULES = {"generator": partial(StepLR, step_size=2, gamma=0.5)}


class Pair(Task):
    """The generator moves rows to where the critic takes them for others; every second step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(optimizers=MAKE, schedulers=SCHEDULES, **options)
        self.generator = nn.Linear(3, 3)
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def turns(self) -> list[str]:
        return ["critic", "generator"] if self.global_step % 2 else ["critic"]

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:
        return {"loss": loss_of(self.generator, self.critic, batch, turn)}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.critic(batch[0]).mean()}


def loss_of(generator: nn.Module, critic: nn.Module, batch: list[Tensor], turn: str) -> Tensor:
    real, weight = batch
    made = critic(generator(-real))[:, 0]
    if turn == "generator":
        return nn.functional.softplus(-made).mean()
    return (nn.functional.softplus(-critic(real)[:, 0]) + weight.abs() * made.exp()).mean()


def pair(kind: type[Pair] = Pair) -> Pair:
    torch.manual_seed(5)
    return kind().double()


@once
def by_hand(accumulate: int = 1, clip: float | None = None) -> dict[str, Any]:
    """The same in plain torch, on one device."""
    task, data = pair(), Rows(22, 4)
    columns = [tensor.double() for tensor in data.train.tensors]
    parts = {name: getattr(task, name) for name in MAKE}
    optimizers = {name: make(parts[name].parameters()) for name, make in MAKE.items()}
    schedule = SCHEDULES["generator"](optimizers["generator"])
    step = 0
    for epoch in range(3):
        batches = permutation(22, seed=0, epoch=epoch).split(4 * accumulate)
        for rows in batches:
            for turn in ["critic", "generator"] if step % 2 else ["critic"]:
                loss = loss_of(**parts, batch=[column[rows] for column in columns], turn=turn)
                weights_ = list(parts[turn].parameters())
                for weight, gradient in zip(
                    weights_, torch.autograd.grad(loss, weights_), strict=True
                ):
                    weight.grad = gradient
                if clip is not None and turn == "critic":
                    nn.utils.clip_grad_norm_(weights_, clip)
                optimizers[turn].step()
            step += 1
        schedule.step()
    return weights(task)


class Counted(Pair):
    """Its critic weighs a batch by something else than rows."""

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:
        output = super().training_step(batch, turn)
        return {**output, "weight": 1.0 + self.global_step} if turn == "critic" else output


def test_each_turn_has_weights_or_none():
    recorder = Recorder()
    steps = fitted(Counted(), Rows(8, 4), loggers=[recorder], max_epochs=1, log_every=1)
    losses = [logged["step/critic/loss"] for _, logged in recorder.log_[:2]]
    assert steps.metrics["train/critic/loss"] == pytest.approx((losses[0] + 2 * losses[1]) / 3)


def by_dpframe(strategy: Strategy, **settings: Any) -> dict[str, Any]:
    recorder = Recorder()
    made = fitted(
        pair(),
        Rows(22, 4),
        strategy=strategy,
        loggers=[recorder],
        precision="64",
        max_epochs=3,
        log_every=4,
        **settings,
    )
    return {"weights": weights(made.task), "metrics": made.metrics, "log": recorder.log_}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 3},
    "clipped": {"clip_norm": {"critic": 0.05}},
}
HAND: dict[str, tuple[Any, ...]] = {"plain": (), "accumulated": (3,), "clipped": (1, 0.05)}
STRATEGIES = {
    "cpu": CPU,
    "data_parallel": partial(DataParallel, 3, "cpu"),
    "ddp 2": partial(DDP, 2, "cpu"),
    "ddp 3": partial(DDP, 3, "cpu"),
    "fsdp 3": partial(FSDP, 3, "cpu"),
}


def all_cases(strategy: Strategy) -> dict[str, Any]:
    return {name: by_dpframe(strategy, **settings) for name, settings in CASES.items()}


@once
def asked(name: str) -> dict[str, Any]:
    """All that the tests ask of this strategy, in one group of its ranks."""
    calls = [call for call, names in ASKED.items() if name in names]
    return on(STRATEGIES[name](), each_of, calls)


def each_of(strategy: Strategy, calls: list[Callable[[Strategy], Any]]) -> dict[Any, Any]:
    return {call: call(strategy) for call in calls}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_optimizers_that_take_turns_train_as_a_loop_by_hand(name, case):
    found = asked(name)[all_cases][case]
    assert weights_apart(found["weights"], by_hand(*HAND[case])) < 1e-12


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_turn_is_logged_by_its_name(name):
    run = asked(name)[all_cases]["plain"]
    kinds = {"lr/critic", "lr/generator", "grad_norm/critic", "grad_norm/generator"}
    step, numbers = run["log"][0]
    measured = {"critic/loss", "generator/loss"}
    assert step == 4 and numbers.keys() == {f"step/{n}" for n in kinds | measured}
    assert {"train/critic/loss", "train/generator/loss", "val/loss"} == run["metrics"].keys()
    assert run["metrics"] == pytest.approx(asked("cpu")[all_cases]["plain"]["metrics"], abs=1e-12)
    rates = [n["progress/lr/generator"] for _, n in run["log"] if "progress/lr/generator" in n]
    assert rates == [0.05, 0.05, 0.025]


def test_a_logged_step_has_the_norms_of_its_own_turns_alone():
    recorder, critic = Recorder(), "step/grad_norm/critic"
    settings = {"log_every": 1, "max_epochs": 1, "clip_norm": 1.0, "precision": "64"}
    fitted(pair(), Rows(22, 4), loggers=[recorder], **settings)
    normed = [[n for n in numbers if "grad_norm" in n] for _, numbers in recorder.log_]
    both = [critic, "step/grad_norm/generator"]
    assert [names for names in normed if names] == [[critic], both, [critic], both, [critic], both]


def test_a_run_with_turns_is_resumed_to_the_bit():
    states: list[dict[str, Any]] = []
    hooks = Hooks(
        on_step_end=lambda t: t.global_step == 8 and states.append(deepcopy(t.state_dict()))
    )
    settings = {"max_epochs": 3, "precision": "64"}
    whole = fitted(pair(), Rows(22, 4), callbacks=[hooks], **settings)
    again = fitted(pair(), Rows(22, 4), resume=states[0], **settings)
    assert is_same(again.state_dict()["task"], whole.state_dict()["task"])
    assert is_same(again.state_dict()["optimizer"], whole.state_dict()["optimizer"])
    assert set(states[0]["optimizer"]) == {"critic", "generator"}


def test_only_the_weights_of_the_turn_get_gradients():
    seen: list[tuple[set[str], set[str]]] = []

    def look(made: Any) -> None:
        named = list(made.task.named_parameters())
        graded = {name.partition(".")[0] for name, p in named if p.grad is not None}
        seen.append((graded, {name.partition(".")[0] for name, p in named if p.requires_grad}))

    hooks = Hooks(on_before_step=look)
    fitted(pair(), Rows(8, 4), callbacks=[hooks], max_epochs=1, precision="64")
    assert seen == [({turn}, {turn}) for turn in ("critic", "critic", "generator")]


def made_of(returned: Any) -> type[Pair]:
    class Odd(Pair):
        def configure_optimizer(self) -> Any:
            made = super().configure_optimizer()
            return returned(made) if callable(returned) else returned

    return Odd


class Batched(Pair):
    def training_step(self, batch: Any, batch_idx: int, extra: int) -> dict[str, Any]:
        return {}


class Elsewhere(Pair):
    def turns(self) -> list[str]:
        return ["crtic"]


class Untold(Pair):
    validation_step = Task.validation_step


@pytest.mark.parametrize(
    "make, settings, said",
    [
        (made_of(lambda made: {**made, "both": made["critic"]}), {}, "have a weight in common"),
        (made_of({"a b": MAKE["critic"]([nn.Parameter(torch.ones(1))])}), {}, "named an optimizer"),
        (Batched, {}, "takes (batch, batch_idx, extra) and is called with (batch, turn), as there"),
        (
            Elsewhere,
            {},
            "Elsewhere.turns returned 'crtic', which is no optimizer; did you mean cri",
        ),
        (Pair, {"clip_norm": {"generatr": 1.0}}, "trainer.clip_norm.generatr: there is no such op"),
        (Pair, {"clip_norm": {"critic": 0}}, "trainer.clip_norm.critic=0 is out of range"),
        (Untold, {}, "Untold has several optimizers, and training_step wants the name of one; wri"),
    ],
)
def test_what_can_take_no_turns_is_refused_in_one_line(make, settings, said):
    with pytest.raises(UserError) as caught:
        fitted(pair(make), **settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


class ByRank(Pair):
    """Its parts have the same shapes, so that gloo would add up gradients of different things."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(3, 3)

    def turns(self) -> list[str]:
        return ["generator" if self.rank and self.global_step else "critic"]


class FrozenAtFirst(Pair):
    """Its generator is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.generator.requires_grad_(False)

    def turns(self) -> list[str]:
        return ["critic", "generator"] if self.epoch else ["critic"]

    def on_epoch_start(self, trainer: Any) -> None:
        self.generator.requires_grad_(trainer.epoch > 0)


def other_turns_and_frozen_ones(strategy: Strategy) -> list[Any]:
    said = []
    ranks = [(pair(ByRank), {})] if strategy.world_size > 1 else []
    for task, at in (
        *ranks,
        (pair(), {"on_fit_start": lambda made: made.task.generator.requires_grad_(False)}),
        (small(), {"on_step_end": lambda made: made.task.requires_grad_(False)}),
    ):
        with pytest.raises(UserError) as caught:
            data = Rows(5, 4, val=False)  # of the second batch the second rank has no row
            fitted(task, data, strategy=strategy, callbacks=[Hooks(**at)], precision="64")
        said.append(str(caught.value))
    task = fitted(pair(FrozenAtFirst), Rows(8, 4), strategy=strategy, precision="64").task
    return strategy.collectives.gather(said) + [weights(task)]


def refused(name: str) -> list[Any]:
    return asked(name)[other_turns_and_frozen_ones]


def test_ranks_that_take_other_turns_are_refused_before_they_train():
    for rank, said in enumerate(refused("ddp 2")[:2]):
        name = ("critic", "generator")[rank]
        assert said[0].startswith(f"ByRank.turns returned ['{name}'] on rank {rank} and something")


@pytest.mark.parametrize("name", ["cpu", "ddp 2"])
def test_a_step_whose_weights_are_all_frozen_is_refused_in_one_line(name):
    *everywhere, _ = refused(name)
    for *_, turn, alone in everywhere:
        assert turn == (
            "Pair: all weights of generator are frozen in its turn; leave it out of turns() until "
            "some are thawed"
        )
        assert alone.startswith("all weights of Small are frozen; leave some with requires_grad")


def test_an_optimizer_whose_weights_are_frozen_at_first_has_its_turn_when_they_are_thawed():
    assert weights_apart(refused("ddp 2")[-1], refused("cpu")[-1]) < 1e-12


def test_an_optimizer_for_no_submodule_is_refused_with_the_nearest():
    class Named(Small):
        def __init__(self) -> None:
            super().__init__()
            self.make_optimizers = {"nett": SGD}

    with pytest.raises(UserError, match="Named.nett, which is no submodule; did you mean net?"):
        fitted(Named())


# Schedules of as many steps as an optimizer has turns


class Cycled(Pair):
    """The critic has its turn twice in each step, the generator in every third one, and in none of
    the first epoch."""

    def __init__(self, scheduler: Any = None, **options: Any) -> None:
        super().__init__(**options)
        one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1)
        self.make_schedulers = dict.fromkeys(MAKE, scheduler or one_cycle)

    def turns(self) -> list[str]:
        is_due = self.epoch > 0 and self.global_step % 3 == 0
        return ["critic", "critic", *["generator"] * is_due]


class ByHand(Cycled):
    def configure_optimizer(self) -> Any:
        self.make_schedulers = {}
        return {
            name: (made, StepLR(made, self.count_turns(name), gamma=0.5))
            for name, made in super().configure_optimizer().items()
        }


def cycled(make: Any = Cycled, data: Any = None, **settings: Any) -> Any:
    settings = {"scheduler_every": "step", "max_epochs": 3, "precision": "64", **settings}
    return fitted(make().double(), data or Rows(22, 4), **settings)


@pytest.mark.parametrize(
    "settings, turns",
    [
        ({}, (36, 4)),  # six steps an epoch: the generator's are 6, 9, 12, 15
        ({"max_steps": 13}, (26, 3)),
        ({"accumulate": 2}, (18, 2)),
        ({"scheduler_every": "epoch"}, (3, 3)),
    ],
)
def test_one_cycle_of_an_optimizer_that_takes_turns_has_as_many_steps_as_those(settings, turns):
    updates = cycled(**settings).updates
    for name, count in zip(("critic", "generator"), turns, strict=True):
        scheduler = updates[name].scheduler
        assert (name, scheduler.total_steps, scheduler.last_epoch) == (name, count, count)


def test_turns_are_counted_for_a_configure_optimizer_of_ones_own_too():
    made = cycled(ByHand)
    assert {n: u.scheduler.step_size for n, u in made.updates.items()} == {
        "critic": 36,
        "generator": 4,
    }
    assert made.task.global_step == 18  # the counting is over


def test_turns_that_can_not_be_counted_are_refused_in_one_line():
    with pytest.raises(UserError, match="^task.schedulers.generator has nothing to schedule: Cyc"):
        cycled(max_epochs=1)
    with pytest.raises(UserError, match="^Cycled.turns.. reads self.epoch, and a stream's epoch"):
        cycled(data=Streamed(), max_steps=8, max_epochs=None)
    given = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=50)
    made = cycled(partial(Cycled, given), data=Streamed(), max_steps=8, max_epochs=None)
    assert made.updates["critic"].scheduler.total_steps == 50


# Gradients that are computed more than once


class SAM(Callback):
    """Sharpness-aware minimization: steps by the gradient at the worst weights near by."""

    def __init__(self, rho: float = 0.05) -> None:
        self.rho = rho

    @torch.no_grad()
    def on_before_step(self, trainer: Any) -> None:
        weights = [w for w in trainer.task.parameters() if w.grad is not None]
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights])
        moves = [w.grad * (self.rho / norm) for w in weights]
        for weight, move in zip(weights, moves, strict=True):
            weight.add_(move)
        with torch.enable_grad():
            trainer.recompute_gradients()
        for weight, move in zip(weights, moves, strict=True):
            weight.sub_(move)


LBFGS = partial(torch.optim.LBFGS, lr=0.1, max_iter=4)


def small(optimizer: Any = SGD) -> Small:
    torch.manual_seed(3)
    return Small(optimizer).double()


@once
def sharpness_aware_by_hand() -> dict[str, Any]:
    return _by_hand(SGD, rho=0.05)


@once
def lbfgs_by_hand() -> dict[str, Any]:
    return _by_hand(LBFGS)


def _by_hand(make: Any, rho: float = 0.0) -> dict[str, Any]:
    task = small()
    columns = [tensor.double() for tensor in Rows(22, 4).train.tensors]
    optimizer = make(task.parameters())
    for epoch in range(2):
        for rows in permutation(22, seed=0, epoch=epoch).split(8):

            def closure(rows: Tensor = rows) -> Tensor:
                optimizer.zero_grad()
                loss = task.training_step([column[rows] for column in columns])["loss"]
                loss.backward()
                return loss

            if rho:
                closure()
                norm = torch.cat([w.grad.flatten() for w in task.parameters()]).norm()
                moves = [w.grad * (rho / norm) for w in task.parameters()]
                for weight, move in zip(task.parameters(), moves, strict=True):
                    weight.data += move
                closure()
                for weight, move in zip(task.parameters(), moves, strict=True):
                    weight.data -= move
                optimizer.step()
            else:
                optimizer.step(closure)
    return weights(task)


def both(strategy: Strategy) -> list[dict[str, Any]]:
    settings = {"strategy": strategy, "precision": "64", "accumulate": 2}
    runs = [
        fitted(small(), Rows(22, 4), callbacks=[SAM()], **settings),
        fitted(small(LBFGS), Rows(22, 4), **settings),
    ]
    return [weights(run.task) for run in runs]


ASKED: dict[Callable[[Strategy], Any], list[str]] = {
    all_cases: list(STRATEGIES),
    both: [name for name in STRATEGIES if name != "fsdp 3"],
    other_turns_and_frozen_ones: ["cpu", "ddp 2"],
}


@pytest.mark.parametrize("name", ASKED[both])
def test_a_step_may_compute_its_gradients_again(name):
    sam, lbfgs = asked(name)[both]
    assert weights_apart(sam, sharpness_aware_by_hand()) < 1e-12
    assert weights_apart(lbfgs, lbfgs_by_hand()) < 1e-10  # its line of steps magnifies rounding


def test_a_line_search_compares_losses_of_full_precision():
    search = partial(torch.optim.LBFGS, line_search_fn="strong_wolfe", max_iter=20)
    run = fitted(small(search), Rows(22, 8), precision="64")
    assert weights_apart(weights(run.task), _by_hand(search)) < 1e-9


@pytest.mark.parametrize("key, value", [("clip_norm", 1.0), ("clip_value", 1.0)])
def test_an_optimizer_that_computes_gradients_itself_is_not_clipped(key, value):
    with pytest.raises(UserError) as caught:
        fitted(small(LBFGS), **{key: value})
    assert str(caught.value) == (
        f"trainer.{key}=1.0 can't be combined with LBFGS, which computes the gradients of a step "
        f"several times; use trainer.{key}=null, or another optimizer"
    )


# A task's own hooks, and what it can read


class Told(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_epoch_start(self, trainer: Any) -> None:
        self.seen.append(("epoch", self.epoch))

    def on_before_step(self, trainer: Any) -> None:
        assert all(p.grad is not None for p in self.parameters())

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        self.seen.append((self.global_step, self.rank, self.device.type))
        return super().training_step(batch)


def test_a_task_has_hooks_and_reads_where_it_is():
    task = fitted(Told(), Rows(8, 4, val=False)).task
    steps = [(step, 0, "cpu") for step in range(4)]
    assert task.seen == [("epoch", 0), *steps[:2], ("epoch", 1), *steps[2:]]
    assert Told().global_step == Told().epoch == Told().rank == 0
    assert deepcopy(task).global_step == 4  # e.g. by AveragedModel


def test_a_task_may_call_something_else_its_rank():
    task = Small()
    task.rank = 8
    assert fitted(task).task.rank == 8


def test_a_misspelt_hook_of_a_task_is_refused():
    class Misspelt(Small):
        def on_epoch_begin(self, trainer: Any) -> None: ...

    with pytest.raises(UserError, match="Misspelt.on_epoch_begin is no hook"):
        trainer(Misspelt())


def test_hooks_see_the_batch_and_what_the_step_returned():
    seen: list[Any] = []

    class Sees(Callback):
        def on_batch_start(self, trainer: Any, batch: Any) -> None:
            seen.append([len(share.batch[0]) for share in batch.shares])

        def on_batch_end(self, trainer: Any, batch: Any, outputs: Any) -> None:
            seen.append((batch.rows, [sorted(output) for output in outputs]))

        on_validation_batch_end = on_batch_end

    strategy = DataParallel(2, "cpu")
    fitted(data=Rows(4, 4), callbacks=[Sees()], strategy=strategy, max_epochs=1)
    measured = [["loss", "mae"]] * 2
    assert seen == [[2, 2], (4, measured), (4, measured)]


def test_what_a_hook_puts_into_a_checkpoint_is_there_when_a_run_resumes():
    class Keeps(Callback):
        loaded = None

        def on_save(self, trainer: Any, state: dict[str, Any]) -> None:
            state["mine"] = [1, 2]

        def on_load(self, trainer: Any, state: dict[str, Any]) -> None:
            self.loaded = state["mine"]

    state = fitted(callbacks=[Keeps()]).state_dict()
    again = Keeps()
    trainer(callbacks=[again], max_epochs=3).prepare(state)
    assert again.loaded == [1, 2]
