"""How long a save in parts stalls training, beside a copy of the same tensors in host memory.

Two gloo ranks of strategy=fsdp with `recipe=gpt` and Adam's state save in turns with copies. Both
have their memory at hand: a save has that of the one before it.
"""

import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from benchmarks.fsdp_step import parts as built
from dpframe import Trainer
from dpframe.checkpoint import Writer, sharded
from dpframe.strategies.fsdp import FSDP

RECIPE = ["recipe=gpt", "data.batch_size=2", "data.block=16"]


def measure(
    strategy: FSDP, folder: str, width: int, turns: int
) -> list[tuple[float, float, float]]:
    with strategy:
        task, data, settings = built([*RECIPE, f"task.width={width}"], 1)
        settings.sanity_batches = 0
        settings.limit_val_batches = 1
        trainer = Trainer(task, data, strategy=strategy, settings=settings)
        trainer.fit()
        writer, path = Writer(), Path(folder, "checkpoints", "last.ckpt")
        clock = time.perf_counter
        seconds: list[tuple[float, float, float]] = []
        copies: list[Tensor] = []
        for _ in range(turns):
            strategy.collectives.sum_numbers([0.0])  # together
            began = clock()
            state = trainer.state_dict(whole=False)
            writer.save(state, [path], sharding=strategy.sharding)
            stalled = clock() - began
            writer.wait()
            written = clock() - began
            own = [
                shard.rows
                for shard in sharded.split(state, Tensor.detach, copies_rest=True)[1].values()
            ]
            copies = copies or [rows.clone() for rows in own]
            strategy.collectives.sum_numbers([0.0])
            began = clock()
            for copy, rows in zip(copies, own, strict=True):
                copy.copy_(rows)
            seconds.append((stalled, clock() - began, written))
        if strategy.is_main:
            size = sum(copy.nbytes for copy in copies)
            print(f"{size / 2**20:.0f} MiB a rank in {len(copies)} tensors")
    return seconds[1:]


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.sharded_save", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    strategy = FSDP(options.ranks, "cpu")
    with TemporaryDirectory() as folder:
        turns = strategy.launch(measure, strategy, folder, options.width, options.turns + 1)
    stalled, copied, written = (1e3 * min(column) for column in zip(*turns, strict=True))
    print(
        f"the fastest of {len(turns)}: stalled {stalled:.1f} ms, a copy takes {copied:.1f} ms: "
        f"{stalled / copied:.2f}; written after {written:.0f} ms"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
