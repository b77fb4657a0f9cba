"""Bad data and bad steps: one line, or the user's own traceback, with the rows that it is about."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command import attempts, dpframe, write
from odd import Odd, OddData
from small import Small, fitted, trainer

from dpframe import Strategy, Trainer, TrainerSettings, UserError
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

DICT = 'return {"loss": scalar tensor, **metrics}'
MEASURED = '; return a dict of what was measured, e.g. {"loss": loss}'
STEPS = {
    ("fit", "train", "none"): f"Odd.training_step returned NoneType; {DICT}",
    ("fit", "train", "list"): f"Odd.training_step returned list; {DICT}",
    ("fit", "train", "empty"): "Odd.training_step returned a dict without 'loss' (it has nothing)",
    ("fit", "train", "no loss"): "Odd.training_step returned a dict without 'loss' (it has mae)",
    ("fit", "train", "a number"): "Odd.training_step returned a loss that is a float, not a tensor",
    ("fit", "train", "a vector"): "Odd.training_step returned a loss of shape (2,); reduce it to",
    ("fit", "train", "detached"): "Odd.training_step returned a loss without a gradient; compute",
    ("fit", "train", "no weight"): "Odd.training_step returned 'weight' as a NoneType; return one",
    ("fit", "train", "weights"): "Odd.training_step returned 'weight' with more than one number",
    ("fit", "train", "text"): "a step returned 'mae' as a str; return one number, or leave it out",
    ("fit", "train", "numbers"): "a step returned 'mae' with more than one number; return its mean",
    ("fit", "val", "none"): f"Odd.validation_step returned NoneType{MEASURED}",
    ("fit", "val", "tensor"): f"Odd.validation_step returned Tensor{MEASURED}",
    ("fit", "val", "empty"): f"Odd.validation_step returned an empty dict{MEASURED}",
    ("fit", "val", "text"): "Odd.validation_step returned 'mae' as a str; return one number",
    ("fit", "val", "no number"): "Odd.validation_step returned 'mae' as a NoneType; return one",
    ("fit", "val", "numbers"): "Odd.validation_step returned 'mae' with more than one number",
    ("test", "test", "none"): f"Odd.test_step returned NoneType{MEASURED}",
    ("predict", "predict", "none"): "Odd.predict_step returned None; return tensors, or lists",
}
NO_ROWS = "has no rows; it needs at least one"
DATA = {
    ("fit", "train", "empty"): f"OddData.train_dataset() {NO_ROWS}",
    ("fit", "train", "list"): f"OddData.train_dataset() {NO_ROWS}",
    ("fit", "train", "none"): "OddData.train_dataset() returned None; return a data set",
    ("fit", "train", "stream"): "OddData.train_dataset() gave no rows",
    ("fit", "val", "empty"): "OddData.val_dataset() has no rows; return None for no validation",
    ("fit", "val", "stream"): "val: the data set gave no rows",
    ("test", "test", "empty"): f"OddData.test_dataset() {NO_ROWS}",
    ("test", "test", "stream"): "test: the data set gave no rows",
    ("predict", "test", "empty"): f"OddData.predict_dataset() {NO_ROWS}",
    ("predict", "test", "stream"): "predict: the data set gave no rows",
    ("validate", "val", "empty"): "OddData.val_dataset() has no rows; return None for no",
}
Case = tuple[str, str, str]
ON_REPLICAS: list[tuple[Any, Case]] = [
    (STEPS, ("fit", "train", "none")),
    (STEPS, ("fit", "train", "text")),
    (STEPS, ("fit", "val", "none")),
    (DATA, ("fit", "val", "empty")),
    (DATA, ("fit", "train", "stream")),
]


def refusal(lines: dict[Case, str], case: Case, strategy: Strategy | None = None) -> str:
    mode, part, fault = case
    task = Odd(**{part: fault}) if lines is STEPS else Odd()
    data = OddData(**{part: fault}) if lines is DATA else OddData()
    settings = TrainerSettings(max_epochs=1, threads=1)
    with pytest.raises(UserError) as caught:
        getattr(Trainer(task, data, strategy=strategy, settings=settings), mode)()
    return str(caught.value)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_training_without_gradients_is_one_line(without):
    with pytest.raises(UserError, match="call fit outside of torch.no_grad"), without():
        fitted()


def test_a_training_step_that_validation_calls_is_named_in_its_errors():
    class Bare(Small):
        def training_step(self, batch):
            return super().training_step(batch)["loss"]

    with pytest.raises(UserError, match="^Bare.training_step returned Tensor; return a dict of"):
        trainer(Bare()).validate()


class Slips(Small):
    def training_step(self, batch):
        return {"los": super().training_step(batch)["loss"]}


class CallsBackward(Small):
    def training_step(self, batch):
        output = super().training_step(batch)
        output["loss"].backward()
        return output


class Explodes(Small):
    def validation_step(self, batch):
        batch[0].sum().backward()


@pytest.mark.parametrize("strategy", [None, DataParallel(2, "cpu")])
def test_a_slip_in_a_training_step_is_told_as_one_before_training(strategy):
    for task, line in (
        (Slips(), "Slips.training_step returned a dict without 'loss' (it has los); return {"),
        (
            CallsBackward(),
            "CallsBackward.training_step calls backward(), which the Trainer does wi",
        ),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(line)}"):
            trainer(task, strategy=strategy, sanity_batches=1).prepare()
    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer(Explodes(), strategy=strategy, sanity_batches=1).prepare()


def test_a_training_step_may_measure_other_things_in_a_validation():
    class Measures(Small):
        def training_step(self, batch):
            output = super().training_step(batch)
            return output if self.training else {"mae": output["mae"]}

    assert fitted(Measures(), sanity_batches=1).metrics.keys() >= {"train/loss", "val/mae"}


def test_what_a_step_or_a_data_set_returns_is_refused_by_its_name():
    for lines in (STEPS, DATA):
        for case, line in lines.items():
            assert refusal(lines, case).startswith(line), case


def test_replicas_refuse_it_alike():
    for lines, case in ON_REPLICAS:
        strategy = DataParallel(2, "cpu")
        strategy.setup()
        assert refusal(lines, case, strategy).startswith(lines[case])


def refusals_in_a_rank() -> list[list[str]]:
    strategy = DDP()
    strategy.setup()
    try:
        return strategy.collectives.gather([refusal(*given, strategy) for given in ON_REPLICAS])
    finally:
        strategy.close()


def test_ranks_refuse_it_alike():
    first, second = DDP(2, "cpu").launch(refusals_in_a_rank)
    assert first == second
    for (lines, case), line in zip(ON_REPLICAS, first, strict=True):
        assert line.startswith(lines[case])


# Through the command

RECIPE = """
# @package _global_
task: {_target_: odd.Odd, train: "", val: "", test: "", predict: ""}
data: {_target_: odd.OddData, train: some, val: some, test: some, workers: 0}
trainer: {max_epochs: 1, accelerator: cpu}
"""
START = ["--config-dir", ".", "recipe=odd", "logger=none"]
RANKS = ["strategy=ddp", "trainer.gpus=2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    parts = Path(__file__).with_name("odd.py").read_text()
    return write(tmp_path_factory.mktemp("odd"), {"odd.py": parts, "recipe/odd.yaml": RECIPE})


def test_a_step_or_a_data_set_that_gives_nothing_is_refused_and_leaves_nothing(place):
    cases = {
        "task.train=none": STEPS["fit", "train", "none"],
        "task.val=empty": STEPS["fit", "val", "empty"],
        "data.val=empty": DATA["fit", "val", "empty"],
        "data.train=stream": DATA["fit", "train", "stream"],
    }
    done = attempts([[*START, way] for way in cases], place)
    for line, attempt in zip(cases.values(), done, strict=True):
        assert attempt.code == 2, attempt.err
        assert attempt.err.splitlines()[-1].startswith(f"dpframe: {line}"), attempt.err
        assert "outputs" not in attempt.files, line


def test_a_step_that_exits_and_a_worker_that_spins_at_the_end_do_not_end_the_run_unnoticed(place):
    exit_line = "sys.exit(0) in <lambda> (odd.py, line "
    spins = ["data.train=spins", "data.workers=1", "trainer.max_steps=1", "data.val=none"]
    (exits, unread) = attempts([[*START, "task.train=exits"], [*START, *spins]], place)
    assert (exits.code, exits.err.count("\n")) == (1, 1)
    assert exits.err.startswith(f"dpframe: {exit_line}")
    assert unread.code == 0, unread.err
    done = dpframe(*START, *RANKS, "task.train=exits", cwd=place)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"^dpframe: rank [01]: {re.escape(exit_line)}", last)
    assert "Traceback" not in done.stderr


def test_the_users_own_traceback_comes_last_with_the_row(place):
    """And two ranks read by the choice of the first, through a class that says `workers: int`."""
    words = [*START, *RANKS, "data.workers=auto", "data.train=broken", "hydra.run.dir=out"]
    done = dpframe(*words, cwd=place)
    assert done.returncode == 1
    assert re.search(r"^data +32 rows by __getitem__, .+: a batch takes .+ ms", done.stdout, re.M)
    *_, at, raises, words_of_its_own, note, where = done.stderr.rstrip().splitlines()
    assert "odd.py" in at and raises.strip() == """raise LookupError("the user's own words")"""
    assert words_of_its_own == "LookupError: the user's own words"
    assert note == "while reading row 25 of Broken"
    assert where == "dpframe: the run is in out; nothing was saved"
