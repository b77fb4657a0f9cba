"""What is trained: recipes as they are shipped, GPT-2 with 124 million parameters, a ResNet-50."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

from benchmarks.gpu.formulas import flops_per_token
from benchmarks.gpu.resnet import Images, ResNet50
from dpframe import DataModule, Task, TrainerSettings
from dpframe.config.build import build, check_targets
from dpframe.config.compose import composed
from dpframe.recipes.gpt import GPT

ROOM = 60 * 2**30  # bytes of a GPU that takes the larger batch of GPT-2
TUNED, LIGHTNING, RESIDENT = "the tuned loop", "Lightning", "Lightning, data on the GPU"


class Problem(NamedTuple):
    task: Task
    data: DataModule
    settings: TrainerSettings


@dataclass(frozen=True)
class Contest:
    """`warm_steps` and `steps` end where an epoch does. `aims` are the shares of other programs'
    step that ours may take at most."""

    title: str
    make: Callable[[], Problem]
    warm_steps: int
    steps: int
    tolerance: float  # between the epochs' losses, relative to the first one's
    unit: str = "samples"
    units_per_row: int = 1
    compile_mode: str | None = None
    has_loader: bool = False  # Lightning reads by a DataLoader, too
    aims: dict[str, float] = field(default_factory=dict)
    least_utilization: float | None = None

    def problem(self) -> Problem:
        """The same weights and rows in each call."""
        torch.manual_seed(0)
        task, data, settings = self.make()
        data.setup()
        return Problem(task, data, replace(settings, compile=self.compile_mode))


def contests(*, is_tiny: bool) -> dict[str, Contest]:
    """By name. The tiny ones show that all of it runs, with two steps each."""
    boston, lenet = partial(recipe, "recipe=boston"), partial(recipe, "recipe=lenet")
    small = {
        "boston": Contest(
            "recipe=boston", boston, 400, 2000, 0.02, has_loader=True, aims={LIGHTNING: 0.2}
        ),
        "lenet": Contest("recipe=lenet", lenet, 46, 460, 0.02, has_loader=True),
    }
    if is_tiny:
        small["boston"] = tiny(small["boston"], partial(first_rows, boston))
        small["lenet"] = tiny(small["lenet"], partial(first_rows, lenet))
        rows, size = 2, ("task.layers=1", "task.heads=2", "task.width=16", "data.block=8")
        gpt = partial(gpt2, rows, "task.vocabulary=64", *size, epoch_steps=1)
        resnet = partial(resnet50, 2, 32, epoch_steps=1, stages=((2, 1, 1), (4, 1, 2)))
    else:
        has_room = torch.cuda.is_available() and torch.cuda.mem_get_info()[1] > ROOM
        rows = 32 if has_room else 8
        # A multiple of 128, which is how GPT-2 is usually trained: the logits are faster then.
        gpt = partial(gpt2, rows, "task.vocabulary=50304", epoch_steps=10)
        resnet = partial(resnet50, 256, 224, epoch_steps=8)
    aims = {TUNED: 1.01, RESIDENT: 0.97}
    large = {
        "gpt": Contest(f"GPT-2 124M, bf16, {rows} x 1024 tokens", gpt, 10, 20, 0.02, "tokens"),
        "resnet": Contest("ResNet-50, bf16, 256 images, channels_last", resnet, 16, 32, 0.05),
    }
    large["gpt"] = replace(large["gpt"], units_per_row=1024, aims=aims)
    large["resnet"] = replace(large["resnet"], unit="images", aims=aims)
    if is_tiny:
        large["gpt"] = tiny(replace(large["gpt"], units_per_row=8), gpt)
        large["resnet"] = tiny(large["resnet"], resnet)
        return small | large
    compiled = {
        f"{name}, compiled": replace(
            contest,
            title=f"{contest.title}, {words}",
            compile_mode=mode,
            least_utilization=0.4 if name == "gpt" else None,
        )
        for name, mode, words in (
            ("boston", "reduce-overhead", "trainer.compile.mode=reduce-overhead"),
            ("gpt", "default", "trainer.compile.mode=default"),
        )
        for contest in [(small | large)[name]]
    }
    compiled["boston, compiled"] = replace(compiled["boston, compiled"], aims={}, has_loader=False)
    return small | large | compiled


def tiny(contest: Contest, make: Callable[[], Problem]) -> Contest:
    """Nothing that is to be met: these times mean nothing."""
    return replace(
        contest,
        title=f"{contest.title} (tiny)",
        make=make,
        warm_steps=1,
        steps=2,
        aims={},
        tolerance=0.1,
    )


def recipe(*words: str) -> Problem:
    """As `python -m dpframe` makes it of these words."""
    job = composed(words)
    check_targets(job)
    task = build(job.config["task"], "task", Task)
    data = build(job.config["data"], "data", DataModule)
    return Problem(task, data, job.settings.trainer)


def first_rows(make: Callable[[], Problem]) -> Problem:
    """With an epoch of one batch."""
    task, data, settings = make()
    data.setup()
    return Problem(task, FirstRows(data), settings)


class FirstRows(DataModule):
    def __init__(self, data: DataModule, count: int = 8) -> None:
        super().__init__(count)
        self.data = data

    def train_dataset(self) -> TensorDataset:
        return self.first(self.data.train_dataset())

    def val_dataset(self) -> TensorDataset:
        return self.first(self.data.val_dataset())

    def first(self, dataset: Any) -> TensorDataset:
        return TensorDataset(*dataset[: self.batch_size])


def gpt2(batch_size: int, *words: str, epoch_steps: int) -> Problem:
    """The experiment on made-up tokens, at a constant and small learning rate: the losses of
    programs that train alike stay near each other."""
    calm = ("task.scheduler=null", "task.optimizer.lr=1e-4", f"data.batch_size={batch_size}")
    task, _, settings = recipe("experiment=gpt2_124m", *calm, *words)
    assert isinstance(task, GPT)
    vocabulary = task.net.tokens.num_embeddings
    tokens = Tokens(batch_size, batch_size * epoch_steps, task.block, vocabulary)
    return Problem(task, tokens, settings)


class Tokens(DataModule):
    """Always the same random ones."""

    def __init__(self, batch_size: int, rows: int, block: int, vocabulary: int) -> None:
        super().__init__(batch_size)
        self.rows, self.block, self.vocabulary = rows, block, vocabulary

    def setup(self) -> None:
        draw = torch.Generator().manual_seed(0)
        shape = self.rows, self.block + 1
        self.tokens = TensorDataset(torch.randint(self.vocabulary, shape, generator=draw))

    def train_dataset(self) -> TensorDataset:
        return self.tokens


def resnet50(
    batch_size: int, side: int, *, epoch_steps: int, stages: tuple | None = None
) -> Problem:
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-5)
    task = ResNet50(optimizer, *([stages] if stages else []))
    settings = TrainerSettings(
        precision="bf16", matmul_precision="high", channels_last=True, cudnn_benchmark=True
    )
    return Problem(task, Images(batch_size, batch_size * epoch_steps, side), settings)


def flops_per_row(problem: Problem) -> float | None:
    """Of a training step; None where there is no formula for it."""
    task = problem.task
    if not isinstance(task, GPT):
        return None
    blocks = list(task.net.blocks)
    width = task.net.tokens.embedding_dim
    parameters = sum(parameter.numel() for parameter in task.parameters())
    each = flops_per_token(parameters, len(blocks), blocks[0].heads, width, task.block)
    return float(each * task.block)
