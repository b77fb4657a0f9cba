"""`mode=test|validate|predict checkpoint=FILE`: the config is that of the checkpoint's own run."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from attempted import Attempt
from command import attempts, write

from dpframe.config.compose import composed

SHORT = ["recipe=boston", "trainer.max_epochs=1", "logger=none"]
BEST, MOVED = "checkpoint=run/checkpoints/best.ckpt", "checkpoint=moved.ckpt"
DIFFERENT = ["data.normalize=false", "data.split_seed=3", "seed=7"]
HELD = ["--config-dir", "mine", "recipe=held"]
MEAN = ["hydra.run.dir=elsewhere", "resume=run", "mode=fit"]

BEGUN = {  # on two virtual replicas; of a recipe that is edited; tampered with; no tensors
    "run": [*SHORT, *DIFFERENT, "strategy=data_parallel", "trainer.gpus=2", "trainer.threads=1"],
    "held": [*HELD, *SHORT[1:], "+vars.n=1"],
    "theirs": SHORT,
    "rows": ["recipe=text", "trainer.max_steps=2", "trainer.limit_val_batches=1", *SHORT[2:]],
}
REFUSED = {  # a line, and what it is told
    "another recipe": (
        ["mode=test", BEST, "recipe=lenet"],
        f"{BEST} is of a run with recipe=boston, not recipe=lenet; use recipe=boston, or name ",
    ),
    "moved, another recipe": (
        ["mode=test", MOVED, "recipe=lenet"],
        f"{MOVED} is of a run with recipe=boston, not recipe=lenet; ",
    ),
    "moved, other numbers": (
        ["mode=test", MOVED, "recipe=boston"],
        "checkpoint=moved.ckpt: its run had another config: data.normalize=false there, true here; "
        "data.split_seed=3 there, 0 here; seed=7 there, 0 here; type what it had, or what you want",
    ),
    "the typed seed is only by chance another value": (
        ["mode=test", MOVED, "recipe=boston", "data.normalize=false", "seed=0"],
        "its run had another config: data.split_seed=3 there, 0 here; type",
    ),
    "a recipe that was edited": (
        [*HELD[:2], "mode=test", "checkpoint=held/checkpoints/best.ckpt"],
        "data.split_seed=1 there, 2 here; type what it had",
    ),
    "no run directory": (["mode=predict", MOVED], "recipe is not set"),
    "a sweep without one": (
        ["-m", "mode=validate", f"{MOVED},moved.ckpt", "hydra.sweep.dir=two"],
        "recipe is not set",
    ),
}
HAD = "its run had"
RUN = {  # a line, and what it prints, if it begins a directory of its own
    "own": (
        ["mode=validate", BEST],
        f"{BEST}: with its run's data.normalize=false data.split_seed=3 seed=7",
    ),
    "typed": (
        ["mode=test", BEST, "data.split_seed=0", "recipe=boston"],
        f"{BEST}: {HAD} data.split_seed=3, this one has data.split_seed=0\n",
    ),
    "followed": (["mode=validate", MOVED, "recipe=boston", *DIFFERENT], ""),
    "todays": (
        ["mode=test", MOVED, "recipe=boston", "data.normalize=true", *DIFFERENT[1:]],
        f"{HAD} data.normalize=false, this one has data.normalize=true",
    ),
    "of training": (
        ["mode=test", BEST, "data.batch_size=7", "data.workers=0", "task.optimizer.lr=1"],
        "",
    ),
    "edited": (
        [*HELD[:2], "mode=test", "checkpoint=held/checkpoints/best.ckpt", "data.split_seed=1"],
        "with its run's +vars.n=1",
    ),
    "read by row": (["mode=test", "checkpoint=rows/checkpoints/last.ckpt"], ""),
    "strangers": (["mode=test", "checkpoint=theirs/checkpoints/best.ckpt"], ""),
    "tuned": ([BEST, "recipe=boston", "trainer.max_epochs=1"], ""),
}
SWEPT = ["-m", "mode=validate", f"{BEST},run/checkpoints/last.ckpt", "seed=7,8"]


@pytest.fixture(scope="module")
def tested(tmp_path_factory) -> tuple[Path, dict[str, Attempt]]:
    """Some runs, a checkpoint that is copied away from its own, and evaluations of them."""
    directory = tmp_path_factory.mktemp("origin")
    text = "# @package _global_\ndefaults: [boston, _self_]\nrecipe: held\ndata: {split_seed: %s}\n"
    recipe = {"mine/recipe/held.yaml": text}
    write(directory, {name: text % 1 for name, text in recipe.items()})
    lines = [[*line, f"hydra.run.dir={name}"] for name, line in BEGUN.items()]
    assert [begun.code for begun in attempts(lines, directory)] == [0] * len(BEGUN)
    write(directory, {name: text % 2 for name, text in recipe.items()})
    shutil.copy(directory / "run" / "checkpoints" / "best.ckpt", directory / "moved.ckpt")
    saved = directory / "theirs" / ".hydra" / "overrides.yaml"
    saved.write_text(yaml.safe_dump([*yaml.safe_load(saved.read_text()), *MEAN]))
    lines = {name: [*line, f"hydra.run.dir={name}"] for name, (line, _) in RUN.items()}
    lines |= {name: line for name, (line, _) in REFUSED.items()} | {"swept": SWEPT}
    done = attempts(list(lines.values()), directory)
    return directory, dict(zip(lines, done, strict=True))


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def config(directory: Path) -> dict:
    return yaml.safe_load((directory / ".hydra" / "config.yaml").read_text())


def test_a_checkpoint_brings_its_runs_config_but_for_where_it_ran(tested):
    directory, _ = tested
    begun, again = summary(directory / "run"), summary(directory / "own")
    assert again["checkpoint"] == "run/checkpoints/best.ckpt"
    assert again["metrics"]["val/loss"] == pytest.approx(begun["metrics"]["val/loss"], rel=1e-6)
    assert (begun["replicas"], again["replicas"]) == (2, 1)
    own = config(directory / "own")
    assert (own["recipe"], own["seed"], own["data"]["split_seed"]) == ("boston", 7, 3)
    assert own["trainer"]["gpus"] is None and own["trainer"]["threads"] is None


@pytest.mark.parametrize("name", RUN)
def test_what_is_typed_wins_and_is_told_but_what_can_not_change_an_evaluation(tested, name):
    _, done = tested
    assert done[name].code == 0, done[name].err
    says = RUN[name][1]
    assert says in done[name].out
    assert (HAD in done[name].out) == (HAD in says)


@pytest.mark.parametrize("name", REFUSED)
def test_a_checkpoint_away_from_its_run_is_refused_where_the_numbers_would_be_others(tested, name):
    directory, done = tested
    assert (done[name].code, done[name].err.count("\n")) == (2, 1)
    assert REFUSED[name][1] in done[name].err and not (directory / "two").exists()


def test_typing_what_the_refusal_says_gives_the_runs_numbers(tested):
    directory, _ = tested
    assert summary(directory / "followed")["metrics"] == summary(directory / "own")["metrics"]


def test_a_sweep_over_checkpoints_takes_the_config_of_each(tested):
    directory, done = tested
    assert done["swept"].code == 0, done["swept"].err
    points = sorted(directory.glob("multirun/validate/boston/*/[0-3]_*"))
    assert [config(point)["data"]["split_seed"] for point in points] == [3] * 4
    # Of one epoch, best and last are the same.
    assert len({summary(point)["metrics"]["val/loss"] for point in points}) == 1


def test_training_that_begins_with_a_checkpoints_weights_has_a_config_of_its_own(tested):
    directory, _ = tested
    assert config(directory / "tuned")["data"]["normalize"] is True


def test_a_strangers_run_directory_does_not_vouch_for_itself(tested):
    directory, _ = tested
    own = config(directory / "strangers")
    assert (own["mode"], own["resume"]) == ("test", None)
    assert not (directory / "elsewhere").exists()


@pytest.mark.parametrize(
    ("mode", "run"),
    [
        ("test", ["trainer.limit_eval_batches=1"]),
        ("validate", ["experiment=debug"]),
        ("predict", ["trainer.limit_eval_batches=1"]),
    ],
)
def test_an_evaluation_reads_all_rows_unless_a_limit_is_typed(tmp_path, mode, run):
    saved = yaml.safe_dump(["recipe=boston", *run])
    write(tmp_path, {".hydra/overrides.yaml": saved, "checkpoints/last.ckpt": ""})
    line = [f"mode={mode}", f"checkpoint={tmp_path / 'checkpoints/last.ckpt'}"]
    assert composed(line).settings.trainer.limit_eval_batches is None
    typed = [([*line, "trainer.limit_eval_batches=2"], 2), ([*line, "experiment=debug"], 1)]
    for overrides, batches in typed:
        assert composed(overrides).settings.trainer.limit_eval_batches == batches
