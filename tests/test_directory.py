"""A run's directory: one each, made when all is checked, unmade when nothing was trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import dpframe, environment, exit_codes_of_two_at_once, write
from disk import library

from dpframe.cli.directory import as_notes
from dpframe.cli.resumed import with_saved


def test_two_runs_of_one_second_get_a_directory_each(tmp_path):
    same = "hydra.run.dir=outputs/boston/now"  # what both seconds would have been called
    conf = write(tmp_path / "mine", {"experiment/now.yaml": "# @package _global_\n"})
    text = f"# @package _global_\nhydra: {{run: {{dir: {same.partition('=')[2]}}}}}\n"
    write(conf, {"experiment/now.yaml": text})
    words = ["recipe=boston", "trainer.max_epochs=1", "--config-dir=mine", "experiment=now"]
    assert exit_codes_of_two_at_once(*words, cwd=tmp_path) == [0, 0]
    made = sorted(path.parent.name for path in tmp_path.glob("outputs/boston/*/summary.json"))
    assert made == ["now", "now-2"]


def test_a_directory_of_the_configs_that_has_a_run_in_it_is_left_to_that_run(tmp_path):
    (tmp_path / "outputs/boston/now/checkpoints").mkdir(parents=True)
    (tmp_path / "outputs/boston/now/checkpoints/last.ckpt").touch()
    text = "# @package _global_\nhydra: {run: {dir: outputs/boston/now}}\n"
    write(tmp_path / "mine", {"experiment/now.yaml": text})
    words = ["recipe=boston", "trainer.max_epochs=1", "--config-dir=mine", "experiment=now"]
    assert dpframe(*words, cwd=tmp_path).returncode == 0
    assert (tmp_path / "outputs/boston/now-2/summary.json").is_file()


def test_a_given_directory_is_used_as_it_is_and_files_need_no_quotes(tmp_path):
    words = (
        "recipe=boston",
        "trainer.max_epochs=1",
        "hydra.run.dir=a b=c,é",
        "+vars.name='ü, =\"'",
    )
    assert "quote it" in dpframe(*words, cwd=tmp_path).stderr
    words = ("recipe=boston", "trainer.max_epochs=1", "hydra.run.dir='a b=c,é'", *words[3:])
    first = dpframe(*words, cwd=tmp_path)
    assert (first.returncode, os.listdir(tmp_path)) == (0, ["a b=c,é"])
    best = "a b=c,é/checkpoints/best.ckpt"
    done = dpframe("recipe=boston", "mode=test", f"checkpoint={best}", cwd=tmp_path)
    assert done.returncode == 0 and "test/loss" in done.stdout


def taken_over(run: Path, saved: list[str], given: list[str]) -> list[str]:
    write(run, {"checkpoints/last.ckpt": "", ".hydra/overrides.yaml": as_notes(saved)})
    resumed = f"resume={run}/checkpoints/last.ckpt"
    return with_saved([resumed, *given], lambda: run)[: -len(given) - 1]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("strategy=cpu", ["+vars.x=1"]),
        ("strategy=ddp", ["strategy.timeout_seconds=60", "+vars.x=1"]),
        ("strategy.timeout_seconds=70", ["strategy=ddp", "+vars.x=1"]),
        ("vars.x=2", ["strategy=ddp", "strategy.timeout_seconds=60", "+vars.x=1"]),
        ("+vars.x=2", ["strategy=ddp", "strategy.timeout_seconds=60"]),
    ],
)
def test_of_a_resumed_runs_overrides_those_are_kept_that_still_have_their_key(
    tmp_path, given, kept
):
    saved = ["strategy=ddp", "strategy.timeout_seconds=60", "+vars.x=1", "mode=fit"]
    assert taken_over(tmp_path / "run", saved, [given]) == kept


@pytest.mark.parametrize(
    "override",
    [
        "task.scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, _partial_: true}",
        "data.file='rows #2.csv'",
        f"+vars.name='{'long ' * 30}ü \udcff: x'",
        "~callbacks.checkpoint",
    ],
)
def test_a_resumed_run_has_each_override_letter_by_letter(tmp_path, override):
    text = as_notes(["recipe=boston", override])
    run = write(tmp_path / "run", {"checkpoints/last.ckpt": ""})
    (run / ".hydra").mkdir()
    (run / ".hydra/overrides.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    resumed = f"resume={run}/checkpoints/last.ckpt"
    assert with_saved([resumed], lambda: run) == ["recipe=boston", override, resumed]


def test_a_directory_that_cant_be_written_is_one_line():
    words = ("recipe=boston", "trainer.max_epochs=1")
    done = dpframe(*words, cwd="/proc")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "can't be made" in done.stderr


def test_a_current_directory_that_is_gone_is_one_line(tmp_path):
    line = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m dpframe"
    words = ["bash", "-c", line]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_nothing_is_left_of_a_run_that_is_refused_in_its_first_epoch(tmp_path):
    (tmp_path / "outputs").mkdir()  # was there before: stays
    done = dpframe("recipe=boston", "callbacks.checkpoint.monitor=val/los", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean val/loss?" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["outputs"]


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is the Linux linker's")
def test_a_file_system_without_locks_and_directory_sync_is_told_and_the_run_goes_on(tmp_path):
    lacks = {"LD_PRELOAD": library(tmp_path), "NO_LOCKS": "1", "NO_DIRECTORY_SYNC": "1"}
    words = ["recipe=boston", "trainer.max_epochs=2", "hydra.run.dir=run"]
    done = dpframe(*words, cwd=tmp_path, env=environment(**lacks))
    assert (done.returncode, done.stderr) == (
        0,
        "dpframe: the file system of run has no locks (No locks available); "
        "see to it that no other run writes there\n",
    )
    unsynced = "warning: the file system of run/checkpoints can't sync all it writes (Invalid"
    assert done.stdout.count(unsynced) == 1
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    assert (tmp_path / "run/summary.json").is_file()
