"""Sharded checkpoints: what ranks save in parts goes on anywhere, and is whole or not there."""

import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import oracle
import pytest
import torch
from forked import fresh, limited, on
from recorded import once, weights, weights_apart
from small import Adam, Hooks, Rows, Small, fitted, is_same
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dpframe import Strategy, Trainer, UserError, checkpoint, files, parts
from dpframe.callbacks.averages import EMA
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.errors import Failure
from dpframe.launch.faults import RankFailed
from dpframe.strategies import sharded
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU

EXACT = 1e-12


class Deep(Small):
    """Of its 5 rows 4 ranks have 2, 2, 1 and none."""

    def __init__(self) -> None:
        super().__init__(Adam, partial(torch.optim.lr_scheduler.StepLR, step_size=2))
        self.net = nn.Sequential(
            nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 1)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(2))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        self.seen += 1
        error = self.net(x)[:, 0] * self.scale - y
        return {"loss": error.square().mean(), "mae": error.abs().mean()}


def fit(strategy: Strategy, folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    options = {"precision": "64", "max_epochs": 3, "callbacks": [EMA(0.5), *callbacks], **settings}
    return fitted(None, Rows(11, 4), make=Deep, strategy=strategy, directory=folder, **options)


def ended(strategy: Strategy, folder: Path, start: Path | None, *callbacks: Any) -> dict[str, Any]:
    made = fit(strategy, folder, *callbacks, resume=start)
    return {"weights": weights(made.task), "metrics": dict(made.metrics)}


def kept(strategy: Strategy, folder: Path) -> dict[str, Any]:
    """A run that is over at step 9, and its checkpoint of step 5."""
    saver = Checkpoint(keep=0, every_n_epochs=None, every_n_steps=5, seconds_between=0)

    def keep(trainer: Trainer) -> None:
        saver.writer.wait()
        if trainer.global_step == 6 and strategy.is_main:
            shutil.copytree(folder / "checkpoints", folder / "kept")

    made = fit(strategy, folder, saver, Hooks(on_step_end=keep))
    return {"weights": weights(made.task), "metrics": dict(made.metrics)}


PLACES: dict[str, Callable[[], Strategy]] = {
    "cpu": CPU,
    "ddp 2": partial(DDP, 2, "cpu"),
    "fsdp 1": partial(FSDP, 1, "cpu"),
    "fsdp 2": partial(FSDP, 2, "cpu"),
    "fsdp 3": partial(FSDP, 3, "cpu"),
    "fsdp 4": partial(FSDP, 4, "cpu"),
    "fsdp 2 x 2": partial(FSDP, 4, "cpu", replicate=2),
    "fsdp 2, whole": partial(FSDP, 2, "cpu", checkpoints="whole"),
}


@pytest.fixture(scope="module")
def run_on(tmp_path_factory):
    @once
    def run_on(place: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("runs")
        return folder, on(PLACES[place](), kept, folder)

    return run_on


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("fsdp 4", "cpu"),
        ("fsdp 4", "fsdp 1"),
        ("fsdp 4", "fsdp 2"),
        ("fsdp 4", "fsdp 3"),
        ("fsdp 4", "fsdp 4"),
        ("fsdp 2 x 2", "ddp 2"),
        ("cpu", "fsdp 2 x 2"),
        ("fsdp 2, whole", "fsdp 4"),
    ],
)
def test_a_run_goes_on_with_parts_or_without(there, here, run_on, tmp_path):
    wanted = run_on("cpu")[1]
    folder, there_ended = run_on(there)
    mine = on(PLACES[here](), ended, tmp_path, folder / "kept/last.ckpt")
    for each in (there_ended, mine):
        assert weights_apart(each["weights"], wanted["weights"]) < EXACT
        assert each["metrics"] == pytest.approx(wanted["metrics"], rel=EXACT)
    if there == here:
        assert weights_apart(mine["weights"], there_ended["weights"]) == 0
    is_sharded = files.parts_of(folder / "kept/last.ckpt") is not None
    assert is_sharded == (there in ("fsdp 4", "fsdp 2 x 2"))


# What is in the folder


@pytest.fixture
def saved(run_on, tmp_path) -> Path:
    """A checkpoint in parts, to be tampered with."""
    return shutil.copytree(run_on("fsdp 4")[0] / "kept", tmp_path / "checkpoints") / "last.ckpt"


def folder_of(path: Path) -> Path:
    named = files.parts_of(path)
    assert named is not None
    return path.parent / named.name


def test_torchs_own_tools_read_the_parts(saved, tmp_path):
    dcp_to_torch_save(folder_of(saved), tmp_path / "whole.pt")
    theirs = torch.load(tmp_path / "whole.pt")
    state = checkpoint.load(saved)
    assert theirs["task.net.1.0.weight"].shape == (5, 5)
    assert is_same(theirs["task.net.1.0.weight"], state["task"]["net.1.0.weight"])
    assert is_same(theirs["optimizer.state.1.exp_avg"], state["optimizer"]["state"][1]["exp_avg"])


@pytest.mark.parametrize("here", ["cpu", "fsdp 2"])
def test_a_checkpoint_in_parts_becomes_one_file_that_goes_on_anywhere(
    here, saved, run_on, tmp_path
):
    state, target = checkpoint.load(saved), tmp_path / "joined/whole.ckpt"
    assert checkpoint.join(saved, target) == 5
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert files.flaw(target) == ""
    assert files.parts_of(target) is None
    read = checkpoint.load(target)
    assert read.pop("file") != state.pop("file")
    assert is_same(read, state)
    mine, wanted = on(PLACES[here](), ended, tmp_path, target), run_on("fsdp 4")[1]
    assert weights_apart(mine["weights"], wanted["weights"]) < EXACT
    assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=EXACT)
    with pytest.raises(UserError, match="whole.ckpt is there already; name another directory by"):
        checkpoint.join(saved, target)
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(UserError, match="weights.pt holds weights alone, so no run can go on from"):
        checkpoint.join(tmp_path / "weights.pt", tmp_path / "another/last.ckpt")


TENSORS, ROOM = 24, 32  # of 4 MiB each; MiB for one of them, its file and what torch reads of it


def large(strategy: FSDP, path: Path) -> None:
    strategy.parts({})  # makes the group that saves
    weights = {
        str(n): parts.Part(torch.full((1024, 1024), float(n)), (1024, 1024), 0)
        for n in range(TENSORS)
    }
    checkpoint.write(
        {"task": weights, "progress": {"global_step": 3}}, path, save_parts=strategy.save_parts
    )


def joined(path: Path, target: Path) -> str:
    checkpoint.save({"task": {"0": torch.ones(2)}}, target)  # has loaded what takes memory
    checkpoint.load(target)
    target.unlink()
    limited(ROOM)
    try:
        return f"step {checkpoint.join(path, target)}"
    except (MemoryError, RuntimeError) as error:
        return "out of memory" if "allocate memory" in str(error) else repr(error)


def test_a_checkpoint_is_joined_in_room_for_one_of_its_tensors(tmp_path):
    path, target = tmp_path / "last.ckpt", tmp_path / "whole/last.ckpt"
    (tmp_path / "whole").mkdir()
    on(FSDP(1, "cpu"), large, path)
    assert fresh(joined, path, target) == "step 3"
    task = torch.load(target, mmap=True)["task"]
    assert [int(task[str(n)][7, 7]) for n in range(TENSORS)] == list(range(TENSORS))


def test_best_and_last_share_parts_and_what_nobody_needs_is_removed(tmp_path):
    def names(folder: Path) -> tuple[set[str], set[str]]:
        there = {path.name for path in folder.glob("*.parts")}
        return there, {
            parts.name for path in folder.glob("*.ckpt") if (parts := files.parts_of(path))
        }

    folder = tmp_path / "checkpoints"
    on(FSDP(2, "cpu"), ended, tmp_path, None, Checkpoint(keep=2, seconds_between=0))
    there, named = names(folder)
    assert there == named
    assert len(there) < len(list(folder.glob("*.ckpt")))
    for left in ("step1-ab.parts", ".step2-cd.parts.1.part"):  # by a run that was killed
        (folder / left).mkdir()
    assert files.newest_good(folder) == folder / "last.ckpt"
    again = Checkpoint(keep=2, seconds_between=0)
    fit(CPU(), tmp_path, again, resume=folder / "last.ckpt", max_epochs=9)  # better, and whole
    assert names(folder) == (set(), set())
    assert not list(folder.glob(".*"))


# Faults


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-600, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_a_part_that_is_damaged_or_missing_is_told_and_another_checkpoint_is_taken(saved):
    older = Path(shutil.copy(saved, saved.with_name("older.ckpt")))
    folder = folder_of(saved)
    shutil.copytree(folder, saved.parent / "step5-0.parts")
    state = torch.load(older)
    reseal(older, state, saved.parent / "step5-0.parts")
    damage(folder / "__1_0.distcp")
    said = f"{folder.name}/__1_0.distcp is damaged: its hash is different"
    assert files.flaw(saved) == said
    assert files.newest_good(saved.parent) == older
    with pytest.raises(UserError, match=f"checkpoint={saved} can't be used: {said}"):
        checkpoint.load(saved)
    assert files.instead_of(saved).endswith(f"the newest good one there is {older}")
    shutil.rmtree(folder)
    said = f"its folder {folder.name} is missing, which belongs beside it"
    assert files.flaw(saved) == said
    with pytest.raises(UserError, match=f"checkpoint={saved} can't be used: {said}; the newest"):
        checkpoint.load(saved)


class Fires:
    def __reduce__(self):
        return (print, ("ran",))


def reseal(path: Path, state: dict[str, Any], folder: Path) -> None:
    """As a stranger may."""
    digest = files.digest((folder / files.MANIFEST).read_bytes())
    with path.open("w+b") as file:
        torch.save(state, file)
        files.seal(file, step=5, parts=files.Parts(folder.name, digest))


def test_torchs_own_list_of_a_strangers_parts_is_not_read(saved, capsys):
    wanted = checkpoint.load(saved)
    (folder_of(saved) / ".metadata").write_bytes(pickle.dumps(Fires()))
    assert is_same(checkpoint.load(saved), wanted)
    assert capsys.readouterr().out == ""


def fires(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    content = io.BytesIO()
    torch.save(Fires(), content)
    (folder / "x").write_bytes(content.getvalue())
    (folder / "room").write_bytes(bytes(4096))
    last = list(tensors.values())[-1]["parts"]
    rows = sum(part[0] for part in last)
    digest = files.digest(content.getvalue())
    last[:] = [[rows, "x", 0, len(content.getvalue()), digest]]


def outside(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    tensors["task.net.0.weight"]["parts"][0][1] = "../last.ckpt"


def huge(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    tensors["task.net.0.weight"]["size"][1] = 10**9


def other_size(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    tensors["task.net.0.weight"]["size"][1] = 2


def no_type(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    tensors["task.net.0.weight"]["dtype"] = "nn"


def elsewhere(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    state["parts"]["task.net.0.weight"] = ["progress", "epoch"]


def one_less(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    del tensors["task.net.0.weight"]


def all_at_once(tensors: dict[str, Any], state: dict[str, Any], folder: Path) -> None:
    """Many tensors with the same bytes, which would fill the memory."""
    for number in range(400):
        tensors[f"task.{number}"] = tensors["task.net.1.0.weight"]
        state["task"][str(number)] = None
        state["parts"][f"task.{number}"] = ["task", str(number)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fires, "/x: Weights only load failed"),
        (outside, " has other parts than dpframe writes"),
        (huge, " has other parts than dpframe writes"),
        (other_size, "/__0_0.distcp has another tensor than parts.json says"),
        (no_type, " has other parts than dpframe writes"),
        (elsewhere, " has other parts than dpframe writes"),
        (one_less, " has other parts than dpframe writes"),
        (all_at_once, " has other parts than dpframe writes"),
    ],
)
def test_parts_of_a_stranger_are_refused_in_one_line(saved, change, said, capsys):
    folder, state = folder_of(saved), torch.load(saved)
    listed = json.loads((folder / files.MANIFEST).read_text())
    change(listed["tensors"], state, folder)
    (folder / files.MANIFEST).write_text(json.dumps(listed))
    reseal(saved, state, folder)
    with pytest.raises(UserError) as refused:
        checkpoint.load(saved)
    assert f"{folder.name}{said}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""


def failures(strategy: Strategy, folder: Path) -> list[str]:
    """What the main rank says of each, and how many folders there are after it."""
    made = fit(strategy, folder, max_steps=1, callbacks=[])
    path, said = folder / "checkpoints" / "last.ckpt", []

    def attempt() -> None:
        writer = checkpoint.Writer()
        state = made.state_dict(whole=False)
        options = {"save_parts": strategy.save_parts, "is_main": strategy.is_main}
        writer.save(state, [path], **options)
        try:
            writer.wait()
            said.append("saved")
        except Failure as failure:
            said.append(str(failure).replace(str(folder), "RUN"))
        strategy.collectives.broadcast(None)  # before the next one begins
        said[-1] += f", {len(list(path.parent.glob('*step*')))}"

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    attempt()
    with pytest.MonkeyPatch.context() as patched:
        if strategy.rank == 1:
            patched.setattr(sharded.Writer, "write_data", full)
        attempt()
    with pytest.MonkeyPatch.context() as patched:
        if strategy.is_main:
            patched.setattr(Path, "mkdir", full)
        attempt()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "seal", full)
        attempt()
    if strategy.rank == 1:
        made.task.net[0].weight.to_local().detach().fill_(torch.nan)
    attempt()
    return said


def test_a_save_that_fails_in_a_rank_is_told_by_the_main_one_and_leaves_the_one_before(tmp_path):
    line = "the checkpoint RUN/checkpoints/last.ckpt can't be written: No space left on device"
    nan = "net.0.weight is no longer a number, so RUN/checkpoints/last.ckpt is not written"
    said = on(FSDP(2, "cpu"), failures, tmp_path)
    kept = "; the one before it is kept, 1"
    assert said == ["saved, 1", line + kept, line + kept, line + kept, nan + kept]
    assert files.flaw(tmp_path / "checkpoints/last.ckpt") == ""


def checked(strategy: Strategy, folder: Path) -> str:
    own = folder / str(strategy.rank)
    own.mkdir()
    strategy.nodes = 2
    try:
        strategy.check_folder(folder)
        strategy.check_folder(own)
    except UserError as refused:
        return str(refused).replace(str(own), "RUN")
    return ""


def test_nodes_that_see_other_folders_are_refused(tmp_path):
    assert on(FSDP(2, "cpu"), checked, tmp_path) == (
        "strategy.checkpoints=sharded but not all machines see RUN of the main one; name a run "
        "directory on a file system that they share by hydra.run.dir=DIR, or use "
        "strategy.checkpoints=whole"
    )


def test_the_parts_of_a_state_are_taken_out_by_their_places():
    part = parts.Part(torch.zeros(2), (4,), 2)
    state = {"a.b": {"c": part}, "a": {"b.c": part, 0: 1}}
    rest, named = parts.taken_out(state)
    assert rest == {
        "a.b": {"c": None},
        "a": {"b.c": None, 0: 1},
        "parts": {"a.b.c": ["a.b", "c"], "a.b.c+": ["a", "b.c"]},
    }
    assert named == {"a.b.c": part, "a.b.c+": part}


def test_what_each_process_has_of_its_own_stays_in_its_place_until_it_is_gathered():
    own = parts.Own("here")
    state = {"random": own, "progress": {"means": own, "step": 1}}
    rest, named = parts.taken_out(state)
    assert named == {"random": own, "progress.means": own} and rest == {**state, "parts": {}}
    own.of_all = ["here", "there"]
    assert parts.gathered(state) == {
        "random": own.of_all,
        "progress": {"means": own.of_all, "step": 1},
    }


def of_each_rank(strategy: Strategy, folder: Path) -> Any:
    """What a save within an epoch holds of each rank, and what ranks had when it was asked for."""
    made = fit(strategy, folder, max_steps=1, callbacks=[])
    path, writer = folder / "checkpoints" / "last.ckpt", checkpoint.Writer()
    made.progress.batches_done = 1
    torch.manual_seed(strategy.rank)
    wanted = strategy.collectives.gather((torch.get_rng_state(), made.means.state_dict()))
    state = made.state_dict(whole=False)
    writer.save(state, [path], save_parts=strategy.save_parts, is_main=strategy.is_main)
    torch.rand(5)  # training goes on
    writer.wait()
    strategy.collectives.broadcast(None)
    if not strategy.is_main:
        return None
    read = checkpoint.load(path)
    found = zip(read["random"], read["progress"]["means"], wanted, strict=True)
    return [
        (torch.equal(random["torch"], there), means == of_means, len(read["stream"]))
        for random, means, (there, of_means) in found
    ]


def test_a_save_within_an_epoch_holds_what_each_rank_had(tmp_path):
    assert on(FSDP(3, "cpu"), of_each_rank, tmp_path) == [(True, True, 0)] * 3


def work_to_name(count: int) -> int:
    """How many instructions of Python it takes to take out so many parts."""
    done = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal done
        frame.f_trace_opcodes = True
        done += event == "opcode"
        return note

    part = parts.Part(torch.zeros(2), (4,), 2)
    state = {"task": {f"blocks.{number}.weight": part for number in range(count)}}
    before = sys.gettrace()
    sys.settrace(note)
    try:
        parts.taken_out(state)
    finally:
        sys.settrace(before)
    return done


def test_thousands_of_parts_are_named_without_comparing_each_with_all():
    assert 0 < work_to_name(400) < 3 * work_to_name(200)


# Kills within a save


MOMENTS: dict[str, tuple[int, Any, str]] = {  # the rank, and what it is about to call
    "a part": (1, sharded.Writer, "write_data"),
    "last.ckpt": (0, checkpoint, "_write_all"),
    "best.ckpt": (0, checkpoint, "copy"),
    "what is not needed": (0, files, "remove_parts"),
}


def until_killed(moment: str, folder: Path, strategy: Strategy) -> None:
    rank, owner, name = MOMENTS[moment]
    call, calls = getattr(owner, name), count(1)

    def deadly(*args: Any, **options: Any) -> Any:
        if strategy.rank == rank and next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    setattr(owner, name, deadly)
    oracle.run(str(folder), None, strategy)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[str, Any]:
    return gone_on(tmp_path_factory.mktemp("unbroken"))


def gone_on(folder: Path) -> dict[str, Any]:
    strategy = FSDP(2, "cpu")
    fresh(strategy.launch, oracle.run, str(folder), None, strategy)
    state = checkpoint.load(folder / "checkpoints/last.ckpt")
    return {name: state[name] for name in ("task", "optimizer", "scheduler", "random", "metrics")}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_is_killed_within_a_save_costs_that_save_alone(moment, unbroken, tmp_path):
    strategy, folder = FSDP(2, "cpu"), tmp_path / "checkpoints"
    with pytest.raises(RankFailed):
        fresh(strategy.launch, until_killed, moment, tmp_path, strategy)
    good = files.newest_good(folder)
    assert good is not None
    newest = max(int(re.match(r"\.?step(\d+)", path.name)[1]) for path in folder.glob("*step*-*"))
    assert files.step_of(good) >= newest - 1
    assert is_same(gone_on(tmp_path), unbroken)
    named = {found.name for path in folder.glob("*.ckpt") if (found := files.parts_of(path))}
    assert {path.name for path in folder.glob("*.parts")} == named
    assert not list(folder.glob(".*"))


# On cards


@pytest.fixture(scope="module")
def on_cards(tmp_path_factory):
    @once
    def on_cards() -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("cards")
        return folder, on(FSDP(2, "cuda"), kept, folder)

    return on_cards


@pytest.mark.frees_by_waits  # torch's own streams wait before they use a gradient's memory again
@pytest.mark.parametrize(
    "cards", [pytest.param(cards, marks=pytest.mark.gpu(max(cards, 2))) for cards in (0, 1, 4)]
)
def test_parts_of_two_cards_go_on_on_others_and_on_the_cpu(cards, on_cards, tmp_path):
    folder, wanted = on_cards()
    here = FSDP(cards, "cuda") if cards else CPU()
    mine = on(here, ended, tmp_path, folder / "kept/last.ckpt")
    assert weights_apart(mine["weights"], wanted["weights"]) < 1e-9
    assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9)


def saved_beside_steps(strategy: Strategy, folder: Path) -> list[float]:
    """How far the weights of each save are from those that training had when it was asked for."""
    made = fit(strategy, folder, max_steps=1, callbacks=[])
    path, writer, apart = folder / "checkpoints" / "last.ckpt", checkpoint.Writer(), []
    for _ in range(3):
        state, wanted = made.state_dict(whole=False), weights(made.task)
        torch.cuda.set_sync_debug_mode("error")
        writer.save(state, [path], save_parts=strategy.save_parts, is_main=strategy.is_main)
        for weight in made.task.parameters():
            strategy.local(weight.detach()).add_(1)
        torch.cuda.set_sync_debug_mode("default")
        with patch.object(torch.cuda.Stream, "synchronize") as waited:
            writer.wait()
        assert not waited.called  # by the thread: it would wait for steps that are still to come
        strategy.collectives.broadcast(None)  # all have written theirs
        read = checkpoint.load(path)["task"]
        apart.append(weights_apart({n: t.numpy() for n, t in read.items()}, wanted))
        strategy.collectives.broadcast(None)
    return apart


@pytest.mark.gpu
@pytest.mark.frees_by_waits
def test_parts_are_copied_from_cards_while_training_goes_on(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    assert on(FSDP(2, "cuda"), saved_beside_steps, tmp_path) == [0, 0, 0]
