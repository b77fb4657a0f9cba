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
    dpframe,
    in_turns,
    noted,
    peers_python,
    run,
    script,
)
from benchmarks.performance.report import Result, compared, limited

FEW_ROWS, MANY_ROWS = 10_000, 1_000_000
LOSS_FACTOR = 1.5  # how far apart the final training losses of two programs may be
UNSAVED = "dpframe, no checkpoints"
SAVING = "the loop by hand, saving each epoch"
BARE, VALIDATING = "Lightning, bare", "Lightning, bare but validating"
STEP_TARGETS = {
    "the tuned loop": None,
    "the loop by hand": 0.55,
    SAVING: 0.55,
    BARE: None,
    VALIDATING: None,
    "Lightning, defaults": None,
    "Accelerate": None,
}
DDP = ("recipe=boston", "strategy=ddp", "trainer.gpus=2", "trainer.accelerator=cpu")
STEP = "one step, recipe=boston on the CPU"
WHOLE = "a whole run, recipe=boston on the CPU"
RANKS = "recipe=boston on two ranks"
MEMORY = "peak memory"
LENET = "LeNet, an epoch of 60,000 made-up images"
ANSWERS = "answers that need no torch"
GROWTH = "cost of growth"
NEIGHBOURS = "noisy neighbours"


def boston(rounds: int, *, is_quick: bool) -> list[Result]:
    """Its programs tell time a step, time in all and memory alike."""
    runs = in_turns(boston_programs(is_quick=is_quick), rounds)
    check_losses(runs)
    whole = {"the loop by hand": 0.62, "Lightning, defaults": 0.40}
    others = {name: runs[name] for name in runs if name not in ("dpframe", UNSAVED)}
    ours, by_hand = runs["dpframe"], runs["the loop by hand"]
    return [
        *steps(runs),
        *(
            compared(WHOLE, name, ours, other, "seconds", whole.get(name))
            for name, other in others.items()
            if name not in (BARE, VALIDATING)
        ),
        compared(MEMORY, "the loop by hand", ours, by_hand, "megabytes", 1.05),
    ]


def steps(runs: dict[str, list[Run]]) -> list[Result]:
    """With the ends of the epochs and without; a checkpoint each epoch is most of such an end."""
    pairs = [(name, "dpframe", name, target) for name, target in STEP_TARGETS.items()]
    pairs.append(("the loop by hand, neither saves", UNSAVED, "the loop by hand", 0.55))
    return [
        compared(STEP, f"{name}: {kind}", runs[one], runs[other], measure, target)
        for name, one, other, target in pairs
        for kind, measure in (("all", "epoch_step"), ("training alone", "step"))
        if other in runs
    ]


def boston_programs(*, is_quick: bool) -> list[Program]:
    python = peers_python()
    found = [
        noted("recipe=boston"),
        noted("recipe=boston", "callbacks.checkpoint=null", name=UNSAVED),
        script(python, "boston_by_hand", "--saves", name=SAVING),
        script(python, "boston_tuned", name="the tuned loop"),
        script(python, "boston_by_hand", name="the loop by hand"),
        script(python, "boston_lightning", "--bare", name=BARE),
        script(python, "boston_lightning", name="Lightning, defaults"),
        Program("import torch", [python, "-c", "import torch"]),
    ]
    if not is_quick:
        found += [
            script(python, "boston_accelerate", name="Accelerate"),
            script(python, "boston_lightning", "--bare", "--validates", name=VALIDATING),
        ]
    return found


def ranks(rounds: int, *, is_quick: bool) -> list[Result]:
    python = peers_python()
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    programs = [
        noted(*DDP),
        Program("torchrun", [*torchrun, str(PROGRAMS / "boston_torchrun.py")]),
        script(python, "boston_lightning", "--ranks", "2", name="Lightning ddp"),
    ]
    runs = in_turns(programs[: 2 if is_quick else 3], rounds)
    check_losses(runs)
    ours = runs["dpframe"]
    results = [compared(RANKS, "a whole run: torchrun", ours, runs["torchrun"], "seconds", 0.60)]
    if not is_quick:
        other = runs["Lightning ddp"]
        results.append(compared(RANKS, "a whole run: Lightning ddp", ours, other, "seconds", None))
    for name, other in runs.items():
        if name != "dpframe":
            results.append(compared(RANKS, f"a step: {name}", ours, other, "epoch_step", None))
            alone = f"a step, training alone: {name}"
            results.append(compared(RANKS, alone, ours, other, "step", None))
    return results


def lenet(rounds: int, *, is_quick: bool) -> list[Result]:
    python = peers_python()
    with made_up_images() as folder:
        words = ["recipe=lenet", f"data.root={folder}", "data.batch_size=256"]
        programs = [
            noted(*words, "trainer.max_epochs=1"),
            script(python, "lenet_by_hand", folder, "1", name="the loop by hand"),
            script(python, "lenet_lightning", folder, "1", name="Lightning, defaults"),
        ]
        runs = in_turns(programs, rounds)
    check_losses(runs)
    ours = runs.pop("dpframe")
    return [compared(LENET, name, ours, its, "epoch_step", 1.0) for name, its in runs.items()]


@contextmanager
def made_up_images() -> Iterator[str]:
    """A folder with them."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        subprocess.run([sys.executable, str(PROGRAMS / "images.py"), folder], check=True)
        yield folder


def answers(rounds: int, *, is_quick: bool) -> list[Result]:
    completing = "import os, sys; os.environ.update(COMP_LINE='python -m dpframe recipe=b', "
    completing += "COMP_POINT='26'); from dpframe.cli import main; main(sys.argv[1:])"
    programs = [
        dpframe("--help", name="--help"),
        dpframe("recipe=bostn", name="a typo, recipe=bostn", code=2),
        Program("completion", [sys.executable, "-c", completing, "-sc", "query=bash"]),
        dpframe("recipe=boston", "--cfg", "job", name="--cfg job"),
    ]
    for program in programs:
        refuse_torch(program)
    runs = in_turns(programs, rounds)
    return [
        limited(ANSWERS, name, [run.seconds for run in found], "s", 0.6)
        for name, found in runs.items()
    ]


def refuse_torch(program: Program) -> None:
    python, *words = program.command
    done = subprocess.run([python, "-X", "importtime", *words], capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    if done.returncode != program.code or "torch" in imported or "hydra" not in imported:
        raise SystemExit(f"{program.name}: exit code {done.returncode}, or it imports torch")


def growth(rounds: int, *, is_quick: bool) -> list[Result]:
    few, many, wide = "10,000 rows", "1,000,000 rows", "50 names"
    short, long = "100 epochs", "1,000 epochs"
    programs = [
        grown(few, rows=FEW_ROWS, epochs=MANY_ROWS // FEW_ROWS),
        grown(many, rows=MANY_ROWS, epochs=1),
        grown(wide, rows=FEW_ROWS, epochs=MANY_ROWS // FEW_ROWS, names=50),
        noted("recipe=boston", name=short),
        noted("recipe=boston", "trainer.max_epochs=1000", name=long),
    ]
    runs = in_turns(programs, rounds)
    comparisons: list[tuple[str, str, str, str, float | None]] = [
        (f"a step: {many} to {few}", many, few, "step", 1.15),
        (f"until the first step: {many} to {few}", many, few, "begin", 1.1),
        (f"a step: {wide} measured to 1", wide, few, "step", 1.15),
        (f"a step: {long} to {short}", long, short, "epoch_step", 1.15),
        (f"memory: {long} to {short}", long, short, "megabytes", 1.05),
    ]
    results = [
        compared(GROWTH, name, runs[more], runs[less], measure, target)
        for name, more, less, measure, target in comparisons
    ]
    own = runs[long]
    name = "a step: epochs 750 to 1,000 to epochs 5 to 250"
    return [*results, compared(GROWTH, name, own, own, "last_step", 1.15, "first_step")]


def grown(name: str, *, rows: int, epochs: int, names: int = 1) -> Program:
    words = [f"--config-dir={PROGRAMS / 'conf'}", "recipe=growth", f"data.rows={rows}"]
    return noted(*words, f"task.names={names}", f"trainer.max_epochs={epochs}", name=name)


def neighbours(rounds: int, *, is_quick: bool) -> list[Result]:
    """Idle and beside two busy loops, by turns."""
    program = noted("recipe=boston")
    idle: list[Run] = []
    beside: list[Run] = []
    for _ in range(rounds):
        idle.append(run(program))
        with busy(2):
            beside.append(run(program))
    name = "a step beside two busy loops to an idle one"
    return [compared(NEIGHBOURS, name, beside, idle, "step", 2.0)]


@contextmanager
def busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def check_losses(runs: dict[str, Sequence[Run]]) -> None:
    """A program that trains something else, or not at all, is no peer."""
    losses = {n: statistics.median(r.loss for r in found) for n, found in runs.items()}
    losses = {name: loss for name, loss in losses.items() if loss}
    limit = LOSS_FACTOR * min(losses.values())
    if not all(loss <= limit for loss in losses.values()):  # NaN is not, wherever it stands
        raise SystemExit(f"the programs do not train alike: {losses}")


SECTIONS: dict[str, Callable[..., list[Result]]] = {
    "boston": boston,
    "ranks": ranks,
    "answers": answers,
    "lenet": lenet,
    "growth": growth,
    "neighbours": neighbours,
}
