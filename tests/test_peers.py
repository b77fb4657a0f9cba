"""Which rank's failure is told, where dpframe has not started the ranks."""

import pytest
from torch.distributed import DistError, HashStore

from dpframe import UserError
from dpframe.launch.peers import end_with_peers
from dpframe.launch.rank_errors import RankFailed, describe, explain


def notes_of(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


def test_a_rank_whose_peer_is_gone_names_the_one_that_failed_first():
    store = HashStore()
    first, second = ValueError("a row of 3 numbers\nand more"), DistError("connection closed")
    end_with_peers(first, store, 1, machines=2)
    end_with_peers(second, store, 0, machines=2)
    assert notes_of(first).startswith("dpframe: rank 1 on ") and "has failed" in notes_of(first)
    assert "ended after rank 1 on " in notes_of(second)
    assert notes_of(second).endswith("had failed: ValueError: a row of 3 numbers")


def test_ranks_of_one_machine_leave_it_to_their_launcher():
    error = ValueError("no")
    end_with_peers(error, HashStore(), 0, machines=1)
    assert not notes_of(error)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_fault_of_the_rank_that_failed_by_itself_is_the_jobs(monkeypatch, order):
    faults = []
    for rank, error in ((0, DistError("connection closed")), (1, ValueError("a row is short"))):
        monkeypatch.setenv("RANK", str(rank))
        faults.append(describe(error))
    told = explain([faults[place] for place in order])
    assert isinstance(told, RankFailed)
    assert str(told).endswith("rank 1 failed:\nValueError: a row is short")


def test_a_line_for_the_user_stays_a_line(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    told = explain([describe(UserError("data.batch_size=0 is out of range"))])
    assert type(told) is UserError and str(told) == "data.batch_size=0 is out of range"
