"""Sums from rank to rank: exact and alike everywhere, and a lost rank is told as gloo tells it."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import Adam, Hooks, Rows, Small, fitted, is_same
from torch import Tensor

from dpframe.errors import Failure
from dpframe.strategies import direct, fault
from dpframe.strategies.ddp import DDP
from dpframe.strategies.direct import Direct, Door


def ranks(count: int, timeout_seconds: float = 20) -> list[Direct]:
    others: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            others[one][other], others[other][one] = socket.socketpair()
    for found in others:
        for end in found.values():
            end.settimeout(timeout_seconds)
    return [Direct(rank, found) for rank, found in enumerate(others)]


def together(work: Callable[[int], Any], count: int) -> list[Any]:
    """What each rank has made of it, or what it raised."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def drawn(rank: int, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (direct.LARGEST // 8,)])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_ranks_get_the_same_sum_time_after_time(dtype, shape, count):
    all_of_them = ranks(count)

    def work(rank: int) -> list[Tensor]:
        sums = []
        for number in range(4):
            tensor = drawn(rank, number, dtype, shape)
            turned = tensor.t() if tensor.ndim == 2 else tensor
            all_of_them[rank].sum(turned)
            sums.append(tensor)
        return sums

    found = together(work, count)
    for number in range(4):
        wanted = drawn(0, number, dtype, shape)
        for rank in range(1, count):
            wanted = wanted + drawn(rank, number, dtype, shape)
        assert all(torch.equal(sums[number], wanted) for sums in found)


def test_ranks_that_do_not_do_the_same_are_told_so():
    first, second = ranks(2)
    sizes = (2, 3)
    found = together(lambda rank: (first, second)[rank].sum(torch.ones(sizes[rank])), 2)
    assert [type(error) for error in found] == [RuntimeError] * 2
    assert str(found[0]) == (
        "rank 1 adds up 12 bytes at its sum 1, this rank 8 at its sum 1: they don't do the same"
    )


def test_a_rank_that_is_gone_or_does_not_come_is_a_lost_peer(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    first, second = ranks(2)
    second.close()
    with pytest.raises(dist.DistNetworkError) as gone:
        first.sum(torch.ones(2))
    assert fault.noted(gone.value).is_echo
    first, second = ranks(2, timeout_seconds=0.05)
    with pytest.raises(dist.DistNetworkError) as late:
        first.sum(torch.ones(2))
    assert fault.noted(late.value).is_timeout
    assert str(late.value) == "Timed out waiting 50ms for rank 1"


def test_ranks_meet_and_another_users_process_is_sent_away(monkeypatch):
    doors = [Door(), Door()]
    addresses = [door.address for door in doors]
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(addresses[0])  # the first to knock
    unpack = direct.CREDENTIALS.unpack
    uids = iter([4_000_000_000])

    class Credentials:
        size = direct.CREDENTIALS.size

        def unpack(self, said):
            pid, uid, gid = unpack(said)
            return pid, next(uids, uid), gid

    monkeypatch.setattr(direct, "CREDENTIALS", Credentials())

    def work(rank: int) -> Tensor:
        tensor = torch.tensor([float(10**rank)])
        doors[rank].meet(rank, addresses, 20).sum(tensor)
        return tensor

    assert together(work, 2) == [torch.tensor([11.0])] * 2
    assert stranger.recv(1) == b""


def test_ranks_out_of_each_others_reach_are_told_what_to_do():
    door = Door()
    with pytest.raises(Failure, match="^rank 1 can't reach rank 0 on this machine: Connection ref"):
        door.meet(1, ["\0nobody", door.address], 20)


@pytest.mark.parametrize(
    ("world_size", "local", "platform", "is_possible"),
    [
        (2, 2, "linux", True),
        (8, 8, "linux", True),
        (9, 9, "linux", False),
        (1, 1, "linux", False),
        (4, 2, "linux", False),
        (2, 2, "darwin", False),
    ],
)
def test_it_is_for_few_ranks_of_one_machine(monkeypatch, world_size, local, platform, is_possible):
    monkeypatch.setattr(direct.sys, "platform", platform)
    assert direct.is_possible(world_size, local) is is_possible


def trained(strategy: DDP, width: int = 8) -> dict[str, Any]:
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **more: Any) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(tensor, *args, **more)

    dist.all_reduce = counted
    strategy.setup()
    hooks: list[int] = []
    note = Hooks(on_epoch_end=lambda trainer: hooks.append(len(strategy.module._comm_hooks)))
    one = fitted(
        Small(Adam, width=width), Rows(30, 7), strategy=strategy, callbacks=[note], max_epochs=3
    )
    weights = {name: value.clone() for name, value in one.task.state_dict().items()}
    weights_everywhere = strategy.gather(weights)
    strategy.close()
    return {
        "weights": weights_everywhere,
        "metrics": one.metrics,
        "reduced": len(reduced),
        "hooks": hooks[-1],
    }


def trained_on(count: int, **options: Any) -> dict[str, Any]:
    strategy = DDP(count, accelerator="cpu", timeout_seconds=60, **options)
    return strategy.launch(trained, strategy)


def test_two_ranks_train_as_by_gloo_to_the_bit_and_without_it():
    ours, gloos = trained_on(2), trained_on(2, direct_sums=False)
    assert is_same(ours["weights"], gloos["weights"])
    assert ours["metrics"] == gloos["metrics"]
    assert (ours["reduced"], ours["hooks"]) == (0, 1)
    assert gloos["reduced"] > 3 and gloos["hooks"] == 0


def test_three_ranks_end_with_the_same_weights_each():
    first, *others = trained_on(3)["weights"]
    assert all(is_same(first, other) for other in others)


def wide(strategy: DDP) -> dict[str, Any]:
    return trained(strategy, width=5000)


def test_the_gradients_of_a_larger_model_are_left_to_gloo():
    strategy = DDP(2, accelerator="cpu", timeout_seconds=60)
    found = strategy.launch(wide, strategy)
    assert (found["reduced"], found["hooks"]) == (0, 0)  # but not its metrics
