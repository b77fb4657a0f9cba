"""A checkpoint holds what there was when it was asked for, whatever training does meanwhile."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
import torch
from small import Adam, Rows, Small, fitted, is_same
from torch import Tensor

from dpframe import checkpoint
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.checkpoint import file, snapshot
from dpframe.checkpoint.snapshot import Snapshot
from dpframe.devices import memory
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.single import SingleGPU


def state_on(device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 32, generator=generator).to(device)
    image = torch.randn(2, 3, 4, 5, generator=generator).to(device)
    return {
        "weight": weight,
        "tied": weight,
        "row": weight[1],
        "column": weight[:, 1],
        "wide": weight[:1].expand(7, 32),
        "image": image.to(memory_format=torch.channels_last),
        "half": weight.bfloat16(),
        "steps": torch.tensor(3.0),
        "empty": torch.empty(0, 4, device=device),
        "nested": [{"number": torch.arange(5, device=device)}],
    }


def tensors(value: Any) -> Iterator[Tensor]:
    parts = value.values() if isinstance(value, dict) else value if type(value) is list else []
    for part in parts:
        yield from [part] if isinstance(part, Tensor) else tensors(part)


def saved(state: dict[str, Any], path: Path, *, is_overwritten: bool = True) -> bytes:
    writer = checkpoint.Writer()
    writer.save(state, [path])
    for tensor in tensors(state) if is_overwritten else ():
        if 0 not in tensor.stride():  # else torch refuses
            tensor.mul_(0).sub_(1)
    writer.wait()
    return path.read_bytes()


def test_what_changes_after_a_save_is_not_in_its_file(tmp_path):
    file = saved(state_on("cpu"), tmp_path / "a.ckpt")
    assert file == saved(state_on("cpu"), tmp_path / "b.ckpt", is_overwritten=False)
    state = torch.load(tmp_path / "a.ckpt")
    assert state.pop("format") and is_same(state, state_on("cpu"))


def test_a_save_takes_the_memory_of_one_that_is_written_and_of_no_other(tmp_path, monkeypatch):
    begun, go_on, writer, places = Semaphore(0), Semaphore(0), checkpoint.Writer(), []
    write = file.write

    def slowly(state: dict[str, Any], *paths: Path, **_: Any) -> None:
        places.append({tensor.data_ptr() for tensor in tensors(state)})
        begun.release()
        assert go_on.acquire(timeout=60)
        write(state, *paths)

    def save(number: int) -> None:
        writer.save({"a": torch.full((40, 3), number), "b": torch.tensor(number)}, [path(number)])

    def path(number: int) -> Path:
        return tmp_path / f"{number}.ckpt"

    monkeypatch.setattr(file, "write", slowly)
    save(0)
    assert begun.acquire(timeout=60)
    save(1)  # while the first is read
    go_on.release()
    assert begun.acquire(timeout=60)  # the first is written
    save(2)
    for _ in range(2):
        go_on.release()
    writer.finish()
    assert [int(torch.load(path(n))["a"].unique()) for n in range(3)] == [0, 1, 2]
    assert [int(torch.load(path(n))["b"]) for n in range(3)] == [0, 1, 2]
    assert places[0].isdisjoint(places[1])
    assert places[2] == places[0]


def test_tensors_of_one_form_have_each_their_own_of_the_memory_that_is_used_again():
    def state(value: float) -> list[Tensor]:
        return [torch.full((3,), value), torch.full((3,), -value)]

    spare = Snapshot()
    kept = [spare.copy(tensor) for tensor in state(1.0)]
    again = Snapshot(spare.memory)
    copies = [again.copy(tensor) for tensor in state(2.0)]
    assert is_same(copies, state(2.0))
    assert {c.data_ptr() for c in copies} == {tensor.data_ptr() for tensor in kept}


def test_a_sparse_tensor_is_saved(tmp_path):
    saved({"sparse": torch.eye(3).to_sparse()}, tmp_path / "a.ckpt", is_overwritten=False)
    assert torch.load(tmp_path / "a.ckpt")["sparse"].to_dense().equal(torch.eye(3))


def test_tied_weights_have_one_copy():
    kept, state = Snapshot(), state_on("cpu")
    assert kept.copy(state["weight"]) is kept.copy(state["tied"])
    assert kept.nbytes == state["weight"].nbytes


@pytest.mark.parametrize(("processes", "most"), [(None, 8000), ("8", 1000)])
def test_all_processes_of_a_machine_pin_an_eighth_of_its_memory(monkeypatch, processes, most):
    monkeypatch.setattr(memory, "machine", lambda: 64_000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    kept = Snapshot()
    kept.nbytes = most
    assert kept._is_small()
    kept.nbytes += 1
    assert not kept._is_small()


def test_pinned_memory_is_hardly_more_than_its_tensors(monkeypatch):
    sizes: list[int] = []

    def pinned(size: int) -> Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(snapshot, "_pinned", pinned)
    state = list(tensors(state_on("cpu")))
    state += [torch.full((1025, 300), number) for number in range(20)]  # 1.2 MiB: 2 by themselves
    kept = snapshot.Pinned()
    pairs = [kept.like(tensor) for tensor in state]
    for tensor, (_, place) in zip(state, pairs, strict=True):
        place.copy_(tensor)
    assert is_same([host for host, _ in pairs], state)
    assert len({host.data_ptr() for host, _ in pairs}) == len(pairs)  # torch.save wants that
    for tensor, (host, _) in zip(state, pairs, strict=True):
        alone = torch.empty_like(tensor)
        assert (host.stride(), host.untyped_storage().nbytes()) == (
            alone.stride(),
            alone.untyped_storage().nbytes(),
        )
    assert all(size.bit_count() == 1 for size in sizes)
    whole = sum(tensor.nbytes for tensor in state)
    assert sum(sizes) < 1.4 * whole, (sizes, whole)


# On a GPU: `room` is how much of what is free may be used for copies there


@pytest.fixture(params=["copied there first", "waited for by its next step"])
def room(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "copied there first":
        monkeypatch.setattr(snapshot, "SHARE_OF_FREE", 1 << 60)


@pytest.mark.gpu(1)
def test_a_save_from_a_gpu_makes_the_same_file(tmp_path, room):
    for number in range(3):  # the later ones have the pinned memory of the earlier ones
        path = tmp_path / f"{number}.ckpt"
        assert saved(state_on("cuda"), path) == saved(state_on("cpu"), tmp_path / "b.ckpt")


@pytest.mark.gpu(1)
def test_a_save_waits_for_nothing_that_a_gpu_has_to_do(tmp_path, room):
    state, writer = {"weight": torch.zeros(1 << 20, device="cuda")}, checkpoint.Writer()
    writer.save(state, [tmp_path / "first.ckpt"])
    writer.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 4):
            state["weight"].add_(1)
            writer.save(state, [tmp_path / f"{number}.ckpt"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    writer.wait()
    for number in range(1, 4):
        weight = torch.load(tmp_path / f"{number}.ckpt")["weight"]
        assert weight.eq(number).all()


@pytest.mark.gpu(1)
def test_memory_that_is_freed_after_a_save_is_in_its_file(tmp_path, room):
    writer = checkpoint.Writer()
    for number in range(4):
        writer.save(
            {"weight": torch.full((1 << 20,), number, device="cuda")}, [tmp_path / "a.ckpt"]
        )
        torch.full((1 << 20,), -1, device="cuda")  # it may get that memory
        writer.wait()
        assert (torch.load(tmp_path / "a.ckpt")["weight"] == number).all()


@pytest.mark.gpu(1)
def test_what_changes_a_tensor_at_once_waits_for_its_snapshot(room):
    weight, kept = torch.ones(1 << 20, device="cuda"), Snapshot()
    copy = kept.copy(weight)
    kept.start()
    weight.add_(1)
    kept.wait()
    assert copy.eq(1).all()


class Compares(Checkpoint):
    """Saves at each step, and sometimes looks whether the file has the weights of this step."""

    def on_step_end(self, trainer: Any) -> None:
        super().on_step_end(trainer)
        if trainer.global_step % 3 == 0:
            self.writer.wait()
            path = Path(trainer.run.directory) / "checkpoints" / "last.ckpt"
            now = {name: value.cpu() for name, value in trainer.task.state_dict().items()}
            assert is_same(checkpoint.load(path)["task"], now), trainer.global_step


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SingleGPU, marks=pytest.mark.gpu(1)),
        pytest.param(DataParallel, marks=pytest.mark.gpu),
    ],
)
def test_a_run_that_saves_each_step_saves_its_weights_and_trains_as_without(tmp_path, room, kind):
    def trained(**given: Any) -> Any:
        strategy = kind(accelerator="cuda")
        strategy.setup()
        make = partial(Small, Adam)
        return fitted(make=make, data=Rows(40, 6), strategy=strategy, **given)

    plain = trained()
    saving = trained(callbacks=[Compares(every_n_steps=1, seconds_between=0)], directory=tmp_path)
    assert is_same(saving.task.state_dict(), plain.task.state_dict())
