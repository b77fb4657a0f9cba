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
from forked import fresh, in_turn, limited, on
from recorded import once, weights, weights_apart
from small import Adam, Hooks, Rows, Small, fitted, is_same
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Placed

from dpframe import Strategy, Task, Trainer, UserError, checkpoint
from dpframe.callbacks.averages import EMA
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.freeze import Freeze
from dpframe.checkpoint import file as one_file
from dpframe.checkpoint import seal, sharded
from dpframe.errors import Failure, Interrupted
from dpframe.launch.rank_errors import RankFailed
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU
from dpframe.util import files

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
    options = {"make": Deep, **options}
    return fitted(None, Rows(11, 4), strategy=strategy, directory=folder, **options)


def ended(
    strategy: Strategy, folder: Path, start: Path | None, *callbacks: Any, **options: Any
) -> dict[str, Any]:
    made = fit(strategy, folder, *callbacks, resume=start, **options)
    return {"weights": weights(made.task), "metrics": dict(made.metrics)}


def kept(strategy: Strategy, folder: Path, *callbacks: Any, **options: Any) -> dict[str, Any]:
    """A run that is over at step 9, and its checkpoint of step 5."""
    saver = Checkpoint(keep=0, every_n_epochs=None, every_n_steps=5, seconds_between=0)

    def keep(trainer: Trainer) -> None:
        saver.writer.wait()
        if trainer.global_step == 6 and strategy.is_main:
            shutil.copytree(folder / "checkpoints", folder / "kept")

    made = fit(strategy, folder, saver, Hooks(on_step_end=keep), *callbacks, **options)
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
        if place in ON_FOUR:
            return on_four()[place]
        folder = tmp_path_factory.mktemp("runs")
        return folder, on(PLACES[place](), kept, folder)

    @once
    def on_four() -> dict[str, tuple[Path, dict[str, Any]]]:
        folders = [tmp_path_factory.mktemp("runs") for _ in ON_FOUR]
        cases = [(PLACES[p](), kept, folder) for p, folder in zip(ON_FOUR, folders, strict=True)]
        return dict(zip(ON_FOUR, zip(folders, in_turn(cases), strict=True), strict=True))

    return run_on


ON_FOUR = ["fsdp 4", "fsdp 2 x 2"]
GOES_ON = [
    ("fsdp 4", "cpu"),
    ("fsdp 4", "fsdp 1"),
    ("fsdp 4", "fsdp 2"),
    ("fsdp 4", "fsdp 3"),
    ("fsdp 4", "fsdp 4"),
    ("fsdp 2 x 2", "ddp 2"),
    ("cpu", "fsdp 2 x 2"),
    ("fsdp 2, whole", "fsdp 4"),
]


@pytest.fixture(scope="module")
def goes_on(tmp_path_factory, run_on):
    """How each ends of those that go on with as many ranks, in one group of them."""

    @once
    def goes_on(ranks: Any) -> dict[tuple[str, str], dict[str, Any]]:
        pairs = [(there, here) for there, here in GOES_ON if PLACES[here]().gpus == ranks]
        starts = [run_on(there)[0] / "kept/last.ckpt" for there, _ in pairs]
        cases = [
            (PLACES[here](), ended, tmp_path_factory.mktemp("goes_on"), start)
            for (_, here), start in zip(pairs, starts, strict=True)
        ]
        done = in_turn(cases) if ranks else [on(*case) for case in cases]
        return dict(zip(pairs, done, strict=True))

    return goes_on


@pytest.mark.parametrize(("there", "here"), GOES_ON)
def test_a_run_goes_on_with_parts_or_without(there, here, run_on, goes_on):
    wanted = run_on("cpu")[1]
    folder, there_ended = run_on(there)
    mine = goes_on(PLACES[here]().gpus)[there, here]
    for each in (there_ended, mine):
        assert weights_apart(each["weights"], wanted["weights"]) < EXACT
        assert each["metrics"] == pytest.approx(wanted["metrics"], rel=EXACT)
    if there == here:
        assert weights_apart(mine["weights"], there_ended["weights"]) == 0
    is_sharded = seal.parts_of(folder / "kept/last.ckpt") is not None
    assert is_sharded == (there in ("fsdp 4", "fsdp 2 x 2"))


class Pieces(Task):
    """Two optimizers; a weight under two names, one that nothing uses, and a frozen layer."""

    def __init__(self) -> None:
        rates = {"body": partial(torch.optim.AdamW, lr=0.01), "head": Adam}
        super().__init__(optimizers=rates)
        layers = [nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)]
        self.body = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
        self.body[3][0].weight = self.body[2][0].weight
        self.body.register_parameter("unused", nn.Parameter(torch.ones(3, 2)))
        self.head = nn.Linear(5, 1)

    def turns(self) -> list[str]:
        return ["body", "head"] if self.global_step % 2 else ["head"]

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Any]:
        x, y = batch
        return {"loss": (self.head(self.body(x))[:, 0] - y).square().mean()}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.head(self.body(batch[0])).mean()}


def in_pieces(strategy: Strategy, folder: Path, start: Path | None) -> dict[str, Any]:
    """The layer thaws after step 7: between the checkpoint of step 5, and the end of step 9."""
    thaws = Freeze("body.1", thaw_at_step=7)
    if start is None:
        return kept(strategy, folder, thaws, make=Pieces)
    return ended(strategy, folder, start, thaws, make=Pieces)


@pytest.fixture(scope="module")
def pieces_on_two(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pieces")
    return folder / "kept/last.ckpt", on(FSDP(2, "cpu"), in_pieces, folder, None)


@pytest.mark.parametrize("here", ["fsdp 2", "fsdp 3", "cpu"])
def test_thawed_unused_and_tied_weights_of_two_optimizers_go_on(here, pieces_on_two, tmp_path):
    start, wanted = pieces_on_two
    mine = on(PLACES[here](), in_pieces, tmp_path, start)
    apart = weights_apart(mine["weights"], wanted["weights"])
    assert apart < EXACT if here != "fsdp 2" else apart == 0
    assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=EXACT)


def loaded_often(strategy: FSDP, path: Path) -> list[bool]:
    """Whether each of 50 loads gives all weights and moments as they are in the file."""
    made = fit(strategy, path.parent, max_steps=1, callbacks=[])
    wanted = checkpoint.load(path)
    alike = []
    for _ in range(50):
        state = checkpoint.load(path, whole=False)
        with torch.no_grad():
            for weight in made.task.parameters():
                strategy.sharding.local(weight).zero_()
        checkpoint.load_task(made.task, state, is_resumed=True, sharding=strategy.sharding)
        mine = strategy.sharding.whole(made.task.state_dict(), for_all=True)
        moment = state["optimizer"]["state"][2]["exp_avg"]
        weight = made.task.net[1][0].weight
        whole = strategy.sharding.whole(strategy.sharding.shard_like(moment, weight), for_all=True)
        mine_too = wanted["optimizer"]["state"][2]["exp_avg"]
        alike.append(is_same(mine, wanted["task"]) and is_same(whole, mine_too))
    return alike


def test_fifty_loads_on_three_ranks_are_alike(saved):
    assert on(FSDP(3, "cpu"), loaded_often, saved) == [True] * 50


def loaded_but(strategy: FSDP, path: Path) -> tuple[list[str], list[str]]:
    """What stays, and what is not as in the file, where a part of it is left out."""
    made = fit(strategy, path.parent, max_steps=1, callbacks=[])
    with torch.no_grad():
        for weight in made.task.parameters():
            strategy.sharding.local(weight).zero_()
    state, sharding = checkpoint.load(path, whole=False), strategy.sharding
    stays = checkpoint.load_task(made.task, state, sharding=sharding, skip=["net.1"])
    mine = sharding.whole(made.task.state_dict(), for_all=True)
    there = checkpoint.load(path)["averaged"]
    return stays, sorted(name for name in mine if not torch.equal(mine[name], there[name]))


def test_a_part_of_a_sharded_checkpoint_is_left_out(saved):
    stays, unlike = on(FSDP(2, "cpu"), loaded_but, saved)
    assert stays == unlike and stays and all(name.startswith("net.1.") for name in stays)


# What is in the folder


@pytest.fixture
def saved(run_on, tmp_path) -> Path:
    """A checkpoint in parts, to be tampered with."""
    return shutil.copytree(run_on("fsdp 4")[0] / "kept", tmp_path / "checkpoints") / "last.ckpt"


def folder_of(path: Path) -> Path:
    named = seal.parts_of(path)
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
    assert seal.damage(target) == ""
    assert seal.parts_of(target) is None
    read = checkpoint.load(target)
    assert read.pop("file") != state.pop("file")
    assert is_same(read, state)
    mine, wanted = on(PLACES[here](), ended, tmp_path, target), run_on("fsdp 4")[1]
    assert weights_apart(mine["weights"], wanted["weights"]) < EXACT
    assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=EXACT)
    with pytest.raises(UserError, match="whole.ckpt is there already; name another directory by"):
        checkpoint.join(saved, target)
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(UserError, match="weights.pt holds only weights, so no run can go on from"):
        checkpoint.join(tmp_path / "weights.pt", tmp_path / "another/last.ckpt")


TENSORS, ROOM = 12, 32  # of 4 MiB each; MiB for one of them, its file and what torch reads of it


def large(strategy: FSDP, path: Path) -> None:
    weights = {
        str(n): DTensor.from_local(torch.full((1024, 1024), float(n)), strategy.mesh)
        for n in range(TENSORS)
    }
    state = {"task": weights, "progress": {"global_step": 3}}
    rest, shards = strategy.sharding.split(state, Tensor.clone)
    one_file.write(rest, path, save_shards=partial(strategy.sharding.save, shards))


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
            parts.name for path in folder.glob("*.ckpt") if (parts := seal.parts_of(path))
        }

    folder = tmp_path / "checkpoints"
    on(FSDP(2, "cpu"), ended, tmp_path, None, Checkpoint(keep=2, seconds_between=0))
    there, named = names(folder)
    assert there == named
    assert len(there) < len(list(folder.glob("*.ckpt")))
    for left in ("step1-ab.parts", ".step2-cd.parts.1.part"):  # by a run that was killed
        (folder / left).mkdir()
    assert seal.newest_good(folder) == folder / "last.ckpt"
    again = Checkpoint(keep=2, seconds_between=0)
    fit(CPU(), tmp_path, again, resume=folder / "last.ckpt", max_epochs=9)  # better, and whole
    assert names(folder) == (set(), set())
    assert not list(folder.glob(".*"))


def test_several_checkpoints_write_their_shards_one_after_another(tmp_path):
    """Each has a thread, and all threads of a rank meet those of the others in one group."""
    savers = [
        Checkpoint(keep=2, every_n_steps=1, seconds_between=0),
        Checkpoint(keep=2, file="mae-{epoch}", monitor="val/mae", seconds_between=0),
        Checkpoint(keep=2, file="loss-{epoch}", monitor="train/loss", seconds_between=0),
    ]
    on(FSDP(2, "cpu"), ended, tmp_path, None, *savers)
    paths = sorted((tmp_path / "checkpoints").glob("*-step*.ckpt"))
    assert [path.name[:3] for path in paths] == ["epo", "epo", "los", "los", "mae", "mae"]
    for path in paths:
        assert path.name.endswith(f"-step{checkpoint.load(path)['progress']['global_step']}.ckpt")


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
    assert seal.damage(saved) == said
    assert seal.newest_good(saved.parent) == older
    with pytest.raises(UserError, match=f"checkpoint={saved} can't be used: {said}"):
        checkpoint.load(saved)
    assert seal.instead_of(saved).endswith(f"the newest good one there is {older}")
    shutil.rmtree(folder)
    said = f"its folder {folder.name} is missing, which belongs beside it"
    assert seal.damage(saved) == said
    with pytest.raises(UserError, match=f"checkpoint={saved} can't be used: {said}; the newest"):
        checkpoint.load(saved)


class Fires:
    def __reduce__(self):
        return (print, ("ran",))


def reseal(path: Path, state: dict[str, Any], folder: Path) -> None:
    """As a stranger may."""
    digest = seal.digest((folder / seal.MANIFEST).read_bytes())
    with path.open("w+b") as file:
        torch.save(state, file)
        seal.add(file, step=5, parts=seal.Parts(folder.name, digest))


def outside(tensors: Any, folder: Path) -> None:
    for file in files_in(tensors):
        file[0] = "../last.ckpt"


def huge(tensors: Any, folder: Path) -> None:
    tensors[NAME]["size"] = [2**61]


def another_type(tensors: Any, folder: Path) -> None:
    tensors[NAME]["dtype"] = "float32"


def no_type(tensors: Any, folder: Path) -> None:
    tensors[NAME]["dtype"] = "load"


def one_less(tensors: Any, folder: Path) -> None:
    del tensors[NAME]


def no_tensor(tensors: Any, folder: Path) -> None:
    tensors[NAME] = 1


def no_place(tensors: Any, folder: Path) -> None:
    for chunk in tensors[NAME]["chunks"]:
        chunk["offsets"] = ["1"]


def another_place(tensors: Any, folder: Path) -> None:
    for file in files_in(tensors):
        file[1] += 1


def places_of_text(tensors: Any, folder: Path) -> None:
    for file in files_in(tensors):
        file[1] = "0"


def code_in_a_tensor(tensors: Any, folder: Path) -> None:
    content = io.BytesIO()
    torch.save(Fires(), content)
    for path in folder.glob("*.distcp"):
        path.write_bytes(content.getvalue())
    for file in files_in(tensors):
        file[1:] = [0, len(content.getvalue())]


def code_in_the_index(tensors: Any, folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Fires()))
    del tensors[NAME]


def files_in(tensors: Any) -> list[Any]:
    return [chunk["file"] for tensor in tensors.values() for chunk in tensor["chunks"]]


NAME = "task.net.0.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (outside, " names ../last.ckpt, which is no file of its list"),
        (huge, f" has no such {NAME} as the checkpoint says"),
        (another_type, f" has no such {NAME} as the checkpoint says"),
        (no_type, f"/parts.json can't be read: {NAME} has no type"),
        (one_less, f" has no such {NAME} as the checkpoint says"),
        (no_tensor, "/parts.json can't be read: 'int' object is not subscriptable"),
        (no_place, "/parts.json can't be read: "),
        (another_place, f": {NAME} can't be read: "),
        (places_of_text, f": {NAME} can't be read: "),
        (code_in_a_tensor, f": {NAME} can't be read: Weights only load failed"),
        (code_in_the_index, f" has no such {NAME} as the checkpoint says"),
    ],
)
def test_parts_of_a_stranger_are_refused_in_one_line(saved, change, said, capsys):
    folder = folder_of(saved)
    tensors = tensors_in(folder)
    change(tensors, folder)
    relist(saved, tensors)
    with pytest.raises(UserError) as refused:
        checkpoint.load(saved)
    assert f"{folder.name}{said}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_places_of_tensors_are_those_of_dcps_index(tmp_path):
    tensors = {"x": torch.ones(2), "y": torch.zeros(3, 1, dtype=torch.bfloat16)}
    index = dcp.save(tensors, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    read = sharded.index_of(json.loads(json.dumps(sharded.places_of(index))))
    assert read.state_dict_metadata == index.state_dict_metadata
    for key, place in index.storage_data.items():
        assert vars(read.storage_data[key]).items() >= vars(place).items()


def test_dcps_own_index_is_never_unpickled(saved, capsys):
    """It is a pickle, which other versions of Python write otherwise, and a stranger's has code."""
    before = torch.load(saved)
    folder = folder_of(saved)
    (folder / ".metadata").write_bytes(pickle.dumps(Fires()))
    relist(saved, tensors_in(folder))
    assert checkpoint.load(saved).keys() >= before.keys()
    assert capsys.readouterr().out == ""


def test_tensors_larger_than_their_files_are_refused(saved):
    """Many with the same bytes, or one of 2**61 numbers, in the file and in the index alike."""
    folder, state = folder_of(saved), torch.load(saved)
    tensors = tensors_in(folder)
    for number in range(2000):
        state["task"][str(number)] = state["task"]["net.0.weight"]
        tensors[f"task.{number}"] = tensors[NAME]
    refuse_tensors(saved, state, tensors, "no such task.")
    state, size = torch.load(saved), torch.Size([2**58, 3])
    state["task"]["net.0.weight"] = torch.empty(size, dtype=torch.float64, device="meta")
    tensors[NAME]["size"] = list(size)
    refuse_tensors(saved, state, tensors, f"no such {NAME}")


def refuse_tensors(path: Path, state: dict[str, Any], tensors: Any, said: str) -> None:
    relist(path, tensors, state)
    with pytest.raises(UserError, match=said):
        checkpoint.load(path)


def tensors_in(folder: Path) -> Any:
    return json.loads((folder / seal.MANIFEST).read_text())["tensors"]


def relist(path: Path, tensors: Any, state: Any = None) -> None:
    """As a stranger may, whose hashes fit what he has made."""
    folder = folder_of(path)
    names = [each.name for each in folder.iterdir() if each.name != seal.MANIFEST]
    hashes = {name: seal.digest_of(folder / name) for name in names}
    (folder / seal.MANIFEST).write_text(json.dumps({"files": hashes, "tensors": tensors}))
    reseal(path, torch.load(path) if state is None else state, folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", seal.MANIFEST])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_among_the_parts_is_not_waited_for(saved, name, kind):
    part = folder_of(saved) / name
    part.unlink()
    if kind == "pipe":
        os.mkfifo(part)
    else:
        part.symlink_to("/dev/zero")
    said = f"{part.parent.name}/{name}: it is no file"
    assert seal.damage(saved) == said
    with pytest.raises(UserError, match=f"checkpoint={saved} can't be used: {said}"):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ({"tensors": {}}, "is no list of files that dpframe writes"),
        ({"files": {"../last.ckpt": "0"}}, "is no list of files that dpframe writes"),
        ({"files": [1]}, "is no list of files that dpframe writes"),
        ([1], "is no list of files that dpframe writes"),
    ],
)
def test_a_list_of_parts_that_is_no_list_of_this_dpframes_is_one_line(saved, listed, said):
    folder = folder_of(saved)
    (folder / seal.MANIFEST).write_text(json.dumps(listed))
    reseal(saved, torch.load(saved), folder)
    assert seal.damage(saved).startswith(f"{folder.name}/parts.json {said}")
    with pytest.raises(UserError, match=said):
        checkpoint.load(saved)


def failures(strategy: Strategy, folder: Path) -> list[str]:
    """What the main rank says of each, and how many folders there are after it."""
    made = fit(strategy, folder, max_steps=1, callbacks=[])
    path, said = folder / "checkpoints" / "last.ckpt", []

    def attempt() -> None:
        writer = checkpoint.Writer()
        state = made.state_dict(whole=False)
        options = {"sharding": strategy.sharding}
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
            patched.setattr(FileSystemWriter, "write_data", full)
        attempt()
    with pytest.MonkeyPatch.context() as patched:
        if strategy.is_main:
            patched.setattr(Path, "mkdir", full)
        attempt()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(seal, "add", full)
        attempt()
    if strategy.rank == 1:
        made.task.net[0].weight.to_local().detach().fill_(torch.nan)
    attempt()
    return said


def test_a_save_that_fails_in_a_rank_is_told_by_the_main_one_and_leaves_the_one_before(of_two):
    line = "the checkpoint RUN/checkpoints/last.ckpt can't be written: No space left on device"
    nan = "net.0.weight is no longer a number, so RUN/checkpoints/last.ckpt is not written"
    folder, said = of_two["failures"]
    kept = "; the one before it is kept, 1"
    assert said == ["saved, 1", line + kept, line + kept, line + kept, nan + kept]
    assert seal.damage(folder / "checkpoints/last.ckpt") == ""


def checked(strategy: Strategy, folder: Path) -> str:
    own = folder / str(strategy.rank)
    own.mkdir()
    strategy.sharding._nodes = 2
    try:
        strategy.sharding.check_folder(folder)
        strategy.sharding.check_folder(own)
    except UserError as refused:
        return str(refused).replace(str(own), "RUN")
    return ""


def test_nodes_that_see_other_folders_are_refused(of_two):
    assert of_two["checked"][1] == (
        "strategy.checkpoints=sharded but not all machines see RUN of the main one; name a run "
        "directory on a file system that they share by hydra.run.dir=DIR, or use "
        "strategy.checkpoints=whole"
    )


def taken_out(strategy: FSDP, folder: Path) -> Any:
    whole = torch.arange(8.0).view(4, 2)
    weight = distribute_tensor(whole, strategy.mesh, [Placed(0)])
    copies: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    state = {"a.b": {"c": weight}, "a": {"b.c": [weight], 0: torch.ones(1), "d": 1}}
    rest, shards = sharded.split(state, copy, copies_rest=True)
    places = [rest["a.b"]["c"], rest["a"]["b.c"][0]]
    return (
        [(place.is_meta, place.shape, place.dtype) for place in places],
        rest["a"][0] is copies[-1] and rest["a"]["d"],
        {name: shard.rows.tolist() for name, shard in shards.items()},
    )


def test_the_shards_of_a_state_are_taken_out_by_their_names(of_two):
    is_there, rest, shards = of_two["taken out"][1]
    assert is_there == [(True, (4, 2), torch.float32)] * 2
    assert rest == 1
    assert shards == {"a.b.c": [[0, 1], [2, 3]], "a.b.c+": [[0, 1], [2, 3]]}


def of_each_rank(strategy: Strategy, folder: Path) -> Any:
    """What a save within an epoch holds of each rank, and what ranks had when it was asked for."""
    made = fit(strategy, folder, max_steps=1, callbacks=[])
    path, writer = folder / "checkpoints" / "last.ckpt", checkpoint.Writer()
    made.progress.batches_done = 1
    torch.manual_seed(strategy.rank)
    wanted = strategy.collectives.gather((torch.get_rng_state(), made.training.means.state_dict()))
    state = made.state_dict(whole=False)
    writer.save(state, [path], sharding=strategy.sharding)
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


def work_to_name(strategy: FSDP) -> list[int]:
    """How many instructions of Python it takes to take out 200 and 400 shards."""
    done = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal done
        frame.f_trace_opcodes = True
        done += event == "opcode"
        return note

    def work(count: int) -> int:
        nonlocal done
        weight = DTensor.from_local(torch.zeros(2), strategy.mesh)
        state = {"task": {f"blocks.{number}.weight": weight for number in range(count)}}
        before, done = sys.gettrace(), 0
        sys.settrace(note)
        try:
            sharded.split(state, Tensor.detach, copies_rest=True)
        finally:
            sys.settrace(before)
        return done

    return [work(200), work(400)]


def test_thousands_of_shards_are_named_without_comparing_each_with_all():
    few, many = on(FSDP(1, "cpu"), work_to_name)
    assert 0 < many < 3 * few


# Kills within a save


MOMENTS: dict[str, tuple[int, Any, str]] = {  # the rank, and what it is about to call
    "a part": (1, FileSystemWriter, "write_data"),
    "last.ckpt": (0, one_file, "_write_all"),
    "best.ckpt": (0, one_file, "copy"),
    "what is not needed": (0, seal, "remove_parts"),
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
    good = seal.newest_good(folder)
    assert good is not None
    newest = max(int(re.match(r"\.?step(\d+)", path.name)[1]) for path in folder.glob("*step*-*"))
    assert seal.step_of(good) >= newest - 1
    assert is_same(gone_on(tmp_path), unbroken)
    named = {found.name for path in folder.glob("*.ckpt") if (found := seal.parts_of(path))}
    assert {path.name for path in folder.glob("*.parts")} == named
    assert not list(folder.glob(".*"))


CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}


def saved_twice(strategy: FSDP, moments: Path) -> None:
    """Copies the folder before each change of a file by any rank in the second of two saves."""
    (moments / "run").mkdir(exist_ok=True)
    folder, writer, count_ = moments / "run/checkpoints", checkpoint.Writer(), count()
    is_copying = is_watched = False

    def watch(event: str, args: tuple) -> None:
        nonlocal is_copying
        writes = event == "open" and bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if not is_watched or is_copying or not (writes or event in CHANGES):
            return
        is_copying = True
        shutil.copytree(folder, moments / f"{strategy.rank}-{next(count_)}")
        is_copying = False

    sys.addaudithook(watch)
    for step in (1, 2):
        weight = DTensor.from_local(torch.full((2, 2), float(step)), strategy.mesh, [Placed(0)])
        state = {"task": {"w": weight}, "progress": {"global_step": step}}
        is_watched = step == 2
        paths = [folder / "last.ckpt", folder / "best.ckpt"]
        options = {"sharding": strategy.sharding}
        writer.save(state, paths, **options)
        writer.wait()
        strategy.collectives.broadcast(None)
    is_watched = False


def test_killed_at_any_change_of_a_file_a_save_leaves_the_old_checkpoint_or_the_new_one(of_two):
    moments = [path for path in of_two["saved twice"][0].iterdir() if path.name != "run"]
    assert {path.name[:2] for path in moments} == {"0-", "1-"}
    steps = []
    for folder in moments:
        assert all(seal.damage(path) == "" for path in folder.glob("*.ckpt"))
        good = seal.newest_good(folder)
        steps.append(seal.step_of(good))
        assert checkpoint.load(good)["task"]["w"].tolist() == [[steps[-1]] * 2] * 4
        files.remove_leftovers(folder)
        seal.remove_parts(folder)
        named = {found.name for path in folder.glob("*.ckpt") if (found := seal.parts_of(path))}
        assert {path.name for path in folder.iterdir()} == {"last.ckpt", "best.ckpt", *named}
    assert set(steps) == {1, 2}


# What two ranks are asked in one group of them; the last one leaves an audit hook behind.
OF_TWO = {
    "failures": failures,
    "checked": checked,
    "taken out": taken_out,
    "saved twice": saved_twice,
}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict[str, tuple[Path, Any]]:
    folders = {name: tmp_path_factory.mktemp("of_two") for name in OF_TWO}
    done = in_turn([(FSDP(2, "cpu"), OF_TWO[name], folder) for name, folder in folders.items()])
    return {name: (folders[name], value) for name, value in zip(OF_TWO, done, strict=True)}


# On GPUs


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    @once
    def on_gpus() -> tuple[Path, dict[str, Any]]:
        """All that two of them are asked."""
        calls = {"kept": kept, "beside steps": saved_beside_steps, "collected": collected}
        folders = {name: tmp_path_factory.mktemp("gpus") for name in calls}
        done = in_turn([(FSDP(2, "cuda"), calls[name], folder) for name, folder in folders.items()])
        return folders["kept"], dict(zip(calls, done, strict=True))

    return on_gpus


@pytest.mark.frees_by_waits  # torch's own streams wait before they use a gradient's memory again
@pytest.mark.parametrize(
    "gpus", [pytest.param(gpus, marks=pytest.mark.gpu(max(gpus, 2))) for gpus in (0, 1, 3)]
)
def test_parts_of_two_gpus_go_on_on_others_and_on_the_cpu(gpus, on_gpus, tmp_path):
    folder, found = on_gpus()
    wanted = found["kept"]
    here = FSDP(gpus, "cuda") if gpus else CPU()
    mine = on(here, ended, tmp_path, folder / "kept/last.ckpt")
    assert weights_apart(mine["weights"], wanted["weights"]) < 1e-9
    assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9)


def saved_beside_steps(strategy: Strategy, folder: Path) -> list[float]:
    """How far the weights of each save are from those that training had when it was asked for."""
    made = fit(strategy, folder, max_steps=1, callbacks=[])
    path, writer, apart = folder / "checkpoints" / "last.ckpt", checkpoint.Writer(), []
    for _ in range(3):
        wanted = weights(made.task)
        torch.cuda.set_sync_debug_mode("error")
        state = made.state_dict(whole=False)
        writer.save(state, [path], sharding=strategy.sharding)
        for weight in made.task.parameters():
            strategy.sharding.local(weight.detach()).add_(1)
        torch.cuda.set_sync_debug_mode("default")
        with patch.object(torch.cuda.Stream, "synchronize") as waited:
            writer.wait()
        assert not waited.called  # by the thread: it would wait for steps that are still to come
        strategy.collectives.broadcast(None)  # all have written theirs
        read = checkpoint.load(path)["task"]
        apart.append(weights_apart({n: t.numpy() for n, t in read.items()}, wanted))
        strategy.collectives.broadcast(None)
    return apart


@pytest.mark.gpu(2)
@pytest.mark.frees_by_waits
def test_parts_are_copied_from_gpus_while_training_goes_on(on_gpus):
    assert on_gpus()[1]["beside steps"] == [0, 0, 0]


def collected(strategy: FSDP, folder: Path) -> float:
    """How far whole weights are from the right ones, collected while the host waits for none."""
    made = fit(strategy, folder, max_steps=2, callbacks=[])
    wanted = weights(made.task)
    torch.cuda.set_sync_debug_mode("error")
    state = strategy.sharding.whole(made.task.state_dict())
    torch.cuda.set_sync_debug_mode("default")
    if not strategy.is_main:
        return 0.0
    return weights_apart({name: each.cpu().numpy() for name, each in state.items()}, wanted)


@pytest.mark.gpu(2)
@pytest.mark.frees_by_waits
def test_whole_weights_are_collected_from_gpus_without_a_wait_for_each(on_gpus):
    assert on_gpus()[1]["collected"] == 0


def ended_by_a_signal(strategy: FSDP, folder: Path) -> None:
    """The other rank is at its end while the main one has collected nothing yet."""

    def stop(trainer: Trainer) -> None:
        if trainer.global_step == 2:
            raise Interrupted(signal.SIGTERM)

    def wait_for_the_other(trainer: Trainer) -> None:
        if strategy.is_main and trainer.global_step:  # else a save is only tried
            strategy._shared_store().wait(["at its end"])

    hooks = Hooks(on_step_end=stop, on_save=wait_for_the_other)
    try:
        fit(strategy, folder, hooks, Checkpoint(every_n_epochs=None))
    except Interrupted as error:
        if not strategy.is_main:
            strategy._shared_store().set("at its end", "")
        strategy.abort(error)


@pytest.mark.frees_by_waits
@pytest.mark.gpu(2)
def test_a_signal_ends_no_group_before_the_main_rank_has_collected_a_whole_checkpoint(tmp_path):
    """What another rank has begun in it on its GPU goes on while its host is at its end."""
    on(FSDP(2, "cuda", checkpoints="whole", timeout_seconds=60), ended_by_a_signal, tmp_path)
    path = tmp_path / "checkpoints/last.ckpt"
    assert seal.damage(path) == ""
    assert seal.step_of(path) == 2
