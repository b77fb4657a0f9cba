"""`mode=doctor`: what is here, what each strategy would use, and what is wrong."""

import platform
import re
import resource
import shutil
import sys
from types import SimpleNamespace

from command import dpframe

from dpframe.config.compose import composed
from dpframe.plugins.lab import machine
from dpframe.plugins.lab.operations import flop
from dpframe.plugins.lab.variants import list_strategies


def test_without_a_recipe_it_tells_what_each_strategy_would_use(tmp_path):
    done = dpframe("mode=doctor", "trainer.gpus=3", "trainer.accelerator=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(\w+) {2,}(\S.*)$", done.stdout, re.M))
    assert set(list_strategies(composed(["mode=doctor"]))) <= set(rows)
    assert rows["data_parallel"] == "3 x cpu" and rows["ddp"] == "3 x cpu, in ranks"
    assert rows["cpu"].startswith("trainer.gpus=3 but CPU is one replica; use trainer.gpus=1")
    assert rows["ranks"] == "2 have talked to each other" and "gloo" in rows["backends"]
    assert "fastest" not in done.stdout and list(tmp_path.iterdir()) == []


def test_with_a_recipe_it_counts_what_a_step_computes(tmp_path):
    done = dpframe("mode=doctor", "recipe=boston", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    forward, backward = 2 * (13 * 16 + 16 * 32 + 32) * 128, 2 * (16 * 32 + 32) * 128  # to inputs
    assert f"step of 128 rows is {flop(2 * forward + backward)} of" in done.stdout
    assert re.search(r"^model +801 parameters; a step", done.stdout, re.M)


def test_operations_are_told_by_thousands():
    assert [flop(count) for count in (0, 999, 524_288, 3.2e18)] == [
        *("0 FLOP", "999 FLOP", "524 kFLOP", "3.2e+03 PFLOP"),
    ]


def test_what_is_wrong_with_a_machine_is_told_with_what_to_do(monkeypatch):
    assert not [problem for problem in machine._problems() if "RANK" in problem]
    assert not [problem for problem in machine._problems() if "CPython" in problem] or (
        sys.version_info < (3, 11, 10)
    )
    monkeypatch.setattr(machine, "FORKS_SAFELY", (99, 1))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    usage = SimpleNamespace(total=64 << 20, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = "\n".join(machine._problems())
    for words in (
        f"Python {platform.python_version()} forks may hang at its start (CPython's issue 112275), "
        "until it is started again; use 99.1 or newer",
        "/dev/shm has 64 MiB, which data workers may fill; use data.workers=0",
        "TMPDIR has 1 MiB free; make room",
        "a process may open 64 files; ulimit -n 1024",
        "RANK and WORLD_SIZE are set, and this is no rank; unset RANK WORLD_SIZE",
    ):
        assert words in told
