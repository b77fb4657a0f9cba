"""The conformance kit passes what is exact, and fails each planted bug with its cause."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import planted
import pytest
import torch
from command import attempts, dpframe, write
from small import Rows, Stream
from test_turns import Pair
from torch import nn

from dpframe import Task, TrainerSettings, UserError
from dpframe.plugins.verify import measure
from dpframe.plugins.verify.checks import CHECKS
from dpframe.plugins.verify.course import KIT, Small, Table, courses
from dpframe.plugins.verify.reference import sensitivity
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU, SingleGPU
from dpframe.testing import Recipe, check_strategy, verify

Step = Callable[[Any, Any], dict[str, Any]]
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
        (FSDP, TWO),
    ],
)
def test_the_strategies_pass_every_check(strategy, arguments):
    report = check_strategy(strategy, recipe="boston", **arguments)
    assert [finding.check for finding in report.findings] == list(CHECKS)
    void = {finding.check for finding in report.findings if finding.passed is None}
    assert void == ({"bits"} if strategy is DDP else {"bits", "gradient_sync"})
    assert "8 of boston" in report["weights"].compared
    assert re.match(
        r"verify boston on ((CPU|SingleGPU): 1|FSDP: 2|(DataParallel|DDP): 3)", report.title
    )


@pytest.mark.gpu(1)
def test_a_gpu_passes_every_check():
    assert check_strategy(SingleGPU, recipe="lenet", gpus=1, accelerator="cuda").passed
    assert check_strategy(DDP, recipe="boston", gpus=1, accelerator="cuda").passed


def test_a_strategy_that_can_not_gather_rows_is_not_failed_for_it():
    report = check_strategy(planted.GathersNothing, **THREE)
    assert (report["gathered"].passed, report["gathered"].compared) == (
        None,
        "none: GathersNothing has no gather_rows",
    )


def gathers(task: Any, batch: Any) -> dict[str, Any]:
    """As `contrastive`, but exact."""
    output = task.net(batch[0])
    rows = task.all_gather(output)
    apart = (output - rows.T).square()
    same = (output.detach() == rows.detach().T).double()
    return {"loss": nn.functional.cross_entropy(-apart, same / same.sum(1, keepdim=True))}


@pytest.mark.parametrize("strategy", [DataParallel, DDP])
def test_a_loss_over_rows_that_are_gathered_passes(strategy):
    report = check_strategy(strategy, recipe=recipe_of(gathers), only=CURVES, **THREE)
    assert "8 of mine" in report["weights"].compared


def test_random_numbers_and_threads_are_left_as_they_were():
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    check_strategy(CPU, only=["weights"])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


# Planted bugs: on how many replicas, the checks that fail, and the words of one of them

GROUPS = {
    "*weights": "weights loss_curve metrics accumulation few_rows weighted gathered exact_layers"
    " float32",
    "*but_gathered": "weights loss_curve metrics accumulation few_rows weighted float32",
    "*means": "loss_curve metrics validation accumulation gathered exact_layers float32 evaluation",
}
PLANTED = r"""
MeanOfMeans on 3: *weights
    weights: the kit's network ends with other weights, most in net
Padded on 2: *but_gathered launch rows_once validation predict_order evaluation
    rows_once: of a batch of 1 row the shares have 1 1: they are padded, or overlap; row 0
Unshared on 2: *weights gradient_sync evaluation
    weights: .*; rank 1 ends with other ones than rank 0
SaysAveraged on 3: *weights
    weights: the kit's network ends with other weights, most in net
Rounds on 1: weights loss_curve metrics accumulation few_rows weighted gathered exact_layers
    loss_curve: the kit's network: first apart in step/loss at step 2: 4\.\d+, not 4\.\d+
Averages on 2: collectives weighted
    collectives: sum gave \[1.5, 1.0\] in rank 0, not \[3.0, 2\]: sum and sum_numbers add up
SharesTheMains on 2: *means collectives weighted
    validation: of 0² to 9² the mean is 28.5; it gave 6
EvenMeans on 3: *means
    validation: of 0² to 9² the mean is 28.5; it gave 35.8333
GathersNumbers on 2: gathered exact_layers
    gathered: the kit's contrastive network ends with other weights
PadLarge on 2: rows_once float32
    rows_once: of a batch of 33 rows the shares have 24 16: they are padded
Other4 on 2: rows_once
    rows_once: of a batch of 1 row the shares on 4 replicas have 0 0 0 0: row 0 is missing
StreamDropTail on 2: rows_once launch
    rows_once: of a batch of 1 row, as a list as streams have them, .* 0 0: row 0 is missing
HalfIfFloat32 on 2: float32
    float32: the kit's network of 9,889 weights ends .* computed in fewer digits than float32's
TopKLarge on 2: float32
    float32: .* 9[78]% of its weights never moved: gradients are left out
FirstThree on 1: accumulation
    accumulation: the kit's network ends with other weights, most in net
EvalHalf on 2: float32 evaluation
    evaluation: .* validates other numbers than its weights give on the CPU, first ap
EvalTrains on 3: evaluation statistics exact_layers
    evaluation: .* validation_step runs in training mode
BuffersApart on 2: evaluation
    evaluation: .*: rank 1 has another net.1.running_mean than rank 0, and validates with it
MovesTwice on 2: statistics exact_layers
    statistics: the kit's BatchNorm has counted 24 batches, and 12 are due: of replicas that share
SameMasks on 2: random_numbers checkpoint
    random_numbers: rank 1 draws the random numbers of rank 0, so that dropout drops the same
RandomStateLost on 1: random_numbers checkpoint
    random_numbers: a run that is resumed within an epoch draws other random numbers than one
ShareNumbers on 2: collectives
    collectives: broadcast of a list of numbers gave \[1, 7\] in rank 1, not \[0, 7\]
LogsEverywhere on 2: logged_once
    logged_once: each number was logged 2 times, by the ranks 0 1: `logger` must return the loggers
NeverQuiet on 2: gradient_sync
    gradient_sync: the gradients were shared 3 times in one update: grad_sync\(False\) has no effect
Backwards on 2: collectives predict_order random_numbers checkpoint
    predict_order: 10 rows came as 5 6 7 8 9 0 1 2 3 4: shares have to keep the batch's order
ForgetsToReturn on 1: launch
    launch: launch did not return what `run` returned in the main process
NeverRuns on 1: launch
    launch: launch did not call `run` in any process
WrapsInPlace on 1: checkpoint evaluation
    checkpoint: it has net.module.0.weight in place of net.0.weight: wrap must leave the task
ForgetsItsState on 1: checkpoint
    checkpoint: .* task.net.0.weight is not what was saved once it is read again: state_dict
LeavesThings on 1: shutdown
    shutdown: left behind: environment variable MASTER_ADDR, .*; port \d+, .*; process \d+: .*sleep
LeavesThreadInRanks on 2: shutdown
    shutdown: left behind: thread watcher, in rank 0 after close\(\); thread watcher, in
AllMain on 2: launch logged_once
    launch: failed in .*; is_main is True in process 1 of 2, not False
"""
ENTRY = re.compile(r"^(\w+) on (\d): (.*)\n    (.*)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "replicas", "failed", "cause"),
    [pytest.param(*entry, id=entry[0]) for entry in ENTRY.findall(PLANTED)],
)
def test_a_planted_bug_fails_its_checks_with_the_cause(name, replicas, failed, cause, monkeypatch):
    if failed == "shutdown":  # what is left there stays for good
        monkeypatch.setattr(measure, "GRACE_SECONDS", 0.1)
    arguments = {"gpus": int(replicas)} if replicas != "1" else {}
    report = verify(partial(getattr(planted, name), accelerator="cpu", **arguments))
    print(report)
    expected = " ".join(GROUPS.get(word, word) for word in failed.split())
    assert {finding.check for finding in report.failed} == set(expected.split())
    assert re.search(f"^FAIL {cause}", str(report), re.MULTILINE)


def test_multiprocessings_own_process_is_not_left_behind_whatever_its_python_is_called(tmp_path):
    python = tmp_path / ("long" * 20) / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    code = "from multiprocessing.resource_tracker import main; print(flush=True); main(0)"
    pipe, before = subprocess.PIPE, measure.list_resources()
    with subprocess.Popen([python, "-c", code], stdin=pipe, stdout=pipe) as tracker:
        tracker.stdout.readline()  # it has begun, and ends when its input does
        assert measure.list_resources() == before


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


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"strategy": CPU, "gpus": 2}, "CPU is one replica"),
        ({"strategy": "ddp"}, "pass recipe=NAME"),
        ({"strategy": CPU, "overrides": ["seed=1"]}, "pass recipe=NAME"),
    ],
)
def test_what_can_not_be_tried_is_refused_and_no_fail(arguments, refusal):
    with pytest.raises(UserError, match=refusal):
        check_strategy(**arguments)


# Recipes, and what of them can be compared


class Mine(Small):
    """Its step is a function of the task and a batch; its network may have more layers."""

    def __init__(self, step: Step, *layers: nn.Module) -> None:
        super().__init__()
        self.step = step
        for layer in layers:
            self.net.insert(1, deepcopy(layer))

    def training_step(self, batch: Any) -> dict[str, Any]:
        return self.step(self, batch)

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "error_rate": 1 - means["accuracy"]} if "accuracy" in means else means


class PredictData(Table):
    def predict_dataset(self) -> Any:
        return self.held_out


def recipe_of(step: Step = Small.training_step, *layers: nn.Module) -> Recipe:
    return Recipe("mine", partial(Mine, step, *layers), PredictData)


def noisy(task: Any, batch: Any) -> dict[str, Any]:
    return Small.training_step(task, [batch[0] + torch.randn_like(batch[0]), *batch[1:]])


def with_largest(task: Any, batch: Any) -> dict[str, Any]:
    """Measures something that is no mean."""
    return Small.training_step(task, batch) | {"largest": task._error(batch).abs().max()}


def rounding(task: Any, batch: Any) -> dict[str, Any]:
    """The usual accuracy: a float32 in a task of float64."""
    accuracy = (task._error(batch).abs() < 2).float().mean()
    return Small.training_step(task, batch) | {"accuracy": accuracy}


def rounding_numbers(task: Any, batch: Any) -> dict[str, Any]:
    return {
        name: value.item() if name == "accuracy" else value
        for name, value in rounding(task, batch).items()
    }


def rounding_loss(task: Any, batch: Any) -> dict[str, Any]:
    return {"loss": task._error(batch).float().square().mean()}


def contrastive(task: Any, batch: Any) -> dict[str, Any]:
    """Each row is told from the others of its batch."""
    output = task.net(batch[0])
    apart = (output - output.T).square()
    return {"loss": nn.functional.cross_entropy(-apart, torch.arange(len(output)))}


def balanced(task: Any, batch: Any) -> dict[str, Any]:
    """Rows count by their class, and the step doesn't say how much they count together."""
    return {"loss": Small.training_step(task, batch)["loss"] / batch[2].mean()}


def off_by_a_millionth(task: Any, batch: Any) -> dict[str, Any]:
    """Another number on another number of replicas, and not by rounding."""
    measured = rounding(task, batch)
    return measured | {"loss": measured["loss"] * (1 + 1e-6 / len(batch[0]))}


CURVES = ["weights", "loss_curve", "metrics", "mean_over_rows"]


@pytest.mark.parametrize("step", [rounding, rounding_numbers])
def test_a_metric_that_the_task_rounds_is_compared_as_closely_as_it_is_known(step):
    report = check_strategy(DataParallel, recipe=recipe_of(step), only=CURVES, **THREE)
    assert report.notes == []
    assert 1e-9 < float(report["metrics"].measured) < 1e-6
    assert float(report["loss_curve"].measured) < 1e-12


@pytest.mark.parametrize(
    "recipe",
    [
        (contrastive,),
        (balanced,),
        (off_by_a_millionth,),
        (contrastive, nn.BatchNorm1d(8)),
        (contrastive, nn.Dropout(0.1)),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_fails_on_any_strategy(recipe):
    report = verify(CPU, recipe=recipe_of(*recipe), only=CURVES)
    assert [finding.check for finding in report.failed] == ["mean_over_rows"]
    cause = (
        r"mine's loss of 5 rows is [\d.]+ in one batch and [\d.]+ in shares of 3 2, .* replicas"
        r".* e\.g\. a contrastive one, has to use self\.all_gather$"
    )
    assert re.match(cause, report["mean_over_rows"].cause)


LEFT_OUT = "mine is left out of the curves: "


@pytest.mark.parametrize(
    ("recipe", "note"),
    [
        (
            (Small.training_step, nn.Dropout(0.1)),
            "mine's dropout is set to 0 here: other shares draw other masks",
        ),
        (
            (Small.training_step, nn.BatchNorm1d(8)),
            f"{LEFT_OUT}1 BatchNorm layer sees each replica's rows alone: trainer.batch_norm",
        ),
        ((noisy,), f"{LEFT_OUT}the loss of the same 5 rows differs by what it draws at random"),
        ((rounding_loss,), f"{LEFT_OUT}its loss is rounded to float32"),
        ((with_largest,), "mine's largest: no mean over rows, so it is not compared"),
        ((Small.training_step, nn.Dropout(0.0)), ""),
        ((Small.training_step, nn.Dropout(0.1).eval()), ""),
    ],
)
def test_what_of_a_recipe_differs_by_share_is_not_compared_and_a_note_says_so(recipe, note):
    report = check_strategy(DataParallel, recipe=recipe_of(*recipe), only=CURVES, **THREE)
    assert "\n".join(report.notes).startswith(note) and len(report.notes) == bool(note)
    assert ("8 of mine" in report["metrics"].compared) == (not note.startswith(LEFT_OUT))


class Centered(Small):
    """Its loss is about the step before, too, whose mean a buffer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def training_step(self, batch: Any) -> dict[str, Any]:
        mean = self.all_gather(batch[0]).mean()
        loss = (self.net(batch[0]) - self.center).square().mean()
        self.center.copy_(mean)
        return {"loss": loss}


@pytest.mark.parametrize("strategy", [DDP, DataParallel])
def test_a_step_that_changes_a_buffer_is_compared_and_a_note_names_it(strategy):
    recipe = Recipe("mine", Centered, Rows)
    report = check_strategy(strategy, recipe=recipe, only=CURVES, **TWO)
    [note] = report.notes
    assert note.startswith("mine's training_step changes center of the task: of several replicas")


def test_a_recipe_whose_optimizers_take_turns_is_left_out_of_the_curves():
    report = check_strategy(DataParallel, recipe=Recipe("mine", Pair, Rows), only=CURVES, **THREE)
    assert report.notes == [
        f"{LEFT_OUT}its optimizers take turns, and the kit computes the steps of one; the kit's "
        "own network stands in for it"
    ]


class OnlyPredicts(Task):
    """Like the recipe shapes: nothing to train, nothing to validate."""

    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return batch[0]


def test_a_recipe_that_only_predicts_is_tried_for_its_order():
    recipe = Recipe("mine", OnlyPredicts, PredictData)
    assert check_strategy(DataParallel, recipe=recipe, only=["predict_order"], **TWO).passed


def test_a_recipe_without_a_curve_is_tried_for_its_rows_evaluation_checkpoint_and_order():
    recipe = recipe_of(Small.training_step, nn.BatchNorm1d(8))
    only = ["rows_once", "evaluation", "predict_order", "checkpoint"]
    report = check_strategy(DDP, recipe=recipe, only=only, **THREE)
    assert report["evaluation"].compared.endswith("dropout, mine")
    report = verify(partial(planted.EvalTrains, **THREE), recipe=recipe, only=only)
    cause = "mine validates other numbers than its weights give on the CPU"
    assert cause in report["evaluation"].cause
    assert "mine predicts something else than on the CPU" in report["predict_order"].cause
    # Batches of 20 rows are none of the sizes that the kit cuts.
    drops = partial(planted.DropsOf20, gpus=5, accelerator="cpu")
    report = verify(drops, recipe=recipe, only=["rows_once"])
    assert re.match(r"2 epochs of mine read row [\d ]+ 1 .*times", report["rows_once"].cause)


class ByName(Small):
    def validation_step(self, batch: Any, name: str) -> dict[str, Any]:
        return self.training_step(batch) | {"weight": float(len(batch[0]) * len(name))}

    def predict_step(self, batch: Any, name: str) -> torch.Tensor:
        return self.net(batch[0]) + len(name)


class SeveralSets(Table):
    def val_dataset(self) -> Any:
        return {"clean": self.held_out, "of_others": torch.utils.data.Subset(self.held_out, [3, 1])}

    predict_dataset = val_dataset


def test_each_of_several_sets_is_tried():
    recipe = Recipe("mine", ByName, SeveralSets)
    only = ["metrics", "evaluation", "predict_order"]
    report = check_strategy(DataParallel, recipe=recipe, only=only, **TWO)
    assert all("mine" in report[name].compared for name in only[:2])


# Settings and data that are part of the maths


class StreamData(Table):
    def train_dataset(self) -> Any:
        return Stream(self.train)

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


class Cancelling(Small):
    """The gradient of `shift` is 0 but for rounding: a softmax does not depend on it. Adam divides
    by it, or by `eps`."""

    eps = 1e-8

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any) -> dict[str, Any]:
        output = super().training_step(batch)
        score = (batch[0] * batch[1][:, None] + self.shift).softmax(dim=1)
        return {"loss": output["loss"] + score[:, 0].mean()}

    def configure_optimizer(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02, eps=self.eps)


class Amplifying(Cancelling):
    eps = 1e-30


@pytest.mark.parametrize("strategy", [DataParallel, DDP])
def test_weights_that_an_optimizer_makes_of_rounding_may_differ_by_as_much(strategy):
    recipe = Recipe("mine", Cancelling, Table)
    report = check_strategy(strategy, recipe=recipe, only=["weights"], **THREE)
    assert 1e-12 < float(report["weights"].measured) < 1e-9
    assert any("the order of a sum" in note for note in report.notes)


def test_no_more_than_that():
    recipe = Recipe("mine", Cancelling, Table)
    kept, _ = sensitivity(courses(recipe, 3)["recipe"], 3)
    assert 1e-12 < kept < 1e-9
    assert max(sensitivity(courses(KIT, 3)["recipe"], 3)) < 1e-12  # SGD divides by nothing
    chaotic = Recipe("mine", Amplifying, Table)
    assert sensitivity(courses(chaotic, 3)["recipe"], 3)[0] == 0
    report = verify(partial(DataParallel, **THREE), recipe=chaotic, only=["weights"])
    assert "mine ends with other weights, most in shift" in report["weights"].cause


# At the command line

MINE = """
from dpframe import Strategy
from dpframe.strategies.data_parallel import DataParallel

class SaysAveraged(DataParallel):
    def setup(self):
        super().setup()
        self.gradient_divisor = self.replicas

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
    words = ["mode=verify", "recipe=boston", "strategy=ddp", "trainer.gpus=2"]
    words.append("trainer.logical_replicas=8")
    done = dpframe(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("verify boston on DDP: 2 replicas in 2 processes on cpu; float64")
    assert [line.split()[0] for line in lines[3:-2]] == list(CHECKS)
    assert all(line.endswith("  pass") for line in lines[3:-2])
    assert lines[-1] == f"{len(CHECKS)} of {len(CHECKS)} checks passed"
    assert list(tmp_path.iterdir()) == []  # it leaves no run directory


def test_mode_verify_takes_no_checkpoint(tmp_path):
    words = ["recipe=boston", "mode=verify", "checkpoint=a.ckpt"]
    (refused,) = attempts([words], write(tmp_path, {"a.ckpt": ""}))
    assert refused.code == 2 and refused.files == ["a.ckpt"]
    assert "checkpoint=a.ckpt: mode=verify starts from the recipe's own weights" in refused.err


def test_mode_verify_exits_with_1_where_a_check_fails_in_a_sweep_too(tmp_path):
    lines = [
        ["recipe=shapes"],
        ["--config-dir=mine", "recipe=boston", "strategy=sums", "trainer.gpus=2"],
        ["--config-dir=mine", "-m", "recipe=shapes", "strategy=cpu,forgets"],
    ]
    tried = attempts([[*line, "mode=verify"] for line in lines], write(tmp_path, FILES))
    trains_nothing, fails, sweep = tried
    assert trains_nothing.code == 0
    note = "note: shapes is left out of the curves: it trains nothing; the kit's own"
    assert note in trains_nothing.out
    assert fails.code == 1 and fails.files == ["a.ckpt", "mine"]
    assert "boston ends with other weights" in fails.out
    assert sweep.code == 1 and "sweep: 1 of 2 runs finished" in sweep.out
    kept = sorted(path.read_text().splitlines()[-1] for path in tmp_path.rglob("verify.txt"))
    assert kept == ["19 of 20 checks passed", "20 of 20 checks passed"]
