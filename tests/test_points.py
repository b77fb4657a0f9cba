"""Points of a sweep: to the last key what Hydra composes of each, though it composes one."""

import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dpframe import UserError
from dpframe.config.loader import ConfigLoader
from dpframe.config.points import Points, compose_point

SHARED = [
    "hydra.job.config.override_dirname.exclude_keys=['recipe','trainer.max_steps']",
    "hydra.sweep.dir='/tmp/here'",
]
SWEPT: dict[str, list[list[str]]] = {
    "numbers": [["seed=0", "seed=7"], ["task.optimizer.lr=0.1", "task.optimizer.lr=1e-3"]],
    "words": [["task.optimizer._target_=torch.optim.SGD", "task.optimizer._target_=x.Y"]],
    "quoted": [["+vars.a='a b'", "+vars.a='1'", "+vars.a='=,'", "+vars.a=true", "+vars.a=-0.5"]],
    "added by dpframe": [["task.optimizer.amsgrad=true", "task.optimizer.amsgrad=false"]],
    "referred to": [["seed=3", "seed=4"], ["trainer.threads=${seed}", "+vars.n=${hydra:job.num}"]],
    "of the environment": [["+vars.home=${oc.env:HOME}"], ["seed=3", "seed=4"]],
    "options": [["strategy=cpu", "strategy=ddp"], ["callbacks=ema", "callbacks=none"], ["seed=1"]],
    "whole values": [["data.file=a", "data.file=null"], ["+vars.x=[1,2]", "+vars.x=1"]],
    "twice": [["seed=1", "seed=2"], ["seed=3", "seed=4"]],
    "nested": [["+vars.x={a:1}", "+vars.x={a:2}"], ["++vars.x.a=3", "++vars.x.a=4"]],
    "recipes": [["recipe=boston", "recipe=shapes"], ["seed=1", "seed=2"]],
    "deleted": [["~callbacks.progress"], ["seed=1", "seed=2"]],
}


class Counting(ConfigLoader):
    composed_points = 0

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        self.composed_points += 1
        return super().compose(overrides)


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    instance = HydraConfig.instance()
    before = instance.cfg
    yield
    instance.cfg = before


def points_of(keys: list[list[str]]) -> list[list[str]]:
    recipe = [] if any("recipe=" in key[0] for key in keys) else ["recipe=boston"]
    return [[*SHARED, *recipe, "trainer.max_steps=1", *point] for point in product(*keys)]


@pytest.mark.parametrize("name", SWEPT)
def test_a_point_is_what_hydra_composes_of_it(name):
    points, configs = Points(ConfigLoader(None)), ConfigLoader(None)
    for number, words in enumerate([*points_of(SWEPT[name]), *points_of(SWEPT[name])[:1]]):
        job, directory = points.compose(words, number)
        alone, config = compose_point(configs, words, number)
        for each in (job, alone):  # a second may pass
            each.run_dir = each.run_dir.rpartition("/")[0]
        assert job == alone and job.notes == alone.notes
        assert directory == str(config.hydra.sweep.subdir)


@pytest.mark.parametrize(
    ("name", "count"),
    [("numbers", 1), ("words", 1), ("quoted", 1), ("added by dpframe", 1), ("options", 4)],
)
def test_hydra_composes_one_of_the_points_that_differ_by_values_alone(name, count):
    configs = Counting(None)
    points = Points(configs)
    for _ in range(3):
        for number, words in enumerate(points_of(SWEPT[name])):
            points.compose(words, number)
    assert configs.composed_points == count


def test_what_a_point_may_not_have_is_said_as_of_a_run_and_the_next_ones_are_right():
    points = Points(ConfigLoader(None))
    words = ["recipe=boston", "trainer.max_steps=1", "trainer.max_epochs="]
    for value, said in [("2", ""), ("abc", "is text"), ("0", "out of range"), ("3", "")]:
        point = [*words[:2], words[2] + value]
        if said:
            with pytest.raises(UserError, match=rf"trainer.max_epochs={value} .*{said}"):
                points.compose(point, 0)
        else:
            assert points.compose(point, 0)[0].settings.trainer.max_epochs == int(value)


def test_what_an_earlier_sweep_brings_is_asked_at_each_point_whether_it_names_a_call(tmp_path):
    (tmp_path / "experiment").mkdir()
    called = "{optimizer: {_target_: '${oc.select:vars.what,a.B}'}}"
    text = f"# @package _global_\ntask: {called}\nvars: {{what: a.B}}"
    Path(tmp_path, "experiment", "mine.yaml").write_text(text)
    configs = ConfigLoader(str(tmp_path))
    configs.taken = ["vars.what=torch.optim.SGD"]
    points = Points(configs)
    words = ["recipe=boston", "experiment=mine"]
    assert points.compose([*words, "vars.what=a.B"], 0)
    with pytest.raises(UserError, match=r"its overrides make task\.optimizer\._target_=os\.system"):
        points.compose([*words, "vars.what=os.system"], 1)


def test_a_point_takes_a_tenth_of_a_megabyte_with_what_is_not_collected_yet():
    points, words = Points(ConfigLoader(None)), [*SHARED, "recipe=boston"]
    kept = [points.compose([*words, "seed=0"], 0)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    kept += [points.compose([*words, f"seed={seed}"], seed) for seed in range(1, 21)]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / 20 < 100_000


def test_so_many_configs_are_kept_however_many_forms_the_points_have(monkeypatch):
    monkeypatch.setattr("dpframe.config.points.KEPT", 2)
    points, words = Points(ConfigLoader(None)), [*SHARED, "recipe=boston"]
    for number in range(4):
        points.compose([*words, f"+vars.x=[{number}]"], 0)
    assert len(points._forms) == 2
