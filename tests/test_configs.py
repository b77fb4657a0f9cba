"""What a config file may not set of Hydra's; the attacks themselves are in tests/test_trust.py."""

from pathlib import Path

import pytest
from command import write

from dpframe.config.search import Configs
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
def configs(tmp_path: Path) -> Configs:
    return Configs(str(write(tmp_path, {"hydra/launcher/mine.yaml": LAUNCHER})))


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
