"""What is sent to other processes of this machine: bytes, copies, and what stays shared."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from forked import fresh, limited
from small import Rows, Small
from torch import nn

from dpframe import Callback, Trainer
from dpframe.launch import parcel
from dpframe.launch.parcel import Parcel
from dpframe.strategies.ddp import DDP

MIB = 2**20


@pytest.mark.parametrize("package", ["", "cloudpickle"])
def test_tensors_and_arrays_are_written_once_and_what_is_shared_stays_shared(package, monkeypatch):
    """Also without the package, which needs a notebook alone."""
    if package:
        monkeypatch.setitem(sys.modules, package, None)
    table = nn.Embedding(64, 1024)
    tied = nn.Linear(1024, 64, bias=False)
    tied.weight = table.weight
    rows = torch.arange(2.0**16)
    array = numpy.arange(2.0**16)
    value = {"net": [table, tied], "half": rows[2**15 :], "all": rows, "array": array}
    with parcel.in_memory() as path:
        packed = parcel.pack(value, path)
        bytes_once = table.weight.nbytes + rows.nbytes + array.nbytes
        assert bytes_once < os.stat(path).st_size < bytes_once + 4096
        there = packed.unpack()
        packed.drop()
        assert os.stat(path).st_size == 0
    net, other = there["net"]
    assert net.weight is other.weight and torch.equal(net.weight, table.weight)
    assert torch.equal(there["all"], rows) and numpy.array_equal(there["array"], array)
    there["all"][2**15] = -1
    assert there["half"][0] == -1
    assert all(at % 64 == 0 for at in (net.weight.data_ptr(), there["array"].ctypes.data))


def test_tensors_of_all_kinds_arrive_as_they_were():
    noted = torch.ones(2)
    noted.note = "kept"
    value = [
        torch.randn(4, 6).T[1:, ::2],
        torch.ones(3, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.empty(0, 2, dtype=torch.uint16),
        torch.empty(2, device="meta"),
        noted,
    ]
    with parcel.in_memory() as path:
        there = parcel.pack(value, path).unpack()
    for one, other in zip(value, there, strict=True):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        assert one.requires_grad == other.requires_grad and vars(one) == vars(other)
        if one.layout is torch.strided:
            assert one.stride() == other.stride()
        if one.device.type == "cpu":
            assert torch.equal(one.to_dense(), other.to_dense())


def in_little_room(packed: Parcel | None, path: str) -> Any:
    """Packs, or unpacks, 64 MiB."""
    value = None if packed else torch.ones(16 * MIB)
    limited(80 if packed else 8)
    if packed is None:
        assert parcel.is_packable(value)
        return parcel.pack(value, path)
    return float(packed.unpack().sum())


def test_a_process_packs_in_no_room_and_unpacks_in_room_for_one_copy():
    with parcel.in_memory() as path:
        packed = fresh(in_little_room, None, path)
        assert fresh(in_little_room, packed, path) == 16 * MIB


def test_what_goes_to_another_machine_needs_no_file():
    packed = parcel.pack(torch.ones(3), None)
    assert packed.path is None and torch.equal(packed.unpack(), torch.ones(3))


class Closed:
    def __reduce__(self) -> Any:
        raise OSError("it is closed")


def test_what_can_not_be_packed_is_known_without_a_copy():
    assert not parcel.is_packable(Closed())
    assert parcel.is_packable({"best": torch.ones(2)})
    assert not parcel.is_packable({"lock": threading.Lock()})


def anonymous(pid: int) -> float:
    """MiB of a process's own memory, that a fork shares with its parent included."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Weighed(Callback):
    """Of the main rank, the interpreter that has forked it, and the program."""

    def on_fit_start(self, trainer: Any) -> None:
        rank = os.getpid()
        interpreter = parent_of(rank)
        self.found = [anonymous(pid) for pid in (rank, interpreter, parent_of(interpreter))]


SIZE = 200  # MiB


def test_the_program_and_each_of_its_ranks_have_one_copy_of_a_model():
    task: Any = Small()
    task.ballast = nn.Parameter(torch.ones(SIZE * MIB // 4), requires_grad=False)
    weighed = Weighed()
    given: Any = {"strategy": DDP(2, "cpu"), "callbacks": [weighed], "share_check": "off"}
    trainer = Trainer(task, Rows(), max_epochs=1, **given)
    before = anonymous(os.getpid())
    trainer.fit()
    rank, interpreter, program = weighed.found
    assert rank - interpreter < 1.5 * SIZE, "its own"
    assert interpreter < 1.5 * SIZE, "none, but for what torch takes"
    assert program - before < 0.5 * SIZE, "no other"
    assert anonymous(os.getpid()) - before < 0.5 * SIZE, "afterwards"
