"""What `${oc.env:NAME}` stands for is used, and not written down: it may be a secret."""

import torch
import yaml
from command import ROOT, attempts, write

from dpframe import checkpoint
from dpframe.config.compose import composed

SECRET = "s3cr3t-t0k3n"
EXPERIMENT = """
# @package _global_
seed: ${oc.env:SEED}
vars:
  token: ${oc.env:TOKEN}
  header: Bearer ${vars.token}
  selected: ${oc.select:vars.token}
  none: ${oc.env:NOT_THERE,null}
  nested: ${oc.env:NOT_THERE,${oc.env:TOKEN}}
data:
  file: ${oc.env:FOLDER}/rows.csv
task:
  optimizer:
    lr: ${oc.decode:${oc.env:RATE}}
"""
WRITTEN = {
    "token": "${oc.env:TOKEN}",
    "header": "Bearer ${oc.env:TOKEN}",
    "selected": "${oc.env:TOKEN}",
    "none": "${oc.env:NOT_THERE,null}",
    "nested": "${oc.env:NOT_THERE,${oc.env:TOKEN}}",
    "typed": "${oc.env:TOKEN}",
}


def test_no_file_of_a_run_has_what_is_in_the_environment(tmp_path, monkeypatch):
    folder = tmp_path / "in" / SECRET
    write(folder, {"rows.csv": (ROOT / "recipes/data/boston.csv").read_text(encoding="utf-8")})
    environment = {"TOKEN": SECRET, "FOLDER": str(folder), "RATE": "0.02", "SEED": "3"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = write(tmp_path / "out", {"mine/experiment/env.yaml": EXPERIMENT})
    start = ["--config-dir=mine", "trainer.max_epochs=1"]
    typed = "+vars.typed=${oc.env:TOKEN}"  # each time, as what a directory refers to is not taken
    begun = ["recipe=boston", "experiment=env", typed]
    lines = [
        [*start, *begun, "hydra.run.dir=run"],
        [*start, "resume=run", "trainer.max_epochs=2", typed],
        [*start, "mode=test", "checkpoint=run/checkpoints/last.ckpt", typed],
        ["-m", *start, *begun, "seed=1,2"],
        [*start, *begun, "-c", "job"],
    ]
    for line, attempt in zip(lines, attempts(lines, place), strict=True):
        assert attempt.code == 0, (line, attempt.err)
    with_it = [path for path in place.rglob("*") if SECRET in str(path) or _has_secret(path)]
    assert with_it == []
    config = yaml.safe_load((place / "run/.hydra/config.yaml").read_text())
    assert (config["vars"], config["seed"]) == (WRITTEN, "${oc.env:SEED}")
    state = checkpoint.load(place / "run/checkpoints/last.ckpt")
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.02
    assert state["progress"]["epoch"] == 2

    monkeypatch.setenv("RATE", "0.03")
    (refused,) = attempts([[*start, "resume=run", "trainer.max_epochs=3", typed]], place)
    assert refused.code == 2 and "task.optimizer.lr=${oc.env:RATE} (sha256 " in refused.err


def _has_secret(path) -> bool:
    if not path.is_file():
        return False
    text = path.read_bytes()
    if path.suffix == ".ckpt":
        text += repr(torch.load(path, weights_only=True)).encode()
    return SECRET.encode() in text


def test_a_name_that_is_made_of_the_environment_keeps_the_config_as_it_was_composed(monkeypatch):
    monkeypatch.setenv("WHICH", "small")
    words = ["recipe=boston", "+vars.small=1", "+vars.x='${vars.${oc.env:WHICH}}'"]
    job = composed(words)
    assert job.config["vars"]["x"] == 1
    assert job.public["vars"]["x"] == "${vars.${oc.env:WHICH}}"
    assert composed(["recipe=boston"]).public == composed(["recipe=boston"]).config
