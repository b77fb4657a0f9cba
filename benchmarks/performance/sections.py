"""The comparisons, a function a section: which programs take turns, what is read, the targets."""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.performance.process import (
    PROGRAMS,
    Program,
    Run,
    in_turns,
    noted,
    peer,
    peers_python,
    run,
)
from benchmarks.performance.report import Result, compared

LOSS_FACTOR = 1.5  # how far apart the final training losses of two programs may be
TUNED, HAND = "the tuned loop", "the loop by hand"
SAVING = "the loop by hand, saving each epoch"
BARE, VALIDATING = "Lightning, bare", "Lightning, bare but validating"
LIGHTNING, ACCELERATE = "Lightning, defaults", "Accelerate"
TUNED_LIGHTNING = "Lightning, tuned"
STEP_TARGETS = {HAND: 0.55, SAVING: 0.55}
WHOLE_TARGETS = {HAND: 0.62, LIGHTNING: 0.40}
LARGER: dict[str, dict[str, float]] = {
    "gpt": {TUNED: 1.02, BARE: 0.95},
    "resnet": {TUNED: 1.02, BARE: 0.95},
    "gan": {},
}
EPOCHS, STEPS = 100, 4  # of boston, and in an epoch of it
RANKS = ("strategy=ddp", "trainer.gpus=2", "trainer.accelerator=cpu")
DDP = ("recipe=boston", *RANKS)
FEW_STEPS = ("trainer.max_epochs=12", "trainer.limit_train_batches=2", "callbacks=none")
FEW_STEPS += ("trainer.sanity_batches=0", "trainer.limit_val_batches=1")
GPT = ("recipe=gpt", "task.dropout=0.1", "task.attention_dropout=0", "data.stories=100", *FEW_STEPS)
RESNET = (f"--config-dir={PROGRAMS / 'conf'}", "recipe=resnet")
EXACT = (("trainer.batch_norm", "global", RESNET), ("trainer.dropout", "row", GPT))
COMPLETING = """\
import os, sys
os.environ.update(COMP_LINE="python -m dpframe recipe=b", COMP_POINT="26")
from dpframe.cli import main
main(sys.argv[1:])"""


def boston(rounds: int) -> list[Result]:
    """Its programs tell time a step, time in all and memory alike."""
    imports, unsaved = "import torch", "dpframe, no checkpoints"
    programs = [
        noted("recipe=boston"),
        noted("recipe=boston", "callbacks.checkpoint=null", name=unsaved),
        peer(TUNED, "tuned"),
        peer(HAND, "by_hand"),
        peer(SAVING, "by_hand", "--saves"),
        peer(BARE, "in_lightning", "--bare"),
        peer(VALIDATING, "in_lightning", "--bare", "--validates"),
        peer(LIGHTNING, "in_lightning"),
        peer(TUNED_LIGHTNING, "in_lightning", "--tuned"),
        peer(ACCELERATE, "in_accelerate"),
        Program(imports, [peers_python(), "-c", "import torch"]),
    ]
    runs = in_turns(programs, rounds)
    check_losses(runs)
    ours = runs["dpframe"]
    steps = {name: (ours, runs[name], STEP_TARGETS.get(name)) for name in runs}
    steps["the loop by hand, neither saves"] = runs[unsaved], runs[HAND], 0.55
    for name in ("dpframe", unsaved, imports):
        del steps[name]
    section = "one step, recipe=boston on the CPU"
    # With the ends of the epochs and without; a checkpoint each epoch is most of such an end.
    results = [
        compared(section, f"{name}: {kind}", mine, other, measure, target)
        for name, (mine, other, target) in steps.items()
        for kind, measure in (("all", "epoch_step"), ("training alone", "step"))
    ]
    section = "a whole run, recipe=boston on the CPU"
    results += [
        compared(section, name, ours, runs[name], "seconds", WHOLE_TARGETS.get(name))
        for name in (TUNED, HAND, SAVING, LIGHTNING, TUNED_LIGHTNING, ACCELERATE, imports)
    ]
    least = [
        start._replace(seconds=start.seconds + EPOCHS * STEPS * loop.epoch_step / 1e6)
        for start, loop in zip(runs[imports], runs[TUNED], strict=True)
    ]
    name = f"{imports}, and {EPOCHS} epochs of {TUNED}"
    results.append(compared(section, name, ours, least, "seconds", 1.05))
    limits = {TUNED: None, HAND: 1.05}
    return results + [
        compared("peak memory", name, ours, runs[name], "megabytes", limit)
        for name, limit in limits.items()
    ]


def ranks(rounds: int) -> list[Result]:
    torchrun = [peers_python(), "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", str(PROGRAMS / "by_hand.py")]
    programs = [
        noted(*DDP),
        Program("torchrun", torchrun),
        peer("Lightning ddp", "in_lightning", "--ranks", "2"),
    ]
    runs = in_turns(programs, rounds)
    check_losses(runs)
    ours = runs.pop("dpframe")
    return [
        compared("recipe=boston on two ranks", f"{kind}: {name}", ours, other, measure, target)
        for kind, measure, targets in (
            ("a whole run", "seconds", {"torchrun": 0.60}),
            ("a step", "epoch_step", {}),
            ("a step, training alone", "step", {}),
        )
        for name, other in runs.items()
        for target in [targets.get(name)]
    ]


def lenet(rounds: int) -> list[Result]:
    with made_up_images() as folder:
        words = ("--images", folder, "--epochs", "1")
        programs = [
            noted(*images_of(folder), "trainer.max_epochs=1"),
            peer(HAND, "by_hand", *words),
            peer(LIGHTNING, "in_lightning", *words),
        ]
        runs = in_turns(programs, rounds)
    check_losses(runs)
    ours = runs.pop("dpframe")
    section = "LeNet, an epoch of 60,000 made-up images"
    return [compared(section, name, ours, its, "epoch_step", 1.0) for name, its in runs.items()]


def larger(rounds: int) -> list[Result]:
    """Networks of some size, where a framework's part of a step is small."""
    results = []
    for name, targets in LARGER.items():
        path = str(PROGRAMS / "larger.py")
        ours = Program("dpframe", [sys.executable, path, name, "dpframe"])
        others = [peer(TUNED, "larger", name, "tuned"), peer(BARE, "larger", name, "lightning")]
        runs = in_turns([ours, *others], rounds)
        check_losses(runs)
        mine = runs.pop("dpframe")
        section = "a step of larger networks on the CPU"
        results += [
            compared(section, f"{name}: {other}", mine, its, "step", targets.get(other))
            for other, its in runs.items()
        ]
        limit = 1.02 if name != "gan" else None
        results.append(
            compared("peak memory", f"{name}: {TUNED}", mine, runs[TUNED], "megabytes", limit)
        )
    return results


def exact(rounds: int) -> list[Result]:
    """Layers that are computed for the whole batch, beside those that are each replica's own."""
    results = []
    for key, value, words in EXACT:
        ours, own = f"{key}={value}", f"{key}=replica"
        runs = in_turns([noted(*words, *RANKS, each, name=each) for each in (ours, own)], rounds)
        check_losses(runs)
        name = f"{ours}: replica"
        results.append(compared("a step on two ranks", name, runs[ours], runs[own], "step", None))
    return results


@contextmanager
def made_up_images() -> Iterator[str]:
    """A folder with them."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        subprocess.run([sys.executable, str(PROGRAMS / "problems.py"), folder], check=True)
        yield folder


def images_of(folder: str) -> tuple[str, ...]:
    return "recipe=lenet", f"data.root={folder}", "data.batch_size=256"


def answers(rounds: int) -> list[Result]:
    """Beside a limit."""
    command = [sys.executable, "-m", "dpframe"]
    programs = [
        Program("--help", [*command, "--help"]),
        Program("a typo, recipe=bostn", [*command, "recipe=bostn"], code=2),
        Program("completion", [sys.executable, "-c", COMPLETING, "-sc", "query=bash"]),
        Program("--cfg job", [*command, "recipe=boston", "--cfg", "job"]),
    ]
    limit = [Run(seconds=0.6)] * rounds
    return [
        compared("answers that need no torch", name, runs, limit, "seconds", 1.0)
        for name, runs in in_turns(programs, rounds).items()
    ]


def growth(rounds: int) -> list[Result]:
    """What is more than it was: its pairs of programs, what is read of them, and the target."""
    made_up = [f"--config-dir={PROGRAMS / 'conf'}", "recipe=growth"]
    small = [*made_up, "data.rows=10000"]
    few_steps = ["trainer.max_epochs=12", "trainer.limit_train_batches=5"]
    one_row = [*made_up, *few_steps, "data.is_written=false"]
    written = [*made_up, *few_steps, "data.rows=2000000"]
    wide = [*made_up, *few_steps, "data.rows=10000", "task.sizes=[13,1000,2000,1]"]
    parallel = [*wide, "strategy=data_parallel", "trainer.accelerator=cpu"]
    sweep = ["--first", "-m", "recipe=boston", "trainer.max_epochs=12"]
    boston = ["recipe=boston"]
    programs = {
        "1,000,000 rows": [*made_up, "data.rows=1000000", "trainer.max_epochs=1"],
        "10,000 rows": [*small, "trainer.max_epochs=100"],
        "50 names": [*small, "trainer.max_epochs=100", "task.names=50"],
        "200 names": [*small, "trainer.max_epochs=100", "task.names=200"],
        "100 epochs": boston,
        "1,000 epochs": [*boston, "trainer.max_epochs=1000"],
        "1,000,000,000 rows": [*one_row, "data.rows=1000000000"],
        "1,000 rows": one_row,
        "a Subset": [*written, "data.is_subset=true"],
        "its data set": written,
        "10 sets to validate on": [*small, *few_steps, "data.sets=10"],
        "1 set": [*small, *few_steps, "data.sets=1"],
        "8 replicas in a process": [*parallel, "trainer.gpus=8"],
        "1 replica": [*parallel, "trainer.gpus=1"],
        "a sweep of 1,000 points": [*sweep, "seed=range(0,1000)"],
        "one of 20": [*sweep, "seed=range(0,20)"],
    }
    runs = in_turns([noted(*words, name=name) for name, words in programs.items()], rounds)
    long = runs["1,000 epochs"]
    runs["its beginning"] = [run._replace(last_step=run.first_step) for run in long]
    read = {
        "a step": "step",
        "an epoch of 5 steps": "epoch_step",
        "a step and its part of an epoch": "epoch_step",
        "until the first step": "begin",
        "memory": "megabytes",
        "the last quarter of steps": "last_step",
    }
    return [
        compared(
            "cost of growth", f"{what}: {more} to {less}", runs[more], runs[less], read[what], most
        )
        for what, more, less, most in (
            ("a step", "1,000,000 rows", "10,000 rows", 1.15),
            ("until the first step", "1,000,000 rows", "10,000 rows", 1.1),
            ("until the first step", "1,000,000,000 rows", "1,000 rows", 1.1),
            ("memory", "1,000,000,000 rows", "1,000 rows", 1.2),
            ("memory", "a Subset", "its data set", 1.05),
            ("a step", "50 names", "10,000 rows", 1.15),
            ("a step", "200 names", "10,000 rows", 1.2),
            ("an epoch of 5 steps", "10 sets to validate on", "1 set", None),
            ("memory", "8 replicas in a process", "1 replica", None),
            ("until the first step", "a sweep of 1,000 points", "one of 20", None),
            ("memory", "a sweep of 1,000 points", "one of 20", None),
            ("a step and its part of an epoch", "1,000 epochs", "100 epochs", 1.15),
            ("memory", "1,000 epochs", "100 epochs", 1.05),
            ("the last quarter of steps", "1,000 epochs", "its beginning", 1.15),
        )
    ]


def neighbours(rounds: int) -> list[Result]:
    """Idle and beside two busy loops, by turns."""
    program = noted("recipe=boston")
    idle: list[Run] = []
    beside: list[Run] = []
    for _ in range(rounds):
        idle.append(run(program))
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            beside.append(run(program))
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
    name = "a step beside two busy loops to an idle one"
    return [compared("noisy neighbours", name, beside, idle, "step", 2.0)]


def check_losses(runs: dict[str, Sequence[Run]]) -> None:
    """A program that trains something else, or not at all, is no peer."""
    losses = {n: statistics.median(r.loss for r in found) for n, found in runs.items()}
    losses = {name: loss for name, loss in losses.items() if loss}
    limit = LOSS_FACTOR * min(losses.values())
    if not all(loss <= limit for loss in losses.values()):  # NaN is not, wherever it stands
        raise SystemExit(f"the programs do not train alike: {losses}")


SECTIONS: dict[str, Callable[[int], list[Result]]] = {
    "boston": boston,
    "ranks": ranks,
    "answers": answers,
    "lenet": lenet,
    "larger": larger,
    "exact": exact,
    "growth": growth,
    "neighbours": neighbours,
}
