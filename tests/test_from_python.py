"""A Trainer that is made in Python: its strategy, its devices, and where its files go."""

import os
import random
import resource
import subprocess
import sys
import threading
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from forked import fresh
from small import Hooks, Listed, Rows, Small, fitted, heavy, is_same, trainer
from torch.utils.data import DataLoader, random_split

import dpframe.callbacks.display
from dpframe import (
    Callback,
    RunInfo,
    Strategy,
    Trainer,
    TrainerSettings,
    UserError,
    seeding,
)
from dpframe.callbacks.averages import EMA
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.progress import Progress
from dpframe.launch.interpreter import pack, unpack
from dpframe.launch.rank_errors import RankFailed
from dpframe.loggers.csv import CSV
from dpframe.loggers.history import History
from dpframe.loggers.tensorboard import TensorBoard
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP
from dpframe.strategies.single import CPU
from dpframe.trainer.compute.placement import (
    default_dtype,
    process_settings,
    process_settings_restored,
)
from dpframe.trainer.ranks import attributes_of

ONCE = TrainerSettings(max_epochs=1)
NAMES = ("a/loss", "a/mae", "loss", "mae")
FD_SETSIZE = 1024  # select(2) takes no file of this number or a higher one


class Counted(Strategy):
    """As a plugin may: neither calls `super`."""

    def __init__(self):
        super().__init__()
        self.called = []

    def setup(self):
        self.called.append("setup")

    def close(self):
        self.called.append("close")


def test_a_trainer_sets_up_its_strategy_for_all_modes_and_closes_it_at_the_end_of_with():
    strategy = Counted()
    with Trainer(Small(), Rows(), strategy=strategy, settings=ONCE) as trainer:
        assert strategy.called == ["setup"]
        for mode in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
            mode()
        Trainer(Small(), Rows(), strategy=strategy, settings=ONCE).fit()
        assert strategy.called == ["setup"]
    trainer.close()
    assert strategy.called == ["setup", "close"]


@pytest.mark.parametrize("kind", [Counted, CPU, DataParallel])
def test_a_strategy_that_another_has_opened_is_left_open(kind):
    strategy = kind()
    with strategy:
        with Trainer(Small(), Rows(), strategy=strategy, settings=ONCE) as trainer:
            trainer.fit()
        assert strategy.is_set_up
    assert not strategy.is_set_up


def test_data_parallel_needs_no_call_but_fit():
    losses = []
    for strategy in (None, DataParallel(3)):
        torch.manual_seed(0)
        settings = TrainerSettings(max_epochs=2, precision="64")
        losses.append(Trainer(Small(), Rows(), strategy=strategy, settings=settings).fit())
    assert strategy.replicas == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


DATA = (
    "pass a data set, e.g. TensorDataset(x, y), a DataLoader, a dict of these by name, or an "
    "object of your DataModule"
)


class Staged(Rows):
    def setup(self, stage):
        raise AssertionError("it is called")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"task": torch.nn.Linear(1, 1)}, "Trainer: task=Linear(in_features=1, out_features=1, "
            "bias=True); pass an object of your Task"),
        ({"data": 1}, f"Trainer: data=1; {DATA}"),
        ({"data": None}, f"Trainer: data=None; {DATA}"),
        ({"data": torch.ones(2)}, f"Trainer: data=tensor([1., 1.]); {DATA}"),
        ({"data": Small}, f"Trainer: data=<class 'small.Small'>; {DATA}"),
        ({"data": [1], "test": {"a": [2], "b": "c"}},
            f"Trainer: test={{'a': [2], 'b': 'c'}}; {DATA}"),
        ({"val": [1]}, "Trainer: val beside Rows, a DataModule, which says that itself; leave it "
            "out"),
        ({"batch_size": 2}, "Trainer: batch_size beside Rows, a DataModule, which says that "
            "itself; leave it out"),
        ({"data": DataLoader([1]), "batch_size": 2}, "Trainer: batch_size is that of the "
            "DataLoader; leave it out"),
        ({"strategy": 2}, 'Trainer: strategy=2; pass e.g. "ddp", or DataParallel(2)'),
        ({"settings": {"max_epochs": 2}}, "Trainer: settings={'max_epochs': 2}; pass "
            "TrainerSettings(KEY=VALUE)"),
        ({"callbacks": [Checkpoint]}, "Trainer: callbacks=<class 'dpframe.callbacks.checkpoint."
            "Checkpoint'>; pass a list of Callbacks"),
        ({"data": Staged()}, "Staged.setup takes (stage) and is called with (); write setup(self)"),
    ],
)  # fmt: skip
def test_parts_of_another_kind_are_refused_in_one_line(parts, said):
    with pytest.raises(UserError) as caught:
        Trainer(**{"task": Small(), "data": Rows(), **parts})
    assert str(caught.value) == said


def test_data_sets_train_and_are_measured_as_their_datamodule_does():
    data = Rows()
    metrics, predictions = [], []
    for given in ({"data": data}, {"data": data.train, "val": data.held_out, "batch_size": 4}):
        torch.manual_seed(0)
        held_out = {} if given["data"] is data else {"test": data.held_out}
        made = Trainer(Small(), **given, **held_out, settings=ONCE)
        made.fit()
        metrics.append(dict(made.test()))
        predictions.append(made.predict().joined())
    assert metrics[0] == metrics[1] and is_same(*predictions)
    alone = Trainer(made.task, test={"a": data.held_out}, predict=[*data.train], settings=ONCE)
    of_fit = {f"test/{name}": metrics[0][f"test/{name.rpartition('/')[2]}"] for name in NAMES}
    assert alone.test() == pytest.approx(of_fit, rel=1e-6)  # of batches of 32 rows
    assert len(alone.predict().joined()) == 20
    with pytest.raises(UserError) as caught:
        alone.fit()
    said = "DataSets.train_dataset() returned None; set data.train, or pass it to the Trainer"
    assert str(caught.value) == said


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_fit_start(self, trainer):
        self.lock = threading.Lock()  # which no other process can get

    def on_epoch_end(self, trainer):
        self.losses.append(trainer.metrics["val/loss"])

    def on_predict_end(self, trainer, predictions):
        self.known = {"step": trainer.global_step, "epoch": trainer.epoch, **trainer.metrics}


class Drawn(Rows):
    """Its setup draws rows by all three generators."""

    def setup(self):
        rows, _ = random_split([*self.train, *self.held_out], [30, 10])
        some = random.sample(list(rows), 20)
        self.held_out = [some[i] for i in numpy.random.permutation(20)[:10]]


@pytest.mark.parametrize("strategy", [DDP(2, "cpu"), FSDP(2, "cpu")])
def test_a_trainer_starts_its_ranks_that_draw_the_same_rows_and_takes_over_what_they_came_to(
    strategy,
):
    """They draw what one process draws, in the setup of the data too, and the task gets the average
    of the weights. Each mode starts a new interpreter: one strategy predicts as well, and knows
    what the fit has come to."""
    made = []
    for given in ({}, {"strategy": strategy}):
        given |= {"max_epochs": 2, "precision": "64", "callbacks": [Losses(), EMA(0.5)]}
        given["loggers"] = [history := History()]
        with seeding.seeded(3):
            trainer = Trainer(heavy(Small()), Drawn(), **given)
        returned = trainer.fit()
        assert returned == trainer.metrics and trainer.mode == "fit"
        tensors = list(trainer.task.parameters())
        if isinstance(strategy, DDP):
            tensors.append(trainer.predict().joined())
        made.append((trainer, tensors, [without_rates(row) for row in history.rows]))
    (one, tensors, rows), (several, same, again) = made
    assert len(rows) == 2 and again == [pytest.approx(row, rel=1e-12) for row in rows]
    assert several.metrics == pytest.approx(one.metrics, rel=1e-12)
    assert several.callbacks[0].losses == pytest.approx(one.callbacks[0].losses, rel=1e-12)
    assert (several.global_step, several.epoch) == (one.global_step, one.epoch) == (10, 2)
    assert is_same(several.whole_state_dict(), several.task.state_dict())
    if isinstance(strategy, DDP):
        assert several.callbacks[0].known == pytest.approx(one.callbacks[0].known, rel=1e-12)
    for there, here in zip(same, tensors, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-14)


def without_rates(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.endswith("per_second")}


class Grows(Callback):
    def on_epoch_start(self, trainer):
        trainer.data.train.level = trainer.epoch


def test_a_warning_of_all_ranks_is_printed_once(capfd):
    """As the command's ranks do it, of which the main one has the screen."""
    data = Rows()
    data.train, data.workers = Listed(data.train), 1
    with Trainer(Small(), data, strategy=DDP(2, "cpu"), max_epochs=2, callbacks=[Grows()]) as one:
        one.fit()
    assert capfd.readouterr().err.count("data workers begin again before each epoch") == 1


SCRIPT = """
import torch

def doubled(x):
    return torch.add(x, x)
"""


def compiled_there(content: bytes) -> list[float]:
    function = unpack(content, owns_main=True)
    compiled = torch.compile(lambda x: function(x), backend="eager", fullgraph=True)
    return compiled(torch.ones(2)).tolist()


def test_what_a_script_defines_is_compiled_in_its_ranks(monkeypatch):
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(SCRIPT, vars(script))
    content = pack(script.doubled)
    monkeypatch.undo()
    assert fresh(compiled_there, content) == [2.0, 2.0]
    unpack(content)
    assert not hasattr(sys.modules["__main__"], "doubled")  # in a program, which has its own


class Failing(Small):
    def training_step(self, batch):
        raise ValueError("ouch")


def test_an_error_in_its_ranks_is_the_trainers_with_their_traceback():
    with pytest.raises(RankFailed, match=r"(?s)rank \d failed:.*, in training_step.*: ouch$"):
        Trainer(heavy(Failing()), Rows(), max_epochs=1, gpus=2, accelerator="cpu").fit()


def test_a_program_of_many_open_files_starts_ranks():
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(20 * FD_SETSIZE, kept[1]), kept[1]))
    try:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(FD_SETSIZE)]
        try:
            Trainer(heavy(Small()), Rows(), max_epochs=1, gpus=2, accelerator="cpu").fit()
        finally:
            for file in files:
                os.close(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)


def test_a_trainer_that_has_trained_resumes_from_the_checkpoint_that_fit_is_given():
    longer = Trainer(Small(), Rows(), max_epochs=2)
    longer.fit()
    trainer = Trainer(Small(), Rows(), settings=ONCE)
    trainer.fit()
    trainer.fit(longer.state_dict())
    assert trainer.global_step == longer.global_step
    for here, there in zip(trainer.task.parameters(), longer.task.parameters(), strict=True):
        assert torch.equal(here, there)


class Stops(Callback):
    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("given", [{}, {"callbacks": [Stops()]}, {"strategy": DDP(2, "cpu")}])
def test_a_trainer_trains_once_unless_it_resumes(given):
    trainer = Trainer(heavy(Small()), Rows(), max_epochs=1, **given)
    if "callbacks" in given:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    else:
        trainer.fit()
    step, weights = trainer.global_step, deepcopy(trainer.task.state_dict())
    for between in (lambda: None, trainer.validate):
        between()
        with pytest.raises(
            UserError, match="has trained already; make another one, .* or pass resume"
        ):
            trainer.fit()
    assert trainer.global_step == step
    assert is_same(trainer.task.state_dict(), weights)


GOES_ON = """
from dpframe import DataModule, RunInfo, Task, Trainer
from dpframe.callbacks import Checkpoint
from small import SGD, Rows, Small

class Own(Small): ...

class Mine(Rows): ...

for epochs, gpus in ((1, 2), (2, 1), (3, 2)):
    run = {"run": RunInfo(directory="run"), "callbacks": [Checkpoint()], "max_epochs": epochs}
    made = Trainer(Own(), Mine(), gpus=gpus, accelerator="cpu", share_check="off", **run)
    made.fit(resume="last" if epochs > 1 else None)
    print(gpus, made.global_step)
"""


def test_what_a_script_defines_is_the_same_code_in_its_ranks_to_a_resume(tmp_path):
    (tmp_path / "goes_on.py").write_text(GOES_ON)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "goes_on.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 5", "1 10", "2 15"]


def test_settings_may_be_given_one_by_one():
    trainer = Trainer(Small(), Rows(), settings=ONCE, clip_norm=1.0)
    assert (trainer.settings.max_epochs, trainer.settings.clip_norm) == (1, 1.0)
    for given, near in (({"max_epoch": 3}, "max_epochs"), ({"callback": []}, "callbacks")):
        with pytest.raises(UserError) as caught:
            Trainer(Small(), Rows(), **given)
        said = f"there is no setting {next(iter(given))}; did you mean {near}?"
        assert str(caught.value) == f"Trainer: {said}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"gpus": 4},
            r"TrainerSettings\(gpus=4\) but the strategy is CPU\(gpus=None\); pass",
        ),
        (
            {"accelerator": "cuda"},
            r"accelerator='cuda'\) but .* is CPU\(accelerator='auto'",
        ),
    ],
)
def test_devices_that_contradict_the_strategys_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        Trainer(Small(), Rows(), strategy=CPU(), settings=TrainerSettings(**settings))


def outcome(**given: Any) -> str:
    torch.manual_seed(0)
    trainer = Trainer(Small(), Rows(), **{"settings": ONCE, **given})
    trainer.fit()
    loss = trainer.test()["test/loss"]
    return f"{trainer.strategy.name} {trainer.strategy.replicas} {loss}"


def trained_in_turns() -> list[str]:
    shared = DDP()
    with shared:
        trained = [outcome(strategy=shared), outcome(strategy=shared)]
        trained.append(outcome(settings=TrainerSettings(max_epochs=1, gpus=2)))  # joins its group
    trained.append(outcome(strategy=DDP()))  # opens another group in the same store
    return trained


def test_ddp_is_set_up_once_in_each_rank():
    trained = fresh(DDP(2, "cpu").launch, trained_in_turns)
    assert len(trained) == 4 and len(set(trained)) == 1 and trained[0].startswith("DDP 2 ")


@pytest.mark.parametrize("part", [Checkpoint, CSV, TensorBoard])
def test_what_writes_files_asks_for_a_directory(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = "callbacks" if part is Checkpoint else "loggers"
    trainer = Trainer(Small(), Rows(), settings=ONCE, **{kind: [part()]})
    with pytest.raises(
        UserError, match=rf"^{part.__name__} writes files, .* run=RunInfo\(directory=…\)$"
    ):
        trainer.fit()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="directory=s3://bucket/x is a URL, and dpframe reads"):
        RunInfo(directory="s3://bucket/x")
    run = RunInfo(directory=str(tmp_path / "mine"))
    Trainer(Small(), Rows(), settings=ONCE, run=run, **{kind: [part()]}).fit()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_ranks_refuse_the_directory_of_another_run(tmp_path):
    fitted(callbacks=[Checkpoint()], directory=tmp_path, max_epochs=1)
    run = RunInfo(directory=str(tmp_path))
    given = {"strategy": DDP(2, "cpu"), "callbacks": [Checkpoint()], "run": run}
    with pytest.raises(UserError, match="^the run directory .* has the checkpoints of another run"):
        Trainer(Small(), Rows(), settings=ONCE, **given).fit()


def refusal(directory: Path) -> str:
    """What a fit of another process says that resumes a run there."""
    with pytest.raises(UserError) as caught:
        fitted(callbacks=[Checkpoint()], directory=directory, resume="last")
    return str(caught.value)


def test_a_directory_that_another_program_trains_in_is_refused_until_its_fit_ends(tmp_path):
    said: list[str] = []

    def look(trainer: Any) -> None:
        if trainer.epoch == 1:
            trainer.callbacks[-1].writer.wait()
            said.append(fresh(refusal, tmp_path))

    looks = Hooks(on_epoch_start=look)
    fitted(callbacks=[looks, Checkpoint()], directory=tmp_path)
    assert said[0].startswith(f"the run directory {tmp_path} is in use by process ")
    assert said[0].endswith("; end that first, or name another by run=RunInfo(directory=…)")
    fresh(resumed, tmp_path)
    failed = trainer(callbacks=[Hooks(on_fit_end=fail), Checkpoint()], directory=tmp_path)
    with pytest.raises(ZeroDivisionError):
        failed.fit(resume="last")
    fresh(resumed, tmp_path)


def fail(trainer: Any) -> None:
    raise ZeroDivisionError


def resumed(directory: Path) -> None:
    fitted(callbacks=[Checkpoint()], directory=directory, resume="last")


class Moves(Small):
    def setup(self, trainer):
        os.chdir(Path.cwd().parent)


def test_the_directory_of_a_run_is_where_the_program_has_named_it(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = RunInfo(directory="run")
    Trainer(Moves(), Rows(), max_epochs=1, run=run, callbacks=[Checkpoint()]).fit()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert (tmp_path / "here" / "run" / "checkpoints" / "last.ckpt").is_file()
    with pytest.raises(UserError, match="^directory=3 is a whole number; use text or a path"):
        RunInfo(directory=3)


def test_without_files_no_directory_is_needed_or_named(capsys):
    Trainer(Small(), Rows(), settings=ONCE, callbacks=[Progress()]).fit()
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("run ")]


def test_a_program_shows_its_progress_on_a_terminal_and_in_a_notebook_alone(monkeypatch, capsys):
    def shown(**options: Any) -> str:
        Trainer(Small(), Rows(), settings=ONCE, **options).fit()
        return capsys.readouterr().out

    assert shown() == "", "over a pipe"
    assert "task       Small, seed 0\n" in shown(show_progress=True)
    monkeypatch.setattr(dpframe.callbacks.display, "can_redraw", lambda: True)
    assert "samples/s" in shown() and shown(show_progress=False) == ""
    assert shown(callbacks=[Progress()]).count("task  ") == 1, "one is enough"
    kernel = SimpleNamespace(initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", SimpleNamespace(IPKernelApp=kernel))
    line = shown()
    assert "\repoch 1/1  step 5/5 " in line and line.count("\n") == 1


def test_the_trainer_of_a_program_shows_it_in_the_first_of_its_ranks(monkeypatch):
    monkeypatch.setattr(dpframe.callbacks.display, "can_redraw", lambda: True)
    trainer = Trainer(Small(), Rows(), settings=ONCE, strategy=DDP(2, "cpu"))
    trainer.fit()
    (progress,) = trainer.callbacks
    assert [epoch.number for epoch in progress.epochs] == [1]


class Typed(Callback):
    """Of which type its Trainer is."""

    found: type | None = None

    def on_fit_start(self, trainer: Any) -> None:
        self.found = type(trainer)


@pytest.mark.parametrize("strategy", [CPU(), DDP(2, "cpu")])
def test_hooks_have_the_trainer_that_a_program_makes(strategy):
    trainer = Trainer(heavy(Small()), Rows(), settings=ONCE, strategy=strategy, callbacks=[Typed()])
    trainer.fit()
    assert trainer.callbacks[0].found is Trainer


class Settings(Callback):
    def on_fit_start(self, trainer: Any) -> None:
        self.found = torch.get_default_dtype(), process_settings()


def test_the_ranks_of_a_trainer_have_the_torch_settings_of_the_program():
    note = Settings()
    with process_settings_restored(), default_dtype(torch.float64):
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        Trainer(Small(), Rows(), settings=ONCE, strategy=DDP(2, "cpu"), callbacks=[note]).fit()
        assert note.found == (torch.float64, process_settings())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_dashboard_is_named_where_a_logger_has_one(tmp_path, capsys):
    for logger in (CSV(), TensorBoard()):
        run = RunInfo(directory=str(tmp_path / f"its {type(logger).__name__}"))
        given = {"callbacks": [Progress()], "loggers": [logger], "run": run}
        Trainer(Small(), Rows(), settings=ONCE, **given).fit()
        lines = [o for o in capsys.readouterr().out.splitlines() if o.startswith("dashboard")]
        wanted = [f"dashboard  tensorboard --logdir '{run.directory}'"]
        assert lines == (wanted if isinstance(logger, TensorBoard) else [])


def test_a_compiled_run_says_why_its_first_step_takes_so_long(caplog):
    class Ends(Callback):
        def on_fit_start(self, trainer):
            raise EOFError

    caplog.set_level("INFO", "dpframe")
    settings = TrainerSettings(max_epochs=1, compile=True)
    with pytest.raises(EOFError):
        Trainer(Small(), Rows(), settings=settings, callbacks=[Ends()]).fit()
    line = "trainer.compile.mode=default: the first step may take minutes to compile"
    assert line in caplog.text


def test_what_another_process_can_not_have_stays_behind():
    part = Callback()
    vars(part).update(best=0.5, lock=threading.Lock(), curve=[1, 2])
    assert attributes_of(part) == {"best": 0.5, "curve": [1, 2]}
