"""Predicts an epoch by `mode=plan`, then trains it over a throttled link; or runs through crashes.

Each rank has a network namespace of its own, or each two of them (2x2); `tc qdisc … tbf` limits
what each namespace may send. Needs Linux, root, `ip` and `tc`. The ranks share this machine's
cores, so a replica's compute is measured by as many plans at once as there will be ranks, before
and after they train.

With --crashes a training of two ranks is killed at seeded random times, restarts itself, and its
goodput is compared with the formula's. A step sleeps, so that other work on the machine counts
little.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median

from dpframe_plan.failures import goodput

import dpframe
from dpframe.plugin import step_of

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parents[1] / "benchmarks" / "performance" / "programs"
RANKS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2x2": (2, 2)}  # namespaces, and ranks of each
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
# fully_shard's blocks: each layer
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp", "strategy.shard=Linear", "strategy.whole_in_hooks=false"],
}
LINK = """
import statistics, time, torch, torch.distributed as dist
dist.init_process_group("gloo")

def seconds(size, count):  # of an all-reduce of two ranks: two hops, and each sends all of it
    tensor, taken = torch.ones(size // 4), []
    for _ in range(count):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)

latency = seconds(4, 200) / 2
print(latency, 2**22 / (seconds(2**22, 5) - 2 * latency))
dist.destroy_process_group()
"""
HEADER = """\
| recipe | strategy | link | latency | ranks | predicted | measured | error | MiB a step | sent |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"""
STEP, SAVED = 0.05, 10  # seconds, and steps between two saves, of the training that crashes


class Clock(dpframe.Callback):
    """Writes down how long each epoch took."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.seconds: list[float] = []

    def on_epoch_start(self, trainer: "dpframe.Trainer") -> None:
        trainer.strategy.collectives.broadcast(None)  # waits for all ranks
        self.began = time.perf_counter()

    def on_epoch_end(self, trainer: "dpframe.Trainer") -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if trainer.strategy.is_main:
            self.file.write_text(json.dumps(self.seconds))


class Slow(dpframe.Callback):
    """Sleeps in each step, and writes down when each has ended."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_step_end(self, trainer: "dpframe.Trainer") -> None:
        time.sleep(STEP)
        if trainer.strategy.is_main:
            with self.file.open("a") as file:
                file.write(f"{time.time()}\n")


def main() -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--crashes", type=float, metavar="SECONDS", help="run for so long")
    parser.add_argument("--between", type=float, default=10, help="mean seconds between crashes")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rate", nargs="+", type=int, default=[200, 1000], help="Mbit/s")
    parser.add_argument("--epochs", type=int, default=5, help="the first and last are left out")
    options = parser.parse_args()
    if options.epochs < 3:
        parser.error(f"--epochs {options.epochs} leaves none to measure; use 3 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the network, too
    if options.crashes:
        through_crashes(options.crashes, options.between)
        return 0
    print(f"An epoch's seconds, {options.epochs} epochs, {os.cpu_count()} cores.\n\n{HEADER}")
    errors = []
    for rate in options.rate:
        with network(max(RANKS[name][0] for name in options.ranks), rate) as names:
            latency, _ = link(names[:2]) if len(names) > 1 else (0.0, 0.0)
            between = ["plan.node_bandwidth=" + str(rate * 1e6 / 8 * PAYLOAD)]
            between += [f"plan.node_latency={latency}"]
            for recipe, strategy, ranks in product(options.recipe, options.strategy, options.ranks):
                machines, each = RANKS[ranks]
                if machines == 1 and strategy == "fsdp":
                    continue
                places = [name for name in names[:machines] for _ in range(each)]
                links = [*between, f"plan.per_node={each}"]
                if each > 1:
                    within = link(places[:2])
                    links += [f"plan.latency={within[0]}", f"plan.bandwidth={within[1]}"]
                told = [recipe, strategy, f"{rate} Mbit/s", f"{latency * 1e6:.0f} us", ranks]
                errors.append(row(recipe, strategy, places, links, told, options.epochs))
    print(f"\nmean error {mean(errors):.0%}, largest {max(errors):.0%}")
    return 0


def link(names: list[str]) -> tuple[float, float]:
    """Seconds, and bytes a second, between two places."""
    latency, bandwidth = together(names, [sys.executable, "-c", LINK])[0].split()
    return float(latency), float(bandwidth)


def row(
    recipe: str, strategy: str, names: list[str], links: list[str], told: list[str], epochs: int
) -> float:
    """Prints a line of the table, and returns its error."""
    command = [sys.executable, "-m", "dpframe", *RECIPES[recipe], "trainer.accelerator=cpu"]
    command += ["trainer.threads=1", "trainer.limit_train_batches=6"]
    command += STRATEGIES[strategy] if len(names) > 1 else ["strategy=cpu"]
    before, moved = plan(names, [*command, *links])
    sent = bytes_sent(names[-1])
    measured, steps = train(names, command, epochs)
    sent = bytes_sent(names[-1]) - sent
    after, _ = plan(names, [*command, *links])
    predicted = (before + after) / 2  # the machine may have had other work
    error = predicted / measured - 1
    cells = [*told, f"{predicted:.3f} s", f"{measured:.3f} s", f"{error:+.0%}"]
    cells += [f"{moved / 2**20:.2f}", f"{sent / steps / 2**20:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)
    return abs(error)


def plan(names: list[str], command: list[str]) -> tuple[float, float]:
    """An epoch's seconds, the mean of plans measured at once, and the bytes a rank sends a step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, "mode=plan", "plan.max_replicas=4", "plan.steps=8"]
        together(names, [*command, f"hydra.run.dir={folder}/{{rank}}"], are_ranks=False)
        plans = [json.loads(p.read_text())["plan"] for p in Path(folder).glob("*/summary.json")]
    rows = [row for rows in plans for row in rows if row["replicas"] == len(names)]
    return mean(row["seconds"] for row in rows), rows[0]["moved"]


def train(names: list[str], command: list[str], epochs: int) -> tuple[float, int]:
    """The median epoch, and the steps. Left out are the first epoch, in which DDP rebuilds its
    buckets, and the last, which ends with a validation."""
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder, "seconds.json"), Path(folder, "run")
        words = [
            f"trainer.max_epochs={epochs}",
            f"trainer.validate_every_epochs={epochs + 1}",
            "callbacks=none",
            "logger=none",
        ]
        words += [f"+callbacks.clock={{_target_: plan_check.Clock, file: {file}}}"]
        together(names, [*command, *words, f"hydra.run.dir={run_dir}"])
        summary = json.loads((run_dir / "summary.json").read_text())
        return median(json.loads(file.read_text())[1:-1]), summary["steps"]


# ---- crashes


def through_crashes(seconds: float, between: float) -> None:
    """Ranks are killed at seeded times that do not depend on each other."""
    draw = random.Random(0).expovariate
    with tempfile.TemporaryDirectory() as folder:
        run_dir, ended = Path(folder, "run"), Path(folder, "ended")
        recipe = [*RECIPES["wide"][:-1], "trainer.accelerator=cpu", "trainer.threads=1"]
        words = [sys.executable, "-m", "dpframe", *recipe, "callbacks.progress=null"]
        saves = [f"callbacks.checkpoint.every_n_steps={SAVED}"]
        saves += ["callbacks.checkpoint.every_n_epochs=null", "callbacks.checkpoint.keep=0"]
        environment = os.environ | {"PYTHONPATH": f"{HERE}:{PROGRAMS}"}
        planned = [*words, "mode=plan", "plan.steps=1", "plan.max_replicas=2", "strategy=cpu"]
        planned += ["plan.node_mtbf_hours=1", f"hydra.run.dir={folder}/plan"]
        subprocess.run(planned, env=environment, check=True, capture_output=True)
        save = json.loads(Path(folder, "plan", "summary.json").read_text())["failures"][1]
        words += ["strategy=ddp", "trainer.gpus=2", "trainer.max_restarts=1000", *saves]
        words += ["trainer.max_epochs=1000000", f"hydra.run.dir={run_dir}", "logger=none"]
        words += [f"+callbacks.slow={{_target_: plan_check.Slow, file: {ended}}}"]
        with open(Path(folder, "said"), "w+") as said:
            job = subprocess.Popen(words, env=environment, stdout=said, stderr=said)
            try:
                began, stopped, kills = crashed(job, ended, seconds, lambda: draw(1 / between))
            except BaseException:
                job.kill()
                said.seek(0)
                print(said.read()[-2000:], file=sys.stderr)
                raise
        times = [float(line) for line in ended.read_text().split()]
        steps = step_of(run_dir / "checkpoints" / "last.ckpt")
    step = mean(b - a for a, b in pairwise(times) if not any(a < kill < b for kill in kills))
    firsts = [next((t for t in times if t > kill), stopped) for kill in kills]
    last = {first: kill for kill, first in reversed(list(zip(kills, firsts, strict=True)))}
    restart = mean(first - kill for first, kill in last.items()) - step
    rate = len(kills) / (stopped - began)
    predicted = goodput(SAVED * step, save["stall"], save["write"], restart, rate)
    ends = [time - began for time in (*kills, stopped)]
    replayed = replay(ends, SAVED * step, save["stall"], save["write"], restart) / ends[-1]
    measured = steps * step / ends[-1]
    print(
        f"{len(kills)} crashes in {ends[-1]:.0f} s, {restart:.2f} s to restart, steps of "
        f"{step * 1e3:.0f} ms, a save each {SAVED}: goodput {measured:.1%}; for these very crashes "
        f"the model has {replayed:.1%}, and in the mean over all {predicted:.1%}"
    )


def replay(ends: list[float], interval: float, stall: float, write: float, restart: float) -> float:
    """Seconds of training that are kept; at the last of the ends all is saved."""
    began = kept = 0.0
    for end in ends:
        seconds = max(0.0, end - began)
        whole = max(0, int((seconds - write) / (interval + stall))) * interval
        kept += seconds if end == ends[-1] else whole
        began = end + restart
    return kept


def crashed(
    job: subprocess.Popen, ended: Path, seconds: float, draw: Callable[[], float]
) -> tuple[float, float, list[float]]:
    """When it began and was stopped, and when a rank was killed."""

    def wait(until: Callable[[], bool]) -> None:
        while not until():
            if job.poll() is not None:
                raise SystemExit(f"the job exited with {job.returncode}")
            time.sleep(0.02)

    wait(ended.exists)
    began, kills = time.time(), []
    while (pause := draw()) < began + seconds - time.time():
        time.sleep(pause)
        wait(lambda: bool(ranks_of(job.pid)))  # it may be restarting
        os.kill(ranks_of(job.pid)[-1], signal.SIGKILL)
        kills.append(time.time())
    time.sleep(max(0.0, began + seconds - time.time()))
    stopped = time.time()
    job.terminate()  # it saves
    job.wait()
    return began, stopped, kills


def ranks_of(pid: int) -> list[int]:
    printed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in printed.split()]


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
