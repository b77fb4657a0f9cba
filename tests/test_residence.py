"""Data on the GPU: what goes there, what is refused, and the very order of rows of the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import Rows
from torch import Tensor

from dpframe import TrainerSettings, UserError
from dpframe.data import Loader, _copied
from dpframe.order import Order
from dpframe.trainer import residence

MiB = 2**20


def card(**more: Any) -> Any:
    facts = {"device": torch.device("cuda", 0), "replicas": 1, "world_size": 1, "dtype": None}
    return SimpleNamespace(name="SingleGPU", **(facts | more))


def is_moved(monkeypatch: pytest.MonkeyPatch, asked: Any, *, free: int, **more: Any) -> bool:
    """Two float tensors, of one MiB together."""
    moved = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    monkeypatch.setattr(residence, "move", lambda tensors, *where: moved.append(where) or tensors)
    tensors = torch.zeros(2**17), torch.zeros(2**17)
    assert residence.place_of(card(**more), asked)(tensors) is tensors
    assert moved in ([], [(torch.device("cuda", 0), more.get("dtype"))])
    return bool(moved)


@pytest.mark.parametrize(
    ("asked", "free", "more", "expected"),
    [
        ("auto", 10 * MiB, {}, True),
        ("auto", 10 * MiB - 10, {}, False),
        ("auto", 10 * MiB, {"dtype": torch.float64}, False),  # twice as much
        ("auto", 20 * MiB, {"dtype": torch.float64}, True),
        (True, MiB, {}, True),
        (False, 99 * MiB, {}, False),
        ("auto", 99 * MiB, {"replicas": 2}, False),  # data_parallel
        ("auto", 99 * MiB, {"replicas": 2, "world_size": 2}, True),  # a rank
        ("auto", 99 * MiB, {"device": torch.device("cpu")}, False),
    ],
)
def test_tensors_go_to_the_gpu_where_they_take_a_tenth_of_what_is_free(
    monkeypatch, asked, free, more, expected
):
    assert is_moved(monkeypatch, asked, free=free, **more) is expected


def test_more_than_there_is_room_for_is_refused(monkeypatch):
    line = "trainer.data_on_device=true but the data takes 1,048,576 bytes and cuda:0 has 99 free"
    with pytest.raises(UserError, match=f"^{line}; use"):
        is_moved(monkeypatch, True, free=99)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, "the data set is not nothing but tensors"),
        ({"replicas": 2}, "SingleGPU has several devices in one process"),
    ],
)
def test_what_can_not_be_on_the_gpu_is_refused_only_where_that_was_asked_for(more, line):
    loader = Loader([1, 2, 3], batch_size=2, shares=lambda rows: [rows])  # type: ignore[arg-type]
    residence.check(loader, card(**more), "auto")
    residence.check(loader, card(**more, device=torch.device("cpu")), True)
    with pytest.raises(UserError, match=f"^trainer.data_on_device=true but {line}"):
        residence.check(loader, card(**more), True)


def test_a_batch_is_made_where_the_data_is():
    """The meta device is one that is not the CPU: rows and data have to meet there."""

    def place(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to("meta") for tensor in tensors)

    shares = lambda rows: list(torch.chunk(rows, 2))  # noqa: E731
    loader = Loader(Rows(10).train, batch_size=4, shares=shares, shuffle=True, place=place)
    assert loader.device.type == "meta"
    batches = list(loader.epoch(skip=1))
    assert [[tuple(x.shape) for (x, _), _ in batch.shares] for batch in batches] == [
        [(2, 3), (2, 3)],
        [(1, 3), (1, 3)],
    ]
    assert {t.device.type for b in batches for share in b.shares for t in share.batch} == {"meta"}


def test_the_rows_of_an_epoch_come_out_of_one_copy_as_they_went_in():
    batches = list(Order(11, 4, shuffle=True, seed=3).epoch(2))
    copied = _copied(batches, torch.device("cpu"))
    assert [part.tolist() for part in copied] == [part.tolist() for part in batches]


@pytest.mark.parametrize("key", ["data_on_device", "cuda_graph"])
@pytest.mark.parametrize("given", ["yes", 1, None])
def test_what_is_neither_auto_nor_true_nor_false_is_refused(key, given):
    with pytest.raises(UserError, match=f"^trainer.{key}={given} is not one of auto, true, false"):
        TrainerSettings(**{key: given})
