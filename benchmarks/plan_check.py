"""Predicts an epoch on 1, 2 and 4 ranks by `mode=plan`, then trains it over a throttled link.

Each rank has a network namespace of its own; `tc qdisc … tbf` limits what each may send. Needs
Linux, root, `ip` and `tc`. The ranks share this machine's cores, so that a replica's compute is
measured by as many plans at once as there will be ranks, before and after these have trained.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpframe

REPLICAS = (1, 2, 4)
RATES = (200, 1000)  # Mbit/s
# An Ethernet frame of 1514 bytes, which is what `tbf` counts, has 1448 of ours.
PAYLOAD = 1448 / 1514
WIDE = """\
# @package _global_
# Many parameters and few rows: the link decides.
recipe: wide
task:
  _target_: plan_check.Wide
  layers: 4
  width: 1024
  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.001}
data: {_target_: plan_check.Noise, batch_size: 32, rows: 140, width: 1024}
"""
HEADER = (
    "| recipe | link | latency | ranks | predicted | measured | error | MiB a step "
    "| sent |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


class Wide(dpframe.Task):
    def __init__(self, layers: int, width: int, optimizer: Any) -> None:
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        super().__init__(nn.Sequential(*parts), optimizer)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": self.net(batch[0]).square().mean()}


class Noise(dpframe.DataModule):
    def __init__(self, batch_size: int, rows: int, width: int) -> None:
        super().__init__(batch_size)
        self.train = TensorDataset(torch.randn(rows, width))

    def train_dataset(self) -> TensorDataset:
        return self.train


class Clock(dpframe.Callback):
    """Writes down how long each epoch took."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.seconds: list[float] = []

    def on_epoch_start(self, trainer: dpframe.Trainer) -> None:
        trainer.strategy.share(None)  # all ranks are here
        self.began = time.perf_counter()

    def on_epoch_end(self, trainer: dpframe.Trainer) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if trainer.strategy.is_main:
            self.file.write_text(json.dumps(self.seconds))


class Row(NamedTuple):
    recipe: str
    rate: int
    latency: float
    replicas: int
    predicted: float
    measured: float
    sent: tuple[float, float]  # MiB a rank and step: predicted, and as the kernel counted

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        cells = [self.recipe, f"{self.rate} Mbit/s", f"{self.latency * 1e6:.0f} us", self.replicas]
        cells += [f"{self.predicted:.3f} s", f"{self.measured:.3f} s", f"{self.error:+.0%}"]
        cells += [f"{sent:.2f}" for sent in self.sent]
        return f"| {' | '.join(map(str, cells))} |"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.probe:
        return probe()
    if os.geteuid() or subprocess.run(["tc", "-V"], capture_output=True).returncode:
        print("this needs root, and the commands `ip` and `tc`", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the network goes, too
    print(
        f"An epoch's seconds, {options.epochs} epochs, {os.cpu_count()} cores shared.\n\n{HEADER}"
    )
    rows = []
    for rate in options.rate:
        with network(max(options.replicas), rate) as names, tempfile.TemporaryDirectory() as folder:
            write_recipe(Path(folder))
            latency = probed(names[:2]) if len(names) > 1 else 0.0
            for recipe in options.recipe:
                for count in options.replicas:
                    given = recipe, names[:count], rate, latency, Path(folder), options.epochs
                    rows.append(row(*given))
                    print(rows[-1], flush=True)
    errors = [abs(row.error) for row in rows]
    print(f"\nmean error {statistics.mean(errors):.0%}, largest {max(errors):.0%}")
    return 0


def row(recipe: str, names: list[str], rate: int, latency: float, folder: Path, epochs: int) -> Row:
    before, moved = plan(recipe, names, rate, latency, folder)
    sent = bytes_sent(names[-1])
    measured, steps = train(recipe, names, epochs, folder)
    sent = bytes_sent(names[-1]) - sent
    after, _ = plan(recipe, names, rate, latency, folder)
    predicted = (before + after) / 2  # the machine may have had other work
    mebibytes = moved / 2**20, sent / steps / 2**20
    return Row(recipe, rate, latency, len(names), predicted, measured, mebibytes)


def parse(arguments: list[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", nargs="+", default=["wide", "lenet"])
    parser.add_argument("--rate", nargs="+", type=int, default=list(RATES), help="Mbit/s")
    parser.add_argument("--replicas", nargs="+", type=int, default=list(REPLICAS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--probe", action="store_true", help="what a rank does: not for you")
    return parser.parse_args(arguments)


# ---- the network


@contextmanager
def network(count: int, rate: int) -> Iterator[list[str]]:
    """Namespaces on one bridge, at 10.77.0.1 and on; each sends `rate` Mbit/s at most."""
    hub = f"dpframe-plan-{os.getpid()}"
    names = [f"{hub}-{number}" for number in range(count)]
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "hub", "type", "bridge")
        ip("-n", hub, "link", "set", "hub", "up")
        for number, name in enumerate(names):
            join(hub, name, number, rate)
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def join(hub: str, name: str, number: int, rate: int) -> None:
    ip("netns", "add", name)
    there = f"port{number}"
    ip("-n", name, "link", "add", "wire", "type", "veth", "peer", "name", there, "netns", hub)
    ip("-n", hub, "link", "set", there, "master", "hub")
    ip("-n", hub, "link", "set", there, "up")
    ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "wire")
    ip("-n", name, "link", "set", "wire", "up")
    ip("-n", name, "link", "set", "lo", "up")
    limit = ["tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "100ms"]
    run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", *limit])


def ip(*words: str) -> None:
    run(["ip", *words])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")


# ---- what is run in it


def plan(
    recipe: str, names: list[str], rate: int, latency: float, folder: Path
) -> tuple[float, float]:
    """An epoch's seconds on as many replicas, of plans that were measured at once; and the bytes
    that each sends a step."""
    bandwidth = rate * 1e6 / 8 * PAYLOAD
    plans = [folder / f"plan{number}" for number in range(len(names))]
    common = [f"plan.bandwidth={bandwidth}", f"plan.latency={latency}", "plan.max_replicas=4"]
    together(
        [
            [*inside(name), *dpframe_of(recipe, folder), "mode=plan", "strategy=cpu", *common]
            + ["plan.steps=8", f"hydra.run.dir={directory}"]
            for name, directory in zip(names, plans, strict=True)
        ]
    )
    found = [json.loads((directory / "summary.json").read_text())["plan"] for directory in plans]
    rows = [row for rows in found for row in rows if row["replicas"] == len(names)]
    return statistics.mean(row["seconds"] for row in rows), rows[0]["moved"]


def train(recipe: str, names: list[str], epochs: int, folder: Path) -> tuple[float, int]:
    """The median epoch, and the steps: without the first, in which DDP rebuilds its buckets, and
    the last, which ends with a validation."""
    file = folder / "seconds.json"
    clock = f"+callbacks.clock={{_target_: plan_check.Clock, file: {file}}}"
    strategy = "ddp" if len(names) > 1 else "cpu"
    words = [f"strategy={strategy}", f"trainer.max_epochs={epochs}", "callbacks=none", clock]
    words += ["strategy.direct_sums=false"] if strategy == "ddp" else []  # all by the wire
    # Without validation, which a plan is not about.
    words += ["logger=none", f"trainer.validate_every_epochs={epochs + 1}"]
    words += [f"hydra.run.dir={folder / 'run'}"]
    command = [*dpframe_of(recipe, folder), *words]
    together(
        [[*inside(name, rank=rank, of=len(names)), *command] for rank, name in enumerate(names)]
    )
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return statistics.median(json.loads(file.read_text())[1:-1]), summary["steps"]


def bytes_sent(name: str) -> int:
    """With a header for each packet of up to 64 KiB: they are cut into frames only afterwards."""
    counter = ["cat", "/sys/class/net/wire/statistics/tx_bytes"]
    found = subprocess.run(["ip", "netns", "exec", name, *counter], capture_output=True, text=True)
    return int(found.stdout)


def probed(names: list[str]) -> float:
    this = [sys.executable, str(Path(__file__).resolve()), "--probe"]
    ranks = [[*inside(name, rank=rank, of=2), *this] for rank, name in enumerate(names)]
    return float(together(ranks)[0])


def probe() -> int:
    """A rank of two: a hop's seconds, by all-reduces of a single number, of which each is two."""
    dist.init_process_group("gloo")
    number = torch.ones(1)
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        dist.all_reduce(number)
        seconds.append(time.perf_counter() - began)
    print(statistics.median(seconds) / 2)
    dist.destroy_process_group()
    return 0


def inside(name: str, *, rank: int = 0, of: int = 1) -> list[str]:
    """A command of that namespace, with torchrun's variables where it is one of several ranks."""
    several = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": of}
    several |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29510, "GLOO_SOCKET_IFNAME": "wire"}
    given = [f"{key}={value}" for key, value in several.items()] if of > 1 else []
    path = f"PYTHONPATH={Path(__file__).resolve().parent}"
    return ["ip", "netns", "exec", name, "env", path, "OMP_NUM_THREADS=1", *given]


def dpframe_of(recipe: str, folder: Path) -> list[str]:
    words = [f"recipe={recipe}", "trainer.accelerator=cpu", "trainer.threads=1"]
    words += ["trainer.limit_train_batches=6"]
    return [sys.executable, "-m", "dpframe", "--config-dir", str(folder), *words]


def together(commands: list[list[str]]) -> list[str]:
    """What they print; all are ended where one fails."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, error) in zip(running, said, strict=True):
        if process.returncode:
            raise SystemExit(f"{' '.join(map(str, process.args))}\nended badly:\n{error}")
    return [out for out, _ in said]


def write_recipe(folder: Path) -> None:
    (folder / "recipe").mkdir()
    (folder / "recipe" / "wide.yaml").write_text(WIDE)


if __name__ == "__main__":
    raise SystemExit(main())
