"""docs/from-the-tutorials.md: every command and program on it runs, and says what it shows."""

import io
import re
import runpy
from contextlib import redirect_stdout
from functools import partial

import pytest
import torch
from command import ROOT, attempts, dpframe, write
from forked import fresh
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import parallel_apply, replicate
from torch.utils.data import TensorDataset

from dpframe import DataModule, Task, Trainer, UserError, checkpoint
from dpframe.data import split
from dpframe.recipes.boston import Boston
from dpframe.strategies.data_parallel import DataParallel

PAGE = (ROOT / "docs" / "from-the-tutorials.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.S | re.M)
COMMANDS = re.findall(r"^(?:\w+=\S+ )?dpframe (.*?)(?: +#.*)?$", "".join(BLOCKS), re.M)
PROGRAMS = dict(re.findall(r"^`(\S+)`:\n```python\n(.*?)^```$", PAGE, re.S | re.M))
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"]
PROCESSES = {"strategy=ddp", "mode=compare", "mode=doctor", "sweep.jobs=2"}
SHAPES = re.findall(r"^\| (\d+) \| ([\d ]+) \| ([\d ]+) \|$", PAGE, re.M)


def network() -> nn.Sequential:
    layers = nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)
    return nn.Sequential(*layers)


def printed(program: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(program)
    return out.getvalue()


@pytest.mark.whole
def test_every_command_runs(tmp_path):
    assert len(COMMANDS) == sum(block.count("dpframe ") for block in BLOCKS) == 17
    torch.save({"state_dict": nn.DataParallel(network()).state_dict()}, tmp_path / "theirs.pt")
    lines = [[*command.split(), *SHORT] for command in COMMANDS]
    apart = [line for line in lines if PROCESSES & {*line}]
    done = attempts([line for line in lines if line not in apart], tmp_path)
    assert {each.code for each in done} <= {0, None}, [each.err for each in done if each.code]
    out = "".join(each.out for each in done)
    for line in apart:  # ranks are forked from a process that has computed nothing
        ran = dpframe(*line, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        out += ran.stdout
    for line in re.findall(r"^task\.scale_lr: .*$|`(model +\d.*)`", PAGE, re.M):
        assert line in out
    sizes = [
        len(share)
        for replicas, *_ in SHAPES
        for rows in (30, 30, 30, 10)
        for share in split(range(rows), int(replicas))
        if len(share)
    ]
    shown = re.findall(r"In Model: input size torch.Size\(\[(\d+), 5\]\)", out)
    assert list(map(int, shown)) == sizes


def test_the_table_of_shares_is_what_split_gives():
    assert [int(replicas) for replicas, *_ in SHAPES] == [1, 2, 3, 4, 8]
    for replicas, *shares in SHAPES:
        for rows, text in zip((30, 10), shares, strict=True):
            sizes = [len(share) for share in split(range(rows), int(replicas))]
            assert text.split() == [str(size) for size in sizes if size]


def test_what_does_not_match_is_told_in_the_line_that_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(network()[:3].state_dict(), "theirs.pt")
    with pytest.raises(UserError) as caught:
        checkpoint.load_task(Boston(network(), None), checkpoint.load("theirs.pt"))
    assert f"`{caught.value}`" in PAGE


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_gives_the_same_in_threads(tmp_path, program):
    write(tmp_path, PROGRAMS)
    assert fresh(printed, program, folder=tmp_path).splitlines()[-1] == "the same"


# On GPUs


@pytest.mark.gpu(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_gives_the_same_on_gpus(tmp_path, monkeypatch, program):
    monkeypatch.chdir(write(tmp_path, PROGRAMS))
    assert printed(program).splitlines()[-1] == "the same"


@pytest.mark.gpu(2)
def test_weights_of_one_gpu_are_taken_on_another_and_on_none(tmp_path):
    torch.save(network().to("cuda:1").state_dict(), tmp_path / "theirs.pt")
    state = checkpoint.load(tmp_path / "theirs.pt")
    for device in ("cuda:0", "cpu"):
        task = Boston(network().to(device), None)
        checkpoint.load_task(task, state)
        assert torch.equal(task.net[0].weight.cpu(), state["task"]["0.weight"])
        assert str(task.net[0].weight.device) == device


class Wide(Task):
    def training_step(self, batch):
        return {"loss": cross_entropy(self.net(batch[0]), batch[1])}


class WideData(DataModule):
    def train_dataset(self):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(3072, 64, generator=generator)
        return TensorDataset(rows, torch.randint(4096, (3072,), generator=generator))


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4096))


def peaks() -> list[float]:
    found = [torch.cuda.max_memory_allocated(gpu) / 2**20 for gpu in (0, 1)]
    for gpu in (0, 1):
        torch.cuda.reset_peak_memory_stats(gpu)
    return found


@pytest.mark.gpu(2)
def test_the_first_gpu_needs_little_more_than_the_second_unless_it_gathers_the_outputs():
    peaks()
    gathering()
    theirs = peaks()
    make = partial(torch.optim.Adam, lr=0.001)
    strategy = DataParallel([0, 1], "cuda")
    data, settings = WideData(batch_size=1024), {"max_epochs": 1, "data_on_device": False}
    with Trainer(Wide(wide(), make), data, strategy=strategy, **settings) as trainer:
        trainer.fit()
    ours = peaks()
    assert theirs[0] > 2.5 * theirs[1] and ours[0] < 1.2 * ours[1] < 0.7 * theirs[0]


def gathering() -> None:
    """What nn.DataParallel does."""
    net = wide().to("cuda:0")
    optimizer = torch.optim.Adam(net.parameters())
    columns = (column.split(1024) for column in WideData().train_dataset().tensors)
    for x, y in zip(*columns, strict=True):
        halves = [(half.to(f"cuda:{gpu}"),) for gpu, half in enumerate(x.chunk(2))]
        outputs = parallel_apply(replicate(net, [0, 1]), halves)
        gathered = torch.cat([output.to("cuda:0") for output in outputs])
        cross_entropy(gathered, y.to("cuda:0")).backward()
        optimizer.step()
        optimizer.zero_grad()
