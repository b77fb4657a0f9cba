"""What is known after a run: the best epoch, the next commands, and why a run has failed."""

import csv
import json
import math
import os
import pty
import re
import shlex
import sys
from contextlib import suppress

import pytest
from command import attempts, dpframe, write
from forked import started

from dpframe.cli import main
from dpframe.cli.outcome import outcome_of

BOSTON = ["recipe=boston", "trainer.max_epochs=2"]
BOOM = """\
from dpframe.callbacks import Callback

class Boom(Callback):
    def on_epoch_end(self, trainer):
        if trainer.epoch == 2:
            raise ValueError("boom")
"""
FAILING = ["recipe=boston", "+callbacks.boom._target_=boom.Boom"]


def ends(out: str) -> dict[str, str]:
    """The last lines, by their first word."""
    block = out.rstrip().rpartition("\n\n")[2]
    return {line.split()[0]: line.partition(" ")[2].strip() for line in block.splitlines()}


def words(command: str) -> list[str]:
    return shlex.split(command)[1:]


def test_a_run_whose_time_was_over_goes_on_without_that_limit_with_a_schedule_too(tmp_path):
    limits = ["trainer.max_epochs=100000", "trainer.max_seconds=0.1", "task/schedule=linear"]
    (done,) = attempts([["recipe=boston", *limits, "hydra.run.dir=run"]], tmp_path)
    assert words(ends(done.out)["resume"]) == ["resume=run", "trainer.max_seconds=null"], done.err


STOP = """\
from dpframe.callbacks import Callback

class Stop(Callback):
    def on_epoch_end(self, trainer):
        if trainer.epoch == 3:
            trainer.stop("enough")
"""


def test_the_resume_that_a_run_offers_after_it_was_stopped_trains(tmp_path):
    write(tmp_path, {"stop.py": STOP})
    early = ["callbacks=early_stopping", "callbacks.early_stopping.patience=1"]
    early += ["callbacks.early_stopping.min_delta=1000"]  # so that the second epoch is the last
    line = ["recipe=boston", "trainer.max_seconds=1000"]
    before, at_the_end, own = attempts(
        [
            [*line, *early, "trainer.max_epochs=4", "hydra.run.dir=before"],
            [*line, *early, "trainer.max_epochs=2", "hydra.run.dir=end"],
            [*line, "+callbacks.stop._target_=stop.Stop", "trainer.max_epochs=8"],
        ],
        tmp_path,
    )
    assert before.code == at_the_end.code == own.code == 0, before.err + at_the_end.err + own.err
    offers = [words(ends(done.out)["resume"]) for done in (before, at_the_end)]
    off = "callbacks.early_stopping=false"
    assert offers == [["resume=before", off], ["resume=end", off, "trainer.max_epochs=4"]]
    for done in attempts(offers, tmp_path):
        assert done.code == 0 and "epoch 4/4" in done.out, done.err
    assert "stopped: enough" in own.out
    assert "resume" not in ends(own.out), "its callback may stop it again"


def on_terminal() -> None:
    """The command on a terminal of its own; what this shows is printed."""
    child, terminal = pty.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
        main()
        sys.exit(0)
    with suppress(OSError):  # the other end is closed
        while shown := os.read(terminal, 1 << 16):
            sys.stdout.write(shown.decode())
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_command_shows_colours_on_a_terminal_alone_and_not_with_no_color(tmp_path, no_color):
    line = ["recipe=boston", "trainer.max_epochs=1", "logger=none"]
    variables = {"TERM": "xterm", "NO_COLOR": no_color}
    with started(line, tmp_path, program=on_terminal, **variables) as job:
        assert job.wait() == 0, job.printed()
        shown = job.printed()
    assert "━" in shown and "\x1b[2K" in shown, "a bar is drawn again and again"
    colours = {*re.findall(r"\x1b\[[\d;]*m", shown)}
    assert ("\x1b[32m" in colours) is (not no_color)
    best = "best       epoch 1, step 4: val/loss "
    assert (f"\n\x1b[32m{best}" if not no_color else f"\n{best}") in shown.replace("\r", "")
    (piped,) = attempts([line], tmp_path, **variables)
    assert f"\n{best}" in piped.out and "\x1b" not in piped.out + piped.err


def test_the_commands_that_a_run_ends_with_can_be_typed(tmp_path):
    first = attempts([[*BOSTON, "hydra.run.dir=a run"]], tmp_path)[0]
    said = ends(first.out)
    assert [*said] == ["best", "run", "test", "resume", "dashboard"]
    assert said["run"] == "a run"
    shorter = ["resume=a run", "trainer.max_epochs=3"]
    tested, resumed, again = attempts(
        [words(said["test"]), words(said["resume"]), shorter], tmp_path
    )
    assert tested.code == 0 and "test/loss" in tested.out
    assert resumed.code == 0 and "epoch 4/4" in resumed.out
    assert again.code == 0
    assert "trainer.max_epochs=3 is reached: nothing is left to train" in again.out
    assert words(ends(again.out)["resume"])[-1] == "trainer.max_epochs=8"
    summary = json.loads((tmp_path / "a run" / "summary.json").read_text())
    assert (summary["status"], summary["best_epoch"], summary["best_step"]) == ("finished", 4, 16)
    assert summary["best_metrics"] == summary["metrics"]
    value = summary["best"]["val/loss"]
    assert ends(resumed.out)["best"] == f"epoch 4, step 16: val/loss {value:.6g}"


def test_a_run_whose_schedule_ends_with_it_is_not_told_to_go_on(tmp_path):
    write(tmp_path, {"own/recipe/cycle.yaml": CYCLE})
    line = ["--config-dir=own", "recipe=cycle", "trainer.max_epochs=1"]
    done = attempts([line], tmp_path)[0]
    assert done.code == 0, done.err
    said = ends(done.out)
    assert "resume" not in said
    assert words(said["test"])[:3] == ["--config-dir", "own", "mode=test"]
    assert attempts([words(said["test"])], tmp_path)[0].code == 0


def test_a_run_that_trains_longer_follows_its_new_schedule_and_its_old_one_is_told_to_have_ended(
    tmp_path,
):
    def cosine(epochs: int) -> str:
        kind = "_target_:torch.optim.lr_scheduler.CosineAnnealingLR,_partial_:true"
        return f"+task.scheduler={{{kind},T_max:{epochs}}}"

    line = ["recipe=boston", "logger=csv", "hydra.run.dir=run"]
    longer = ["resume=run", "trainer.max_epochs=8", cosine(8)]
    short, refused, new, after = attempts(
        [
            [*line, "trainer.max_epochs=4", cosine(4)],
            longer,
            [*longer, "resume_anyway=true"],
            ["resume=run", "trainer.max_epochs=9", cosine(8)],
        ],
        tmp_path,
    )
    assert short.code == 0 and "resume" not in ends(short.out), short.err
    assert "continue: task.scheduler.T_max=4 there, 8 here; set back" in refused.err
    assert (new.code, after.code) == (0, 0), (new.err, after.err)
    assert "CosineAnnealingLR has come to the end of its T_max=8, and the run goes" in after.err
    with (tmp_path / "run" / "metrics.csv").open() as file:
        found = [float(row["progress/lr"]) for row in csv.DictReader(file)]
    of_eight = [0.01 * (1 + math.cos(math.pi * epoch / 8)) / 2 for epoch in range(4, 8)]
    assert found[4:8] == pytest.approx(of_eight)


NO_TEST = """\
import torch
from dpframe import DataModule

class Rows(DataModule):
    def train_dataset(self):
        return torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))

    val_dataset = train_dataset
"""
OF_ROWS = """\
# @package _global_
task:
  _target_: dpframe.recipes.boston.Boston
  net: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}
  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.01}
data: {_target_: rows.Rows, batch_size: 4}
"""


def test_data_without_a_test_set_is_not_told_to_be_tested_and_rows_of_another_size_are_named(
    tmp_path,
):
    files = {"rows.py": NO_TEST, "own/recipe/rows.yaml": OF_ROWS, "table.csv": "a,b\n1,2\n"}
    write(tmp_path, files)
    start = ["--config-dir=own", "recipe=rows"]
    best = [*start, "checkpoint=best"]
    lines = [
        [*start, "trainer.max_epochs=1"],
        [*best, "mode=test"],
        [*best, "mode=predict"],
        [*best, "mode=predict", "data.input=table.csv"],
    ]
    trained, tested, predicted, of_others = attempts(lines, tmp_path)
    assert trained.code == 0 and "test" not in ends(trained.out), trained.err
    assert tested.err == "dpframe: Rows has no test_dataset; write one, or use mode=validate\n"
    assert predicted.err == (
        "dpframe: Rows has no predict_dataset; write one, or name a file by data.input=FILE\n"
    )
    assert of_others.code == 1
    assert "these are rows of data.input=table.csv, as Rows.input_row makes" in of_others.err


CYCLE = """\
# @package _global_
defaults:
  - boston
recipe: cycle
task:
  scheduler:
    _target_: torch.optim.lr_scheduler.OneCycleLR
    _partial_: true
    max_lr: 0.01
"""


def test_best_and_last_are_checkpoints_of_the_recipes_newest_run(tmp_path):
    lines = [
        ["recipe=boston", "mode=test", "checkpoint=best"],
        [*BOSTON, "hydra.run.dir=outputs/boston/b"],
        [*BOSTON, "hydra.run.dir=outputs/boston/a"],
        ["recipe=boston", "mode=test", "checkpoint=best"],
        ["recipe=boston", "mode=validate", "checkpoint=last"],
        ["recipe=lenet", "mode=test", "checkpoint=best"],
        ["mode=test", "checkpoint=best"],
        ["recipe=boston", "mode=test", "checkpoint=./best"],
    ]
    none, _, _, best, last, other, unnamed, file = attempts(lines, tmp_path)
    assert (none.code, none.err) == (
        2,
        "dpframe: checkpoint=best: there is no run with a checkpoint in outputs/boston\n",
    )
    assert best.code == last.code == 0, (best.err, last.err)
    summaries = map(json.loads, (p.read_text() for p in tmp_path.glob("outputs/**/summary.json")))
    assert {path.name for path in (tmp_path / "outputs/boston").iterdir()} == {"a", "b"}
    used = [one["checkpoint"] for one in summaries if not one["steps"]]
    folder = "outputs/boston/a/checkpoints"
    assert sorted(used) == [f"{folder}/best.ckpt", f"{folder}/last.ckpt"]
    assert (other.code, unnamed.code) == (2, 2)
    assert unnamed.err.startswith("dpframe: checkpoint=best: of which recipe? add recipe=NAME, or ")
    assert file.err == "dpframe: checkpoint=best: there is no such file\n"


def test_a_newest_run_without_its_best_is_one_line(tmp_path):
    lines = [
        [*BOSTON, "hydra.run.dir=outputs/boston/a"],
        ["recipe=boston", "mode=test", "checkpoint=best"],
    ]
    attempts(lines[:1], tmp_path)
    (tmp_path / "outputs/boston/a/checkpoints/best.ckpt").unlink()
    assert attempts(lines[1:], tmp_path)[0].err == (
        "dpframe: checkpoint=outputs/boston/a/checkpoints/best.ckpt: there is no such file\n"
    )


@pytest.mark.parametrize("strategy", [[], ["strategy=ddp", "trainer.gpus=2"]], ids=["cpu", "ddp"])
def test_the_best_weights_are_tested_after_fit(tmp_path, strategy):
    # With this rate the last weights are not the best.
    own = ["recipe=boston", "trainer.max_epochs=3", "trainer.precision=64", "task.optimizer.lr=3"]
    line = [*own, *strategy]
    run = dpframe(*line, "test_after_fit=true", "hydra.run.dir=outputs/boston/a", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [
        ["recipe=boston", "mode=test", "checkpoint=best", "hydra.run.dir=tested"],
        ["recipe=boston", "mode=test", "checkpoint=last", "hydra.run.dir=last"],
    ]
    assert [one.code for one in attempts(lines, tmp_path)] == [0, 0]
    after, best, last = (
        json.loads((tmp_path / name / "summary.json").read_text())["metrics"]["test/loss"]
        for name in ("outputs/boston/a", "tested", "last")
    )
    assert best != last
    assert after == pytest.approx(best, rel=1e-12)
    rows = list(csv.DictReader((tmp_path / "outputs/boston/a/metrics.csv").open()))
    assert [row["test/loss"] for row in rows] == ["", "", str(after)]  # TensorBoard has it, too


@pytest.mark.parametrize("strategy", [[], ["strategy=ddp", "trainer.gpus=2"]], ids=["cpu", "ddp"])
def test_a_failed_run_keeps_its_directory_and_the_reason(tmp_path, strategy):
    write(tmp_path, {"boom.py": BOOM, "my own/experiment/none.yaml": ""})
    line = ["--config-dir=my own", *FAILING, *strategy, "hydra.run.dir=run"]
    failed = dpframe(*line, cwd=tmp_path, PYTHONPATH=".")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1] == (
        "dpframe: the run is in run; go on with dpframe --config-dir 'my own' "
        "+callbacks.boom._target_=boom.Boom resume=run"
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "ValueError: boom")
    assert "in on_epoch_end" in summary["traceback"]
    assert "in on_epoch_end" in (tmp_path / "run/run.log").read_text()
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()


def test_a_summary_of_a_failed_run_is_no_result_of_a_sweep():
    summary = {"status": "failed", "reason": "ValueError: boom"}
    assert outcome_of(summary, "val/loss") == ("failed", None, "ValueError: boom")
