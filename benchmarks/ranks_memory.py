"""How many copies of a model a program and the ranks that its Trainer starts have in memory.

A program trains a model of frozen weights, and another program almost no model: the difference, in
sizes of the model, is the copies. Memory is PSS, by which what several processes share counts once;
`all` has the files in memory, too. `steady` is after the first step, where training stands still.
"""

import json
import os
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpframe import Callback, DataModule, Task, Trainer

LOOK_SECONDS = 0.01
STILL_SECONDS = 3.0
WIDTH = 1024


class Table(Task):
    """Frozen rows, and a layer that is trained."""

    def __init__(self, megabytes: float) -> None:
        rows = max(1, round(megabytes * 1e6 / 4 / WIDTH))
        table = nn.Embedding.from_pretrained(torch.ones(rows, WIDTH))
        net = nn.Sequential(table, nn.Linear(WIDTH, 1))
        super().__init__(net, partial(torch.optim.SGD, lr=1e-6))

    def training_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.net(batch[0]).square().mean()}


class Rows(DataModule):
    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.zeros(64, dtype=torch.long))


class Still(Callback):
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == 1:
            time.sleep(STILL_SECONDS / 3)
            self.marker.touch()
            time.sleep(STILL_SECONDS / 3)
            self.marker.unlink(missing_ok=True)
            time.sleep(STILL_SECONDS / 3)


def train(megabytes: float, strategy: str, folder: Path) -> None:
    """A program: it prints what its processes took, in MB."""
    looks, is_over = {"steady": Counter[str](), "peak": Counter[str]()}, threading.Event()
    marker = folder / "still"

    def look_on() -> None:
        while not is_over.wait(LOOK_SECONDS):
            now = look()
            looks["peak"] |= now
            if marker.exists():
                looks["steady"] |= now

    task = Table(megabytes)
    trainer = Trainer(
        task,
        Rows(16, shuffle=False),
        strategy=strategy,
        gpus=2,
        accelerator="cpu",
        max_epochs=1,
        share_check="off",
        callbacks=[Still(marker)],
    )
    thread = threading.Thread(target=look_on)
    thread.start()
    trainer.fit()
    is_over.set()
    thread.join()
    looks["after"] = look()
    print(json.dumps(looks))


def look() -> Counter[str]:
    """The megabytes of this process, of the interpreter below it and of that one's ranks."""
    own = os.getpid()
    found = Counter({"program": megabytes_of(own)})
    for interpreter in children(own):
        found["interpreter"] += megabytes_of(interpreter)
        for number, rank in enumerate(children(interpreter)):
            found[f"rank {number}"] = megabytes_of(rank)
    found["all"] = sum(found.values())
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(file).startswith("/memfd:"):
                found["all"] += file.stat().st_blocks * 512 / 1e6
    return found


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def megabytes_of(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.ranks_memory", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200, help="of the model")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--program", type=Path, help="to be the program itself, in this folder")
    options = parser.parse_args()
    if options.program:
        train(options.megabytes, options.strategy, options.program)
        return 0
    of_both = []
    for megabytes in (options.megabytes, 0):
        given = ["--megabytes", str(megabytes), "--strategy", options.strategy]
        program = [sys.executable, "-m", "benchmarks.ranks_memory", *given]
        with TemporaryDirectory() as folder:
            output = subprocess.check_output([*program, "--program", folder], text=True)
        of_both.append(json.loads(output.splitlines()[-1]))
    model, base = of_both
    for when, found in model.items():
        copies = [
            f"{kind} {(found[kind] - base[when].get(kind, 0)) / options.megabytes:.2f}"
            for kind in found
        ]
        print(f"{when:7}", ", ".join(copies))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
