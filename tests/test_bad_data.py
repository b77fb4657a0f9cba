"""Bad data and bad steps: one line, or the user's own traceback, with the rows that it is about."""

import os
import re
import shlex
import signal
import sys
import time
from itertools import repeat
from pathlib import Path

import pytest
import torch
from command import attempts, dpframe, write
from conftest import descendants
from torch.utils.data import Dataset, IterableDataset, Subset

from dpframe.data import Loader
from dpframe.errors import Failure, UserError

ONE = {"batch_size": 4, "shares": lambda rows: [rows]}


class Bad(Dataset):
    """Twelve rows; what the tenth is decides the fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int):
        if row != 9:
            return {"x": torch.ones(4), "y": (row, 1.0)}
        return getattr(self, self.fault)()

    def shape(self):
        return {"x": torch.ones(3), "y": (1, 1.0)}

    def keys(self):
        return {"x": torch.ones(4)}

    def parts(self):
        return {"x": torch.ones(4), "y": (1,)}

    def kinds(self):
        return {"x": torch.ones(4), "y": ("a", 1.0)}

    def nothing(self):
        return None

    def odd(self):
        raise LookupError("it is broken")

    def refused(self):
        raise UserError("row 9 has no label; mend labels.csv")

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def left(self):
        os._exit(3)

    def hung(self):
        time.sleep(60)

    def exits(self):
        sys.exit(0)

    def stopped(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        return {"x": torch.ones(4), "y": (9, 1.0)}

    def spins(self):
        sum(repeat(0))  # in C, and it never gives its GIL away


class Stream(IterableDataset):
    def __init__(self, fault: str) -> None:
        self.rows = Bad(fault)

    def __iter__(self):
        return (self.rows[row] for row in range(12))


def read(dataset: Dataset, **given) -> None:
    loader = Loader(dataset, **{**ONE, **given})
    for _ in loader.epoch():
        pass


LINES = {
    "shape": "rows 8 and 9 of Bad: 'x': shapes (4,) and (3,); make all rows alike, or put them "
    "together in your DataModule's collate",
    "keys": "rows 8 and 9 of Bad: keys y in one of them alone; make all",
    "parts": "rows 8 and 9 of Bad: 'y': 2 and 1 parts; make all",
    "kinds": "rows 8 and 9 of Bad: 'y': part 0: a int and a str; make all",
    "nothing": "rows 8 and 9 of Bad: a dict and a NoneType; make all",
    "refused": "row 9 has no label; mend labels.csv",
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Bad, Stream])
def test_rows_that_do_not_fit_together_are_told_with_their_numbers(kind, workers):
    for fault, line in LINES.items():
        with pytest.raises(UserError) as caught:
            read(kind(fault), workers=workers)
        assert str(caught.value).startswith(line.replace("Bad", kind.__name__)), fault


def test_what_torch_can_never_put_together_is_one_line():
    class Own:
        pass

    with pytest.raises(UserError) as caught:
        read(Subset([{"x": [1, Own()]}] * 4, [0, 2]))
    assert str(caught.value).startswith(
        "row 0 of Subset of list: 'x': part 1: a Own, which torch can't put together; make"
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Bad, Stream])
def test_what_a_row_raises_keeps_its_traceback_and_has_its_number(kind, workers):
    with pytest.raises(LookupError, match="it is broken") as caught:
        read(kind("odd"), workers=workers)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert told.rstrip().endswith(f"while reading row 9 of {kind.__name__}")
    if workers:
        assert 'in odd\n    raise LookupError("it is broken")' in told
    else:
        assert caught.traceback[-1].name == "odd"


def test_rows_read_together_and_a_collate_of_ones_own_are_told_by_all_their_numbers():
    class Together(Bad):
        def __getitems__(self, rows):
            raise LookupError(rows)

    def collate(rows):
        raise LookupError(len(rows))

    for dataset, given, note in (
        (Together(""), {}, "while reading rows 0 1 2 3 of Together"),
        (Bad(""), {"collate": collate}, "while putting together rows 0 1 2 3 of Bad"),
    ):
        with pytest.raises(LookupError) as caught:
            read(dataset, **given)
        assert caught.value.__notes__ == [note]


@pytest.mark.parametrize("kind", [Bad, Stream])
@pytest.mark.parametrize(
    "fault, line",
    [
        ("killed", "was killed by SIGKILL; perhaps for memory: try a smaller data.workers"),
        ("left", "left by itself; data.workers=0 may show why"),
    ],
)
def test_a_lost_worker_is_one_line(fault, line, kind):
    with pytest.raises(Failure) as caught:
        read(kind(fault), workers=2)
    assert str(caught.value).startswith("data worker (pid ") and line in str(caught.value)


def test_a_hung_worker_is_told_by_where_it_is():
    began = time.monotonic()
    with pytest.raises(Failure) as caught:
        read(Bad("hung"), workers=2, timeout_seconds=1.0)
    assert time.monotonic() - began < 30
    line = str(caught.value)
    assert line.startswith("data worker 0 (pid ") and "has given nothing for 1 s, in hung (" in line
    assert line.endswith("; mend that, or raise trainer.data_timeout_seconds")
    assert f"__getitem__ ({Path(__file__).name}, line " in line


def told_of(fault: str, **given) -> tuple[str, list[int]]:
    """The line that a fault of a worker ends with, and the workers that outlive it."""
    before = set(descendants())
    with pytest.raises(Failure) as caught:
        read(Bad(fault), workers=2, **given)
    return str(caught.value), list(set(descendants()) - before)


def test_a_worker_that_is_stopped_or_keeps_its_gil_is_told_and_ended():
    line, left = told_of("stopped", timeout_seconds=1.0)
    assert not left and line.startswith("data worker 0 (pid ")
    assert ") has given nothing for 1 s: it is stopped, by SIGSTOP or a debugger; " in line
    line, left = told_of("spins", timeout_seconds=1.0)
    assert not left and line.startswith("data worker 0 (pid ")
    assert ") has given nothing for 1 s, in spins (test_bad_data.py, line " in line


def test_a_worker_that_exits_is_told_by_where():
    line, _ = told_of("exits")
    assert re.fullmatch(
        r"data worker 0: sys\.exit\(0\) in exits \(test_bad_data\.py, line \d+\) ended it before "
        r"its work was done; raise an exception instead",
        line,
    )


# Through the command


PARTS = """
import sys
from itertools import repeat

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import dpframe

RETURNS = {
    "none": lambda loss: None,
    "list": lambda loss: [loss],
    "tensor": lambda loss: loss,
    "empty": lambda loss: {},
    "no loss": lambda loss: {"mae": loss},
    "a number": lambda loss: {"loss": 1.0},
    "a vector": lambda loss: {"loss": torch.stack([loss, loss])},
    "detached": lambda loss: {"loss": loss.detach()},
    "no weight": lambda loss: {"loss": loss, "weight": None},
    "weights": lambda loss: {"loss": loss, "weight": torch.ones(2)},
    "text": lambda loss: {"loss": loss, "mae": "low"},
    "no number": lambda loss: {"loss": loss, "mae": None},
    "numbers": lambda loss: {"loss": loss, "mae": torch.ones(3)},
    "exits": lambda loss: sys.exit(0),
}


class Odd(dpframe.Task):
    def __init__(self, train="", val="", test="", predict=""):
        super().__init__(torch.nn.Linear(1, 1))
        self.returns = {"train": train, "val": val, "test": test, "predict": predict}

    def given(self, step, batch):
        loss = self.net(batch[0]).square().mean()
        return RETURNS.get(self.returns[step], lambda loss: {"loss": loss})(loss)

    def training_step(self, batch):
        return self.given("train", batch)

    def validation_step(self, batch):
        return self.given("val", batch)

    def test_step(self, batch):
        return self.given("test", batch)

    def predict_step(self, batch):
        return self.given("predict", batch)

    def configure_optimizer(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Broken(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, row):
        if row == 25:
            raise LookupError("the user's own words")
        return torch.ones(1), torch.ones(1)


class Spins(Broken):
    def __getitem__(self, row):
        return torch.ones(1), torch.ones(1) * (sum(repeat(0)) if row == 8 else 0)


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


KINDS = {
    "some": lambda: TensorDataset(torch.ones(8, 1)),
    "none": lambda: None,
    "empty": lambda: TensorDataset(torch.ones(0, 1)),
    "list": lambda: [],
    "stream": Nothing,
    "broken": Broken,
    "spins": Spins,
}


class OddData(dpframe.DataModule):
    def __init__(self, batch_size=4, workers=0, *, train, val, test, sampler):
        super().__init__(batch_size, workers, shuffle=False)
        self.kinds = {"train": train, "val": val, "test": test}
        self.sampler = sampler

    def train_dataset(self):
        return KINDS[self.kinds["train"]]()

    def val_dataset(self):
        return KINDS[self.kinds["val"]]()

    def test_dataset(self):
        return KINDS[self.kinds["test"]]()

    def train_sampler(self, dataset):
        return [] if self.sampler else None
"""
RECIPE = """
# @package _global_
task: {_target_: odd.Odd, train: "", val: "", test: "", predict: ""}
data: {_target_: odd.OddData, train: some, val: some, test: some, workers: 0, sampler: false}
trainer: {max_epochs: 1, accelerator: cpu}
"""
DICT = 'return {"loss": scalar tensor, **metrics}'
MEASURED = "; return a dict of what was measured"
STEPS = {
    "task.train=none": f"Odd.training_step returned NoneType; {DICT}",
    "task.train=list": f"Odd.training_step returned list; {DICT}",
    "task.train=empty": "Odd.training_step returned a dict without 'loss' (it has nothing)",
    "task.train='no loss'": "Odd.training_step returned a dict without 'loss' (it has mae)",
    "task.train='a number'": "Odd.training_step returned a loss that is a float, not a tensor",
    "task.train='a vector'": "Odd.training_step returned a loss of shape (2,)",
    "task.train=detached": "Odd.training_step returned a loss without a gradient",
    "task.train='no weight'": "Odd.training_step returned 'weight' as a NoneType; return one",
    "task.train=weights": "Odd.training_step returned 'weight' with more than one number",
    "task.train=text": "a step returned 'mae' as a str; return one number, or leave it out",
    "task.train=numbers": "a step returned 'mae' with more than one number; return its mean",
    "task.val=none": f"Odd.validation_step returned NoneType{MEASURED}",
    "task.val=tensor": f"Odd.validation_step returned Tensor{MEASURED}",
    "task.val=empty": f"Odd.validation_step returned an empty dict{MEASURED}",
    "task.val=text": "Odd.validation_step returned 'mae' as a str; return one number",
    "task.val='no number'": "Odd.validation_step returned 'mae' as a NoneType; return one number",
    "task.val=numbers": "Odd.validation_step returned 'mae' with more than one number",
    "task.test=none mode=test": f"Odd.test_step returned NoneType{MEASURED}",
    "task.predict=none mode=predict": "Odd.predict_step returned None; return tensors, or lists",
}
DATA = {
    "data.train=empty": "OddData.train_dataset() has no rows; give it at least one",
    "data.train=list": "OddData.train_dataset() has no rows; give it at least one",
    "data.train=none": "OddData.train_dataset() gives no data set; write it",
    "data.train=stream": "OddData.train_dataset() gave no rows",
    "data.val=empty": "OddData.val_dataset() has no rows; return None for no validation",
    "data.val=stream": "val: the data set gave no rows",
    "data.test=empty mode=test": "OddData.test_dataset() has no rows; give it at least one",
    "data.test=stream mode=test": "test: the data set gave no rows",
    "data.test=empty mode=predict": "OddData.predict_dataset() has no rows; give it at least one",
    "data.test=stream mode=predict": "predict: the data set gave no rows",
    "data.val=empty mode=validate": "OddData.val_dataset() has no rows; return None for no",
    "data.sampler=true": "train_sampler returned a list of no rows",
}
START = ["--config-dir", ".", "recipe=odd", "logger=none"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("odd"), {"odd.py": PARTS, "recipe/odd.yaml": RECIPE})


REPLICAS = ["strategy=data_parallel", "trainer.gpus=2"]
ON_REPLICAS = ("task.train=none", "task.train=text", "task.val=none", "data.val=empty")


def test_a_step_or_a_data_set_that_gives_nothing_is_refused_and_leaves_nothing(place):
    told = [(way, line, []) for way, line in (STEPS | DATA).items()]
    told += [(way, (STEPS | DATA)[way], REPLICAS) for way in ON_REPLICAS]
    lines = [
        [*START, *more, *shlex.split(f'"{way}"' if "'" in way else way)] for way, _, more in told
    ]
    done, _ = attempts(lines, place)
    for (_, line, _), attempt in zip(told, done, strict=True):
        assert attempt.code == 2, attempt.err
        assert attempt.err.splitlines()[-1].startswith(f"dpframe: {line}"), attempt.err
        assert "outputs" not in attempt.files, line


RANKS = ["strategy=ddp", "trainer.gpus=2"]


@pytest.mark.parametrize("way", ["task.train=text", "data.val=empty", "data.train=stream"])
def test_ranks_refuse_it_alike(way, place):
    done = dpframe(*START, *RANKS, way, cwd=place)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"dpframe: {(STEPS | DATA)[way]}")
    assert "Traceback" not in done.stderr and not (place / "outputs").exists()


def test_a_step_that_exits_and_a_worker_that_spins_at_the_end_do_not_end_the_run_unnoticed(place):
    odd = "sys.exit(0) in <lambda> (odd.py, line "
    spins = ["data.train=spins", "data.workers=1", "trainer.max_steps=1", "data.val=none"]
    (exits, unread), _ = attempts([[*START, "task.train=exits"], [*START, *spins]], place)
    assert (exits.code, exits.err.count("\n")) == (1, 1)
    assert exits.err.startswith(f"dpframe: {odd}")
    assert unread.code == 0, unread.err
    done = dpframe(*START, *RANKS, "task.train=exits", cwd=place)
    assert done.returncode == 1
    assert re.search(rf"^dpframe: rank [01]: {re.escape(odd)}", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [["data.workers=0"], ["data.workers=1"], [*RANKS, "data.workers=1"]]
)
def test_the_users_own_traceback_comes_last_with_the_row(words, place):
    done = dpframe(*START, *words, "data.train=broken", "hydra.run.dir=out", cwd=place)
    assert done.returncode == 1
    *_, at, raises, words_of_its_own, note = done.stderr.rstrip().splitlines()
    assert "odd.py" in at and raises.strip() == """raise LookupError("the user's own words")"""
    assert words_of_its_own == "LookupError: the user's own words"
    assert note == "while reading row 25 of Broken"
