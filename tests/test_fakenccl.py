"""Fake NCCL: the host goes on while a collective waits, and a group may not end under it."""

from tempfile import TemporaryDirectory
from textwrap import dedent

import pytest
from fakecuda import build
from recorded import once
from test_fakecuda import child

# What each of two ranks does with its tensor x, on its own GPU.
GOES_ON = """
    if rank:
        dist.all_reduce(x)
        store.set("went on", "")  # while its peer has begun nothing
    else:
        store.wait(["went on"])
        dist.all_reduce(x)
    assert x.tolist() == [3, 3]
"""
ENDS = """
    if rank:
        dist.all_reduce(x)
        {end}
    else:
        store.wait(["left"])
        dist.all_reduce(x)
        x.tolist()
        store.set("done", "")
"""
LEAVES = 'dist.group.WORLD.abort(); store.set("left", "")'
FAILS = f"""
        try:
            raise ValueError
        except ValueError:
            {LEAVES}
"""
WAITS_FIRST = """
        store.set("left", "")
        torch.cuda.synchronize()
        store.wait(["done"])
        dist.group.WORLD.abort()
"""
OF_RANKS = {
    "the host goes on": GOES_ON,
    "a rank leaves": ENDS.format(end=LEAVES),
    "a rank leaves after its collectives": ENDS.format(end=WAITS_FIRST),
    "a rank fails": ENDS.format(end=FAILS),
}
RANKS = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from fakecuda import report
told, files, done = Path(os.environ["FAKECUDA_REPORT"]), sys.argv[1], {}
def run(rank, code, file):
    store = dist.FileStore(file, 2)
    store.set_timeout(timedelta(seconds=60))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    x = torch.full((2,), rank + 1.0, device="cuda")
    exec(code, {"torch": torch, "dist": dist, "rank": rank, "store": store, "x": x})
for number, (name, code) in enumerate(json.load(sys.stdin)):
    forks = []
    for rank in range(2):
        forks.append(os.fork())
        if not forks[-1]:
            try:
                run(rank, code, f"{files}/{number}")
            except Exception as error:
                told.open("a").write(f"{rank}: {type(error).__name__}\\n")
            finally:
                os._exit(0)
    for fork in forks:
        os.waitpid(fork, 0)
    done[name] = report.violations(told.read_text())
    told.write_text("")
json.dump(done, sys.stdout)
"""


@once
def found_in_ranks() -> dict[str, list[str]]:
    if reason := build.why_not():
        pytest.skip(reason)
    codes = [(name, dedent(code)) for name, code in OF_RANKS.items()]
    with TemporaryDirectory() as files:
        return child(codes, RANKS, files)


def test_a_collective_lets_the_host_go_on():
    assert found_in_ranks()["the host goes on"] == []


def test_a_group_that_ends_before_its_collectives_do_is_noticed():
    assert "ABORT: a rank ends its group before 1 of its" in str(found_in_ranks()["a rank leaves"])


def test_a_group_that_ends_after_its_collectives_or_by_an_error_is_left_alone():
    assert found_in_ranks()["a rank leaves after its collectives"] == []
    assert "ABORT" not in str(found_in_ranks()["a rank fails"])
