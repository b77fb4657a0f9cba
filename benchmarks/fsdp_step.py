"""A step of strategy=fsdp beside a loop by hand over torch's fully_shard: wall time on gloo ranks.

Both train `recipe=gpt` on the same rows, in turns and in the same ranks; the ratio is the median of
the turns'.
"""

import io
import statistics
import time
from argparse import ArgumentParser
from contextlib import redirect_stdout
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.logical_cost import WARM_UP, Times
from dpframe import DataModule, Task, Trainer, seeding
from dpframe.blocks import blocks
from dpframe.cli.build import build, check_targets
from dpframe.cli.compose import composed
from dpframe.data import split
from dpframe.strategies.fsdp import FSDP


def parts(words: list[str], steps: int) -> tuple[Any, Any, Any]:
    job = composed(
        [*words, "callbacks=none", "trainer.threads=1", f"trainer.max_steps={WARM_UP + steps}"]
    )
    trust = check_targets(job)
    seeding.seed_everything(0)
    task = build(job.config["task"], "task", Task, trust=trust)
    data = build(job.config["data"], "data", DataModule, trust=trust)
    return task, data, job.settings.trainer


def by_dpframe(strategy: FSDP, words: list[str], steps: int) -> float:
    task, data, settings = parts(words, steps)
    times = Times()
    settings.sanity_batches = 0
    task.validation_step = lambda batch: {"loss": 0.0}
    with redirect_stdout(io.StringIO()):
        Trainer(task, data, strategy=strategy, settings=settings, callbacks=[times]).fit()
    return statistics.median(wall for _, wall in times.steps)


def by_hand(strategy: FSDP, words: list[str], steps: int) -> float:
    task, data, settings = parts(words, steps)
    data.setup()
    rows: Any = data.train_dataset()
    for _, block in blocks(task):
        fully_shard(block, mesh=strategy.mesh)
    fully_shard(task, mesh=strategy.mesh)
    task.forward = task.training_step
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3, fused=True)
    seconds = []
    for step in range(WARM_UP + steps):
        began = time.perf_counter()
        numbers = torch.arange(step * data.batch_size, (step + 1) * data.batch_size) % len(rows)
        own = split(numbers, strategy.world_size)[strategy.rank]
        batch = torch.utils.data.default_collate([rows[int(number)] for number in own])
        task(batch)["loss"].backward()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(task.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def measure(strategy: FSDP, words: list[str], steps: int, turns: int) -> list[tuple[float, float]]:
    strategy.open()
    torch.set_num_threads(1)
    pairs = [(by_dpframe(strategy, words, steps), by_hand(strategy, words, steps))]
    for _ in range(turns):
        pairs.append((by_dpframe(strategy, words, steps), by_hand(strategy, words, steps)))
    strategy.shut()
    return pairs[1:]


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.fsdp_step", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of each turn, after the first ones")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("words", nargs="*", default=["recipe=gpt"], help="overrides")
    options = parser.parse_args()
    strategy = FSDP(options.ranks, "cpu")
    pairs = strategy.launch(measure, strategy, options.words, options.steps, options.turns)
    ratios = sorted(mine / hand for mine, hand in pairs)
    mine, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"dpframe {1e3 * mine:.1f} ms, by hand {1e3 * hand:.1f} ms a step: "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
