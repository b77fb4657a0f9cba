"""What a batch costs besides the maths: frames, Python calls, and waits for the device."""

import json
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from recorded import once
from small import SGD, Rows, Small, fitted
from torch import nn
from torch.overrides import TorchFunctionMode

import dpframe
from dpframe import Callback, Strategy, Trainer, TrainerSettings
from dpframe.recipes.boston import Boston, BostonData
from dpframe.trainer.step import Step

HOUSE = str(Path(dpframe.__file__).parent)

# Frames


class Looks(Small):
    """Notes which of our frames are between `fit` and its training_step, outermost first."""

    def training_step(self, batch: Any) -> Any:
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            is_comprehension = frame.f_code.co_name == "<listcomp>"  # no frame from Python 3.12 on
            if frame.f_code.co_filename.startswith(HOUSE) and not is_comprehension:
                file = Path(frame.f_code.co_filename).relative_to(HOUSE)
                frames.append(f"{file}: {frame.f_code.co_qualname}")
            frame = frame.f_back
        inside = takewhile(lambda name: name != "trainer/loop.py: Trainer.fit", frames)
        if self.training:
            self.crossed = ["trainer/loop.py: Trainer.fit", *reversed(list(inside))]
        return super().training_step(batch)


def crossed(strategy: Strategy) -> list[str]:
    with strategy:
        return fitted(Looks(), strategy=strategy, max_steps=2).task.crossed  # the second's


FRAMES = [
    "trainer/loop.py: Trainer.fit",
    "trainer/loop.py: Trainer._train_epoch",
    "trainer/step.py: Step.gradients",
    "trainer/step.py: TrainStep.forward",
]
REPLICAS = "strategies/data_parallel.py: Replicas.forward"
GATHERING = [
    "strategies/fsdp.py: Gathering.forward",
    "strategies/sharding.py: _call",
    "strategies/fsdp.py: Gathering._step",
]
HAS_FSDP = pytest.mark.skipif(torch.__version__ < "2.13", reason="strategy=fsdp needs torch 2.13")
SAID = """four frames lead from `fit` to your `training_step` on `cpu`, one GPU and
  `ddp`, five on `data_parallel`, seven on `fsdp`."""


@pytest.mark.parametrize(
    "name, frames",
    [
        ("cpu", FRAMES),
        ("ddp", FRAMES),
        ("data_parallel", [*FRAMES[:3], REPLICAS, FRAMES[3]]),
        pytest.param("fsdp", [*FRAMES[:3], *GATHERING, FRAMES[3]], marks=HAS_FSDP),
    ],
)
def test_a_batch_crosses_as_many_frames_as_the_readme_says(name, frames):
    assert measured()["crossed"][name] == frames
    assert SAID in (Path(HOUSE).parent / "README.md").read_text()


def measure() -> dict[str, Any]:
    """Ranks come first: they are forked from a process that has computed nothing, as a run's is."""
    from dpframe.strategies.data_parallel import DataParallel
    from dpframe.strategies.ddp import DDP
    from dpframe.strategies.fsdp import FSDP
    from dpframe.strategies.single import CPU

    ranked: dict[str, Any] = {"ddp": DDP(2, accelerator="cpu")}
    if torch.__version__ >= "2.13":
        ranked["fsdp"] = FSDP(2, accelerator="cpu")
    by_ranks = {name: ranks.launch(crossed, ranks) for name, ranks in ranked.items()}
    return {
        "crossed": {
            **by_ranks,
            "cpu": crossed(CPU()),
            "data_parallel": crossed(DataParallel(2, accelerator="cpu")),
        },
        "calls": calls_a_batch(),
        "calls_a_set": (calls_of(12) - calls_of(2)) / 10,
        "way": way_to_the_first_step(),
        "way_with_sanity": way_to_the_first_step(sanity_batches=2),
        "way_with_share_check": way_to_the_first_step(share_check="on"),
    }


@once
def measured() -> dict[str, Any]:
    """What this file measures, by a process of its own."""
    code = "import json, test_loop_budget; print(json.dumps(test_loop_budget.measure()))"
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


# Calls

BATCHES = 20
OWN_BUDGET = 33  # calls of dpframe's own a batch, the recipe's among them
BUDGET = 157  # all Python calls a batch, with torch's; Lightning 2.6 makes 483


class CountsCalls(Callback):
    """From the end of one step to the end of another: data, forward, backward, update, hooks."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_step_end(self, trainer: Trainer) -> None:
        step = trainer.progress.global_step  # a look at its property would be a call of ours
        if step == 10:
            sys.setprofile(self.note)
        if step == 10 + BATCHES:
            sys.setprofile(None)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code.co_filename] += 1


class Training(BostonData):
    def val_dataset(self) -> None:  # type: ignore[override]
        return None


def calls_a_batch() -> tuple[float, float]:
    net = nn.Sequential(
        nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    counts = CountsCalls()
    trainer = Trainer(
        Boston(net, partial(torch.optim.Adam, lr=0.01)),
        Training(batch_size=8),
        settings=TrainerSettings(max_epochs=1, max_steps=40),
        callbacks=[counts],
    )
    # Where a step takes long, signals are looked for more often: here each look takes 10 us.
    with patch("time.perf_counter", partial(next, count(0.0, 1e-5))):
        trainer.fit()
    houses = (HOUSE, str(Path(HOUSE).parent / "recipes"))
    own = sum(count for file, count in counts.calls.items() if file.startswith(houses))
    return own / BATCHES, sum(counts.calls.values()) / BATCHES


def test_a_batch_keeps_its_budget_of_python_calls():
    own, every = measured()["calls"]
    print(f"CALLS A BATCH: {own:.1f} of ours, {every:.1f} in all; Lightning 483")
    assert 10 < own <= OWN_BUDGET  # a count of next to nothing would have missed them
    if torch.accelerator.current_accelerator() is None:  # else torch looks for it in each step
        assert 60 < every <= BUDGET


# Calls of a validation set

SET_BUDGET = 124  # all Python calls of a set of one batch, the net's among them


class Validations(Callback):
    """Counts the calls of one validation."""

    def __init__(self) -> None:
        self.calls = 0

    def on_validation_start(self, trainer: Trainer) -> None:
        if trainer.progress.global_step == 3:  # batches have their pace by now
            sys.setprofile(self.note)

    def on_validation_end(self, trainer: Trainer) -> None:
        sys.setprofile(None)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"


class OneStep(BostonData):
    """An epoch of one step, and so many validation sets of one batch."""

    def __init__(self, sets: int) -> None:
        super().__init__(batch_size=512)
        self.sets = sets

    def val_dataset(self) -> Any:
        held_out = super().val_dataset()
        return {f"set{number}": held_out for number in range(self.sets)}


def calls_of(sets: int) -> int:
    counts = Validations()
    net = nn.Sequential(
        nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    task = Boston(net, partial(torch.optim.Adam, lr=0.01))
    settings = TrainerSettings(max_epochs=3, share_check="off")
    with patch("time.perf_counter", partial(next, count(0.0, 1e-5))):
        Trainer(task, OneStep(sets), settings=settings, callbacks=[counts]).fit()
    return counts.calls


def test_a_validation_set_keeps_its_budget_of_python_calls():
    calls = measured()["calls_a_set"]
    print(f"CALLS OF A VALIDATION SET: {calls:.1f}")
    assert 60 < calls <= SET_BUDGET


# The way to the first step

# Three are whether a terminal or a notebook shows the progress; six look for modules that a note is
# about, four keep the options of schedules and groups, five tell the user's own modules. Eighteen
# check types and ranges: of a Trainer's arguments, and of the data's settings for each data set.
# Ten look for layers that depend on the other rows of a batch, one for modules that put parts of
# them into evaluation mode.
ENTRIES, FILES, CHANGES = 271, 56, 180
SHARE_CHECK = 569  # entries more, of its three steps with a collate, and torch's functions in them
SANITY = 75  # entries more, of its one batch of validation, after which the task is as before


def way_to_the_first_step(
    sanity_batches: int = 0, share_check: str = "off"
) -> tuple[int, int, int]:
    """Boston on the CPU without callbacks or loggers, from `Trainer(...)` to its first step.

    Counts the entries into functions of dpframe, the files that they are in, and how often one
    entry is in another file than the entry before. Comprehensions are part of their function.
    """
    entered: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(HOUSE)
        if is_ours and not code.co_name.startswith("<"):
            entered.append(code.co_filename)
            if code is Step.gradients.__code__:
                sys.setprofile(None)

    task = Boston(nn.Linear(13, 1), partial(torch.optim.Adam, lr=0.01))
    own = {"sanity_batches": sanity_batches, "share_check": share_check}
    data, settings = BostonData(), TrainerSettings(max_epochs=1, **own)  # type: ignore[arg-type]
    sys.setprofile(note)
    Trainer(task, data, settings=settings).fit()
    changes = sum(file != before for before, file in zip(entered, entered[1:], strict=False))
    return len(entered), len(set(entered)), changes


def test_the_way_from_a_trainer_to_its_first_step_gets_no_longer():
    entries, files, changes = measured()["way"]
    print(f"TO THE FIRST STEP: {entries} entries, {files} files, {changes} changes of file")
    assert 50 < entries <= ENTRIES  # a count of next to nothing would have missed them
    assert files <= FILES
    assert changes <= CHANGES
    assert 10 < measured()["way_with_sanity"][0] - entries <= SANITY
    assert 10 < measured()["way_with_share_check"][0] - entries <= SHARE_CHECK


# Waits


class Reads(TorchFunctionMode):
    """Notes at which step a tensor was turned into a number, which waits for a GPU."""

    WAIT = {"item", "tolist", "__float__", "__int__", "__bool__", "__index__", "numpy", "nonzero"}
    WAIT |= {"cpu", "__format__", "__repr__"}

    def __init__(self) -> None:
        super().__init__()
        self.step = 1
        self.steps: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if getattr(function, "__name__", "") in self.WAIT:
            self.steps.append(self.step)
        return function(*args, **(kwargs or {}))


class Weighted(Small):
    def training_step(self, batch: Any) -> Any:
        return {**super().training_step(batch), "weight": batch[1].abs().sum()}


@pytest.mark.parametrize("task", [Small, Weighted])
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"clip_norm": 0.1}, {"clip_value": 0.1}, {"precision": "bf16"}],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_nothing_is_read_between_log_steps(monkeypatch, task, settings):
    """As on a GPU: the CPU's losses are there at once, and looked at."""
    monkeypatch.setattr("dpframe.trainer.outputs.READ_AT_ONCE", set())
    reads = Reads()

    class Steps(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            reads.step = trainer.global_step + 1

    with reads:
        fitted(
            task(SGD),  # stock Adam reads its own step counter, which is on the CPU
            Rows(40, 2, val=False),
            callbacks=[Steps()],
            max_epochs=1,
            max_steps=10,
            log_every=4,
            share_check="off",
            **settings,
        )
    assert {4, 8} <= set(reads.steps) <= {4, 8, 11}  # 11: the epoch's end, after step 10
