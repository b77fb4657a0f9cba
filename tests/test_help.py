"""`--help TOPIC` prints settings with their comments, and imports nothing heavy."""

import re
from dataclasses import fields

import pytest
from command import cold_attempts, write

from dpframe.cli.main import parser
from dpframe.config.help import shown_for
from dpframe.trainer.settings import TrainerSettings

OURS = """
# @package _global_
# A recipe of one's own.
defaults: [boston, _self_]
task:
  optimizer: {lr: 0.5}
vars:
  layers:  # from the first one
    - 1
    - 2
"""
SHOWN = {
    "trainer": [
        r"trainer=default  How long, how exactly",
        r"^  trainer\.max_epochs=10 +whichever of these three comes first; null: no limit$",
        r"^  trainer\.compile\.mode=null +torch\.compile: default, reduce-overhead",
    ],
    "strategy": [r"^strategy=cpu  One process", r"^  strategy\.timeout_seconds=1800 +how long a"],
    "callbacks": [r"^  callbacks\.early_stopping\.patience=10 +validations, or epochs"],
    "recipe": [r"^recipe=boston  House prices", r"^dpframe --help recipe=NAME shows"],
    "callbacks=ema": [r"^  callbacks\.ema\.decay=0\.999 +what stays of the average"],
    "boston": [
        r"^recipe=boston  House prices",
        r"^  task\.optimizer\.lr=0\.01$",
        r"^  data\.split_seed=0 +which 102 rows",
    ],
    "recipe=ours": [r"one's own", r"lr: 0\.5", r"^  vars\.layers=\[…\] +from the first one$"],
    "trainer.max_epochs=3": [r"^  trainer\.max_epochs=10 +whichever"],
    "strategy.timeout_seconds": [r"^  strategy\.timeout_seconds=1800"],
    "tune": [r"^mode=tune +The largest batch", r"^  tune\.memory=null +bytes a replica"],
    "data": [r"^  prepare_data\(\) +downloads", r"^  setup\(\) ", r"^  data\.drop_last=false "],
    "task": [r"^  training_step\(batch\) +returns", r"^  task\.scale_lr=null "],
    "task.optimizer": [r"^recipe=boston$", r"^  task\.optimizer\._target_=torch\.optim\.Adam$"],
    "lr": [r"^recipe=lenet$", r"^  task\.optimizer\.lr=0\.2$", r"^recipe=ours$", r"lr: 0\.5"],
    "devices": [r"^  trainer\.gpus=null"],
    "seed": [r"^  seed=0 +of weights, shuffling"],
}
REFUSED = {
    "trainr": "did you mean trainer?",
    "strategy=dpd": "did you mean ddp?",
    "task.optimzer.lr": "did you mean task.optimizer.lr?",
    "trainer.max_epoch": "did you mean trainer.max_epochs?",
    "xyz": "there is: recipe, strategy, trainer",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("help"), {"mine/recipe/ours.yaml": OURS})
    lines = [["--config-dir=mine", "--help", topic] for topic in (*SHOWN, *REFUSED)]
    done, heavy = cold_attempts(lines, folder)
    assert heavy == []
    return dict(zip((*SHOWN, *REFUSED), done, strict=True))


OF_PLUGINS = {"tune"}


@pytest.mark.parametrize(
    "topic", [pytest.param(t, marks=pytest.mark.whole) if t in OF_PLUGINS else t for t in SHOWN]
)
def test_help_on_a_topic_has_its_settings_with_their_comments(shown, topic):
    assert shown[topic].code == 0, shown[topic].err
    for pattern in SHOWN[topic]:
        assert re.search(pattern, shown[topic].out, re.MULTILINE), shown[topic].out


def test_a_topic_that_is_not_there_is_told_with_the_nearest(shown):
    for topic, says in REFUSED.items():
        assert shown[topic].code == 2 and says in shown[topic].err, shown[topic]


def test_help_shows_every_setting_of_every_option():
    """And no value twice: what is shown is what the file says."""
    page = shown_for(parser().parse_intermixed_args(["--help", "trainer"]))
    keys = re.findall(r"^  (trainer\.[\w.]+)=", page, re.MULTILINE)
    assert len(keys) == len(set(keys))
    tops = {key.split(".")[1] for key in keys}
    assert {field.name for field in fields(TrainerSettings)} <= tops | {"compile"}
