"""The sections, each in a process of its own: what is measured, until the time for it is over."""

import gc
import gzip
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.contests import Contest, Problem, Tokens, contests, flops_per_row
from benchmarks.gpu.formulas import idle_share
from benchmarks.gpu.records import Records
from benchmarks.gpu.ways import Turn, ours, ways
from dpframe import Callback, Strategy, Trainer
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.strategies.ddp import DDP
from dpframe.strategies.single import CPU, SingleGPU

ROOT = Path(__file__).resolve().parents[2]
MOST_TURNS = 5
SHOWN_FAILURES = 20
ENDING_SECONDS = 15  # for tests that are stopped: they still report what ran
ONE_TEST = "tests/test_gpu.py::test_the_gpu_that_was_asked_for_is_taken"


@dataclass
class Job:
    """A section's part of the time, its device, and where it writes."""

    seconds: float
    device: torch.device
    is_dry: bool
    records: Records

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def contest(self, name: str) -> Contest | None:
        return contests(is_tiny=self.is_dry).get(name)


def machine(job: Job) -> None:
    fact = job.records.fact
    fact("cores", os.cpu_count())
    fact("Python", platform.python_version())
    fact("torch", torch.__version__)
    if not job.is_cuda:
        job.records.note("No GPU: everything ran on the CPU.")
        return
    gpu = torch.cuda.get_device_properties(job.device)
    fact("GPU", gpu.name)
    fact("GPUs", torch.cuda.device_count())
    fact("memory of the GPU", gpu.total_memory / 2**30, "GiB")
    fact("CUDA", torch.version.cuda)
    fact("driver", driver())
    size = 64 if job.is_dry else 8192
    a, b = (torch.randn(size, size, device=job.device, dtype=torch.bfloat16) for _ in range(2))
    times = 2 if job.is_dry else 20
    for _ in range(2):  # the first one warms
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            a @ b
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / times
    fact(f"bf16 product of {size} x {size}", 2 * size**3 / seconds / 1e12, "TFLOP/s")


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.split()), None)


# The tests


def tests(job: Job) -> None:
    """`pytest -m gpu`; where time is over, what had run until then."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", "--timeout=90", "--tb=short"]
        command += (
            [ONE_TEST, "-n0"] if job.is_dry else ["tests", f"-n{min(4, os.cpu_count() or 1)}"]
        )
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        is_whole = True
        try:
            output, _ = process.communicate(timeout=max(1.0, job.left - ENDING_SECONDS))
        except subprocess.TimeoutExpired:
            is_whole = False
            process.send_signal(signal.SIGINT)  # it still writes its report
            output, _ = process.communicate()
        if not report.is_file():
            raise RuntimeError(f"pytest ended with {process.returncode}: {output[-1000:]}")
        counts, failures = outcome(report.read_text())
    failures = failures[:SHOWN_FAILURES]
    job.records.add("test", counts=counts, failures=failures, is_whole=is_whole)


def outcome(xml: str) -> tuple[dict[str, int], list[str]]:
    """Of a report of pytest: how many tests passed, failed and were skipped, and of each failure
    its test and its first line."""
    suite = next(ElementTree.fromstring(xml).iter("testsuite"))
    others = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
    counts = {"passed": int(suite.get("tests", 0)) - sum(others.values()), **others}
    failures = []
    for case in suite.iter("testcase"):
        for problem in (*case.iterfind("failure"), *case.iterfind("error")):
            line = (problem.get("message") or "").strip().splitlines()
            failures.append(f"{case.get('name')}: {line[0] if line else '?'}"[:200])
    return counts, failures


# Contests


def small(job: Job) -> None:
    race(job, ["boston", "lenet", "boston, compiled"])


def gpt(job: Job) -> None:
    race(job, ["gpt", "gpt, compiled"])


def resnet(job: Job) -> None:
    race(job, ["resnet"])


def race(job: Job, names: Sequence[str]) -> None:
    """All ways of a contest by turns, in an order that changes; then the next contest. Turns go on
    while there is time for one more."""
    has_lightning = importlib.util.find_spec("lightning") is not None
    if not has_lightning:
        job.records.note("Lightning is not installed, so it is missing here.")
    torch.set_num_threads(1)  # the GPU computes; on the CPU a pool of threads only wakes and waits
    runners = {}
    for name in names:
        contest = job.contest(name)
        if contest is not None:
            runners[name] = contest, ways(contest, has_lightning=has_lightning)
            describe(job.records, name, contest)
    seconds = dict.fromkeys(runners, 0.0)
    for number in range(1 if job.is_dry else MOST_TURNS):
        for name, (contest, programs) in runners.items():
            if number and seconds[name] > job.left:
                continue
            began = time.monotonic()
            take_turns(job, name, contest, programs, number)
            seconds[name] = time.monotonic() - began


def describe(records: Records, name: str, contest: Contest) -> None:
    problem = contest.problem()
    records.add(
        "contest",
        name=name,
        title=contest.title,
        unit=contest.unit,
        units_per_step=problem.data.batch_size * contest.units_per_row,
        flops_per_step=(flops_per_row(problem) or 0) * problem.data.batch_size,
        parameters=sum(p.numel() for p in problem.task.parameters()),
        tolerance=contest.tolerance,
        aims=contest.aims,
        least_utilization=contest.least_utilization,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    )


def take_turns(
    job: Job,
    name: str,
    contest: Contest,
    programs: dict[str, Callable[..., Turn]],
    number: int,
) -> None:
    order = list(programs)
    for way in order[number % len(order) :] + order[: number % len(order)]:
        free()
        if contest.compile_mode is not None:
            torch.compiler.reset()  # no turn inherits what another has compiled
        try:
            turn = programs[way](contest, job.device)
        except Exception as error:  # e.g. out of memory; the other ways go on
            del programs[way]
            line = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {line[0][:200]}"
            job.records.add("failure", contest=name, way=way, text=text)
            continue
        job.records.add("turn", contest=name, way=way, number=number, **turn._asdict())


# Idle time, start-up, saving


def running(job: Job) -> None:
    for name in ("boston", "lenet", "gpt"):
        measure_idle_time(job, name)
    measure_start(job)
    measure_save(job)


def measure_idle_time(job: Job, name: str) -> None:
    contest = job.contest(name)
    assert contest is not None
    steps = 2 if job.is_dry else 20
    contest = replace(contest, steps=steps)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        trace = Path(folder, "trace.json.gz")
        ours(contest, job.device, callbacks=[Traced(contest.warm_steps, steps, trace)])
        share = idle_share(kernels(trace))
    note = "" if share is not None else "no work of the GPU was recorded"
    job.records.fact(f"idle share of the GPU, {name}", share, note=note)


class Traced(Callback):
    """Records the steps after `first` by torch.profiler."""

    def __init__(self, first: int, steps: int, path: Path) -> None:
        self.first, self.last, self.path = first, first + steps, path
        # Of a GPU its work alone: the calls on the CPU would make most of the trace.
        cuda = {torch.profiler.ProfilerActivity.CUDA}
        activities = torch.profiler.supported_activities()
        self.profiler = torch.profiler.profile(activities=activities & cuda or activities)

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == self.first:
            self.profiler.start()
        elif trainer.global_step == self.last:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))


def kernels(trace: Path) -> list[tuple[float, float]]:
    """From when to when the GPU worked, in microseconds: kernels and copies."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    is_work = {"kernel", "gpu_memcpy", "gpu_memset"}
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in is_work]


def measure_start(job: Job) -> None:
    """The whole of `python -m dpframe recipe=boston`, beside the import of torch."""
    words = ["recipe=boston", f"trainer.accelerator={job.device.type}"]
    words += ["trainer.max_epochs=1"] if job.is_dry else []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = [sys.executable, "-m", "dpframe", *words]
        times = 1 if job.is_dry else 2
        whole = [process_seconds(command, folder) for _ in range(times)]
        imports = [process_seconds([sys.executable, "-c", "import torch"], folder) for _ in whole]
    fact = job.records.fact
    fact("python -m dpframe recipe=boston, whole process", statistics.median(whole), "s")
    fact("python -c 'import torch'", statistics.median(imports), "s")


def process_seconds(command: list[str], folder: str) -> float:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}"
        )
    return seconds


def measure_save(job: Job) -> None:
    """What one checkpoint of GPT-2 and its AdamW adds to the steps that it is written beside."""
    contest = job.contest("gpt")
    assert contest is not None
    seconds = []
    for saves in (False, True):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            at = contest.warm_steps + 1
            callbacks: list[Callback] = [Saves(at)] if saves else []
            turn = ours(contest, job.device, callbacks=callbacks, directory=folder)
        seconds.append(turn.step_seconds * contest.steps)
    without, with_save = seconds
    name = f"a checkpoint of GPT-2 and AdamW, added to {contest.steps} steps of training"
    job.records.fact(name, with_save - without, "s")


class Saves(Checkpoint):
    """Once, at a step."""

    def __init__(self, step: int) -> None:
        super().__init__(keep=0, every_n_epochs=None, every_n_steps=step)

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.global_step == self.every_n_steps:
            super().on_step_end(trainer)


# Several processes


def ddp(job: Job) -> None:
    """One GPU by ddp and by single_gpu, in turns; then all GPUs, with a batch for each."""
    contest = job.contest("gpt")
    assert contest is not None
    gpus = torch.cuda.device_count() if job.is_cuda else 1
    seconds: dict[str, list[float]] = {"single": [], "ddp": [], "all": []}
    single = SingleGPU(gpus=1, accelerator="cuda") if job.is_cuda else CPU()
    last = 0.0
    for number in range(1 if job.is_dry else MOST_TURNS):
        if number and last > job.left:
            break
        began = time.monotonic()
        seconds["single"].append(launched(single, job))
        seconds["ddp"].append(launched(DDP(1, job.device.type), job))
        if gpus > 1:
            seconds["all"].append(launched(DDP(gpus, job.device.type), job, copies=gpus))
        last = time.monotonic() - began
    alone, one = statistics.median(seconds["single"]), statistics.median(seconds["ddp"])
    fact = job.records.fact
    fact("GPT-2 on one GPU by single_gpu", 1e3 * alone, "ms a step")
    fact("the same by ddp", 1e3 * one, "ms a step", f"{one / alone:.3f} of single_gpu")
    if gpus > 1:
        several = statistics.median(seconds["all"])
        note = f"{gpus * alone / several:.2f} times the tokens of one GPU"
        fact(f"{gpus} times the batch on {gpus} GPUs by ddp", 1e3 * several, "ms a step", note)
    else:
        job.records.note("There is one GPU, so scaling over several was not measured.")


def launched(strategy: Strategy, job: Job, copies: int = 1) -> float:
    free()  # ranks are other processes, on the same GPU
    return strategy.launch(in_rank, strategy, job.is_dry, copies)


def in_rank(strategy: Strategy, is_dry: bool, copies: int) -> float:
    """Seconds a step, with the batch of one GPU for each of `copies` GPUs."""
    with strategy:
        contest = contests(is_tiny=is_dry)["gpt"]
        contest = replace(contest, make=partial(larger, contest.make, copies))
        return ours(contest, strategy.device, strategy=strategy).step_seconds


def larger(make: Callable[[], Problem], copies: int) -> Problem:
    problem = make()
    assert isinstance(problem.data, Tokens)
    problem.data.batch_size *= copies
    problem.data.rows *= copies
    return problem


def free() -> None:
    """Gives the GPU what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[Job], None]] = {
    "machine": machine,
    "tests": tests,
    "small": small,
    "gpt": gpt,
    "resnet": resnet,
    "running": running,
    "ddp": ddp,
}
