"""Runs of a sweep, one at a time."""

from hydra.core.hydra_config import HydraConfig

from dpframe.cli.runner import compose_point
from dpframe.config.loader import ConfigLoader


def test_a_point_is_a_run_of_its_own_with_its_number(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as it was before, afterwards
    job, config = compose_point(ConfigLoader(None), ["recipe=boston", "seed=7"], 3)
    assert (job.number, job.settings.seed, config.seed) == (3, 7, 7)
    assert HydraConfig.get().job.num == 3
