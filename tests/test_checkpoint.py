"""Checkpoints: whole or not at all, read without running code, and a resume that loses nothing."""

import errno
import io
import math
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import fresh, on
from small import SGD, Adam, Clock, Hooks, Rows, Scripted, Small, fitted, is_same, trainer

from dpframe import Callback, Strategy, Trainer, UserError, checkpoint
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.checkpoint import file as one_file
from dpframe.checkpoint import seal
from dpframe.errors import Failure
from dpframe.strategies.ddp import DDP

# Written whole or not at all


class Halfway(Exception):
    pass


def test_what_a_killed_process_left_half_written_is_swept_away(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".last.ckpt.123.part").write_bytes(b"half")
    fitted(callbacks=[Checkpoint()], directory=tmp_path)
    assert sorted(file.name for file in folder.iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    "value, said", [(Path("here"), r"a pathlib\.\w*Path"), (b"", "empty bytes")]
)
def test_an_object_that_could_not_be_read_back_is_refused_when_saving(tmp_path, value, said):
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"moment": {"at": value}}

    with pytest.raises(UserError, match=f"can't hold callbacks.Keeps.moment.at, {said};"):
        fitted(callbacks=[Keeps(), Checkpoint()], directory=tmp_path)


@pytest.mark.parametrize("number, is_saved", [(errno.ENOTSUP, True), (errno.EIO, False)])
def test_what_a_file_system_can_not_sync_is_saved_and_what_fails_to_is_not(
    tmp_path, monkeypatch, number, is_saved
):
    def refuses(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuses)
    path = tmp_path / "last.ckpt"
    if is_saved:
        checkpoint.save({"task": {}}, path)
    else:
        with pytest.raises(Failure, match="can't be written: Input/output error"):
            checkpoint.save({"task": {}}, path)
    assert path.is_file() == is_saved


def test_a_checkpoint_and_its_copy_are_on_the_disk_before_and_after_they_get_their_names(
    tmp_path, monkeypatch
):
    """A power cut leaves the old or the new one: its bytes come first, and then its name."""
    synced, sync = [], os.fsync

    def note(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(f".{os.getpid()}")[0]
        synced.append((name, sorted(path.name for path in tmp_path.glob("*.ckpt"))))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    checkpoint.save({"task": {}}, tmp_path / "last.ckpt", tmp_path / "best.ckpt")
    both = ["best.ckpt", "last.ckpt"]
    assert synced == [
        (".last.ckpt", []),
        (tmp_path.name, ["last.ckpt"]),
        (".best.ckpt", ["last.ckpt"]),
        (tmp_path.name, both),
    ]


def test_last_goes_on_unless_another_has_more_steps_and_without_it_the_one_of_the_most_steps(
    tmp_path,
):
    """Whatever the times of the files say: who copies a run changes them."""

    def written(name: str, step: int, at: int) -> Path:
        checkpoint.save({"task": {}, "progress": {"global_step": step}}, tmp_path / name)
        os.utime(tmp_path / name, (at, at))
        return tmp_path / name

    last = written("last.ckpt", 8, at=1000)
    written("epoch0001-step4.ckpt", 4, at=500)
    best = written("best.ckpt", 8, at=2000)
    assert seal.newest_good(tmp_path) == last
    more = written("epoch0003-step12.ckpt", 12, at=4000)
    assert seal.newest_good(tmp_path) == more
    more.unlink()
    last.unlink()
    assert seal.newest_good(tmp_path) == best
    most = written("epoch0002-step10.ckpt", 10, at=100)
    assert seal.newest_good(tmp_path) == most


def test_a_resumed_run_keeps_the_best_and_makes_the_best_ckpt_that_a_killed_one_was_about_to_write(
    tmp_path,
):
    given = {"directory": tmp_path, "max_epochs": 2}
    fitted(callbacks=[Checkpoint(keep=2)], **given)
    folder = tmp_path / "checkpoints"
    names, best = kept(tmp_path), (folder / "best.ckpt").read_bytes()
    (folder / "best.ckpt").write_bytes((folder / "epoch0001-step5.ckpt").read_bytes())
    state = checkpoint.load(folder / "epoch0002-step10.ckpt")
    fitted(callbacks=[Checkpoint(keep=2)], **given, resume=state)
    assert (folder / "best.ckpt").read_bytes() == best
    assert kept(tmp_path) == names


# Beside training


def test_a_checkpoint_has_a_copy_of_each_tensor_and_hardly_more(tmp_path):
    """Weights, and Adam's two states of each; and nothing that grows with rows or epochs."""
    sizes = []
    for rows, epochs in ((20, 1), (2000, 3)):
        run, data = tmp_path / str(rows), Rows(rows, batch_size=rows // 2)
        task = Small(Adam, width=20_000)
        fitted(task, data, callbacks=[Checkpoint()], directory=run, max_epochs=epochs)
        sizes.append((run / "checkpoints" / "last.ckpt").stat().st_size)
    tensors = 3 * sum(weight.nbytes for weight in task.parameters())
    assert all(tensors < size < tensors + 30_000 for size in sizes), sizes
    assert abs(sizes[1] - sizes[0]) < 5000, sizes


def test_training_goes_on_while_a_checkpoint_is_written(monkeypatch, tmp_path):
    save, may_end = one_file.write, threading.Event()
    in_time = []

    def slow(state, *paths, **_):
        in_time.append(may_end.wait(timeout=20))
        save(state, *paths)

    monkeypatch.setattr(one_file, "write", slow)
    hooks = Hooks(on_step_end=lambda t: t.global_step == 4 and may_end.set())
    keeper = Checkpoint(every_n_steps=3, every_n_epochs=None, keep=0, seconds_between=0)
    fitted(callbacks=[hooks, keeper], directory=tmp_path, max_epochs=1)
    assert in_time == [True, True]


def test_of_states_that_come_too_often_the_newest_is_written_last_and_at_once(monkeypatch):
    written = []
    note = lambda state, *paths, **_: written.append((state["n"], paths))  # noqa: E731
    monkeypatch.setattr(one_file, "write", note)
    last, best = Path("last.ckpt"), Path("best.ckpt")
    writer = checkpoint.Writer(seconds_between=600)
    for n, paths in enumerate([[last], [best], [last], [best, last], [last]]):
        writer.save({"n": n}, paths)
    writer.wait()  # not for `seconds_between`, which is longer than a test may take
    assert written == [(0, (last,)), (3, (best,)), (4, (last,))]


def test_a_state_that_waits_and_is_dropped_meanwhile_is_neither_written_nor_kept_elsewhere(
    tmp_path,
):
    calls, is_first_there = [], threading.Event()

    class Elsewhere(checkpoint.Writer):
        def after_write(self, paths, removed):
            calls.append(([*paths], [*removed]))
            is_first_there.set()

    writer = Elsewhere(seconds_between=600)
    last, first, second, third = (tmp_path / name for name in ("last", "1", "2", "3"))
    writer.save({"n": 1}, [first, last])
    assert is_first_there.wait(60)
    writer.save({"n": 2}, [second, last])
    writer.save({"n": 3}, [third, last], drop=[first, second])
    writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "last"]
    assert calls == [([first, last], []), ([third, last], [first])]


@pytest.mark.parametrize(
    "seconds_a_step, seconds_to_validate, epochs",
    [(0.01, 0.0, [1, 2, 12, 20]), (0.12, 0.0, [*range(1, 21)]), (0.001, 0.6, [*range(1, 21)])],
)
def test_epochs_shorter_than_seconds_between_are_saved_if_best_and_now_and_then(
    monkeypatch, tmp_path, seconds_a_step, seconds_to_validate, epochs
):
    """Five steps each; the second one is the best, the last one is saved as the end of training."""
    clock, saved = Clock(monkeypatch), []
    keeper = Checkpoint(monitor="val/score")
    hooks = Hooks(
        on_step_end=clock.ticks(seconds_a_step), on_validation_end=clock.ticks(seconds_to_validate)
    )
    note = lambda state, paths, drop, **_: saved.append(state["progress"]["epoch"])  # noqa: E731
    monkeypatch.setattr(keeper.writer, "save", note)
    scores = [0.5, 0.0, *[1.0] * 18]
    fitted(Scripted(scores), callbacks=[hooks, keeper], directory=tmp_path, max_epochs=20)
    assert saved == epochs


@pytest.mark.parametrize("every_n_epochs", [1, None])
def test_weights_become_common_as_often_whatever_the_clock_says(tmp_path, every_n_epochs):
    def syncs(seconds_between: float) -> int:
        class Counts(Strategy):
            reads = 0

            def sync_weights(self, for_reading):
                self.reads += for_reading

        strategy = Counts()
        keeper = Checkpoint(
            every_n_epochs=every_n_epochs, every_n_steps=2, seconds_between=seconds_between
        )
        folder = tmp_path / str(seconds_between)
        fitted(data=Rows(val=False), strategy=strategy, callbacks=[keeper], directory=folder)
        return strategy.reads

    assert syncs(600) == syncs(0)


def test_a_save_that_fails_stops_the_run_with_its_reason(monkeypatch, tmp_path):
    def full(state, file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    keeper = Checkpoint(every_n_steps=2, keep=0)  # a best would be written first, if both wait

    def fills(trainer):
        if trainer.global_step == 3:
            keeper.writer.wait()
            monkeypatch.setattr(torch, "save", full)

    hooks = Hooks(on_step_end=fills)
    with pytest.raises(Failure) as caught:
        fitted(callbacks=[hooks, keeper], directory=tmp_path)
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert str(caught.value) == (
        f"the checkpoint {last} can't be written: No space left on device; "
        "the one before it is kept"
    )
    assert checkpoint.load(last)["progress"]["global_step"] == 2
    assert kept(tmp_path) == ["last.ckpt"]


def test_a_failed_save_does_not_hide_what_ended_the_run(monkeypatch, tmp_path):
    def dies(trainer):
        if trainer.global_step == 3:
            raise Halfway

    def full(state, *paths, **_):
        raise Failure("the disk is full")

    monkeypatch.setattr(one_file, "write", full)
    with pytest.raises(Halfway):
        fitted(callbacks=[Hooks(on_step_end=dies), Checkpoint(every_n_steps=2)], directory=tmp_path)


# Read without running code; a wrong file is one line


class Fires:
    def __reduce__(self):
        return (print, ("ran",))


def sealed(content: Any) -> bytes:
    """As a stranger may seal it: a hash tells of damage, it is no signature."""
    file = io.BytesIO()
    torch.save(content, file)
    seal.add(file)
    return file.getvalue()


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "there is no such file"),
        (b"", "can't be used: it is empty; there is no good one beside it"),
        (b"rubbish" * 99, "can't be used: it has no checksum: truncated, or not written"),
        (sealed({"format": 2, "task": {}})[:-1], "can't be used: it has no checksum: truncated"),
        (sealed({"format": 2, "task": Fires()}), "can't be read: Weights only load failed"),
        (sealed({"weights": 1}), "is not a dpframe checkpoint"),
        (sealed([1, 2]), "is not a dpframe checkpoint"),
        (sealed({"format": "two", "task": {}}), "is not a dpframe checkpoint"),
        (sealed({"format": None, "task": {}}), "is not a dpframe checkpoint"),
        (sealed({"format": 99, "task": {}}), "has format 99, this dpframe reads 2; upgrade dpf"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path, capsys, content, said):
    path = tmp_path / "a.ckpt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        checkpoint.load(path)
    assert str(caught.value).startswith(f"checkpoint={path}") and said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_weights_only_can_not_be_turned_off_by_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (tmp_path / "a.ckpt").write_bytes(sealed({"format": 2, "task": Fires()}))
    with pytest.raises(UserError, match="can't be read"):
        checkpoint.load(tmp_path / "a.ckpt")
    assert capsys.readouterr().out == ""


def repacked(content: bytes, **options: Any) -> bytes:
    """The same entries, written by Python's zip module, and sealed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", **options) as new:
        for name in sorted(old.namelist(), key=lambda name: name.endswith("/data.pkl")):
            new.writestr(name, old.read(name))
    return resealed(file.getvalue())


def resealed(content: bytes) -> bytes:
    file = io.BytesIO(content)
    seal.add(file)
    return file.getvalue()


class Call:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


ZEROS = {"format": 2, "task": {"w": torch.zeros(1 << 20)}}
BOMBS = {
    "compressed": (repacked(sealed(ZEROS), compression=zipfile.ZIP_DEFLATED), "entries are larger"),
    "prefixed": (resealed(b"x" * 99 + sealed(ZEROS)[:-81] + bytes(2)), "can't be read"),
    "no zip": (resealed(b"x" * 999 + bytes(2)), "no zip file as torch writes them"),
    "an expanded tensor": (torch.zeros(1).expand(10**9), "a tensor of size (1000000000,) without"),
    "a tensor on meta": (torch.zeros(10**9, device="meta"), "a tensor of size (1000000000,)"),
    "a tensor made by a call": (Call(torch.Tensor, 1 << 20), "more numbers than its"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_checkpoint_that_takes_up_more_than_its_size_is_refused_in_one_line(tmp_path, bomb):
    content, said = BOMBS[bomb]
    whole = content if isinstance(content, bytes) else sealed({"format": 2, "task": {"w": content}})
    (tmp_path / "a.ckpt").write_bytes(whole)
    with pytest.raises(UserError) as caught:
        checkpoint.load(tmp_path / "a.ckpt")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_and_tuples_that_stand_in_several_places_are_read(tmp_path):
    pair = (1, (2, b"\xff and more"))
    state = {"task": {}, "here": [pair, pair, b"\xff"], "there": {"x": pair, (1, 2): {3, 4}}}
    checkpoint.save(state, tmp_path / "a.ckpt")
    assert checkpoint.load(tmp_path / "a.ckpt").items() >= state.items()


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path):
    path = tmp_path / "a.ckpt"
    checkpoint.save({"task": {"w": torch.arange(4.0)}, "progress": {"global_step": 7}}, path)
    whole = path.read_bytes()
    assert seal.damage(path) == "" and seal.step_of(path) == 7
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(whole):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
            assert seal.damage(path), at
            os.pwrite(file.fileno(), bytes([byte]), at)
        assert seal.damage(path) == ""
        for at in reversed(range(len(whole))):
            file.truncate(at)
            assert seal.damage(path), at


def read_again(strategy: Strategy, path: Path) -> list[int]:
    """How many bytes were hashed in this process and in each rank."""
    hashed = [0]
    compute = seal._hash

    def counted(file: Any, end: int, more: bytes) -> bytes:
        hashed[0] += end
        return compute(file, end, more)

    seal._hash, seal.SETTLED = counted, -1
    checkpoint.load(path)
    before, hashed[0] = hashed[0], 0
    checkpoint.load(path)
    again, hashed[0] = hashed[0], 0
    in_ranks = strategy.launch(read_in_rank, strategy, path, hashed)
    os.utime(path)
    checkpoint.load(path)
    return [before, again, in_ranks, hashed[0]]


def read_in_rank(strategy: Strategy, path: Path, hashed: list[int]) -> float:
    with strategy:
        checkpoint.load(path)
        return strategy.collectives.sum_numbers([float(hashed[0])])[0]


def test_a_file_is_hashed_once_for_a_process_and_its_ranks_until_it_changes(tmp_path):
    fitted(callbacks=[Checkpoint()], directory=str(tmp_path))
    path = tmp_path / "checkpoints" / "last.ckpt"
    before, again, in_ranks, changed = fresh(read_again, DDP(2, "cpu"), path)
    assert before == changed > 1000
    assert again == in_ranks == 0


def test_a_checkpoint_of_an_earlier_version_that_does_not_seal_its_step_is_read(tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(sealed({"format": 2, "task": {}, "progress": {"global_step": 7}}))
    assert checkpoint.load(path)["progress"] == {"global_step": 7}
    assert seal.step_of(path) == -1


@pytest.mark.parametrize(
    "content", ["cut", {"task": Fires()}, {"weights": 1}, {"format": 99, "task": {}}]
)
def test_the_error_about_a_bad_checkpoint_names_the_newest_good_one(tmp_path, content):
    for number, name in enumerate(["epoch0001-step5", "best", "last"]):
        checkpoint.save({"task": {}}, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (number, number))
    last = tmp_path / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[:-300] if content == "cut" else sealed({"format": 2} | content))
    with pytest.raises(UserError) as caught:
        checkpoint.load(last)
    assert str(caught.value).endswith(f"; the newest good one there is {tmp_path / 'best.ckpt'}")


def test_weights_that_are_not_numbers_are_neither_saved_nor_loaded(tmp_path):
    path = tmp_path / "last.ckpt"
    module = torch.nn.BatchNorm1d(2)
    checkpoint.save({"task": module.state_dict() | {"mask": torch.tensor([-math.inf])}}, path)
    bad = {"task": module.state_dict() | {"weight": torch.tensor([1.0, math.nan])}}
    with pytest.raises(
        Failure, match="weight is no longer a number, .*; the one before it is kept"
    ):
        checkpoint.save(bad, path)
    assert torch.equal(checkpoint.load(path)["task"]["weight"], torch.ones(2))
    with pytest.raises(UserError, match="weights that are not numbers, in weight"):
        checkpoint.load_task(module, bad)
    assert torch.equal(module.weight, torch.ones(2))


class Deeper(Small):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    "saved, here, said",
    [
        (
            Small(width=9),
            Small(),
            "Small: net.0.weight has size (9, 3) in the checkpoint, size (8, 3) in the task; "
            "checkpoint_skip=[net.0,net.3] leaves as it is what differs",
        ),
        (
            Small(),
            Deeper(),
            "Deeper: it has no more.weight; checkpoint_skip=[more] leaves as it is what differs",
        ),
        (
            Deeper(),
            Small(),
            "Small: it has more.weight, which the task has not; checkpoint_skip=[more] leaves as "
            "it is what differs",
        ),
    ],
)
def test_another_architecture_is_told_by_its_first_difference(saved, here, said):
    before = {name: value.clone() for name, value in here.state_dict().items()}
    with pytest.raises(UserError) as caught:
        checkpoint.load_task(here, {"task": saved.state_dict(), "file": "a.ckpt"})
    assert str(caught.value) == f"checkpoint=a.ckpt does not fit this recipe's {said}"
    assert is_same(here.state_dict(), before)


@pytest.mark.parametrize(
    ("saved", "here", "skip", "stay"),
    [
        (Small(width=9), Small(), ["net.0", "net.3"], ["net.0.bias", "net.0.weight"]),
        (Small(), Deeper(), "more", ["more.bias", "more.weight"]),
        (Deeper(), Small(), "more", []),
        (Small(), Small(), ["net", "!1d"], ["net.0.weight", "net.3.weight"]),
    ],
)
def test_what_is_skipped_of_a_checkpoint_stays_as_it_is(saved, here, skip, stay, tmp_path):
    checkpoint.save({"task": saved.state_dict()}, tmp_path / "a.ckpt")
    before = {name: value.clone() for name, value in here.state_dict().items()}
    stays = checkpoint.load_task(here, checkpoint.load(tmp_path / "a.ckpt"), skip=skip)
    assert set(stay) <= set(stays) <= before.keys()
    for name, value in here.state_dict().items():
        wanted = before if name in stays else saved.state_dict()
        assert torch.equal(value, wanted[name]), name


def test_what_differs_beside_what_is_skipped_is_still_refused():
    state = {"task": Deeper().state_dict()}
    said = r"Deeper: net.0.weight has size .*; checkpoint_skip=\[more,net.0,net.3\] leaves as it is"
    with pytest.raises(UserError, match=said):
        checkpoint.load_task(with_width(9), state, skip="more")
    with pytest.raises(UserError, match="checkpoint_skip=mor matches no parameter; did you mean"):
        checkpoint.load_task(Small(), state, skip="mor")
    with pytest.raises(UserError, match=r"it has no more.weight$"):
        checkpoint.load_task(Deeper(), {"task": Small().state_dict()}, skip=None)


def with_width(width: int) -> Deeper:
    task = Deeper()
    task.net = Small(width=width).net
    return task


# Weights of other programs


def network() -> torch.nn.Sequential:
    return Small().net


FOREIGN: dict[str, Callable[[Any], Any]] = {
    "alone": lambda net: net.state_dict(),
    "of the task": lambda net: {f"net.{n}": value for n, value in net.state_dict().items()},
    "of DataParallel, as the imagenet example saves it": lambda net: {
        "epoch": 3,
        "arch": "resnet18",
        "best_acc1": torch.tensor(71.0),
        "state_dict": torch.nn.DataParallel(net).state_dict(),
        "optimizer": SGD(net.parameters()).state_dict(),
    },
    "compiled, beside an average": lambda net: {
        "model_ema": {n: value + 1 for n, value in net.state_dict().items()},
        "model": {f"_orig_mod.{n}": value for n, value in net.state_dict().items()},
    },
    "compiled in DDP, under another name": lambda net: {
        f"module.backbone._orig_mod.{n}": value for n, value in net.state_dict().items()
    },
}


@pytest.mark.parametrize("how", FOREIGN)
def test_weights_of_another_program_are_found_whatever_is_around_them(tmp_path, how):
    task, net = Small(), network()
    torch.save(FOREIGN[how](net), tmp_path / "a.pt")
    checkpoint.load_task(task, checkpoint.load(tmp_path / "a.pt"))
    assert is_same(task.net.state_dict(), net.state_dict())


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net[0], self.head = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)
        self.head.weight = self.net[0].weight


def test_safetensors_are_read_and_what_they_leave_out_as_it_has_two_names(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    there, here = Tied(), Tied()
    safetensors.save_model(there, tmp_path / "a.safetensors")
    checkpoint.load_task(here, checkpoint.load(tmp_path / "a.safetensors"))
    assert is_same(here.state_dict(), there.state_dict())
    (tmp_path / "b.safetensors").write_bytes(b"rubbish" * 9)
    with pytest.raises(UserError, match="b.safetensors can't be read: .*header"):
        checkpoint.load(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    "saved, said",
    [
        (lambda: network()[:2].state_dict(), "2 of the task's 4 names are in it; it has no net.3."),
        (
            lambda: network().state_dict() | {"head.weight": torch.ones(2)},
            "4 of the task's 4 names are in it; it has head.weight, which the task has not",
        ),
        (lambda: Small(width=9).net.state_dict(), "net.0.weight has size (9, 3) in the checkpoint"),
        (lambda: {"one": network().state_dict(), "two": network().state_dict()}, "one, two; save "),
        (lambda: [1, 2], "is no dpframe checkpoint, and holds no state dict"),
        (network, "can't be read: it holds torch.nn.modules.container.Sequential, which is code;"),
    ],
)
def test_what_does_not_match_of_another_programs_file_is_one_line(tmp_path, saved, said):
    torch.save(saved(), tmp_path / "a.pt")
    task = Small()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(UserError) as caught:
        checkpoint.load_task(task, checkpoint.load(tmp_path / "a.pt"))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert is_same(task.state_dict(), before)


def test_a_checkpoint_of_dpframe_whose_seal_is_lost_is_no_other_programs_file(tmp_path):
    torch.save({"format": 2, "task": Small().state_dict()}, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="it has no checksum"):
        checkpoint.load(tmp_path / "a.ckpt")


# What is kept


@pytest.mark.parametrize(
    "option, valid",
    [
        ({"keep": -1}, "0 or more"),
        ({"every_n_epochs": 0}, "1 or more, or null"),
        ({"every_n_steps": 0}, "1 or more, or null"),
        ({"every_n_minutes": math.nan}, "more than 0, or null"),
        ({"seconds_between": -0.5}, "0 or more"),
    ],
)
def test_an_option_out_of_range_is_refused_with_the_valid_ones(option, valid):
    ((key, value),) = option.items()
    with pytest.raises(UserError) as caught:
        Checkpoint(**option)
    assert str(caught.value) == f"callbacks.checkpoint.{key}={value} is out of range; use {valid}"


def kept(directory: Path) -> list[str]:
    return sorted(file.name for file in (directory / "checkpoints").iterdir())


SCORES = [3.0, 1.0, math.nan, 2.0, 5.0, 4.0]  # of epochs 1 to 6


def run_scripted(directory: Path, scores: list[float] = SCORES, **given) -> Any:
    keeper = Checkpoint(monitor="val/score", **given)
    return fitted(
        Scripted(list(scores)), callbacks=[keeper], directory=directory, max_epochs=len(scores)
    )


@pytest.mark.parametrize(
    "options, best, others",
    [
        ({}, 2, []),
        ({"mode": "max"}, 5, []),
        ({"keep": 3}, 2, ["0001-step5", "0002-step10", "0004-step20"]),
        ({"keep": 3, "mode": "max"}, 5, ["0001-step5", "0005-step25", "0006-step30"]),
        ({"keep": 0}, None, []),
    ],
)
def test_the_best_by_the_metric_are_kept_up_or_down_and_none_that_is_nan(
    tmp_path, options, best, others
):
    ended = run_scripted(tmp_path, **options)
    names = ["best.ckpt"] if best else []
    assert kept(tmp_path) == [*names, *(f"epoch{name}.ckpt" for name in others), "last.ckpt"]
    assert ended.checkpoint == str(tmp_path / "checkpoints" / [*names, "last.ckpt"][0])
    assert checkpoint.load(ended.checkpoint)["progress"]["epoch"] == (best or 6)


F1 = "f1-{epoch}-{val/score:.1f}"


@pytest.mark.parametrize("start", ["last.ckpt", "f1-2-1.0-step10.ckpt"])
def test_several_checkpoints_keep_their_own_files_through_a_resume_from_any_of_them(
    tmp_path, start
):
    def several() -> list[Checkpoint]:
        by_file = [("val/score", "max", F1, 2), ("val/loss", "min", "loss", 1)]
        named = [Checkpoint(m, mode, file=file, keep=keep) for m, mode, file, keep in by_file]
        return [*named[:1], Checkpoint("val/score"), *named[1:]]

    def run(callbacks: list[Checkpoint], scores: list[float], **given: Any) -> Any:
        make = partial(Scripted, list(scores))
        return fitted(make=make, callbacks=callbacks, directory=tmp_path, **given)

    whole = run(several(), SCORES, max_epochs=6)
    names = kept(tmp_path)
    assert names[:4] == ["best.ckpt", "f1-5-5.0-step25.ckpt", "f1-6-4.0-step30.ckpt", "last.ckpt"]
    assert len(names) == 5 and re.fullmatch(r"loss-step\d+\.ckpt", names[4])
    assert whole.checkpoint == str(tmp_path / "checkpoints" / "best.ckpt")
    files = {name: checkpoint.load(tmp_path / "checkpoints" / name)["task"] for name in names}
    shutil.rmtree(tmp_path / "checkpoints")
    run(several(), SCORES[:2], max_epochs=2)
    state = checkpoint.load(tmp_path / "checkpoints" / start)
    (tmp_path / "checkpoints" / "f1-9-9.0-step1.ckpt").touch()  # a kill came before its removal
    state["callbacks"][f"Checkpoint max val/score {F1}"]["dropped"] = ["f1-9-9.0-step1.ckpt"]
    (tmp_path / "checkpoints" / "f1-mine.ckpt").touch()
    run(several(), SCORES[2:], max_epochs=6, resume=state)
    assert [name for name in kept(tmp_path) if name != "f1-mine.ckpt"] == names
    for name, weights in files.items():
        assert is_same(checkpoint.load(tmp_path / "checkpoints" / name)["task"], weights)


def test_another_file_on_a_resume_keeps_its_own(tmp_path):
    one = run_scripted(tmp_path, [3.0, 2.0], file=F1)
    again = Checkpoint("val/score", file="other")
    state = checkpoint.load(one.checkpoint)
    fitted(Scripted([9.0]), callbacks=[again], directory=tmp_path, max_epochs=3, resume=state)
    assert kept(tmp_path) == ["f1-2-2.0-step10.ckpt", "other-step15.ckpt"]


def test_a_checkpoint_by_file_alone_is_the_one_of_the_run(tmp_path):
    one = run_scripted(tmp_path, file=F1)
    assert kept(tmp_path) == ["f1-2-1.0-step10.ckpt"]
    assert one.checkpoint == str(tmp_path / "checkpoints" / "f1-2-1.0-step10.ckpt")


@pytest.mark.parametrize(
    "files, line",
    [
        (["../f1"], "=../f1 is no plain file name that begins with a letter; use e.g. f1-{epoch}"),
        (["a/b"], "=a/b is no plain file name"),
        (["{val/loss}"], "={val/loss} is no plain file name that begins with a letter"),
        (["f1-{epoch.real.__class__}"], "=f1-{epoch.real.__class__} is no plain file name"),
        (["f1-{epoch.x}"], "=f1-{epoch.x}: 'int' object has no attribute 'x'; use e.g. f1-{epoch}"),
        (["f1-{epoch"], "=f1-{epoch: expected '}' before end of string; use e.g. f1-{epoch}"),
        (["f1-{val/los}"], "=f1-{val/los}: val/los is not measured; did you mean val/loss?"),
        (["f1-{val/loss:d}"], "=f1-{val/loss:d}: Unknown format code 'd'"),
        (["f1", "f1b"], "=f1b of one Checkpoint and f1 of another begin with the same text; begin"),
        ([None, "epoch-{val/loss}"], "=epoch-{val/loss} of one Checkpoint and epoch{epoch:04d} of"),
    ],
)
def test_a_file_that_can_not_be_is_refused_in_one_line(tmp_path, files, line):
    with pytest.raises(UserError) as caught:
        fitted(callbacks=[Checkpoint(file=file) for file in files], directory=tmp_path)
    assert str(caught.value).startswith(f"callbacks.checkpoint.file{line}")


def test_two_checkpoints_that_would_write_the_same_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="^two Checkpoints would write best.ckpt; give one of them"):
        fitted(callbacks=[Checkpoint(), Checkpoint()], directory=tmp_path)


def test_raising_keep_on_a_resume_never_deletes_best(tmp_path):
    run_scripted(tmp_path, [3.0])
    state = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt")
    keeper = Checkpoint(monitor="val/score", keep=2)
    task = Scripted([2.0, 1.0, 0.5])
    fitted(task, callbacks=[keeper], directory=tmp_path, max_epochs=4, resume=state)
    assert kept(tmp_path) == [
        "best.ckpt",
        "epoch0003-step15.ckpt",
        "epoch0004-step20.ckpt",
        "last.ckpt",
    ]
    best = checkpoint.load(tmp_path / "checkpoints" / "best.ckpt")
    assert best["progress"]["epoch"] == 4


class AtOnce(checkpoint.Writer):
    """Writes each state before the next one can replace it."""

    def save(self, *args: Any, **options: Any) -> None:
        super().save(*args, **options)
        self.wait()


def saved_steps(
    monkeypatch, keeper: Checkpoint, *, more: Sequence[Callback] = (), **settings
) -> list[tuple[str, int]]:
    saves = []
    keeper.writer = AtOnce()

    def save(state, *paths, **_):
        saves.extend((path.stem, state["progress"]["global_step"]) for path in paths)

    monkeypatch.setattr(one_file, "write", save)
    fitted(callbacks=[keeper, *more], max_epochs=3, **settings)
    return saves


@pytest.mark.parametrize(
    "given, settings, steps",
    [
        ({"every_n_epochs": 2}, {}, [10, 15]),
        ({"every_n_epochs": None, "every_n_steps": 4}, {}, [4, 8, 12, 15]),
        ({"every_n_epochs": None}, {"max_steps": 7}, [7]),
        ({"every_n_epochs": None, "every_n_minutes": 1}, {"max_steps": 10}, [3, 6, 9, 10]),
    ],
)
def test_last_is_written_every_n_steps_epochs_or_minutes_and_at_the_end(
    monkeypatch, tmp_path, given, settings, steps
):
    # A step takes 0.4 minutes by the clock that all processes share.
    def tick(trainer: Trainer) -> None:
        trainer.training.calendar.clock = trainer.global_step * 0.4 * 60

    clock = Hooks(on_step_end=tick)
    options = {"directory": tmp_path, "more": [clock], **settings}
    saves = saved_steps(monkeypatch, Checkpoint(keep=0, **given), **options)
    assert saves == [("last", step) for step in steps]


def test_best_is_judged_at_validations_within_an_epoch(monkeypatch, tmp_path):
    keeper, given = Checkpoint(every_n_epochs=None), {"directory": tmp_path}
    saves = saved_steps(monkeypatch, keeper, validate_every_steps=2, **given)
    best = [step for name, step in saves if name == "best"]
    assert best and {step % 5 for step in best} - {0}
    assert sorted(set(best)) == best  # never twice at one step


def test_another_monitor_on_a_resume_starts_its_own_ranking(tmp_path):
    by_loss, by_mae = (Checkpoint(name, "max") for name in ("val/loss", "val/mae"))
    fitted(callbacks=[by_loss], directory=tmp_path, max_epochs=2)
    state = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt")
    again = fitted(callbacks=[by_mae], directory=tmp_path, max_epochs=3, resume=state)
    # The losses are larger: as a score to beat they would have let no mean error through.
    assert by_loss.monitor.best > by_mae.monitor.best == again.metrics["val/mae"]


@pytest.mark.parametrize("start", ["last.ckpt", "epoch0001-step5.ckpt"])
@pytest.mark.parametrize("callbacks", [[("val/mae", "min")], [("val/loss", "max")]])
def test_a_resume_with_another_monitor_or_mode_removes_no_checkpoint(tmp_path, callbacks, start):
    fitted(callbacks=[Checkpoint("val/loss", keep=3)], directory=tmp_path, max_epochs=3)
    before = {n: (tmp_path / "checkpoints" / n).read_bytes() for n in kept(tmp_path)}
    again = [Checkpoint(monitor, mode, keep=3) for monitor, mode in callbacks]
    file = str(tmp_path / "checkpoints" / start)
    fitted(callbacks=again, directory=tmp_path, max_epochs=4, resume=file)
    assert {*before} < {*kept(tmp_path)}
    if start == "last.ckpt":
        numbered = [name for name in before if name.startswith("epoch")]
        assert all((tmp_path / "checkpoints" / n).read_bytes() == before[n] for n in numbered)


def test_a_resume_with_a_checkpoint_more_or_less_in_front_goes_on_with_each_ones_own(tmp_path):
    by_loss, by_file = Checkpoint("val/loss", keep=3), Checkpoint("val/mae", file="mae", keep=2)
    fitted(callbacks=[by_loss], directory=tmp_path, max_epochs=3)
    names, file = kept(tmp_path), str(tmp_path / "checkpoints" / "last.ckpt")
    again = Checkpoint("val/loss", keep=3)
    fitted(callbacks=[by_file, again], directory=tmp_path, max_epochs=3, resume=file)
    assert again.kept == by_loss.kept and {*kept(tmp_path)} == {*names, "mae-step15.ckpt"}
    fitted(callbacks=[by_file, again], directory=tmp_path, max_epochs=5, resume=file)
    names = [n for n in kept(tmp_path) if not n.startswith("mae")]
    third = Checkpoint("val/loss", keep=3)
    fitted(callbacks=[third], directory=tmp_path, max_epochs=5, resume=file)
    assert third.kept == again.kept and [n for n in kept(tmp_path) if n[0] != "m"] == names


def test_what_begins_afresh_as_it_watches_something_else_is_one_line(tmp_path, caplog):
    fitted(callbacks=[Checkpoint("val/loss")], directory=tmp_path, max_epochs=1)
    file = str(tmp_path / "checkpoints" / "last.ckpt")
    with caplog.at_level("WARNING", "dpframe"):
        fitted(callbacks=[Checkpoint("val/mae")], directory=tmp_path, max_epochs=2, resume=file)
    assert caplog.messages == ["not all is as it was: Checkpoint min val/mae begins afresh"]


@pytest.mark.parametrize(
    "monitor, settings, names",
    [
        ("val/loss", {"max_epochs": 3, "validate_every_epochs": 2}, ["best.ckpt", "last.ckpt"]),
        ("train/loss", {"data": Rows(val=False)}, ["best.ckpt", "last.ckpt"]),
        ("val/loss", {"data": Rows(val=False)}, ["last.ckpt"]),
    ],
)
def test_only_what_is_measured_is_judged(tmp_path, monitor, settings, names):
    fitted(callbacks=[Checkpoint(monitor)], directory=tmp_path, **settings)
    assert kept(tmp_path) == names


def test_a_monitor_that_is_not_measured_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(UserError) as caught:
        fitted(callbacks=[Checkpoint("val/los")], directory=tmp_path)
    assert str(caught.value) == (
        "callbacks.checkpoint.monitor=val/los is not measured; did you mean val/loss?"
    )


@pytest.mark.parametrize("times", [1, 2])
def test_a_folder_that_is_moved_while_a_checkpoint_is_written_is_told(
    times, monkeypatch, tmp_path, caplog
):
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    moves = [tmp_path / f"moved{time}" for time in range(times)]
    dump = checkpoint.dump

    def moved(state, file):
        if moves:
            (tmp_path / "run").rename(moves.pop())
        dump(state, file)

    monkeypatch.setattr(one_file, "dump", moved)
    path.parent.mkdir(parents=True)
    checkpoint.save({"a": 1}, path)
    assert not seal.damage(path)
    said = f"{tmp_path / 'run'} was moved or deleted; what is saved goes on there"
    assert caplog.messages == [said] * times


class Elsewhere(checkpoint.Writer):
    """Another store, as docs/reliability.md has it."""

    store: dict[str, bytes] = {}

    def after_write(self, paths: Sequence[Path], removed: Sequence[Path]) -> None:
        for path in paths:
            assert seal.damage(path) == ""
            self.store[path.name] = path.read_bytes()
        for path in removed:
            assert not path.exists()
            del self.store[path.name]


class Stored(Checkpoint):
    writer_type = Elsewhere


def test_another_store_gets_each_file_when_it_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(Elsewhere, "store", store := {})
    fitted(callbacks=[Stored(keep=2, seconds_between=0)], directory=tmp_path, max_epochs=4)
    files = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").glob("*.ckpt")}
    assert len(files) == 4 and store == files
    (tmp_path / "fetched.ckpt").write_bytes(store["last.ckpt"])
    resumed = tmp_path / "fetched.ckpt"
    assert fitted(resume=resumed, directory=tmp_path / "other", max_epochs=5).epoch == 5


def test_what_another_store_raises_ends_the_run(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError("no bucket")

    monkeypatch.setattr(Elsewhere, "after_write", fail)
    with pytest.raises(OSError, match="no bucket"):
        fitted(callbacks=[Stored()], directory=tmp_path)


# A fit that another one follows in the same ranks


class SlowWriter(checkpoint.Writer):
    """The other ranks would be the first to look for its files."""

    def save(self, *args: Any, **options: Any) -> None:
        time.sleep(0.3)
        super().save(*args, **options)


class SlowCheckpoint(Checkpoint):
    writer_type = SlowWriter


def fit_twice(strategy: Strategy, directory: str) -> list[Any]:
    def fit(epochs: int, resume: Any = None) -> Trainer:
        torch.manual_seed(0)
        made = trainer(
            Small(Adam),
            strategy=strategy,
            callbacks=[SlowCheckpoint("val/loss", "min")],
            directory=directory,
            max_epochs=epochs,
        )
        made.fit(resume)
        return made

    first = fit(1)
    there = checkpoint.load(Path(directory) / "checkpoints" / "last.ckpt")
    steps = [first.global_step, there["progress"]["global_step"], fit(3, "last").global_step]
    return strategy.collectives.gather(steps)


def test_each_rank_finds_the_checkpoint_of_a_fit_that_is_over(tmp_path):
    """So that a second one goes on from the same step in all of them."""
    assert on(DDP(2, "cpu"), fit_twice, str(tmp_path)) == [[5, 5, 15]] * 2
