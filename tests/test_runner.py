"""Runs of a sweep, one at a time."""

import forked
import injector
import pytest
from command import ROOT
from hydra.core.hydra_config import HydraConfig
from small import is_same

from dpframe import checkpoint
from dpframe.cli.runner import compose_point
from dpframe.config.loader import ConfigLoader


def test_a_point_is_a_run_of_its_own_with_its_number(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as it was before, afterwards
    job, config = compose_point(ConfigLoader(None), ["recipe=boston", "seed=7"], 3)
    assert (job.number, job.settings.seed, config.seed) == (3, 7, 7)
    assert HydraConfig.get().job.num == 3


@pytest.mark.parametrize(
    ("strategy", "variables"),
    [
        (["strategy=cpu"], {}),
        (["strategy=ddp", "trainer.gpus=2"], {"SUBMITIT_PREEMPT_SIGNAL": "QUIT"}),
    ],
    ids=["USR2", "another one, two ranks"],
)
def test_a_point_that_submitit_preempts_is_queued_again_and_ends_with_the_same_bits(
    tmp_path, strategy, variables
):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs dpframe[slurm]")
    once = injector.fail_at(0, 5, "preempt")
    line = [*injector.words(tmp_path, *strategy, "logger=none")[:2], *strategy, "logger=none"]
    submitted = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2", "seed=0"]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    done = forked.run(
        ["-m", *line, "hydra.sweep.dir=swept", *submitted],
        tmp_path,
        PYTHONPATH=paths,
        **once,
        **variables,
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("swept/.submitit/*/*log.*"))
    assert injector.has_fired(tmp_path) and "sweep: 1 of 1 runs finished" in done.stdout, logs
    assert "Requeued job" in logs
    forked.run([*line, "seed=0", "hydra.run.dir=whole"], tmp_path)
    (point,) = tmp_path.glob("swept/0*")
    swept, whole = (
        checkpoint.load(run / "checkpoints" / "last.ckpt")["task"]
        for run in (point, tmp_path / "whole")
    )
    assert is_same(swept, whole)
