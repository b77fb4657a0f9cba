"""`mode=test|validate|predict checkpoint=FILE`: the config is that of the checkpoint's own run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from command import attempts

from dpframe.cli.compose import composed

SHORT = ["recipe=boston", "trainer.max_epochs=1", "logger=none"]
BEST = "checkpoint=run/checkpoints/best.ckpt"
MOVED = "checkpoint=moved.ckpt"
DIFFERENT = ["data.normalize=false", "data.split_seed=3", "seed=7"]


@pytest.fixture(scope="module")
def tested(tmp_path_factory) -> tuple[Path, list]:
    """A run on two virtual replicas, its best checkpoint copied away, and tests of both."""
    directory = tmp_path_factory.mktemp("origin")
    replicas = ["strategy=data_parallel", "trainer.gpus=2", "trainer.max_replicas_per_core=9"]
    where = ["hydra.run.dir=run", "callbacks.checkpoint.keep=2"]
    begun = attempts([[*SHORT, *DIFFERENT, *replicas, *where]], directory)
    assert begun[0].code == 0, begun[0].err
    shutil.copy(directory / "run" / "checkpoints" / "best.ckpt", directory / "moved.ckpt")
    lines = [
        ["mode=validate", BEST, "hydra.run.dir=own"],
        ["mode=test", BEST, "data.split_seed=0", "recipe=boston", "hydra.run.dir=typed"],
        ["mode=test", BEST, "recipe=lenet"],
        ["mode=test", MOVED, "recipe=boston"],
        ["mode=validate", MOVED, "recipe=boston", *DIFFERENT, "hydra.run.dir=followed"],
        ["mode=test", MOVED, "recipe=boston", "data.normalize=true", *DIFFERENT[1:]],
        ["mode=test", MOVED, "recipe=lenet"],
        ["mode=test", BEST, "data.batch_size=7", "data.workers=0", "task.optimizer.lr=1"],
        ["mode=predict", MOVED],
        ["-m", "mode=validate", f"{BEST},run/checkpoints/last.ckpt", "seed=7,8"],
        ["-m", "mode=validate", f"{MOVED},moved.ckpt", "hydra.sweep.dir=two"],
        [BEST, "recipe=boston", "trainer.max_epochs=1", "hydra.run.dir=tuned"],
        ["mode=test", MOVED, "recipe=boston", "data.normalize=false", "seed=0"],
    ]
    return directory, attempts(lines, directory)


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def test_a_checkpoint_brings_its_runs_config_but_for_where_it_ran(tested):
    directory, (own, *_) = tested
    assert own.code == 0, own.err
    begun, again = summary(directory / "run"), summary(directory / "own")
    assert again["checkpoint"] == "run/checkpoints/best.ckpt"
    assert again["metrics"]["val/loss"] == pytest.approx(begun["metrics"]["val/loss"], rel=1e-6)
    assert (begun["replicas"], again["replicas"]) == (2, 1)
    config = yaml.safe_load((directory / "own" / ".hydra" / "config.yaml").read_text())
    assert (config["recipe"], config["seed"], config["data"]["split_seed"]) == ("boston", 7, 3)
    assert config["trainer"]["gpus"] is None and config["trainer"]["max_replicas_per_core"] == 8
    line = "run/checkpoints/best.ckpt: with its run's data.normalize=false data.split_seed=3 seed=7"
    assert line in own.out


def test_what_is_typed_wins_and_is_told(tested):
    _, (_, typed, *_) = tested
    assert typed.code == 0, typed.err
    assert (
        "checkpoint=run/checkpoints/best.ckpt: its run had data.split_seed=3, "
        "this one has data.split_seed=0\n"
    ) in typed.out


def test_a_checkpoint_of_another_recipe_is_refused(tested):
    _, done = tested
    assert [done[2].code, done[6].code] == [2, 2]
    said = "is of a run with recipe=boston, not recipe=lenet; use recipe=boston, or name "
    assert f"dpframe: {BEST} {said}" in done[2].err
    assert f"dpframe: {MOVED} is of a run with recipe=boston, not recipe=lenet" in done[6].err


def test_a_checkpoint_away_from_its_run_is_refused_where_the_numbers_would_be_others(tested):
    _, done = tested
    assert done[3].code == 2
    assert done[3].err == (
        "dpframe: checkpoint=moved.ckpt: its run had another config: data.normalize=false there, "
        "true here; data.split_seed=3 there, 0 here; seed=7 there, 0 here; type what it had, or "
        "what you want instead\n"
    )


def test_a_value_that_only_happens_to_be_the_typed_seed_is_not_typed(tested):
    _, done = tested
    assert done[12].code == 2
    assert "its run had another config: data.split_seed=3 there, 0 here; type" in done[12].err


def test_typing_what_the_refusal_says_gives_the_runs_numbers(tested):
    directory, done = tested
    assert done[4].code == 0, done[4].err
    assert "its run had" not in done[4].out
    assert summary(directory / "followed")["metrics"] == summary(directory / "own")["metrics"]


def test_todays_values_are_taken_where_they_are_typed(tested):
    _, done = tested
    assert done[5].code == 0, done[5].err
    assert "its run had data.normalize=false, this one has data.normalize=true" in done[5].out


def test_what_can_not_change_an_evaluation_may_differ(tested):
    _, done = tested
    assert done[7].code == 0, done[7].err
    assert "its run had" not in done[7].out


def test_without_a_run_directory_the_recipe_has_to_be_typed(tested):
    _, done = tested
    assert (done[8].code, done[8].err.count("\n")) == (2, 1)
    assert "recipe is not set" in done[8].err


def test_a_sweep_over_checkpoints_takes_the_config_of_each(tested):
    directory, done = tested
    assert done[9].code == 0, done[9].err
    values = {
        (path.parent.parent.name[0], yaml.safe_load(path.read_text())["data"]["split_seed"])
        for path in directory.glob("multirun/boston/*/*/.hydra/config.yaml")
    }
    assert values == {("0", 3), ("1", 3), ("2", 3), ("3", 3)}
    losses = [
        summary(p.parent)["metrics"]["val/loss"]
        for p in directory.glob("multirun/*/*/*/summary.json")
    ]
    assert len(set(losses)) == 1  # of one epoch, best and last are the same


def test_a_sweep_whose_recipe_nothing_says_is_one_line_and_begins_nothing(tested):
    directory, done = tested
    assert (done[10].code, done[10].err.count("\n")) == (2, 1)
    assert "recipe is not set" in done[10].err and not (directory / "two").exists()


def test_training_that_begins_with_a_checkpoints_weights_has_a_config_of_its_own(tested):
    directory, done = tested
    assert done[11].code == 0, done[11].err
    config = yaml.safe_load((directory / "tuned" / ".hydra" / "config.yaml").read_text())
    assert config["data"]["normalize"] is True


def test_a_strangers_run_directory_does_not_vouch_for_itself(tmp_path):
    attempts([[*SHORT, "hydra.run.dir=run"]], tmp_path)
    saved = tmp_path / "run" / ".hydra" / "overrides.yaml"
    mean = ["trusted_modules=[os]", "hydra.run.dir=elsewhere", "resume=run", "mode=fit"]
    saved.write_text(yaml.safe_dump([*yaml.safe_load(saved.read_text()), *mean]))
    done = attempts([["mode=test", BEST, "hydra.run.dir=test"]], tmp_path)
    assert done[0].code == 0, done[0].err
    config = yaml.safe_load((tmp_path / "test" / ".hydra" / "config.yaml").read_text())
    assert (config["trusted_modules"], config["mode"], config["resume"]) == ([], "test", None)
    assert not (tmp_path / "elsewhere").exists()


def test_a_recipe_edited_since_is_refused(tmp_path):
    recipe = tmp_path / "mine" / "recipe" / "held.yaml"
    recipe.parent.mkdir(parents=True)
    text = "# @package _global_\ndefaults: [boston, _self_]\nrecipe: held\ndata: {split_seed: %s}\n"
    recipe.write_text(text % 1)
    mine = ["--config-dir", "mine"]
    begun = [*mine, "recipe=held", *SHORT[1:], "+vars.n=1", "hydra.run.dir=run"]
    assert attempts([begun], tmp_path)[0].code == 0
    recipe.write_text(text % 2)
    test = [*mine, "mode=test", BEST]
    edited, typed = attempts([test, [*test, "data.split_seed=1"]], tmp_path)
    assert edited.code == 2
    assert re.search(r"data\.split_seed=1 there, 2 here; type what it had", edited.err)
    assert typed.code == 0, typed.err
    assert "with its run's +vars.n=1" in typed.out


@pytest.mark.parametrize("mode", ["test", "validate", "predict"])
@pytest.mark.parametrize("run", [["trainer.limit_eval_batches=1"], ["experiment=debug"]])
def test_an_evaluation_reads_all_rows_unless_a_limit_is_typed(tmp_path, mode, run):
    saved = tmp_path / ".hydra" / "overrides.yaml"
    saved.parent.mkdir()
    saved.write_text(yaml.safe_dump(["recipe=boston", *run]))
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    line = [f"mode={mode}", f"checkpoint={last}"]
    assert composed(line).settings.trainer.limit_eval_batches is None
    typed = [([*line, "trainer.limit_eval_batches=2"], 2), ([*line, "experiment=debug"], 1)]
    for overrides, batches in typed:
        assert composed(overrides).settings.trainer.limit_eval_batches == batches
