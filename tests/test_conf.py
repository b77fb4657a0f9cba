"""Every YAML under conf/ is composed and built, and says all that its class takes."""

import inspect
import re
from dataclasses import asdict, fields
from functools import cache

import pytest
import torch
import yaml
from command import CONFS
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dpframe import checkpoint
from dpframe.config import modes
from dpframe.config.build import build, check_targets, slots
from dpframe.config.compose import composed
from dpframe.config.loader import GROUPS
from dpframe.config.parts import callbacks_of
from dpframe.config.schema import is_off
from dpframe.config.target import find
from dpframe.errors import UserError
from dpframe.strategies.fsdp import FSDP
from dpframe.trainer.settings import COMPILE_OPTIONS, TrainerSettings

CONF = CONFS[0]
FILES = {
    str(path.relative_to(folder).with_suffix("")): path
    for folder in CONFS
    for path in sorted(folder.glob("*/**/*.yaml"))
}
OPTIONS = [file.rsplit("/", 1) for file in FILES if not file.startswith("hydra/")]
BUILT = [
    pair for pair in OPTIONS if pair[0] in ("strategy", "callbacks", "logger", "task/schedule")
]


def test_every_folder_is_a_group():
    assert {group for group, _ in OPTIONS} == set(GROUPS)
    assert {path.name for path in CONF.iterdir()} - {group.split("/")[0] for group in GROUPS} <= {
        "__init__.py",
        "__pycache__",
        "config.yaml",
        "hydra",
    }


WITH_RECIPE = {"gpt2_124m", "gpt_muon"}  # experiments that choose it themselves
GPT = "task.model={model_type:gpt2,n_layer:1,n_embd:8,n_head:1}"
TEXTS = [GPT, "data.tokenizer=words", "data.train=texts.jsonl"]
NEEDED = {  # what an option leaves to its user
    "lightning": ["task.module._target_=lightning.pytorch.demos.boring_classes.BoringModel"],
    "sft": TEXTS,
    "classify": [*TEXTS, "task.labels=[a,b]"],
}
EXTRAS = {  # the packages that an option needs
    "wandb": ["wandb"],
    "mlflow": ["mlflow"],
    "huggingface": ["transformers", "peft"],
    "sft": ["transformers"],
    "classify": ["transformers"],
    "multilabel": ["torchmetrics"],
    "lightning": ["lightning"],
}


@cache
def once_composed(*words):
    """For tests that only read it."""
    return composed(words)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_is_composed_and_built(group, option):
    for package in EXTRAS.get(option, ()):
        pytest.importorskip(package, reason=f"{package} is not installed")
    recipe = [] if group == "recipe" or option in WITH_RECIPE else ["recipe=boston"]
    job = once_composed(*recipe, f"{group}={option}", *NEEDED.get(option, ()))
    check_targets(job)
    for where, node, kind in slots(job.settings):
        assert isinstance(build(node, where, kind), kind)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
def test_the_formats_of_fsdp_are_typed_as_numbers_as_trainer_precision_is(name):
    job = composed(["recipe=boston", "strategy=fsdp", f"strategy.{name}=32"])
    made = build(job.config["strategy"], "strategy", FSDP)
    assert getattr(made.sharding, name) == torch.float32
    assert TrainerSettings(precision=32) == TrainerSettings(precision="32")


def test_every_pair_of_recipe_and_experiment_composes():
    """But for experiments that choose the recipe, and for boston, which has them above."""
    experiments = {option for group, option in OPTIONS if group == "experiment"} - WITH_RECIPE
    for recipe in {option for group, option in OPTIONS if group == "recipe"} - {"boston"}:
        for experiment in experiments:
            words = [f"recipe={recipe}", f"experiment={experiment}", *NEEDED.get(recipe, ())]
            assert composed(words).settings


def test_another_program_can_compose_from_the_package():
    with initialize_config_module("dpframe.conf", version_base="1.3"):
        config = compose("config", ["recipe=boston", "strategy=ddp", "trainer.gpus=4"])
    assert config.strategy.gpus == 4
    assert "hydra" not in config


def test_trainer_default_equals_the_settings_defaults_key_by_key():
    written = yaml.safe_load((CONF / "trainer" / "default.yaml").read_text())
    compile_ = written.pop("compile")  # a group, or one value
    assert compile_ == COMPILE_OPTIONS
    wanted = {k: v for k, v in asdict(TrainerSettings()).items() if k != "compile"}
    assert written == wanted, "a key belongs into conf/trainer/default.yaml, too"


@pytest.mark.whole
def test_every_key_of_a_mode_has_its_help():
    kinds = {name: modes.settings(name) for name in modes.names() if modes.settings(name)}
    assert {"compare", "export", "tune"} <= kinds.keys()
    keys = [(name, each) for name, kind in kinds.items() for each in fields(kind)]
    assert [f"{name}.{each.name}" for name, each in keys if not each.metadata.get("help")] == []


def test_every_trainer_key_has_its_comment():
    lines = (CONF / "trainer" / "default.yaml").read_text().splitlines()
    assert [line for line in lines if "#" not in line and not line.endswith(":")] == []


@pytest.mark.parametrize("file", FILES)
def test_every_file_begins_with_what_it_is(file):
    lines = FILES[file].read_text().splitlines()
    first = next(line for line in lines if not line.startswith("# @package"))
    assert re.fullmatch(r"# [A-Z0-9].+[.?]", first), first


@pytest.mark.parametrize(("group", "option"), BUILT)
def test_a_node_lists_every_option_of_its_class_with_its_default(group, option):
    config = once_composed("recipe=boston", f"{group}={option}").config
    for name in group.split("/"):
        config = config[name]
    nodes = config.values() if group in ("callbacks", "logger") else [config]
    for node in nodes:
        if is_off(node):
            continue
        target = find(node["_target_"], group)
        parameters = inspect.signature(target).parameters
        named = {name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
        assert {**node}.keys() - {"_target_"} == named, node["_target_"]
        differ = {k: v for k, v in node.items() if k in parameters and v != parameters[k].default}
        assert differ == {}, f"{node['_target_']}: the file and the class have other defaults"


def test_callbacks_and_loggers_that_are_listed_are_all_there():
    listed = ["early_stopping", "histograms", "confusion_matrix"]
    words = [f"callbacks=[{','.join(listed)}]", "logger=[wandb,csv]"]
    config = composed(["recipe=boston", *words]).config
    assert {*listed, "checkpoint", "progress"} == {k for k, v in config["callbacks"].items() if v}
    assert config["logger"].keys() == {"wandb", "csv"}


def test_what_a_recipe_sets_of_a_callback_that_is_switched_off_goes_nowhere():
    job = composed(["recipe=transfer", "callbacks=none"])  # its best checkpoint is by val/accuracy
    kept = {where for where, *_ in slots(job.settings) if where.startswith("callbacks.")}
    assert kept == {"callbacks.freeze", "callbacks.ema", "callbacks.stages"}
    check_targets(job)
    assert job.objective.metric == "val/accuracy"  # of a sweep all the same
    listed = composed(["recipe=transfer", "callbacks=[]"])
    assert listed.config == job.config | {"callbacks": listed.config["callbacks"]}
    assert [where for where, *_ in slots(listed.settings)] == [
        where for where, *_ in slots(job.settings)
    ]


@pytest.mark.parametrize("off", ["false", "null", "False", "FALSE"])  # a sweep writes False
@pytest.mark.parametrize(
    "key", ["callbacks.checkpoint", "callbacks.early_stopping", "logger.tensorboard", "logger.csv"]
)
def test_a_callback_or_a_logger_is_switched_off_whether_or_not_it_is_there(key, off):
    switched = composed(["recipe=boston", f"{key}={off}"])
    check_targets(switched)
    as_it_is = [where for where, *_ in slots(composed(["recipe=boston"]).settings)]
    assert [where for where, *_ in slots(switched.settings)] == [w for w in as_it_is if w != key]


@pytest.mark.parametrize("typed", ["callbacks.erly_stopping=false", "callbacks.ema=true"])
def test_what_switches_nothing_off_is_refused(typed):
    with pytest.raises(UserError, match="there is no key callbacks"):
        composed(["recipe=boston", typed])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("+callbacks.erly_stopping=false", "did you mean callbacks.early_stopping?"),
        ("++callbacks.erly_stopping=null", "did you mean callbacks.early_stopping?"),
        ("+logger.tensorbord=false", "did you mean logger.tensorboard?"),
    ],
)
def test_a_plus_adds_no_name_only_to_switch_it_off(typed, said):
    key = typed.lstrip("+").partition("=")[0]
    with pytest.raises(UserError) as refused:
        composed(["recipe=boston", typed])
    assert str(refused.value) == f"{typed}: there is no key {key}; {said}"


def test_a_callback_of_ones_own_is_added_and_switched_off():
    own = "+callbacks.mine._target_=dpframe.callbacks.Live"
    assert "callbacks.mine" in [
        where for where, *_ in slots(composed(["recipe=boston", own]).settings)
    ]
    for off in ("callbacks.mine=false", "++callbacks.mine=null"):
        off_again = composed(["recipe=boston", own, off])
        assert "callbacks.mine" not in [where for where, *_ in slots(off_again.settings)]
    known = composed(["recipe=boston", "+callbacks.early_stopping=false"])
    assert known.config["callbacks"]["early_stopping"] is False


@pytest.mark.parametrize(
    ("saved", "typed", "kept"),
    [
        (["callbacks.early_stopping=false"], [], ["checkpoint", "progress"]),
        (["callbacks=early_stopping"], ["callbacks.early_stopping=false"], None),
        (
            ["callbacks.early_stopping=False"],  # of a sweep's run
            ["callbacks=early_stopping"],
            ["early_stopping", "checkpoint", "progress"],
        ),
        (["callbacks=early_stopping", "callbacks.early_stopping.patience=5"], ["callbacks=[]"], []),
        (["callbacks=early_stopping", "callbacks.checkpoint.keep=2"], ["callbacks=none"], []),
        (["callbacks=[]"], [], []),
        (["callbacks=[]"], ["callbacks=default"], None),
    ],
)
def test_a_resumed_run_has_the_callbacks_that_are_on(tmp_path, saved, typed, kept):
    checkpoint.save({}, tmp_path / "checkpoints" / "last.ckpt")
    (tmp_path / ".hydra").mkdir()
    text = yaml.safe_dump(["recipe=boston", *saved])
    (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
    job = composed([f"resume={tmp_path}", *typed])
    check_targets(job)
    assert {*callbacks_of(job)} == {*(["checkpoint", "progress"] if kept is None else kept)}


def test_a_strategy_takes_the_trainers_keys():
    for option in (option for group, option in OPTIONS if group == "strategy"):
        node = OmegaConf.load(FILES[f"strategy/{option}"])
        for key in ("gpus", "accelerator"):
            assert OmegaConf.to_container(node)[key] == f"${{trainer.{key}}}", option


def test_a_recipe_may_set_any_other_group(tmp_path):
    text = "# @package _global_\ndefaults:\n  - boston\n  - override /strategy: ddp\n"
    text += "  - override /callbacks: none\n  - _self_\nstrategy: {timeout_seconds: 5}\n"
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text(text)
    job = composed(["recipe=own"], config_dir=str(tmp_path))
    assert job.config["strategy"]["_target_"].endswith("DDP")
    assert job.config["strategy"]["timeout_seconds"] == 5
    assert job.config["callbacks"]["checkpoint"] == {"_target_": None}
    typed = composed(["recipe=own", "strategy=cpu"], config_dir=str(tmp_path))
    assert typed.config["strategy"]["_target_"].endswith("CPU")


def test_a_recipe_without_a_name_is_called_as_its_file(tmp_path):
    text = (CONF / "recipe" / "boston.yaml").read_text().replace("recipe: boston\n", "")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text(text)
    job = composed(["recipe=own"], config_dir=str(tmp_path))
    assert job.settings.recipe == "own"
    assert job.run_dir.startswith("outputs/own/")


def test_a_runs_name_ends_that_of_its_directory_and_leads_nowhere_else():
    words = ["recipe=boston", "tags=[ablation,1]", "notes='two words'"]
    job = composed([*words, "name='../off, a=b'"])
    day, _, name = job.run_dir.removeprefix("outputs/boston/").partition("_.._")
    assert (name, job.settings.tags) == ("off, a=b", ["ablation", "1"]) and "/" not in day
    assert composed(words).settings.name is None
    said = {"name='a\nb'": "is not one line of text", "tags=['a,b']": "'a,b' has a comma"}
    for word, reason in said.items():
        with pytest.raises(UserError, match=reason):
            composed(["recipe=boston", word])
