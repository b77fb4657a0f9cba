"""Trains LeNet on two hosts with a slow link between them: ddp, and the example plugin local SGD.

The hosts are two network namespaces with a veth pair, which tc makes as slow as asked: Linux, as
root, with `ip` and `tc`, and the plugin (`pip install examples/dpframe-localsgd`). The bytes are
those that the kernel counts on one end of the link; the seconds are those of training until a
validation has this loss, looked for every 60 steps.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

HOSTS = tuple(f"dpframe-{os.getpid()}-{number}" for number in (0, 1))
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29571"
LINK = "link0"  # its name in each host
LOCAL = ["strategy=localsgd", "strategy.inner_steps=20", "strategy.outer_learning_rate=1"]
LOOK = 60  # steps between two validations, which end a round
METHODS = {
    "ddp": ["strategy=ddp"],
    "averages": [*LOCAL, "strategy.outer_momentum=0"],
    "averages, overlapped": [*LOCAL, "strategy.outer_momentum=0", "strategy.overlap_steps=20"],
    "Nesterov": [*LOCAL, "strategy.outer_momentum=0.4"],
    "Nesterov, overlapped": [*LOCAL, "strategy.outer_momentum=0.4", "strategy.overlap_steps=20"],
}
TIMED = """
import json, os, time
import dpframe

class Timed(dpframe.Callback):
    def on_fit_start(self, trainer):
        self.began = time.perf_counter()
        self.rows = []

    def on_validation_end(self, trainer):
        row = time.perf_counter() - self.began, trainer.global_step, trainer.metrics["val/loss"]
        self.rows.append(row)
        if row[2] <= float(os.environ["LOSS"]):
            trainer.stop("it is there")
        if trainer.strategy.is_main:
            open("rows.json", "w").write(json.dumps(self.rows))
"""


class Outcome(NamedTuple):
    rows: list[tuple[float, int, float]]  # seconds, steps and val/loss of each validation
    sent_bytes: int  # by the first host


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loss", type=float, default=0.15, help="the val/loss to wait for")
    parser.add_argument("--mbit", type=float, default=5.0, help="the link's, a second")
    parser.add_argument("--steps", type=int, default=480, help=f"a multiple of {LOOK}")
    parser.add_argument("--recipe", default="lenet")
    parser.add_argument("--overrides", nargs="*", default=[], help="for all methods")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args(arguments)
    print(
        f"recipe={options.recipe} on two hosts, {options.mbit:g} Mbit/s between them; "
        f"val/loss at most {options.loss:g}\n"
    )
    print("| method | seconds | steps | seconds a step | bytes a step | last val/loss |")
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    given = [f"recipe={options.recipe}", *options.overrides]
    for name in options.method:
        with hosts(options.mbit):
            outcome = train([*given, *METHODS[name]], options.steps, options.loss)
        seconds, steps, last = outcome.rows[-1]
        reached = f"{seconds:.1f}" if last <= options.loss else "not reached"
        each = f"{seconds / steps:.3f} | {outcome.sent_bytes / steps:,.0f}"
        print(f"| {name} | {reached} | {steps} | {each} | {last:.3f} |", flush=True)
    return 0


@contextmanager
def hosts(mbit: float | None) -> Iterator[None]:
    """None: as fast as the machine is. They are removed if the process is ended, too."""
    with ExitStack() as made:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        made.callback(signal.signal, signal.SIGTERM, before)
        for host in HOSTS:
            _run("ip", "netns", "add", host)
            made.callback(_run, "ip", "netns", "del", host)
        ends = [arg for host in HOSTS for arg in ("name", LINK, "netns", host, "peer")][:-1]
        _run("ip", "link", "add", *ends[:4], "type", "veth", *ends[4:])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            inside = ("ip", "-n", host)
            _run(*inside, "addr", "add", f"{address}/24", "dev", LINK)
            for name in ("lo", LINK):
                _run(*inside, "link", "set", name, "up")
            slow = ("tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "40ms")
            if mbit is not None:
                _run("tc", "-n", host, "qdisc", "add", "dev", LINK, "root", *slow)
        yield


def train(words: list[str], steps: int, loss: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "timed.py").write_text(TIMED)
        words = [*words, f"trainer.max_steps={steps}"]
        ranks = [rank(number, words, folder, LOSS=str(loss)) for number in (0, 1)]
        codes = [each.wait() for each in ranks]
        if any(codes):
            raise SystemExit(f"a rank failed: {' '.join(words)}")
        counter = f"/sys/class/net/{LINK}/statistics/tx_bytes"
        sent = _run("ip", "netns", "exec", HOSTS[0], "cat", counter)
        return Outcome(json.loads(Path(folder, "rows.json").read_text()), int(sent))


def on_host(number: int) -> list[str]:
    """What runs a command there, on a core of its own."""
    core = str(number % (os.cpu_count() or 1))
    return ["ip", "netns", "exec", HOSTS[number], "taskset", "-c", core]


def rank(number: int, words: list[str], folder: str, **more: str) -> subprocess.Popen[bytes]:
    """As torchrun would start it: one rank on each host, which has a core to itself."""
    variables = {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": LINK,
        "OMP_NUM_THREADS": "1",
    }
    fixed = ["logger=none", "hydra.run.dir=run", "trainer.sanity_batches=0"]
    fixed += [f"trainer.validate_every_steps={LOOK}", "trainer.validate_every_epochs=1000"]
    fixed += ["trainer.max_epochs=null"]
    fixed += ["callbacks.progress=null", "callbacks.checkpoint.every_n_epochs=null"]
    fixed += ["callbacks.checkpoint.keep=0", "+callbacks.timed._target_=timed.Timed"]
    return subprocess.Popen(
        [*on_host(number), sys.executable, "-m", "dpframe", *fixed, *words],
        cwd=folder,
        env=os.environ | variables | more,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
