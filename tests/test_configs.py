"""What a config file may not set of Hydra's; see tests/test_security.py for run directories."""

from pathlib import Path

import pytest
from command import write

from dpframe.config.loader import ConfigLoader
from dpframe.errors import UserError

LAUNCHER = """
_target_: hydra._internal.core_plugins.basic_launcher.BasicLauncher
partition: gpu
nodes: 2
more: {x: some command}
"""
START = ["recipe=boston", "hydra/launcher=mine"]
TYPED = ["hydra.launcher.more.x=y", "hydra.launcher.more={x: y}", "hydra.launcher={more: {x: y}}"]


@pytest.fixture
def configs(tmp_path: Path) -> ConfigLoader:
    return ConfigLoader(str(write(tmp_path, {"hydra/launcher/mine.yaml": LAUNCHER})))


@pytest.mark.parametrize("typed", TYPED)
def test_a_file_sets_numbers_and_resources_of_a_launcher_and_the_rest_is_typed(configs, typed):
    launcher = configs.compose([*START, typed]).hydra.launcher
    assert (launcher.partition, launcher.nodes, launcher.more.x) == ("gpu", 2, "y")


@pytest.mark.parametrize("typed", [[], ["+hydra.launcher.more={z: 1}"]])
def test_a_group_that_is_typed_does_not_vouch_for_what_a_file_has_in_it(configs, typed):
    with pytest.raises(UserError, match=r"^a config file sets hydra\.launcher\.more\.x, which"):
        configs.compose([*START, *typed])


def test_a_reference_that_is_typed_brings_no_group_of_keys(configs):
    reference = ["+vars.group={_target_: os.system}", "hydra.launcher.more.x=${vars.group}"]
    with pytest.raises(UserError, match=r"^hydra\.launcher\.more\.x=.* is a group of keys; write"):
        configs.compose([*START, *reference])


BASIC = "_target_: hydra._internal.core_plugins.basic_{}.Basic{}\n"
OPTIONS = {  # of groups of Hydra's
    "launcher/setup": "setup: [touch canary]",
    "launcher/srun": "srun: --x=y",
    "launcher/name": "name: '${recipe}'",
    "sweeper/draws": "storage: sqlite:///x",
    "sweeper/own": "custom_search_space: run",
}
SAYS = {  # what an experiment file says, and the line
    "resume: last": "a config file sets resume, which only you can",
    "vars: {x: last}\nresume: ${vars.x}": "a config file sets resume, which only you can",
    "sweep: {resume: theirs}": "a config file sets sweep.resume, which only you can",
    "vars: {x: {resume: theirs}}\nsweep: ${vars.x}": "sweep=${vars.x} is one value; set its keys",
    "hydra: {sweeper: {params: {sweep.resume: theirs}}}": "hydra.sweeper.params.sweep.resume",
    "resume_anyway: true": "a config file sets resume_anyway, which only you can",
    "hydra: {sweeper: {_target_: mine.tasks.Net}}": "hydra.sweeper._target_: dpframe has no use",
    "hydra: {launcher: {_target_: os.system}}": "hydra.launcher._target_: dpframe has no use",
    "hydra: {callbacks: {x: {_target_: os.system}}}": "hydra.callbacks.x._target_: ",
    "hydra: {job: {env_set: {LD_PRELOAD: x.so}}}": "hydra.job.env_set.LD_PRELOAD: ",
    "hydra: {job: {name: '#SBATCH x'}}": "a config file sets hydra.job.name",
    "hydra: {job_logging: {handlers: {x: {(): os.system}}}}": "hydra.job_logging.handlers.x.(): ",
    "hydra: {sweeper: {params: {+resume: 'a,b'}}}": "hydra.sweeper.params.+resume",
    "hydra: {sweeper: {params: {hydra.run.dir: 'a,b'}}}": "hydra.sweeper.params.hydra.run.dir",
    "hydra: {searchpath: ['file:///tmp']}": "only supported from the primary config",
    "defaults: [override /hydra/launcher: setup]": "a config file sets hydra.launcher.setup, which",
    "defaults: [override /hydra/launcher: srun]": "a config file sets hydra.launcher.srun, which",
    "defaults: [override /hydra/launcher: name]": "a config file sets hydra.launcher.name, which",
    "hydra: {overrides: {task: ['resume=x']}}": "hydra.overrides: ",
    "defaults: [override /hydra/sweeper: draws]": "a config file sets hydra.sweeper.storage, which",
    "defaults: [override /hydra/sweeper: own]": "sets hydra.sweeper.custom_search_space, which",
    "hydra: {sweeper: {max_batch_size: 3, params: {seed: '1,2'}}}": "",
}


def test_what_names_commands_or_a_run_to_go_on_with_comes_from_the_command_line_alone(tmp_path):
    texts = {f"experiment/x{n}.yaml": f"# @package _global_\n{s}\n" for n, s in enumerate(SAYS)}
    for name, text in OPTIONS.items():
        kind = name.split("/")[0]
        texts[f"hydra/{name}.yaml"] = BASIC.format(kind, kind.title()) + text
    configs = ConfigLoader(str(write(tmp_path, texts)))
    for number, line in enumerate(SAYS.values()):
        told = ""
        try:
            configs.compose(["recipe=boston", f"experiment=x{number}"])
        except UserError as error:
            told = str(error)
        assert line in told and bool(line) == bool(told) and "\n" not in told, told
    assert configs.compose(["recipe=boston", "experiment=x0", "resume=null"]).resume is None
