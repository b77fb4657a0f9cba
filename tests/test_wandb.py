"""Weights & Biases gets the curves and all else of a run and of its resume under one id."""

import json
import re
from collections import defaultdict
from copy import deepcopy
from pathlib import Path

import pytest
from forked import fresh
from small import Hooks, fitted
from test_media import show_all

from dpframe import UserError
from dpframe.loggers.wandb import WandB

pytest.importorskip("wandb", reason="wandb is not installed")


def test_a_run_and_its_resume_are_one_run_with_every_step(tmp_path):
    fresh(trained_and_resumed, tmp_path)
    first, second = map(records, sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    assert first.run_id == second.run_id == (tmp_path / "wandb-id.txt").read_text()
    assert first.config["strategy"] == "CPU" and first.project == "dpframe"
    assert (first.run.entity, first.run.run_group, first.run.notes) == ("us", "rates", "the first")
    assert (list(first.run.tags), first.run.job_type) == (["baseline"], "sweep")
    assert set(range(1, 11)) == first.curves["step/loss"].keys()
    assert second.curves["train/loss"].keys() == {5, 10, 15}
    for name, values in second.curves.items():
        if name.startswith(("train/", "val/", "step/loss")):
            assert {s: v for s, v in values.items() if s < 11} == {
                s: v for s, v in first.curves[name].items() if s in values
            }
    kinds = {name: first.media[name] for name in ("val/rows", "curve", "weights/a", "said", "tone")}
    assert kinds == {
        "val/rows": {3: "image-file", 8: "image-file"},
        "curve": {3: "image-file", 8: "image-file"},
        "weights/a": {3: "histogram", 8: "histogram"},
        "said": {3: "table-file", 8: "table-file"},
        "tone": {3: "audio-file", 8: "audio-file"},
    }
    assert second.exit_code == 0 and second.summary["val/loss"] == second.curves["val/loss"][15]


def trained_and_resumed(directory):
    saved = {}
    show = Hooks(on_step_end=show_all)
    keep = Hooks(on_epoch_end=lambda t: saved.update({t.epoch: deepcopy(t.state_dict())}))
    both = {"directory": directory, "log_every": 1}
    logger = WandB(
        entity="us", group="rates", tags=["baseline"], notes="the first", job_type="sweep"
    )
    fitted(callbacks=[show, keep], loggers=[logger], **both)
    fitted(callbacks=[show], loggers=[WandB()], resume=saved[1], max_epochs=3, **both)


def test_a_run_has_its_name_tags_and_notes_unless_the_logger_has_its_own(tmp_path):
    fresh(described, tmp_path)
    files = (next((tmp_path / name).glob("wandb/offline-run-*/*.wandb")) for name in "ab")
    run, other = (records(file).run for file in files)
    assert (run.display_name, list(run.tags), run.notes) == ("off", ["x", "y"], "two words")
    assert (other.display_name, list(other.tags), other.notes) == ("own", ["own"], "two words")


def described(directory):
    hparams = {"name": "off", "tags": "x,y", "notes": "two words"}
    for name, logger in {"a": WandB(), "b": WandB(name="own", tags=["own"])}.items():
        (directory / name).mkdir()
        logger.open(str(directory / name), config="", hparams=hparams, purge_step=None)
        logger.close({}, succeeded=True)


class records:
    """What a .wandb file holds: protobuf messages in LevelDB's log format."""

    def __init__(self, path: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        self.curves, self.media, self.summary = defaultdict(dict), defaultdict(dict), {}
        for message in messages(path.read_bytes()):
            record = Record.FromString(message)
            if record.HasField("run"):
                self.run = record.run
                self.run_id, self.project = record.run.run_id, record.run.project
                self.config = {i.key: json.loads(i.value_json) for i in record.run.config.update}
            if record.HasField("exit"):
                self.exit_code = record.exit.exit_code
            for item in record.summary.update:
                self.summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
            for item in record.history.item:
                name, *part = item.nested_key or [item.key]
                if part in ([], ["_type"]):  # the rest says which file it is
                    kept = self.media if part else self.curves
                    kept[name][record.history.step.num] = json.loads(item.value_json)


def messages(data: bytes):
    position, parts = 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        position += 7 + length
        parts.append(data[position - length : position])
        if kind in (1, 4):  # the whole of a message, or its last part
            yield b"".join(parts)
            parts = []


def test_another_mode_of_wandb_is_refused():
    with pytest.raises(UserError, match=r"logger\.wandb\.mode=onlin .* did you mean online\?"):
        WandB(mode="onlin")


@pytest.mark.parametrize(
    "name, says",
    [
        ("entitty", "entitty: wandb.init takes no such argument; did you mean entity?"),
        ("resume", "resume is set by dpframe; leave it out"),
    ],
)
def test_what_wandb_does_not_take_is_refused_before_a_run(name, says):
    with pytest.raises(UserError, match=re.escape(f"logger.wandb.{says}")):
        WandB(**{name: "x"})
