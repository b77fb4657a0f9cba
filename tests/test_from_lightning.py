"""The page for Lightning's users: complete, and true about our side."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from small import Small, fitted
from torch import nn

from dpframe import Trainer, UserError
from dpframe.lightning_names import INSTEAD
from dpframe.trainer.callback import HOOKS
from dpframe.trainer.settings import TrainerSettings

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from-lightning.md").read_text()
ARGUMENTS = """
accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs
max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches
limit_predict_batches overfit_batches val_check_interval check_val_every_n_epoch
num_sanity_val_steps log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary
accumulate_grad_batches gradient_clip_val gradient_clip_algorithm deterministic benchmark
inference_mode use_distributed_sampler profiler detect_anomaly barebones plugins sync_batchnorm
reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams model_registry
"""  # of lightning.pytorch.Trainer 2.6
STAGES = ("validation", "test", "predict")
EACH = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
TRAINING = [f"train_{moment}" for moment in EACH]
OTHERS = """
fit_start fit_end before_backward after_backward before_optimizer_step before_zero_grad
sanity_check_start sanity_check_end save_checkpoint load_checkpoint exception
"""
STAGED = [f"{stage}_{moment}" for stage in STAGES for moment in EACH]
THEIR_HOOKS = {"setup", "teardown"} | {f"on_{n}" for n in [*OTHERS.split(), *TRAINING, *STAGED]}


def table_of(name: str) -> dict[str, str]:
    rows = PAGE.partition(f"<!-- {name} -->")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", rows, re.M))


@pytest.mark.parametrize(
    "name, theirs", [("arguments", set(ARGUMENTS.split())), ("hooks", THEIR_HOOKS)]
)
def test_the_page_has_every_argument_and_every_hook(name, theirs):
    assert table_of(name).keys() == theirs


def test_no_lightning_is_installed_whose_own_loading_of_checkpoints_runs_code():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["lightning"] == ["lightning>=2.6.6"]
    assert "Lightning 2.6.6 or newer" in PAGE


def test_what_it_names_of_ours_is_there():
    settings = {field.name for field in fields(TrainerSettings)}
    named = set(re.findall(r"`trainer\.([a-z]\w*)[=`.]", PAGE)) - {"recompute", "metrics"}
    assert len(named) > 15 and named <= settings, named - settings
    hooks = {
        hook for ours in table_of("hooks").values() for hook in re.findall(r"`(on_\w+)`", ours)
    }
    assert hooks <= set(HOOKS)


class Theirs(Small):
    @property
    def mine(self) -> int:
        return self.missing


class Own(Small):
    def __init__(self) -> None:
        super().__init__()
        self.logger = nn.Linear(1, 1)
        self.hparams = {"width": 8}

    def log(self, name: str) -> str:
        return name


@pytest.mark.parametrize("name", INSTEAD)
def test_what_a_task_has_only_in_lightning_is_one_line_with_what_to_write(name):
    with pytest.raises(UserError) as caught:
        getattr(Theirs(), name)
    line = str(caught.value)
    assert line.startswith(f"Theirs.{name} is Lightning's and not here; ") and "\n" not in line
    for attribute in re.findall(r"self\.(\w+)", INSTEAD[name]):
        assert hasattr(Theirs(), attribute)
    for method in re.findall(r"\btrainer\.(log\w*)", INSTEAD[name]):
        assert hasattr(Trainer, method)


def test_a_tasks_own_names_and_its_own_mistakes_stay_as_they_are():
    task = Own()
    assert (task.log("a"), task.hparams, type(task.logger)) == ("a", {"width": 8}, nn.Linear)
    assert fitted(task).task is task
    with pytest.raises(AttributeError, match="'Theirs' object has no attribute 'mi"):
        Theirs().mine  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'losss'"):
        Theirs().losss  # noqa: B018


class Manual(Small):
    automatic_optimization = False


class SetsIt(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize("kind", [Manual, SetsIt])
def test_manual_optimization_is_refused_before_training(kind):
    with pytest.raises(UserError, match=f"^{kind.__name__}.automatic_optimization is Lightning's"):
        fitted(kind())
