"""A step of strategy=fsdp beside a loop by hand over torch's fully_shard, on gloo ranks.

Both train a small `recipe=gpt` on the same rows, in turns and in the same ranks, until --seconds
are over. The ratio is the median of the turns': of wall time, and of the main rank's processor
time, which other work on the machine changes less.
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
from dpframe.config.build import build, check_targets
from dpframe.config.compose import composed
from dpframe.data import split
from dpframe.strategies.fsdp import FSDP
from dpframe.util.patterns import blocks

Seconds = tuple[float, float]  # wall and processor
SMALL = ["recipe=gpt", "task.layers=3", "data.batch_size=8", "data.block=64"]


def parts(words: list[str], steps: int) -> tuple[Any, Any, Any]:
    job = composed(
        [*words, "callbacks=none", "trainer.threads=1", f"trainer.max_steps={WARM_UP + steps}"]
    )
    check_targets(job)
    seeding.seed_everything(0)
    task = build(job.config["task"], "task", Task)
    data = build(job.config["data"], "data", DataModule)
    return task, data, job.settings.trainer


def by_dpframe(strategy: FSDP, words: list[str], steps: int) -> Seconds:
    task, data, settings = parts(words, steps)
    times = Times()
    settings.sanity_batches = 0
    task.validation_step = lambda batch: {"loss": 0.0}
    with redirect_stdout(io.StringIO()):
        Trainer(task, data, strategy=strategy, settings=settings, callbacks=[times]).fit()
    return medians([(wall, processor) for processor, wall in times.steps])


def by_hand(strategy: FSDP, words: list[str], steps: int) -> Seconds:
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
        began = time.perf_counter(), time.process_time()
        numbers = torch.arange(step * data.batch_size, (step + 1) * data.batch_size) % len(rows)
        own = split(numbers, strategy.world_size)[strategy.rank]
        batch = torch.utils.data.default_collate([rows[int(number)] for number in own])
        task(batch)["loss"].backward()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(task.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return medians(seconds[WARM_UP:])


def medians(seconds: list[Seconds]) -> Seconds:
    wall, processor = (statistics.median(column) for column in zip(*seconds, strict=True))
    return wall, processor


def measure(
    strategy: FSDP, words: list[str], steps: int, seconds: float
) -> list[tuple[Seconds, Seconds]]:
    with strategy:
        torch.set_num_threads(1)
        end = time.perf_counter() + seconds
        pairs: list[tuple[Seconds, Seconds]] = []
        is_over = False
        while not is_over:
            pair = by_dpframe(strategy, words, steps), by_hand(strategy, words, steps)
            if strategy.is_main:
                print(f"turn {len(pairs)}: {1e3 * pair[0][0]:.1f} and {1e3 * pair[1][0]:.1f} ms")
            pairs.append(pair)
            is_over = strategy.collectives.broadcast(len(pairs) > 1 and time.perf_counter() > end)
    return pairs[1:]  # the first one warms up


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.fsdp_step", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="of each turn, after the first ones")
    parser.add_argument("--seconds", type=float, default=60, help="no turn begins after them")
    parser.add_argument("words", nargs="*", default=SMALL, help="overrides")
    options = parser.parse_args()
    strategy = FSDP(options.ranks, "cpu")
    pairs = strategy.launch(measure, strategy, options.words, options.steps, options.seconds)
    for number, kind in enumerate(("wall", "processor")):
        mine, hand = ([pair[side][number] for pair in pairs] for side in (0, 1))
        ratios = sorted(one / other for one, other in zip(mine, hand, strict=True))
        print(
            f"{kind}: dpframe {1e3 * statistics.median(mine):.1f} ms, by hand "
            f"{1e3 * statistics.median(hand):.1f} ms a step: {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f} of {len(ratios)} turns)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
