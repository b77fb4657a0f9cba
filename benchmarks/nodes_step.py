"""A step of `trainer.nodes=2` beside a DistributedDataParallel script by torchrun: wall time.

Both train the same recipe on two hosts, one rank and one core on each, in turns; the ratio is the
median of the turns'. The hosts are two network namespaces: Linux, as root, with `ip`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from benchmarks.slow_link import ADDRESSES, HOSTS, LINK, hosts, on_host

WARM_UP = 20  # steps
FIXED = ["logger=none", "callbacks.progress=null", "callbacks.checkpoint=null"]
FIXED += ["trainer.channels_last=false", "trainer.sanity_batches=0", "trainer.threads=1"]
FIXED += ["trainer.validate_every_epochs=1000000"]
TIMED = """
import json, time
import dpframe

class Timed(dpframe.Callback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, trainer):
        self.ends.append(time.perf_counter())

    def on_fit_end(self, trainer):
        if trainer.strategy.is_main:
            open("ends.json", "w").write(json.dumps(self.ends))
"""
BY_HAND = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dpframe import seeding
from dpframe.cli.build import build
from dpframe.cli.compose import composed

steps, *words = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
config = composed(words).config
seeding.seed_everything(0)
task = build(config["task"], "task")
data = build(config["data"], "data")
data.setup()
tensors = data.train_dataset().tensors
task.forward = task.training_step
model = DistributedDataParallel(task, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(task.parameters(), lr=0.2, fused=True)
ends = []
while len(ends) < int(steps):
    for rows in torch.randperm(len(tensors[0])).split(data.batch_size)[:-1]:
        own = rows.chunk(ranks)[rank]
        loss = model([tensor[own] for tensor in tensors])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
if rank == 0:
    open("ends.json", "w").write(json.dumps(ends[: int(steps)]))
dist.barrier()
os._exit(0)  # torch aborts now and then where the threads of gloo outlive Python
"""


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.nodes_step", description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of each turn, after the first ones")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("words", nargs="*", default=["recipe=lenet"], help="overrides")
    options = parser.parse_args()
    steps = WARM_UP + options.steps
    with hosts(None):
        pairs = [
            (by_dpframe(options.words, steps, turn), by_torchrun(options.words, steps, turn))
            for turn in range(options.turns)
        ]
    ratios = sorted(mine / hand for mine, hand in pairs)
    mine, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"trainer.nodes=2 {1e3 * mine:.1f} ms, by torchrun {1e3 * hand:.1f} ms a step: "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    return 0


def by_dpframe(words: list[str], steps: int, turn: int) -> float:
    meet = ["trainer.nodes=2", f"trainer.rendezvous={ADDRESSES[0]}:{29500 + turn}"]
    fixed = [*FIXED, f"trainer.max_steps={steps}", "trainer.max_epochs=null", "hydra.run.dir=run"]
    timed = ["+callbacks.timed._target_=timed.Timed"]
    return taken(["-m", "dpframe", "strategy=ddp", "trainer.gpus=1", *meet, *fixed, *timed, *words])


def by_torchrun(words: list[str], steps: int, turn: int) -> float:
    meet = [f"--master-addr={ADDRESSES[0]}", f"--master-port={29600 + turn}", "--node-rank=NODE"]
    start = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meet]
    return taken([*start, "by_hand.py", str(steps), *words], GLOO_SOCKET_IFNAME=LINK)


def taken(command: list[str], **variables: str) -> float:
    """Seconds of a step, the median, of Python with these arguments on both hosts."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "timed.py").write_text(TIMED)
        Path(folder, "by_hand.py").write_text(BY_HAND)
        jobs = [
            subprocess.Popen(
                [*on_host(node), sys.executable]
                + [word.replace("=NODE", f"={node}") for word in command],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in range(len(HOSTS))
        ]
        try:
            said = [job.communicate()[1] for job in jobs]
        finally:
            for job in jobs:
                job.terminate()
        if any(job.returncode for job in jobs):
            raise SystemExit(f"{' '.join(command)} failed:\n{said[0]}")
        ends = json.loads(Path(folder, "ends.json").read_text())
        each = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
        return statistics.median(each[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())
