"""Predicts an epoch on 1, 2 and 4 ranks by `mode=plan`, then trains it over a throttled link.

Each rank has a network namespace of its own; `tc qdisc … tbf` limits what each may send. Needs
Linux, root, `ip` and `tc`. The ranks share this machine's cores, so a replica's compute is measured
by as many plans at once as there will be ranks, before and after they train.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpframe

REPLICAS = (1, 2, 4)
# Of an Ethernet frame of 1514 bytes, which is what `tbf` counts, 1448 are payload.
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
LATENCY = """
import statistics, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
number, seconds = torch.ones(1), []
for _ in range(200):
    began = time.perf_counter()
    dist.all_reduce(number)  # two hops
    seconds.append(time.perf_counter() - began)
print(statistics.median(seconds) / 2)
dist.destroy_process_group()
"""
HEADER = """\
| recipe | link | latency | ranks | predicted | measured | error | MiB a step | sent |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


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
        trainer.strategy.share(None)  # waits for all ranks
        self.began = time.perf_counter()

    def on_epoch_end(self, trainer: dpframe.Trainer) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if trainer.strategy.is_main:
            self.file.write_text(json.dumps(self.seconds))


def main() -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", nargs="+", default=["wide", "lenet"])
    parser.add_argument("--rate", nargs="+", type=int, default=[200, 1000], help="Mbit/s")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the network, too
    print(f"An epoch's seconds, {options.epochs} epochs, {os.cpu_count()} cores.\n\n{HEADER}")
    errors = []
    for rate in options.rate:
        with network(max(REPLICAS), rate) as names, tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "recipe").mkdir()
            (folder / "recipe" / "wide.yaml").write_text(WIDE)
            probe = [sys.executable, "-c", LATENCY]
            latency = float(together([[*rank, *probe] for rank in ranks(names[:2])])[0])
            for recipe in options.recipe:
                for count in REPLICAS:
                    errors.append(row(recipe, names[:count], rate, latency, folder, options.epochs))
    print(f"\nmean error {mean(errors):.0%}, largest {max(errors):.0%}")
    return 0


def row(
    recipe: str, names: list[str], rate: int, latency: float, folder: Path, epochs: int
) -> float:
    """Prints a line of the table, and returns its error."""
    command = [sys.executable, "-m", "dpframe", "--config-dir", str(folder), f"recipe={recipe}"]
    command += ["trainer.accelerator=cpu", "trainer.threads=1", "trainer.limit_train_batches=6"]
    link = [f"plan.bandwidth={rate * 1e6 / 8 * PAYLOAD}", f"plan.latency={latency}"]
    before, moved = plan(command, names, link, folder)
    sent = bytes_sent(names[-1])
    measured, steps = train(command, names, epochs, folder)
    sent = bytes_sent(names[-1]) - sent
    after, _ = plan(command, names, link, folder)
    predicted = (before + after) / 2  # the machine may have had other work
    error = predicted / measured - 1
    cells = [recipe, f"{rate} Mbit/s", f"{latency * 1e6:.0f} us", len(names)]
    cells += [f"{predicted:.3f} s", f"{measured:.3f} s", f"{error:+.0%}"]
    cells += [f"{moved / 2**20:.2f}", f"{sent / steps / 2**20:.2f}"]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return abs(error)


def plan(
    command: list[str], names: list[str], link: list[str], folder: Path
) -> tuple[float, float]:
    """An epoch's seconds, the mean of plans measured at once, and the bytes a rank sends a step."""
    command = [*command, "mode=plan", "strategy=cpu", "plan.max_replicas=4", "plan.steps=8", *link]
    folders = [folder / f"plan{number}" for number in range(len(names))]
    alone = [ranks([name])[0] for name in names]
    pairs = zip(alone, folders, strict=True)
    together([[*rank, *command, f"hydra.run.dir={each}"] for rank, each in pairs])
    plans = [json.loads((each / "summary.json").read_text())["plan"] for each in folders]
    rows = [row for rows in plans for row in rows if row["replicas"] == len(names)]
    return mean(row["seconds"] for row in rows), rows[0]["moved"]


def train(command: list[str], names: list[str], epochs: int, folder: Path) -> tuple[float, int]:
    """The median epoch, and the steps. Left out are the first epoch, in which DDP rebuilds its
    buckets, and the last, which ends with a validation."""
    file = folder / "seconds.json"
    words = [f"strategy={'ddp' if len(names) > 1 else 'cpu'}", f"trainer.max_epochs={epochs}"]
    words += [f"trainer.validate_every_epochs={epochs + 1}", "callbacks=none", "logger=none"]
    words += [f"+callbacks.clock={{_target_: plan_check.Clock, file: {file}}}"]
    words += [f"hydra.run.dir={folder / 'run'}"]
    together([[*rank, *command, *words] for rank in ranks(names)])
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return median(json.loads(file.read_text())[1:-1]), summary["steps"]


# ---- the network


@contextmanager
def network(count: int, megabits: int) -> Iterator[list[str]]:
    """Namespaces on one bridge, at 10.77.0.1 and on; each sends this many Mbit/s at most."""
    hub = f"dpframe-plan-{os.getpid()}"
    names = [f"{hub}-{number}" for number in range(count)]
    limit = f"tbf rate {megabits}mbit burst 256kb latency 100ms"
    try:
        run(f"ip netns add {hub}", f"ip -n {hub} link add hub type bridge")
        run(f"ip -n {hub} link set hub up")
        for number, name in enumerate(names):
            port = f"port{number}"
            run(
                f"ip netns add {name}",
                f"ip -n {name} link add wire type veth peer name {port} netns {hub}",
                f"ip -n {hub} link set {port} master hub",
                f"ip -n {hub} link set {port} up",
                f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev wire",
                f"ip -n {name} link set wire up",
                f"ip -n {name} link set lo up",
                f"ip netns exec {name} tc qdisc add dev wire root {limit}",
            )
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(*commands: str) -> str:
    output = ""
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command} exited with {done.returncode}: {done.stderr}")
        output += done.stdout
    return output


def bytes_sent(name: str) -> int:
    """Counts a header for each packet of up to 64 KiB, which is cut into frames only later."""
    return int(run(f"ip netns exec {name} cat /sys/class/net/wire/statistics/tx_bytes"))


def ranks(names: list[str]) -> list[list[str]]:
    """What starts a command in each namespace, with torchrun's variables."""
    here = f"PYTHONPATH={Path(__file__).resolve().parent} OMP_NUM_THREADS=1"
    if len(names) > 1:
        here += f" WORLD_SIZE={len(names)} LOCAL_WORLD_SIZE={len(names)}"
        here += " MASTER_ADDR=10.77.0.1 MASTER_PORT=29510 GLOO_SOCKET_IFNAME=wire"
    own = [
        f" RANK={rank} LOCAL_RANK={rank}" if len(names) > 1 else "" for rank in range(len(names))
    ]
    return [f"ip netns exec {n} env {here}{o}".split() for n, o in zip(names, own, strict=True)]


def together(commands: list[list[str]]) -> list[str]:
    """What the commands print; if one fails, all are killed."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        printed = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, error) in zip(running, printed, strict=True):
        if process.returncode:
            raise SystemExit(f"{process.args} exited with {process.returncode}: {error}")
    return [output for output, _ in printed]


if __name__ == "__main__":
    raise SystemExit(main())
