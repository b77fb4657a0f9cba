"""strategy=fsdp: what ranks keep, batches that leave some without a row, and what is refused."""

import logging
import threading
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import fresh, in_turn, limited, on
from recorded import Recorder, once, weights, weights_apart
from small import SGD, Adam, Hooks, Rows, Small, fitted, is_same, trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpframe import Callback, Strategy, Trainer, UserError, seeding
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.histograms import Histograms
from dpframe.callbacks.sample_predictions import SamplePredictions
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.outline import fill_later, is_outlined
from dpframe.strategies.processes import abort_groups
from dpframe.strategies.single import CPU

EXACT = 1e-12
WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x).tanh())


class Net(nn.Module):
    """Blocks in a list, one that no step uses, weights outside of them, and a scalar."""

    def __init__(self, width: int = WIDTH, count: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


class Deep(Small):
    def __init__(self, width: int = WIDTH, count: int = 3, optimizer: Any = Adam) -> None:
        super().__init__(optimizer)
        self.net = Net(width, count)


class Towers(Deep):
    """Two stacks of blocks whose inputs need no gradient, and of each block an unused part."""

    def __init__(self) -> None:
        super().__init__()
        self.net.first.requires_grad_(False)
        self.other = nn.ModuleList(Block(WIDTH) for _ in range(2))
        for block in self.other:
            block.spare = nn.Linear(2, 2)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        near = self.net(x)[:, 0]
        far = self.net.first(-x)
        for block in self.other:
            far = block(far)
        return {"loss": (near - y).square().mean() + (far[:, 0] + y).square().mean()}


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].inner.weight = self.net.blocks[2].inner.weight


class Recurrent(Deep):
    """Torch's RNNs keep weak references to their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.append(Turned(WIDTH))
        self.net.first = nn.Sequential(nn.Linear(3, WIDTH), Turned(WIDTH))


class Turned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.GRU(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[None])[0][0]


class Norm(Deep):
    def __init__(self) -> None:
        super().__init__(optimizer=SGD)  # Adam makes steps of what a norm leaves of some gradients
        self.net.blocks.insert(0, nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))


class Masked(Deep):
    """A mean over rows that count: a share may have none of them, and its loss is NaN then."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        counts = x[:, 0] > 0
        error = (self.net(x)[:, 0] - y)[counts]
        return {"loss": error.square().sum() / counts.sum(), "weight": int(counts.sum())}


def numbers(strategy: Strategy, make: Callable[[], Any], **settings: Any) -> dict[str, Any]:
    data = Rows(settings.pop("rows", 11), settings.pop("batch_size", 4))
    made = fitted(None, data, make=make, strategy=strategy, **{"precision": "64", **settings})
    return {"weights": weights(made.task), "metrics": made.metrics}


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "blocks": (Deep, {}),
    "fewer rows than ranks": (Deep, {"rows": 9, "batch_size": 2, "max_epochs": 3}),
    "two stacks": (Towers, {"rows": 9, "batch_size": 2}),
    "accumulated": (Deep, {"accumulate": 3, "batch_size": 2, "clip_norm": 0.5, "clip_value": 0.1}),
    "shares that count nothing": (Masked, {"batch_size": 8, "rows": 16}),
    "tied": (Tied, {}),
    "running statistics": (Norm, {"rows": 16, "batch_size": 8}),
    "computed again": (Deep, {"checkpoint_activations": True}),
    "left out": (Deep, {"on_nonfinite": "skip"}),
}


def numbers_of(strategy: Strategy, case: str) -> dict[str, Any]:
    make, settings = CASES[case]
    return numbers(strategy, make, **settings)


def numbers_of_each(strategy: Strategy, cases: list[str]) -> dict[str, Any]:
    return {case: numbers_of(strategy, case) for case in cases}


# How parts are kept, and the cases that this may change.
WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "3 ranks": ({}, list(CASES)),
    "2 x 2 ranks": (
        {"replicate": 2},
        ["blocks", "fewer rows than ranks", "accumulated", "shares that count nothing", "left out"],
    ),
    "kept for the backward": (
        {"reshard_after_forward": False},
        ["blocks", "two stacks", "accumulated", "computed again"],
    ),
    "by class": ({"shard": "Block"}, ["blocks", "two stacks", "tied", "running statistics"]),
}


def way(name: str) -> tuple[Strategy, Callable[..., Any], list[str]]:
    options, cases = WAYS[name]
    return FSDP(4 if "replicate" in options else 3, "cpu", **options), numbers_of_each, cases


@once
def whole(case: str) -> dict[str, Any]:
    return numbers_of(CPU(), case)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, cases) in WAYS.items() for case in cases]
)
def test_parts_train_as_whole_weights_do(name, case):
    ranks = of_ranks(4 if name == "2 x 2 ranks" else 3)
    mine, wanted = ranks[name][case], whole(case)
    if case == "running statistics":  # of each rank's own rows, as under ddp
        wanted = ranks[case]
    assert weights_apart(mine["weights"], wanted["weights"]) < EXACT
    assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=EXACT)


def compiled(strategy: Strategy, make: Callable[[], Any]) -> dict[str, Any]:
    """By torch's own steps, without a compiler of C++."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with pytest.MonkeyPatch.context() as patched:
        compile = torch.compile

        @wraps(compile)
        def quick(call: Any, *, mode: str, **options: Any) -> Any:
            return compile(call, backend="eager", **options)

        patched.setattr(torch, "compile", quick)
        made = numbers(strategy, make, rows=9, batch_size=2, max_epochs=1, compile=True)
    counts = {"graphs": counters["stats"]["unique_graphs"], "frames": counters["frames"]["total"]}
    return {**made, **counts}


def test_blocks_are_compiled_between_their_gathers():
    mine = of_ranks(3)["compiled"]
    wanted = numbers(CPU(), Towers, rows=9, batch_size=2, max_epochs=1)
    assert mine["graphs"] > 1
    assert weights_apart(mine["weights"], wanted["weights"]) < EXACT


@pytest.mark.parametrize("strategy", [FSDP, DDP])
def test_ten_blocks_take_no_more_to_compile_than_three(strategy):
    few, many = (of_ranks(2)[strategy, count] for count in (3, 10))
    assert few["graphs"] == many["graphs"] > 0
    assert few["frames"] == many["frames"]


# What a rank keeps


def kept(strategy: Strategy) -> tuple[int, int, int, int]:
    """The numbers of the model, and those of weights, gradients and optimizer state in this rank,
    when a step is made."""
    sizes: list[int] = []

    def look(trainer: Trainer) -> None:
        local = trainer.strategy.sharding.local
        here = list(trainer.task.parameters())
        sizes.append(sum(local(weight).numel() for weight in here))
        sizes.append(sum(local(weight.grad).numel() for weight in here))

    made = fitted(
        Deep(64, 4), strategy=strategy, callbacks=[Hooks(on_before_step=look)], max_steps=1
    )
    states = made.update.optimizer.state.values()
    moments = [s[n] for s in states for n in ("exp_avg", "exp_avg_sq")]
    whole = sum(weight.numel() for weight in made.task.parameters())
    return whole, *sizes, sum(strategy.sharding.local(moment).numel() for moment in moments)


@pytest.mark.parametrize("replicate", [1, 2])
def test_a_rank_keeps_its_part_of_weights_gradients_and_optimizer_state(replicate):
    size, *mine = of_ranks(4)["kept", replicate]
    for part, wholes in zip(mine, (1, 1, 2), strict=True):  # some don't divide evenly
        assert part == pytest.approx(wholes * size * replicate / 4, rel=0.03)


def groups_of(strategy: FSDP) -> tuple[list[list[int]], set[float], bool]:
    """The ranks of each group of the mesh, their timeouts, and whether an error ends them all."""
    meshs, cpu = strategy.mesh.get_all_groups(), torch.device("cpu")
    timeouts = {group._get_backend(cpu).options._timeout.total_seconds() for group in meshs}
    ended = {group.group_name for group in strategy.groups()}
    are_ended = {dist.group.WORLD.group_name, *(group.group_name for group in meshs)} <= ended
    return [dist.get_process_group_ranks(group) for group in meshs], timeouts, are_ended


@pytest.mark.parametrize(("replicate", "ranks"), [(1, [[0, 1, 2, 3]]), (2, [[0, 2], [0, 1]])])
def test_every_group_of_the_mesh_has_the_timeout_and_ends_with_an_error(replicate, ranks):
    assert of_ranks(4)["groups", replicate] == (ranks, {TIMEOUT}, True)


TIMEOUT = 77.0


class Waiting:
    """A group that can't be aborted before the other one is, too."""

    def __init__(self, others: threading.Barrier) -> None:
        self.others = others

    def abort(self) -> None:
        self.others.wait(60)


def test_groups_are_aborted_together():
    both = threading.Barrier(2)
    abort_groups([Waiting(both), Waiting(both)])


MIB = 2**20
ROOM = 80  # MiB; a model of 32 MiB takes 130 with its gradients and state, and 97 to be saved


def in_little_memory(strategy: Strategy, folder: Path) -> str:
    task, data = Deep(1024, 8), Rows(8, 4, val=False)
    fitted(Small(), strategy=strategy)  # has started what takes memory of its own
    limited(ROOM)
    saver = Checkpoint(keep=0, every_n_epochs=None, every_n_steps=2)
    options = {"callbacks": [saver], "directory": folder, "max_steps": 2}
    try:
        return f"{fitted(task, data, strategy=strategy, **options).global_step} steps"
    except (MemoryError, RuntimeError) as error:
        return "out of memory" if "allocate memory" in str(error) else repr(error)


def test_a_model_that_does_not_fit_one_rank_trains_on_four(tmp_path):
    assert fresh(in_little_memory, CPU(), tmp_path) == "out of memory"
    assert on(FSDP(4, "cpu"), in_little_memory, tmp_path) == "2 steps"


def test_a_whole_checkpoint_takes_room_for_all_parts_in_the_main_rank(tmp_path):
    strategy = FSDP(4, "cpu", checkpoints="whole")
    assert on(strategy, in_little_memory, tmp_path) == "out of memory"


# A task that is built in one rank

BUILT = (Deep, Tied, Recurrent, Norm)


def built(strategy: Strategy) -> dict[str, Any]:
    cases = {}
    for make in BUILT:
        seeding.seed_everything(0)
        with strategy.sharding.building():
            task = make()
        assert all(weight.is_meta for weight in task.parameters()) is not strategy.is_main
        drawn = strategy.collectives.gather(float(torch.rand(1)))
        made = fitted(task, Rows(16, 8), strategy=strategy, precision="64")
        cases[make.__name__] = {"weights": weights(made.task), "drawn": drawn}
    return cases


def test_a_task_that_one_rank_builds_has_the_numbers_of_one_that_all_build():
    mine, wanted = of_ranks(2)["built in one"], of_ranks(2)["built in all"]
    for make in BUILT:
        seeding.seed_everything(0)
        make()
        assert mine[make.__name__]["drawn"] == [float(torch.rand(1))] * 2
    for name, case in mine.items():
        assert weights_apart(case["weights"], wanted[name]) == 0


def built_in_all(strategy: Strategy) -> dict[str, Any]:
    options = {"strategy": strategy, "precision": "64"}
    made = {make.__name__: fitted(None, Rows(16, 8), make=make, **options) for make in BUILT}
    return {name: weights(each.task) for name, each in made.items()}


BUILDING = 24  # MiB; the whole is 32, a fourth of it 8, a block 4


def built_in_little_memory(strategy: Strategy) -> str:
    fitted(Small(), strategy=strategy)  # has started what takes memory of its own
    if not (strategy.sharding.meta_init and strategy.is_main):
        limited(BUILDING)
    try:
        with strategy.sharding.building():
            task = Deep(1024, 8)
        trainer(task, strategy=strategy)
    except (MemoryError, RuntimeError) as error:
        return "out of memory" if "allocate memory" in str(error) else repr(error)
    return "built"


@pytest.mark.parametrize(("builds_once", "said"), [(True, "built"), (False, "out of memory")])
def test_ranks_but_the_main_one_need_no_room_for_the_whole_task(builds_once, said):
    assert on(FSDP(4, "cpu", meta_init=builds_once), built_in_little_memory) == said


def stored(make: Callable[[], Any], folder: Path) -> None:
    """A file for each tensor."""
    seeding.seed_everything(0)
    folder.mkdir()
    for name, tensor in make().state_dict().items():
        torch.save(tensor, folder / name)


def outlined(make: Callable[[], Any], folder: Path) -> Any:
    """The main rank reads its weights from files when the task is cut."""
    if not is_outlined():
        return make()
    with torch.device("meta"):
        task = make()
    fill_later(task, {path.name: partial(torch.load, path) for path in folder.iterdir()})
    return task


def read_later(strategy: Strategy, folder: Path) -> dict[str, Any]:
    made = {}
    for make in BUILT:
        with strategy.sharding.building():
            task = outlined(make, folder / make.__name__)
        assert all(weight.is_meta for weight in task.parameters())
        seeding.seed_everything(0)
        make()  # draws as a task does that is made whole
        again = fitted(task, Rows(16, 8), strategy=strategy, precision="64")
        made[make.__name__] = weights(again.task)
    return made


def test_weights_that_are_read_when_a_task_is_cut_are_those_of_one_that_is_built_whole(tmp_path):
    for make in BUILT:
        stored(make, tmp_path / make.__name__)
    mine = on(FSDP(2, "cpu", meta_init=True), read_later, tmp_path)
    for name, wanted in of_ranks(2)["built in all"].items():
        assert weights_apart(mine[name], wanted) == 0


def read_in_little_memory(strategy: Strategy, folder: Path) -> str:
    fitted(Small(), strategy=strategy)
    limited(BUILDING)
    try:
        with strategy.sharding.building():
            task = outlined(partial(Deep, 1024, 8), folder)
        trainer(task, strategy=strategy)
    except (MemoryError, RuntimeError) as error:
        return "out of memory" if "allocate memory" in str(error) else repr(error)
    return "read"


@pytest.mark.parametrize(("reads_later", "said"), [(True, "read"), (False, "out of memory")])
def test_no_rank_has_room_for_a_whole_task_whose_weights_are_read_later(
    tmp_path, reads_later, said
):
    stored(partial(Deep, 1024, 8), tmp_path / "deep")
    strategy = FSDP(4, "cpu", meta_init=reads_later)
    assert on(strategy, read_in_little_memory, tmp_path / "deep") == said


class Unfilled(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.net.first = nn.Linear(3, WIDTH, device="meta")


class Reads(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.largest = float(self.net.first.weight.max())


class Keeps(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.limits = torch.ones(2)


def refused_by(strategy: Strategy, make: Callable[[], Any]) -> None:
    with strategy.sharding.building():
        task = make()
    trainer(task, strategy=strategy)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Reads, "strategy.meta_init=true: the task can't be built on the meta device: "),
        (Keeps, "strategy.meta_init=true: limits is neither a parameter nor a buffer, so nothing"),
        (Unfilled, "Unfilled.net.first.weight is on the meta device, and nothing fills it; build"),
    ],
)
def test_what_can_not_be_built_in_one_rank_is_refused_in_one_line(make, said):
    with pytest.raises(UserError) as refused:
        on(FSDP(2, "cpu", meta_init=True), refused_by, make)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


class LateMomentum(Deep):
    """A slow copy that a step begins to move later."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(3, WIDTH).requires_grad_(False)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        if self.global_step >= 4 and self.training:
            with torch.no_grad():
                self.slow.weight.add_(1.0)
        return super().training_step(batch)


def said_in_fit(strategy: Strategy, make: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as refused:
        fitted(make(), strategy=strategy)
    return str(refused.value)


def test_a_change_of_weights_that_would_be_lost_is_refused_whenever_it_comes():
    said = on(FSDP(2, "cpu"), said_in_fit, LateMomentum)
    assert said.startswith(
        "LateMomentum.training_step changes slow.weight, which fsdp has gathered"
    )


# Weights outside of their blocks


class Decayed(Deep):
    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        loss = super().training_step(batch)["loss"]
        return {"loss": loss + sum(weight.square().sum() for weight in self.parameters())}


class Measured(Deep):
    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        norm = sum(weight.square().sum() for weight in self.net.blocks.parameters())
        return {**self.training_step(batch), "norm": norm}


class Direct(Deep):
    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        inner = self.net.blocks[0].inner(self.net.first(x))
        return {"loss": (self.net.last(inner)[:, 0] - y).square().mean()}


OUTSIDE = (Decayed, Measured, Direct)


def told(strategy: Strategy) -> list[str]:
    lines = []
    for make in OUTSIDE:
        with pytest.raises((UserError, RuntimeError)) as raised:
            numbers(strategy, make, max_epochs=1)
        lines.append(getattr(raised.value, "__notes__", [str(raised.value)])[-1])
    return lines


def as_whole(strategy: Strategy) -> list[dict[str, Any]]:
    return [numbers(strategy, make, max_epochs=1) for make in OUTSIDE]


def test_weights_outside_of_their_blocks_are_told_and_gathered_if_wanted():
    loss, norm, direct = of_ranks(2)["told"]
    assert loss.startswith("a step returned 'loss' of parts of weights; strategy=fsdp has only")
    assert norm.startswith("a step returned 'norm' of parts of weights; strategy=fsdp has only")
    assert direct.startswith("dpframe: strategy=fsdp has only this rank's part of a weight where")
    for mine, wanted in zip(of_ranks(2)["as whole"], as_whole(CPU()), strict=True):
        assert weights_apart(mine["weights"], wanted["weights"]) < EXACT
        assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=EXACT)


# Callbacks that look at weights


class Draws(Hooks):
    """Calls the task in the main rank alone, as a sampler of texts does."""

    drawn: float | None = None

    def on_validation_end(self, trainer: Trainer) -> None:
        if trainer.strategy.is_main:
            self.drawn = float(trainer.task.net(torch.ones(1, 3, dtype=torch.float64)))


def copied(values: Tensor | None) -> Any:
    return None if values is None else values.detach().tolist()


def looked(strategy: Strategy) -> tuple[float | None, dict[str, Any]]:
    shown: dict[str, Any] = {}
    draws = Draws()
    made = trainer(
        make=Deep,
        strategy=strategy,
        precision="64",
        callbacks=[draws, Histograms(every_n_steps=4), SamplePredictions(rows=2)],
        loggers=[Recorder()],
    )
    made.log_histogram = lambda name, v: shown.update({name: copied(v)})  # type: ignore
    made.log_table = lambda name, columns, rows: shown.update({name: rows})  # type: ignore
    made.fit()
    main = strategy.is_main
    return draws.drawn, shown if main else {}


def test_callbacks_see_whole_weights():
    drawn, shown = of_ranks(3)["looked"]
    wanted, known = looked(CPU())
    assert drawn == pytest.approx(wanted, rel=EXACT)
    assert shown.keys() == known.keys()
    name = "weights/net.blocks.1.inner.weight"
    assert torch.allclose(torch.tensor(shown[name]), torch.tensor(known[name]), rtol=1e-12)
    assert shown["val/samples"] == known["val/samples"]


class Saves(Draws):
    """Has the weights out of a hook, in which the task is called before and after that."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        net = trainer.task.net
        self.said = [tried(module.state_dict) for module in (trainer.task, net, net.first)]

    def on_fit_end(self, trainer: Trainer) -> None:
        self.on_validation_end(trainer)
        before, net = self.drawn, trainer.task.net
        self.checkpoint = trainer.state_dict()["task"]
        self.part = trainer.whole_state_dict(net)
        if trainer.strategy.is_main:  # as peft does within save_pretrained(…, state_dict=…)
            self.names = list(net.first.state_dict())
        self.whole = trainer.whole_state_dict()
        assert not any(isinstance(weight, DTensor) for weight in net.parameters())
        self.on_validation_end(trainer)
        assert self.drawn == before


class SavesPredicted(Callback):
    def on_predict_end(self, trainer: Trainer, predictions: Any) -> None:
        self.said = tried(trainer.whole_state_dict)


def predicted_alone(strategy: Strategy) -> str:
    saves = SavesPredicted()
    trainer(make=Deep, strategy=strategy, callbacks=[saves]).predict()
    return saves.said if strategy.is_main else ""


def test_what_every_rank_has_to_call_is_refused_where_the_main_one_is_alone():
    said = on(FSDP(2, "cpu", timeout_seconds=10), predicted_alone)
    assert said == (
        "trainer.whole_state_dict needs every rank, and only the main one calls "
        "on_predict_end; call it in on_predict_start"
    )
    assert predicted_alone(CPU()) == ""


def tried(call: Callable[[], object]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def saved(strategy: Strategy) -> dict[str, Any]:
    saves = Saves()
    made = trainer(make=Deep, strategy=strategy, precision="64", callbacks=[saves])
    made.fit()
    after = made.whole_state_dict()
    main = strategy.is_main
    return {**vars(saves), "after": after} if main else {}


def test_a_hook_gets_whole_weights_to_save_and_never_this_ranks_part_of_them():
    mine, wanted = of_ranks(3)["saved"], saved(CPU())
    for name in ("whole", "part", "checkpoint", "after"):
        assert mine[name].keys() == wanted[name].keys()
        assert weights_apart(mine[name], wanted[name]) < EXACT, name
    line = (
        "state_dict() has this rank's part of each weight, even in a hook that sees whole ones; "
        "call trainer.whole_state_dict(MODULE) on every rank, and save what the main one gets"
    )
    assert mine["said"] == [line] * 3 and wanted["said"] == [""] * 3
    assert mine["names"] == wanted["names"]


class Unmeasured(Rows):
    """Without a validation, which would run the task before a hook does."""

    def val_dataset(self) -> None:
        return None


class DrawsAtEnds(Draws):
    def on_epoch_end(self, trainer: Trainer) -> None:
        self.on_validation_end(trainer)


def resumed_at_an_end(strategy: Strategy) -> list[Any]:
    """A whole run, and one that goes on from the last step of its first epoch."""
    states: dict[int, Any] = {}  # after the last step of each epoch
    keeps = Hooks(on_step_end=lambda t: states.update({t.epoch: deepcopy(t.state_dict())}))
    runs: list[Any] = []
    for resume in (False, True):
        draws = DrawsAtEnds()
        made = trainer(
            data=Unmeasured(),
            make=Deep,
            strategy=strategy,
            precision="64",
            share_check="off",  # which runs the task, too
            callbacks=[draws, keeps],
        )
        made.fit(strategy.collectives.broadcast(states[0]) if resume else None)
        runs.append((draws.drawn, made.metrics))
    return runs


def test_a_run_that_is_resumed_at_an_epochs_end_gives_its_hooks_whole_weights():
    whole, resumed = of_ranks(2)["resumed at an end"]
    assert resumed == whole and whole[0] is not None


# Half precision


def halves(strategy: Strategy) -> dict[str, Any]:
    made = fitted(make=Deep, strategy=strategy, precision="bf16")
    return made.metrics


class Casts(TorchDispatchMode):
    """Knows the bf16 copies that autocast makes of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, call: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        result = call(*args, **(options or {}))
        is_cast = call is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16
        if is_cast and result.ndim == 2 and result.shape[0] >= WIDE:
            self.made.append(weakref.ref(result))
        return result

    def kept(self) -> int:
        return sum(made() is not None for made in self.made)


class Cast(Deep):
    """Counts what is kept of the weights of its blocks when the forward ends."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.counts: list[tuple[int, int]] = []

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        with Casts() as casts:
            output = super().training_step(batch)
        self.counts.append((len(casts.made), casts.kept()))
        return output


WIDE = 32  # more than a batch has rows


def casts(strategy: Strategy, **settings: Any) -> tuple[list[tuple[int, int]], dict[str, Tensor]]:
    given = {"data": Rows(8, 4, val=False), "precision": "bf16", "max_steps": 2}
    made = fitted(make=Cast, strategy=strategy, **given, **settings)
    state, sharding = made.task.state_dict(), strategy.sharding
    return made.task.counts, sharding.whole(state, for_all=True)


@pytest.mark.parametrize("param_dtype", [None, "bf16"])
def test_no_bf16_copy_of_the_weights_waits_for_the_backward(param_dtype):
    counts, _ = of_ranks(2)["casts", param_dtype]
    assert [kept for _, kept in counts] == [0, 0]
    assert all(made > 0 for made, _ in counts) is (param_dtype is None)


def test_autocast_without_its_cache_has_the_numbers_of_one_with_it():
    counts, mine = of_ranks(1)["casts"]
    assert counts == [(4, 3)] * 2  # those of the blocks are saved for the backward
    _, wanted = casts(CPU())
    assert is_same(mine, wanted)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def told_at_the_start(group: FSDP) -> list[list[str]]:
    said = []
    for param_dtype, settings in (
        (None, {"precision": "bf16"}),
        (None, {"precision": "bf16", "checkpoint_activations": True}),
        ("bf16", {"precision": "bf16"}),
        (None, {}),
    ):
        strategy = FSDP(1, "cpu", param_dtype=param_dtype)
        lines = Lines()
        logging.getLogger("dpframe").addHandler(lines)
        logging.getLogger("dpframe").setLevel("INFO")
        with strategy:
            fitted(make=Deep, strategy=strategy, max_steps=1, **settings)
        logging.getLogger("dpframe").removeHandler(lines)
        said.append([line for line in lines.said if "bf16" in line])
    return said


def test_a_line_says_how_to_keep_no_bf16_copy_of_the_weights():
    plain, *others = of_ranks(1)["told at the start"]
    assert plain == [
        "autocast keeps all weights in bf16 in each process from forward to backward; set "
        "strategy.param_dtype=bf16 or trainer.checkpoint_activations=true where they don't fit"
    ]
    assert others == [[], [], []]


def test_weights_may_be_gathered_in_bf16_beside_autocast():
    wanted = of_ranks(2)["halves of ddp"]
    assert of_ranks(2)["halves"] == pytest.approx(wanted, rel=0.02)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicate": 0}, "replicate=0 is out of range; use 1 or more"),
        (
            {"param_dtype": "bf17"},
            "param_dtype=bf17 is not one of 32, bf16, fp16; did you mean bf16?",
        ),
        (
            {"checkpoints": "shard"},
            "checkpoints=shard is not one of sharded, whole; did you mean sharded?",
        ),
        ({"timeout_seconds": 0}, "timeout_seconds=0 is out of range; use more than 0"),
    ],
)
def test_settings_of_parts_are_refused_in_one_line(arguments, said):
    with pytest.raises(UserError) as refused:
        FSDP(2, "cpu", **arguments)
    assert str(refused.value).removeprefix("strategy.") == said


class Sparse(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


class Flat(Small):
    def __init__(self, optimizer: Any = torch.optim.LBFGS) -> None:
        super().__init__(optimizer)
        self.net = nn.Linear(3, 1, bias=False)  # Muon takes matrices alone


WHOLE = {"mode": "default", "fullgraph": True}
# The strategy's arguments, the task, the Trainer's settings, and what is said.
REFUSED: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
    ({}, Sparse, {}, "Sparse has an embedding with sparse=True, whose gradients strategy=fsdp can"),
    ({}, partial(Flat, torch.optim.Adafactor), {}, "Adafactor needs whole weights in each"),
    ({}, partial(Flat, torch.optim.Muon), {}, "Muon needs whole weights in each pro"),
    ({}, partial(Flat, torch.optim.Rprop), {}, "Rprop needs whole weights in each pr"),
    ({}, Flat, {}, "LBFGS needs whole weights in each process, and FSDP cuts them; use strategy="),
    ({"shard": "net.blok.*"}, Deep, {}, "strategy.shard=net.blok.* matches no module of Deep; di"),
    ({"param_dtype": "bf16"}, Deep, {}, "strategy.param_dtype rounds what is gathered, and traine"),
    (
        {},
        Deep,
        {"precision": "fp16"},
        "trainer.precision=fp16 can't be combined with FSDP, whose ranks",
    ),
    ({}, Deep, {"on_nonfinite": "skip", "accumulate": 2}, "trainer.on_nonfinite=skip with a step "),
    ({}, Deep, {"compile": "max-autotune"}, "trainer.compile.mode=max-autotune records where we"),
    ({}, Deep, {"compile": WHOLE}, "trainer.compile.fullgraph=true wants one graph, and FSDP gath"),
    ({"cpu_offload": True}, Deep, {}, "strategy.cpu_offload=true needs GPUs, and the weights are"),
    ({"replicate": 2}, Deep, {}, "strategy.replicate=2 does not divide the 3 ranks; set it to a d"),
]


def refusals(group: FSDP) -> list[str]:
    said = []
    for arguments, make, settings, _ in REFUSED:
        try:
            fitted(make=make, strategy=FSDP(3, "cpu", **arguments), **settings)
            said.append("nothing")
        except UserError as error:
            said.append(str(error))
    return said


def test_what_can_not_be_had_with_parts_is_refused_in_one_line():
    for said, (*_, wanted) in zip(of_ranks(3)["refusals"], REFUSED, strict=True):
        assert said.startswith(wanted)
        assert "\n" not in said


# All that the tests above ask of as many ranks, which take longer to start than most of it.
OF_RANKS: dict[int, dict[Any, tuple[Any, ...]]] = {
    1: {
        "casts": (FSDP(1, "cpu"), casts),
        "told at the start": (FSDP(1, "cpu"), told_at_the_start),
    },
    2: {
        "built in one": (FSDP(2, "cpu", meta_init=True), built),
        "built in all": (FSDP(2, "cpu"), built_in_all),
        "told": (FSDP(2, "cpu"), told),
        "as whole": (FSDP(2, "cpu", shard=[]), as_whole),
        **{
            ("casts", param_dtype): (
                FSDP(2, "cpu", param_dtype=param_dtype),
                partial(casts, checkpoint_activations=True),
            )
            for param_dtype in (None, "bf16")
        },
        **{
            (kind, count): (kind(2, "cpu"), compiled, partial(Deep, WIDTH, count))
            for kind in (FSDP, DDP)
            for count in (3, 10)
        },
        "resumed at an end": (FSDP(2, "cpu"), resumed_at_an_end),
        "halves of ddp": (DDP(2, "cpu"), halves),
        "halves": (FSDP(2, "cpu", param_dtype="bf16", reduce_dtype="32"), halves),
    },
    3: {
        **{name: way(name) for name in WAYS if name != "2 x 2 ranks"},
        "running statistics": (DDP(3, "cpu"), numbers_of, "running statistics"),
        "looked": (FSDP(3, "cpu"), looked),
        "saved": (FSDP(3, "cpu"), saved),
        "refusals": (FSDP(3, "cpu"), refusals),
        "compiled": (FSDP(3, "cpu"), compiled, Towers),
    },
    4: {
        "2 x 2 ranks": way("2 x 2 ranks"),
        **{
            (what, replicate): (
                FSDP(4, "cpu", replicate=replicate, timeout_seconds=TIMEOUT),
                call,
            )
            for replicate in (1, 2)
            for what, call in (("kept", kept), ("groups", groups_of))
        },
    },
}


@once
def of_ranks(count: int) -> dict[Any, Any]:
    return dict(zip(OF_RANKS[count], in_turn([*OF_RANKS[count].values()]), strict=True))


# On GPUs


@pytest.mark.skipif(torch.__version__ < "2.13", reason="strategy=fsdp needs torch 2.13")
@pytest.mark.frees_by_waits  # torch's own streams wait before they use a gradient's memory again
@pytest.mark.parametrize(
    ("gpus", "offloads"),
    [
        pytest.param(1, True, marks=pytest.mark.gpu(1)),
        pytest.param(2, False, marks=pytest.mark.gpu(2)),
    ],
)
def test_gpus_with_parts_train_as_the_cpu(gpus, offloads):
    mine = on(FSDP(gpus, "cuda", cpu_offload=offloads), numbers, Deep)
    wanted = numbers(CPU(), Deep)
    assert weights_apart(mine["weights"], wanted["weights"]) < 1e-9
