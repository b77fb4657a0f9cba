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

import dpframe

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "performance" / "programs"
REPLICAS = (1, 2, 4)
# Of an Ethernet frame of 1514 bytes, which is what `tbf` counts, 1448 are payload.
PAYLOAD = 1448 / 1514
RECIPES = {
    # Many parameters and few rows: the link decides.
    "wide": [
        *(f"--config-dir={PROGRAMS / 'conf'}", "recipe=growth", "data.batch_size=32"),
        *("task.sizes=[1024,1024,1024,1024,1024]", "data.rows=140", "data.columns=1024"),
        *("task.optimizer._target_=torch.optim.SGD", "callbacks.checkpoint=null"),
    ],
    "lenet": ["recipe=lenet"],
}
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


class Clock(dpframe.Callback):
    """Writes down how long each epoch took."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.seconds: list[float] = []

    def on_epoch_start(self, trainer: "dpframe.Trainer") -> None:
        trainer.strategy.share(None)  # waits for all ranks
        self.began = time.perf_counter()

    def on_epoch_end(self, trainer: "dpframe.Trainer") -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if trainer.strategy.is_main:
            self.file.write_text(json.dumps(self.seconds))


def main() -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rate", nargs="+", type=int, default=[200, 1000], help="Mbit/s")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the network, too
    print(f"An epoch's seconds, {options.epochs} epochs, {os.cpu_count()} cores.\n\n{HEADER}")
    errors = []
    for rate in options.rate:
        with network(max(REPLICAS), rate) as names:
            latency = float(together(names[:2], [sys.executable, "-c", LATENCY])[0])
            for recipe in options.recipe:
                for count in REPLICAS:
                    errors.append(row(recipe, names[:count], rate, latency, options.epochs))
    print(f"\nmean error {mean(errors):.0%}, largest {max(errors):.0%}")
    return 0


def row(recipe: str, names: list[str], rate: int, latency: float, epochs: int) -> float:
    """Prints a line of the table, and returns its error."""
    command = [sys.executable, "-m", "dpframe", *RECIPES[recipe], "trainer.accelerator=cpu"]
    command += ["trainer.threads=1", "trainer.limit_train_batches=6"]
    link = [f"plan.bandwidth={rate * 1e6 / 8 * PAYLOAD}", f"plan.latency={latency}"]
    before, moved = plan(names, [*command, *link])
    sent = bytes_sent(names[-1])
    measured, steps = train(names, command, epochs)
    sent = bytes_sent(names[-1]) - sent
    after, _ = plan(names, [*command, *link])
    predicted = (before + after) / 2  # the machine may have had other work
    error = predicted / measured - 1
    cells = [recipe, f"{rate} Mbit/s", f"{latency * 1e6:.0f} us", len(names)]
    cells += [f"{predicted:.3f} s", f"{measured:.3f} s", f"{error:+.0%}"]
    cells += [f"{moved / 2**20:.2f}", f"{sent / steps / 2**20:.2f}"]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return abs(error)


def plan(names: list[str], command: list[str]) -> tuple[float, float]:
    """An epoch's seconds, the mean of plans measured at once, and the bytes a rank sends a step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, "mode=plan", "strategy=cpu", "plan.max_replicas=4", "plan.steps=8"]
        together(names, [*command, f"hydra.run.dir={folder}/{{rank}}"], are_ranks=False)
        plans = [json.loads(p.read_text())["plan"] for p in Path(folder).glob("*/summary.json")]
    rows = [row for rows in plans for row in rows if row["replicas"] == len(names)]
    return mean(row["seconds"] for row in rows), rows[0]["moved"]


def train(names: list[str], command: list[str], epochs: int) -> tuple[float, int]:
    """The median epoch, and the steps. Left out are the first epoch, in which DDP rebuilds its
    buckets, and the last, which ends with a validation."""
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder, "seconds.json"), Path(folder, "run")
        words = [f"strategy={'ddp' if len(names) > 1 else 'cpu'}", f"trainer.max_epochs={epochs}"]
        words += [f"trainer.validate_every_epochs={epochs + 1}", "callbacks=none", "logger=none"]
        words += [f"+callbacks.clock={{_target_: plan_check.Clock, file: {file}}}"]
        together(names, [*command, *words, f"hydra.run.dir={run_dir}"])
        summary = json.loads((run_dir / "summary.json").read_text())
        return median(json.loads(file.read_text())[1:-1]), summary["steps"]


# ---- the network


@contextmanager
def network(count: int, megabits: int) -> Iterator[list[str]]:
    """Namespaces on one bridge, at 10.77.0.1 and on; each sends this many Mbit/s at most."""
    hub = f"dpframe-plan-{os.getpid()}"
    names = [f"{hub}-{number}" for number in range(count)]
    try:
        run(f"ip netns add {hub}")
        run(f"ip -n {hub} link add hub type bridge")
        run(f"ip -n {hub} link set hub up")
        for number, name in enumerate(names):
            port = f"port{number}"
            run(f"ip netns add {name}")
            run(f"ip -n {name} link add wire type veth peer name {port} netns {hub}")
            run(f"ip -n {hub} link set {port} master hub")
            run(f"ip -n {hub} link set {port} up")
            run(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev wire")
            run(f"ip -n {name} link set wire up")
            run(f"ip -n {name} link set lo up")
            limit = f"tbf rate {megabits}mbit burst 256kb latency 100ms"
            run(f"ip netns exec {name} tc qdisc add dev wire root {limit}")
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def bytes_sent(name: str) -> int:
    """Counts a header for each packet of up to 64 KiB, which is cut into frames only later."""
    return int(run(f"ip netns exec {name} cat /sys/class/net/wire/statistics/tx_bytes"))


def run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} exited with {done.returncode}: {done.stderr}")
    return done.stdout


def together(names: list[str], command: list[str], *, are_ranks: bool = True) -> list[str]:
    """What the command prints in each namespace, with torchrun's variables; if it fails in one, it
    is killed in all. `{rank}` in a word is the rank."""
    count = len(names)
    running = []
    for rank, name in enumerate(names):
        variables = [f"PYTHONPATH={HERE}:{PROGRAMS}", "OMP_NUM_THREADS=1"]
        if are_ranks and count > 1:
            variables += [f"WORLD_SIZE={count}", f"LOCAL_WORLD_SIZE={count}", f"RANK={rank}"]
            variables += [f"LOCAL_RANK={rank}", "MASTER_ADDR=10.77.0.1", "MASTER_PORT=29510"]
            variables += ["GLOO_SOCKET_IFNAME=wire"]
        words = [word.replace("{rank}", str(rank)) for word in command]
        words = ["ip", "netns", "exec", name, "env", *variables, *words]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True))
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
