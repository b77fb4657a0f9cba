"""What trainer.logical_replicas costs: processor and wall time of a step, with and without it.

Plain and logical runs take turns in the same processes, each with one thread, and of each kind the
fastest counts. The processor time is that of all ranks together.
"""

import io
import time
from argparse import ArgumentParser
from contextlib import redirect_stdout
from typing import Any

from dpframe import Callback, DataModule, Strategy, Task, Trainer, seeding
from dpframe.config.build import build, check_targets
from dpframe.config.compose import composed
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU

RECIPES = {
    "gpt": "recipe=gpt",
    "lenet": "recipe=lenet data.batch_size=256",
    "mlp": "recipe=boston data.batch_size=64",
}
WARM_UP = 3
HEADER = (
    "| recipe | ranks | plain: processor ms | logical | ratio | plain: wall | logical | ratio |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|"
)


class Times(Callback):
    """Of each step after the first ones: processor and wall seconds."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.last: tuple[float, float] | None = None

    def on_step_end(self, trainer: Trainer) -> None:
        now = time.process_time(), time.perf_counter()
        if self.last is not None and trainer.global_step > WARM_UP:
            self.steps.append((now[0] - self.last[0], now[1] - self.last[1]))
        self.last = now


def measure(strategy: Strategy, words: str, steps: int, rounds: int, shares: int) -> Any:
    """The least milliseconds of a step: processor and wall, plain and logical."""
    fastest = {None: (float("inf"),) * 2, shares: (float("inf"),) * 2}
    with strategy:
        for _ in range(rounds):
            for logical, before in fastest.items():
                now = once(strategy, words, steps, logical)
                fastest[logical] = tuple(map(min, before, now))  # type: ignore[assignment]
    return fastest


def once(strategy: Strategy, words: str, steps: int, logical: int | None) -> tuple[float, ...]:
    overrides = f"{words} callbacks=none trainer.threads=1 trainer.sanity_batches=0"
    job = composed([*overrides.split(), f"trainer.max_steps={WARM_UP + steps}"])
    check_targets(job)
    job.settings.trainer.logical_replicas = logical
    seeding.seed_everything(0)
    times = Times()
    task = build(job.config["task"], "task", Task)
    data = build(job.config["data"], "data", DataModule)
    task.validation_step = lambda batch: {"loss": 0.0}  # type: ignore[method-assign]
    trainer = Trainer(
        task, data, strategy=strategy, settings=job.settings.trainer, callbacks=[times]
    )
    with redirect_stdout(io.StringIO()):
        trainer.fit()
    medians = [1e3 * sorted(column)[len(column) // 2] for column in zip(*times.steps, strict=True)]
    return strategy.collectives.sum_numbers([medians[0]])[0], medians[1]


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.logical_cost", description=__doc__)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=20, help="of each run, after the first ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", type=int, default=8)
    options = parser.parse_args()
    print(HEADER, flush=True)
    for recipe in options.recipe:
        for ranks in options.ranks:
            strategy = DDP(ranks, "cpu") if ranks > 1 else CPU()
            work = RECIPES[recipe], options.steps, options.rounds, options.shares
            (plain, logical) = strategy.launch(measure, strategy, *work).values()
            cells = [recipe, str(ranks)]
            for one, other in zip(plain, logical, strict=True):
                cells += [f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
