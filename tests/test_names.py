"""The names that an editor and a notebook complete, and the names that a Trainer takes."""

import inspect
import re
from dataclasses import fields
from importlib import import_module
from typing import get_type_hints

import pytest
from command import CONFS, ROOT
from omegaconf import OmegaConf
from small import Rows, Small, fitted

from dpframe import Trainer, TrainerSettings, UserError, strategies
from dpframe.strategies import DataParallel
from dpframe.trainer.checks.keywords import SettingsByName

STRATEGIES = (
    "strategy=dpp is not one of auto, cpu, single_gpu, data_parallel, ddp, fsdp, ray; did you mean "
    "ddp?"
)
PACKAGES = ("dpframe", *(f"dpframe.{n}" for n in ("callbacks", "loggers", "strategies", "trainer")))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.whole
def test_a_package_lists_its_public_names_and_has_each(package):
    module = import_module(package)
    assert {*dir(module)} - {"__version__"} == {*module.__all__}
    assert all(getattr(module, name).__name__ == name for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nothing'"):
        _ = module.Nothing


def test_classes_that_a_config_names_are_in_their_packages():
    pages = "".join(file.read_text() for file in (ROOT / "conf").glob("*/*.yaml"))
    found = re.findall(
        r"_target_: (dpframe\.(?:callbacks|loggers|strategies))\S*\.(\w+)$", pages, re.M
    )
    assert len(found) > 20
    assert [name for package, name in found if name not in dir(import_module(package))] == []


@pytest.mark.whole
def test_a_strategy_has_one_name_in_a_config_and_in_python():
    files = {f.stem: OmegaConf.load(f) for conf in CONFS for f in conf.glob("strategy/*.yaml")}
    assert {*files} == {*strategies.NAMES}
    for name, kind in strategies.NAMES.items():
        assert files[name]["_target_"].endswith(f".{kind}")


def test_a_trainer_takes_a_strategy_by_its_name():
    by_name = fitted(strategy="data_parallel", gpus=2, accelerator="cpu")
    by_object = fitted(strategy=DataParallel(2, "cpu"))
    assert by_name.strategy.name == "DataParallel" and by_name.strategy.replicas == 2
    assert by_name.metrics == by_object.metrics


def test_the_settings_are_typed_keywords_of_a_trainer_and_in_its_signature():
    hints = get_type_hints(TrainerSettings)
    wanted = {each.name: hints[each.name] for each in fields(TrainerSettings)}
    wanted_here = wanted | {"precision": str | int}
    assert get_type_hints(SettingsByName) == wanted_here, "a key belongs there, too"
    shown = inspect.signature(Trainer).parameters
    assert [*shown][-len(wanted) :] == [*wanted]
    assert shown["max_epochs"].default == TrainerSettings.max_epochs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_epoch": 3}, "Trainer: there is no setting max_epoch; did you mean max_epochs?"),
        ({"devices": 2}, "Trainer: there is no setting devices; did you mean gpus?"),
        ({"epochs": 3}, "Trainer: there is no setting epochs; did you mean max_epochs?"),
        ({"workers": 1}, "Trainer: there is no setting workers; use DataSets(…, workers=1)"),
        ({"run": "x/y"}, "Trainer: run=x/y; pass RunInfo(directory='x/y')"),
        ({"strategy": "dpp"}, STRATEGIES),
    ],
)
def test_a_name_of_another_framework_or_kind_is_one_line(given, said):
    with pytest.raises(UserError) as refused:
        Trainer(Small(), Rows(), **given)
    assert str(refused.value) == said
