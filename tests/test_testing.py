"""The conformance kit passes what is exact, and fails each planted bug with its cause."""

import os
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import planted
import pytest
import torch
from command import attempts, dpframe, write
from torch import nn
from torch.utils.data import IterableDataset

from dpframe import Task, TrainerSettings, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU, SingleGPU
from dpframe.testing import Recipe, check_strategy, verify
from dpframe.testing.checks import CHECKS
from dpframe.testing.course import Small, Table

TWO = {"gpus": 2, "accelerator": "cpu"}
THREE = {"gpus": 3, "accelerator": "cpu"}


@pytest.fixture(autouse=True)
def put_away() -> Iterator[None]:
    yield
    for left in planted.LEFT:
        if isinstance(left, subprocess.Popen):
            left.kill()
            left.wait()
        else:
            left.close()
    planted.LEFT.clear()
    os.environ.pop("MASTER_ADDR", None)


@pytest.fixture(autouse=True, scope="module")
def imported_once() -> None:
    """Imports what ddp's ranks would each import, before they are forked."""
    torch.compiler.reset()


# What is exact


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        (CPU, {}),
        (SingleGPU, {"accelerator": "cpu"}),
        ("data_parallel", {**THREE, "overrides": ["seed=4"]}),
        (DDP, THREE),
    ],
)
def test_the_strategies_pass_every_check(strategy, arguments):
    report = check_strategy(strategy, recipe="boston", **arguments)
    assert [finding.check for finding in report.findings] == list(CHECKS)
    void = {finding.check for finding in report.findings if finding.passed is None}
    assert void == (set() if strategy is DDP else {"gradient_sync"})
    assert "8 of boston" in report["weights"].compared
    assert re.match(r"verify boston on (CPU: 1|SingleGPU: 1|DataParallel: 3|DDP: 3)", report.title)


@pytest.mark.gpu
def test_a_gpu_passes_every_check():
    assert check_strategy(SingleGPU, recipe="lenet", gpus=1, accelerator="cuda").passed
    assert check_strategy(DDP, recipe="boston", gpus=1, accelerator="cuda").passed


def test_random_numbers_and_threads_are_left_as_they_were():
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    check_strategy(CPU, only=["weights"])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


# Planted bugs: the checks that fail, and the words of one of them

ONE = {"accelerator": "cpu"}
OTHER_WEIGHTS = {"weights", "loss_curve", "metrics", "accumulation", "few_rows", "weighted"}
OTHER_WEIGHTS |= {"float32"}
OTHER_MEANS = {"loss_curve", "metrics", "validation", "accumulation", "float32", "evaluation"}
PLANTED: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "MeanOfMeans": (
        THREE,
        OTHER_WEIGHTS,
        "weights: the kit's network ends with other weights, most in .*; they follow from the mean "
        "of the replicas' means, not the mean over all rows",
    ),
    "Padded": (
        TWO,
        OTHER_WEIGHTS | {"rows_once", "validation", "predict_order", "evaluation"},
        "rows_once: of a batch of 1 row the shares have 1 1: they are padded, or overlap; row 0 "
        "counts twice",
    ),
    "Unshared": (
        TWO,
        OTHER_WEIGHTS | {"gradient_sync", "evaluation"},
        "weights: .*; rank 1 ends with other ones than rank 0 .* they follow from the main "
        "process's own rows alone: nothing is summed over the processes",
    ),
    "SaysAveraged": (
        THREE,
        OTHER_WEIGHTS,
        "weights: .* they follow from 3 times the gradient: the replicas' gradients are summed, "
        "and averaged_over says that they are averaged",
    ),
    "Rounds": (
        ONE,
        OTHER_WEIGHTS - {"float32"},
        r"loss_curve: the kit's network: first apart in step/loss at step 2: 4\.\d+, not 4\.\d+",
    ),
    "Averages": (
        TWO,
        {"collectives", "weighted"},
        r"collectives: reduce gave \[1.5, 1.0\] in rank 0, not \[3.0, 2\]: reduce is the sum",
    ),
    "SharesTheMains": (
        TWO,
        OTHER_MEANS | {"collectives", "weighted"},
        "validation: of 0² to 9² the mean is 28.5; it gave 6, the main process's own rows alone: "
        "nothing is summed",
    ),
    "EvenMeans": (
        THREE,
        OTHER_MEANS,
        "validation: of 0² to 9² the mean is 28.5; it gave 35.8333, the mean of the replicas' "
        "means, not the mean over all rows",
    ),
    "PadLarge": (
        TWO,
        {"rows_once", "float32"},
        r"rows_once: of a batch of 33 rows the shares have 24 16: they are padded",
    ),
    "Other4": (
        TWO,
        {"rows_once"},
        "rows_once: of a batch of 1 row the shares on 4 replicas have 0 0 0 0: row 0 is missing",
    ),
    "StreamDropTail": (
        TWO,
        {"rows_once"},
        "rows_once: of a batch of 1 row, as a list as streams have them, the shares have 0 0: "
        "row 0 is missing",
    ),
    "HalfIfFloat32": (
        TWO,
        {"float32"},
        "float32: the kit's network of 9,889 weights ends with other weights.* in float32 it is "
        "computed in fewer digits than float32's",
    ),
    "TopKLarge": (
        TWO,
        {"float32"},
        "float32: .* 9[78]% of its weights never moved: gradients are left out",
    ),
    "FirstThree": (
        ONE,
        {"accumulation"},
        "accumulation: .* each update's first 3 micro-batches: the others are lost",
    ),
    "EvalHalf": (
        TWO,
        {"float32", "evaluation"},
        "evaluation: .* validates other numbers than its weights give on the CPU, first apart in "
        "val/loss at step 4: .*: they are what bfloat16 gives",
    ),
    "EvalTrains": (
        THREE,
        {"evaluation"},
        "evaluation: .* validation_step runs in training mode",
    ),
    "BuffersApart": (
        TWO,
        {"evaluation"},
        "evaluation: .*: rank 1 has another net.1.running_mean than rank 0, and validates with it",
    ),
    "SameMasks": (
        TWO,
        {"random_numbers", "checkpoint"},
        "random_numbers: rank 1 draws the random numbers of rank 0, so that dropout drops the same",
    ),
    "RandomStateLost": (
        ONE,
        {"random_numbers", "checkpoint"},
        "random_numbers: a run that is resumed within an epoch draws other random numbers than one",
    ),
    "ShareNumbers": (
        TWO,
        {"collectives"},
        r"collectives: share of a list of numbers gave \[1, 7\] in rank 1, not \[0, 7\]",
    ),
    "LogsEverywhere": (
        TWO,
        {"logged_once"},
        "logged_once: each number was logged 2 times, by the ranks 0 1: `logger` must return the "
        "loggers in the main process alone",
    ),
    "NeverQuiet": (
        TWO,
        {"gradient_sync"},
        r"gradient_sync: the gradients were shared 3 times in one update: grad_sync\(False\) has "
        "no effect",
    ),
    "Backwards": (
        TWO,
        {"collectives", "predict_order", "random_numbers", "checkpoint"},
        "predict_order: 10 rows came as 5 6 7 8 9 0 1 2 3 4: shares have to keep the batch's order",
    ),
    "ForgetsToReturn": (
        ONE,
        {"launch"},
        "launch: launch did not return what `run` returned in the main process",
    ),
    "WrapsInPlace": (
        ONE,
        {"checkpoint", "evaluation"},
        "checkpoint: it has net.module.0.weight in place of net.0.weight: wrap must leave the task",
    ),
    "ForgetsItsState": (
        ONE,
        {"checkpoint"},
        "checkpoint: .* task.net.0.weight is not what was saved once it is read again: state_dict",
    ),
    "LeavesThings": (
        ONE,
        {"shutdown"},
        r"shutdown: left behind: environment variable MASTER_ADDR, in the process that launched "
        r"the job; port \d+, in .*; process \d+: .*sleep\(600\), in the process that launched",
    ),
    "LeavesThreadInRanks": (
        TWO,
        {"shutdown"},
        r"shutdown: left behind: thread watcher, in rank 0 after close\(\); thread watcher, in ",
    ),
    "AllMain": (
        TWO,
        {"launch"},
        "launch: failed in .*; is_main is True in process 1 of 2, not False",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_fails_its_checks_with_the_cause(name):
    arguments, failed, cause = PLANTED[name]
    report = verify(partial(getattr(planted, name), **arguments))
    print(report)
    assert {finding.check for finding in report.failed} == failed
    assert re.search(f"^FAIL {cause}", str(report), re.MULTILINE)


def test_a_rank_that_hangs_is_ended_and_reported():
    report = verify(partial(planted.Hangs, **TWO), give_up_seconds=5)
    assert {finding.check for finding in report.failed} == {"launch"}
    assert "collectives did not end within 5 seconds" in report["launch"].cause


def test_check_strategy_raises_with_the_table_and_the_causes_of_checks_not_skipped():
    only = ["weights", "checkpoint", "metrics"]
    with pytest.raises(AssertionError) as caught:
        check_strategy(planted.SaysAveraged, only=only, skip=["metrics"], **TWO)
    lines = str(caught.value).splitlines()
    assert re.search(r"^weights .* FAIL$", lines[4])
    assert re.search(r"^checkpoint .* pass$", lines[5])
    assert lines[-2].startswith("FAIL weights: ") and lines[-1] == "1 of 2 checks passed"


def test_an_unknown_check_is_refused():
    with pytest.raises(UserError, match="there is no check weigths; did you mean weights"):
        check_strategy(CPU, only=["weigths"])


def test_what_a_strategy_refuses_is_no_fail_of_its():
    with pytest.raises(UserError, match="CPU is one replica"):
        check_strategy(CPU, gpus=2)


@pytest.mark.parametrize("given", [{"strategy": "ddp"}, {"strategy": CPU, "overrides": ["seed=1"]}])
def test_names_need_a_recipe_to_look_them_up_by(given):
    with pytest.raises(UserError, match="pass recipe=NAME"):
        check_strategy(**given)


# Recipes whose curves can't be compared


class Noisy(Small):
    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        return super().training_step([batch[0] + torch.randn_like(batch[0]), *batch[1:]])


class Largest(Small):
    """Measures something that is no mean."""

    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        return {**super().training_step(batch), "largest": self._error(batch).abs().max()}


class Rounding(Small):
    """The usual accuracy: a float32 in a task of float64."""

    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        is_near = self._error(batch).abs() < 2
        return {**super().training_step(batch), "accuracy": is_near.float().mean()}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "error_rate": 1 - means["accuracy"]}


class RoundingNumbers(Rounding):
    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        measured = super().training_step(batch)
        return {**measured, "accuracy": measured["accuracy"].item()}


class RoundingLoss(Small):
    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        return {"loss": self._error(batch).float().square().mean()}


class Contrastive(Small):
    """Each row is told from the others of its batch."""

    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        output = self.net(batch[0])
        apart = (output - output.T).square()
        return {"loss": nn.functional.cross_entropy(-apart, torch.arange(len(output)))}


class Balanced(Small):
    """Rows count by their class, and the step doesn't say how much they count together."""

    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        return {"loss": super().training_step(batch)["loss"] / batch[2].mean()}


CURVES = ["weights", "loss_curve", "metrics", "mean_over_rows"]


@pytest.mark.parametrize("task", [Rounding, RoundingNumbers])
def test_a_metric_that_the_task_rounds_is_compared_as_closely_as_it_is_known(task):
    report = check_strategy(DataParallel, recipe=Recipe("mine", task, Table), only=CURVES, **THREE)
    assert report.notes == []
    assert 1e-9 < float(report["metrics"].measured) < 1e-6
    assert float(report["loss_curve"].measured) < 1e-12


class OffByAMillionth(Rounding):
    """Another number on another number of replicas, and not by rounding."""

    def training_step(self, batch: list[torch.Tensor]) -> dict[str, Any]:
        measured = super().training_step(batch)
        return {**measured, "loss": measured["loss"] * (1 + 1e-6 / len(batch[0]))}


def with_layer(task: type[Small], layer: nn.Module) -> Small:
    made = task()
    made.net.insert(1, layer)
    return made


@pytest.mark.parametrize(
    "task",
    [
        Contrastive,
        Balanced,
        OffByAMillionth,
        partial(with_layer, Contrastive, nn.BatchNorm1d(8)),
        partial(with_layer, Contrastive, nn.Dropout(0.1)),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_fails_on_any_strategy(task):
    report = verify(CPU, recipe=Recipe("mine", task, Table), only=CURVES)
    assert [finding.check for finding in report.failed] == ["mean_over_rows"]
    cause = (
        r"mine's loss of 8 rows is [\d.]+ in one batch and [\d.]+ in shares of 3 3 2, .* replicas"
    )
    assert re.match(cause, report["mean_over_rows"].cause)


@pytest.mark.parametrize(
    ("task", "note"),
    [
        (partial(with_layer, Small, nn.Dropout(0.1)), "net.1 is a Dropout, which draws other"),
        (partial(with_layer, Small, nn.BatchNorm1d(8)), "net.1 is a BatchNorm1d: other shares"),
        (Noisy, "the loss of the same 8 rows differs by what it draws at random"),
        (RoundingLoss, "its loss is rounded to float32"),
    ],
)
def test_a_recipe_that_differs_by_share_is_left_out_of_the_curves_and_says_so(task, note):
    report = check_strategy(DataParallel, recipe=Recipe("mine", task, Table), only=CURVES, **THREE)
    assert re.match(f"mine is left out of the curves: {note}", report.notes[0])
    assert "mine" not in report["weights"].compared


class Predicting(Small):
    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0])


class PredictData(Table):
    def predict_dataset(self) -> Any:
        return self.held_out


class OnlyPredicts(Task):
    """Like the recipe shapes: nothing to train, nothing to validate."""

    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return batch[0]


def test_a_recipe_that_only_predicts_is_tried_for_its_order():
    recipe = Recipe("mine", OnlyPredicts, PredictData)
    assert check_strategy(DataParallel, recipe=recipe, only=["predict_order"], **TWO).passed


NORMED = Recipe("mine", partial(with_layer, Predicting, nn.BatchNorm1d(8)), PredictData)
TRIED = ["rows_once", "evaluation", "predict_order", "checkpoint"]


def test_a_recipe_without_a_curve_is_tried_for_its_rows_evaluation_checkpoint_and_order():
    report = check_strategy(DDP, recipe=NORMED, only=TRIED, **THREE)
    assert report["evaluation"].compared.endswith("dropout, mine")
    report = verify(partial(planted.EvalTrains, **THREE), recipe=NORMED, only=TRIED)
    assert (
        "mine validates other numbers than its weights give on the CPU"
        in report["evaluation"].cause
    )
    assert "mine predicts something else than on the CPU" in report["predict_order"].cause


def test_a_row_of_a_recipe_that_is_dropped_is_found_though_no_share_of_the_kits_shows_it():
    drops = partial(planted.DropsOf20, gpus=5, accelerator="cpu")
    report = verify(drops, recipe=NORMED, only=["rows_once"])
    assert re.match(r"2 epochs of mine read row [\d ]+ 1 .*times", report["rows_once"].cause)


@pytest.mark.parametrize("layer", [nn.Dropout(0.0), nn.Identity()])
def test_a_recipe_whose_dropout_is_zero_is_compared(layer):
    recipe = Recipe("mine", partial(with_layer, Small, layer), Table)
    report = check_strategy(DataParallel, recipe=recipe, only=CURVES, **THREE)
    assert report.notes == [] and "8 of mine" in report["weights"].compared


def test_a_metric_that_is_no_mean_is_left_out_and_the_rest_compared():
    recipe = Recipe("mine", Largest, Table)
    report = check_strategy(DataParallel, recipe=recipe, only=CURVES, **THREE)
    assert report.notes == ["mine's largest: no mean over rows, so it is not compared"]
    assert "8 of mine" in report["metrics"].compared


# Settings and data that are part of the maths


class Stream(IterableDataset):
    def __init__(self) -> None:
        table = Table()
        table.setup()
        self.rows = table.train

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class StreamData(Table):
    def train_dataset(self) -> Any:
        return Stream()

    def val_dataset(self) -> None:
        return None


class Scheduled(Small):
    def configure_optimizer(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.total_steps)


class Plateaued(Small):
    def configure_optimizer(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize(
    ("task", "data", "settings"),
    [
        (Scheduled, Table, {"scheduler_every": "step", "accumulate": 3, "clip_norm": 0.5}),
        (Plateaued, Table, {"clip_value": 0.1}),
        (Small, StreamData, {}),
    ],
)
def test_clipping_schedules_accumulation_and_streams_are_compared(task, data, settings):
    recipe = Recipe("mine", task, data, TrainerSettings(**settings), seed=3)
    assert check_strategy(DataParallel, recipe=recipe, only=CURVES, **THREE).passed


# At the command line

MINE = """
from dpframe import Strategy
from dpframe.strategies.data_parallel import DataParallel

class SaysAveraged(DataParallel):
    def setup(self):
        super().setup()
        self.averaged_over = self.replicas

class ForgetsToReturn(Strategy):
    def launch(self, run, *args):
        run(*args)
"""
FILES = {
    "mine/wrong.py": MINE,
    "mine/strategy/sums.yaml": "_target_: mine.wrong.SaysAveraged\n"
    "gpus: ${trainer.gpus}\naccelerator: cpu\n",
    "mine/strategy/forgets.yaml": "_target_: mine.wrong.ForgetsToReturn\n",
    "a.ckpt": "",
}


def test_mode_verify_prints_the_table(tmp_path):
    words = ("mode=verify", "recipe=boston", "strategy=ddp", "trainer.gpus=2")
    done = dpframe(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("verify boston on DDP: 2 replicas in 2 processes on cpu; float64")
    assert [line.split()[0] for line in lines[3:-2]] == list(CHECKS)
    assert all(line.endswith("  pass") for line in lines[3:-2])
    assert lines[-1] == f"{len(CHECKS)} of {len(CHECKS)} checks passed"
    assert list(tmp_path.iterdir()) == []  # it leaves no run directory


def test_mode_verify_exits_with_1_where_a_check_fails_and_with_2_where_it_is_refused(tmp_path):
    lines = [
        ["recipe=shapes"],
        ["recipe=boston", "checkpoint=a.ckpt"],
        ["--config-dir=mine", "recipe=boston", "strategy=sums", "trainer.gpus=2"],
        ["--config-dir=mine", "-m", "recipe=shapes", "strategy=cpu,forgets"],
    ]
    tried = attempts([[*line, "mode=verify"] for line in lines], write(tmp_path, FILES))
    trains_nothing, refused, fails, sweep = tried
    assert trains_nothing.code == 0
    note = "note: shapes is left out of the curves: it trains nothing; the kit's own"
    assert note in trains_nothing.out
    assert refused.code == 2
    assert "checkpoint=a.ckpt: mode=verify starts from the recipe's own weights" in refused.err
    assert fails.code == 1 and fails.files == ["a.ckpt", "mine"]
    assert "boston ends with other weights" in fails.out
    assert "averaged_over says that they are averaged" in fails.out
    assert sweep.code == 1 and "sweep: 1 of 2 runs finished" in sweep.out
    kept = sorted(path.read_text().splitlines()[-1] for path in tmp_path.rglob("verify.txt"))
    assert kept == ["16 of 17 checks passed", "17 of 17 checks passed"]
