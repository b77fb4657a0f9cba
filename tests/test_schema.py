"""`dpframe schema`: what an editor checks and completes configs by."""

import json
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from command import ROOT, attempts
from omegaconf import OmegaConf

from dpframe.config.json_schema import json_schema

FILES = [file for group in ("recipe", "experiment") for file in (ROOT / "conf" / group).iterdir()]
BOSTON = {
    "task": {
        "_target_": "dpframe.recipes.boston.Boston",
        "net": {"_target_": "torch.nn.Linear", "in_features": 13, "out_features": 1},
        "optimizer": {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.01},
    },
    "data": {"_target_": "dpframe.recipes.boston.BostonData", "batch_size": 128},
    "trainer": {"max_epochs": 3},
    "callbacks": {"checkpoint": {"keep": 2}, "mine": {"_target_": "mine.Mine", "any": 1}},
    "logger": {"tensorboard": None},
    "strategy": {"find_unused_parameters": True},
    "seed": 1,
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made = json_schema(None)
    jsonschema.Draft7Validator.check_schema(made)
    return made


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_recipe_and_experiment_is_right(schema, file):
    jsonschema.validate(OmegaConf.to_container(OmegaConf.load(file)), schema)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.max_epochs", None),
        ("trainer.max_epochs", "${vars.epochs}"),
        ("trainer.gpus", [0, 1]),
        ("trainer.precision", 64),
        ("trainer.limit_train_batches", 0.5),
        ("data.workers", "auto"),
        ("callbacks.checkpoint", None),
        ("callbacks.early_stopping", False),
        ("logger.tensorboard", False),
        ("callbacks.checkpoint", {"_target_": "mine.Checkpoint", "other": 1}),
        ("task.optimizer.groups", {"*.bias": {"lr": 0.1}}),
        ("task.scale_lr", {"batch_size": 128}),
        ("task.schedule", {"warmup": 0.1, "decay": 100}),
        ("task.schedule", {"_target_": "dpframe.schedules.WSD", "decay": 100}),
        ("task.schedule", {"_target_": "mine.Halves", "every": 2}),
        ("task.schedule", "cosine"),  # of a task that takes something by this name
        ("task", {"layers": 3}),
        ("vars.mine", 1),
    ],
)
def test_what_a_run_takes_is_right(schema, key, value):
    jsonschema.validate(changed(key, value), schema)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainr", {}),
        ("trainer.max_epoch", 3),
        ("trainer.max_epochs", "abc"),
        ("trainer.max_epochs", 0),
        ("trainer.max_seconds", 0),
        ("trainer.precision", "bf17"),
        ("trainer.deterministic", "yes"),
        ("task.optimzer", {}),
        ("task.optimizer.lrr", 1),
        ("task.net.in_featurs", 3),
        ("task.schedule.warmpu", 3),
        ("task.schedule", {"_target_": "dpframe.schedules.Linear", "decay": 100}),
        ("task.net.in_features", "many"),
        ("data.batchsize", 3),
        ("data.drop_last", "yes"),
        ("data.pin_memory", "yes"),
        ("callbacks.checkpoint.monitr", "val/f1"),
        ("callbacks.early_stopping", True),
        ("strategy.find_unused", True),
        ("mode", "fitt"),
        ("seed", "x"),
        ("sweep.jbs", 2),
        pytest.param("tune.memry", 1, marks=pytest.mark.whole),
    ],
)
def test_a_typo_is_found_where_it_is(schema, key, value):
    jsonschema.validate(BOSTON, schema)
    (error,) = jsonschema.Draft7Validator(schema).iter_errors(changed(key, value))
    parts = key.split(".")
    assert [*error.absolute_path] in (parts, parts[:-1])


def changed(key: str, value: Any) -> dict[str, Any]:
    config = deepcopy(BOSTON)
    *above, last = key.split(".")
    node: Any = config
    for name in above:
        node = node.setdefault(name, {})
    node[last] = value
    return config


def test_keys_have_their_comments_and_choices(schema):
    trainer = schema["properties"]["trainer"]["properties"]
    page = (ROOT / "conf" / "trainer" / "default.yaml").read_text()
    told = {name: each["description"] for name, each in trainer.items() if "description" in each}
    assert trainer.keys() - told.keys() == {"compile"}  # a group, each of whose keys has its own
    assert all(comment in page for comment in told.values())
    assert "bf16" in trainer["precision"]["anyOf"][0]["enum"]


def test_the_command_prints_it_and_takes_a_folder_of_ones_own(tmp_path):
    file = tmp_path / "conf" / "recipe" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("task: {_target_: collections.Counter}\n")
    lines = [["schema", "--config-dir=conf"], ["schema", "conf"], ["schema", "--help"]]
    done, refused, helped = attempts(lines, tmp_path)
    assert done.code == 0 and "collections.Counter" in json.loads(done.out)["$defs"]
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "dpframe: dpframe schema conf: it takes nothing but --config-dir DIR\n"
    assert helped.out.startswith("dpframe schema [--config-dir DIR] > ")
