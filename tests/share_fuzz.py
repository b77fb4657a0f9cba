"""Random steps for the share check, of which it may refuse no honest one and miss no planted term.

`python tests/share_fuzz.py 500` tries as many of each in float64 and in float32."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from small import SGD
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

from dpframe import Task
from dpframe.strategies.data_parallel import DataParallel
from dpframe.trainer.checks.share_check import NOT_COMPARED, judge
from dpframe.trainer.checks.trial import CUT, EXACT, ROUNDINGS, ROWS, Trial
from dpframe.trainer.progress import Progress

ROW_LOSSES: list[Callable[..., Tensor]] = [
    lambda f, x, y, k: (f - y).square(),
    lambda f, x, y, k: (f - y).abs(),
    lambda f, x, y, k: functional.huber_loss(f, y, reduction="none"),
    lambda f, x, y, k: functional.softplus(-f * y),
    lambda f, x, y, k: (f - y).cosh().log(),
    lambda f, x, y, k: (f - x).square().mean(dim=1, keepdim=True),
    lambda f, x, y, k: (f * x).logsumexp(dim=1, keepdim=True),
    lambda f, x, y, k: (k.clamp(min=0).to(f) * f).sigmoid().mean(dim=1, keepdim=True),
]
# Functions of a share, of which none is a mean over its rows.
PLANTED: dict[str, Callable[..., Tensor]] = {
    "its rows": lambda f, x, y, k: f.new_tensor(float(len(x))),
    "one over its rows": lambda f, x, y, k: f.new_tensor(1 / len(x)),
    "a sum": lambda f, x, y, k: f.sum(),
    "the square of a mean": lambda f, x, y, k: f.mean().square(),
    "a deviation": lambda f, x, y, k: f.std(),
    "a maximum": lambda f, x, y, k: f.max(),
    "the first row": lambda f, x, y, k: f[0].sum(),
    "a ratio of sums": lambda f, x, y, k: f.sum() / (1 + (k >= 0).sum()),
    "a norm": lambda f, x, y, k: (f - y).norm(),
    "a contrast": lambda f, x, y, k: functional.cross_entropy(f @ x[:, :1].T, torch.arange(len(x))),
    "normalised": lambda f, x, y, k: (f * (y - y.mean()) / (y.std() + 1e-8)).mean(),
    "a median": lambda f, x, y, k: f.median(),
    "a mean over tokens": lambda f, x, y, k: (f * (k >= 0)).sum() / (k >= 0).sum(),
}


@dataclass
class Program:
    """A step that is chosen at random."""

    terms: list[tuple[float, int]]
    mean: str  # over what: rows, weights, the whole batch, or by name
    noise: str
    state: str
    metrics: list[str]
    planted: str = ""
    size: float = 0.0  # of what is planted, relative to the rest
    width: int = 8
    rows: int = 40
    seed: int = 0
    has_dropout: bool = field(default=False)

    @classmethod
    def of(cls, random: Random, *, plants: bool) -> "Program":
        terms = [
            (random.uniform(0.1, 3), random.randrange(len(ROW_LOSSES)))
            for _ in range(random.randint(1, 3))
        ]
        planted = random.choice(list(PLANTED)) if plants else ""
        is_known = planted in ("", "its rows", "one over its rows")  # whatever is drawn
        mean = random.choice(["rows", "rows", "weights", "whole", "names"])
        return cls(
            terms,
            mean,
            random.choice(["none", "of rows"]) if is_known else "none",
            random.choice(["none", "mean", "queue", "buffer", "hidden"]),
            random.sample(["most", "spread", "count", "mean"], random.randint(0, 2)),
            planted,
            10 ** random.uniform(-5, 1),
            random.choice([2, 8, 33]),
            random.choice([13, 14, 40]),
            random.randrange(10**6),
            random.random() < 0.3,
        )


class Step(Task):
    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        dropout = nn.Dropout(0.5 if program.has_dropout else 0.0)
        layers = nn.Linear(6, program.width), nn.Tanh(), dropout, nn.Linear(program.width, 1)
        super().__init__(nn.Sequential(*layers), SGD)
        self.program = program
        self.register_buffer("seen", torch.ones(()))
        self.slow = nn.Linear(6, 1).requires_grad_(False)
        self.running, self.queue = 0.5, deque([torch.ones(())], maxlen=3)
        self.hidden: Any = None
        self.to(dtype)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        (x, y, labels), program = batch, self.program
        f = self.net(x + 0.1 * self._noise(x))
        rows = sum(c * ROW_LOSSES[n](f, x, y, labels) for c, n in program.terms)
        rows = rows * self._state(f, x)
        output = self._mean(rows, x, labels)
        if program.planted:
            term = program.size * PLANTED[program.planted](f, x, y, labels)
            output["loss"] = output["loss"] + term
        kinds = {"most": y.max(), "spread": y.std(), "count": float(len(x)), "mean": y.mean()}
        return {**output, **{name: kinds[name] for name in program.metrics}}

    def _noise(self, x: Tensor) -> Tensor:
        has_noise = self.program.noise == "of rows"
        return self.randn_rows(*x.shape).to(x) if has_noise else torch.zeros_like(x)

    def _state(self, f: Tensor, x: Tensor) -> Any:
        """What it was before this step, which changes it."""
        kind, mean = self.program.state, f.detach().mean()
        if kind == "mean":
            before, self.running = self.running, 0.9 * self.running + 0.1 * float(mean)
        elif kind == "queue":
            before = sum(self.queue)
            self.queue.append(mean)
        elif kind == "buffer":
            before = self.seen.clone()
            self.seen.add_(mean)
        elif kind == "hidden":
            before = 1.0 if self.hidden is None else self.hidden
            self.hidden = mean.abs()
        else:
            before = 1.0
        return before

    def _mean(self, rows: Tensor, x: Tensor, labels: Tensor) -> dict[str, Any]:
        weights = (labels >= 0).sum(dim=1, keepdim=True)
        if self.program.mean == "weights":
            return {"loss": (rows * weights).sum() / weights.sum(), "weight": weights.sum()}
        if self.program.mean == "whole":
            return {"loss": rows.sum() * self.batch_rows / len(x)}
        if self.program.mean == "names" and not self.program.planted:
            of_tokens = (rows * weights).sum() / weights.sum(), weights.sum()
            return {"loss": {"rows": (rows.mean(), len(rows)), "tokens": of_tokens}}
        return {"loss": rows.mean()}


def data_of(program: Program) -> TensorDataset:
    draw = torch.Generator().manual_seed(program.seed)
    x, y = (torch.randn(program.rows, size, generator=draw) for size in (6, 1))
    return TensorDataset(x, y, torch.randint(-1, 4, (program.rows, 7), generator=draw))


def difference(program: Program, task: Task, dataset: TensorDataset) -> float:
    """By how much, relative to the loss, what is planted makes the loss of shares another one: the
    most in the rows that the check takes."""
    spread = [place * (len(dataset) - 1) // (ROWS - 1) for place in range(ROWS)]
    most = 0.0
    for picked in [list(range(ROWS)), spread][: 1 if len(dataset) < 2 * ROWS else 2]:
        x, y, labels = (t.double() if t.is_floating_point() else t for t in dataset[picked])
        kept, task.net = task.net, task.net.eval().double()
        with torch.no_grad():
            f = task.net(x)
            loss = sum(c * ROW_LOSSES[n](f, x, y, labels) for c, n in program.terms).abs().mean()
            values = [
                (float(PLANTED[program.planted](f[at], x[at], y[at], labels[at])), weight)
                for at in (slice(None), slice(0, CUT), slice(CUT, ROWS))
                if (
                    weight := float(
                        (labels[at] >= 0).sum() if program.mean == "weights" else len(x[at])
                    )
                )
            ]
        task.net = kept
        (whole, total), *parts = values
        mean = sum(value * weight for value, weight in parts) / total
        size = float(loss) + program.size * max(abs(value) for value, _ in values)
        most = max(most, program.size * abs(whole - mean) / size)
    return most


def judged(program: Program, dtype: torch.dtype) -> tuple[Any, float]:
    """The verdict, and how far apart what is planted makes the losses."""
    torch.manual_seed(program.seed)
    strategy = DataParallel(2, "cpu")
    strategy.setup()
    strategy.dtype = dtype
    task, dataset = Step(program, dtype), data_of(program)
    source: Any = SimpleNamespace(dataset=dataset, collate=default_collate)
    verdict = judge([(Trial(task, strategy, Progress()), source)], "on")
    return verdict, difference(program, task, dataset) if program.planted else 0.0


def fuzz(count: int, dtype: torch.dtype, seed: int = 0) -> tuple[list[Program], int]:
    """The programs that are judged wrongly, and how many planted terms were large enough: ten times
    what has to be noticed, as noise makes the rest of a loss larger."""
    wrong, noticed = [], 0
    limit = 10 * (EXACT if dtype == torch.float64 else ROUNDINGS * torch.finfo(dtype).eps)
    for number in range(count):
        for plants in (False, True):
            program = Program.of(Random(f"{seed} {number} {plants}"), plants=plants)
            verdict, apart = judged(program, dtype)
            if not plants:
                odd = {*program.metrics} - ({"mean"} if program.mean != "weights" else set())
                told = {warning.split()[0] for warning in verdict.warnings}
                notes = [note for note in verdict.notes if note.startswith(NOT_COMPARED)]
                if verdict.refusal or notes or told - odd:
                    wrong.append(program)
            elif apart > limit:
                noticed += 1
                if not verdict.refusal:
                    wrong.append(program)
    return wrong, noticed


if __name__ == "__main__":
    for dtype in (torch.float64, torch.float32):
        count = int(sys.argv[1])
        wrong, noticed = fuzz(count, dtype)
        print(f"{dtype}: {count} honest, {noticed} planted; judged wrongly: {len(wrong)}")
        for program in wrong[:10]:
            print(program)
