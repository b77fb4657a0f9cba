"""What is on this machine, what each strategy would use of it, and what is wrong."""

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from dpframe import Strategy, UserError, __version__
from dpframe.devices.accelerator import cores
from dpframe.plugin import Composed, RankFailed, environment, memory, size
from dpframe.plugins.lab.variants import list_strategies, with_strategy
from dpframe.strategies import DDP
from dpframe.strategies.devices import HIDES, model, present, why_none
from dpframe.strategies.processes import backends

PACKAGES = ("torch", "hydra-core", "omegaconf", "tensorboard", "numpy")
VARIABLES = ("OMP_NUM_THREADS", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 256 << 20  # bytes: data workers hand batches over there
LEAST_DISK = 1 << 30
LEAST_FILES = 1024
FORKS_SAFELY = (3, 11, 10)  # the first Python without CPython's issue 112275


def describe(job: Composed) -> str:
    problems = list(_problems())
    rows = [(name, _describe_use(job, name)) for name in list_strategies(job)]
    talk = _talk(problems)
    facts = [*_facts(), ("ranks", talk)]
    lines = [f"{name:<10} {value}" for name, value in facts]
    width = max(len(name) for name, _ in rows)
    lines += ["", f"{'strategy':<{width}}  would use here"]
    lines += [f"{name:<{width}}  {what}" for name, what in rows]
    lines += ["", *(f"wrong: {problem}" for problem in problems)]
    return "\n".join([*lines, *([] if problems else ["nothing is wrong"])])


def _facts() -> Iterator[tuple[str, str]]:
    built = torch.accelerator.current_accelerator()
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    yield "dpframe", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "packages", ", ".join(versions)
    kinds = "the CPU alone" if built is None else built.type.upper()
    toolkit = f" {torch.version.cuda}" if torch.version.cuda else ""
    yield "torch", f"built for {kinds}{toolkit}; {torch.get_num_threads()} threads"
    yield "backends", f"{', '.join(backends())}: what ranks can talk by"
    total = f"{size(memory.machine())} memory"
    yield "machine", f"{cores()} cores, {total}, {size(_shared())} shared memory"
    devices = present("auto")
    for device in devices:
        yield str(device), _describe(device)
    if not devices:
        yield "devices", f"none: {why_none('auto')}"
    names = [*VARIABLES, *(name for kind in HIDES.values() for name in kind)]
    yield "variables", " ".join(f"{n}={os.environ[n]}" for n in names if n in os.environ) or "none"


def _describe(device: torch.device) -> str:
    module, name = torch.get_device_module(device), model(device)
    free = memory.free(device)
    total = ""
    if hasattr(module, "mem_get_info"):
        total = f" of {size(module.mem_get_info(device)[1])}"
    return name if free is None else f"{name}, {size(free)}{total} free"


def _shared() -> int:
    return shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0


def _describe_use(job: Composed, name: str) -> str:
    """What a strategy would take, or why it can't."""
    variant = with_strategy(job, name)
    if variant.failure:
        return variant.failure
    kinds = list(dict.fromkeys(variant.devices))
    count = len(variant.devices)
    where = f"{count} x {kinds[0]}" if len(kinds) == 1 and count > 1 else ", ".join(kinds)
    return f"{where}, in ranks" if variant.launches_ranks else where


def _talk(problems: list[str]) -> str:
    """Whether ranks can add up a number."""
    if environment.is_one_of_several():
        return "not tried: this is one of several already"
    strategy = DDP(timeout_seconds=60)
    try:
        count = len(strategy.choose_devices(default=None))
        total = strategy.launch(_add_up, strategy)
    except (UserError, RankFailed) as error:
        reason = error.reason if isinstance(error, RankFailed) else str(error).splitlines()[-1]
        problems.append(f"ranks can't work together: {reason}")
        return "failed"
    if total != count:
        problems.append(f"{count} ranks added up ones to {total:g}")
    return f"{count} have talked to each other"


def _add_up(strategy: Strategy) -> float:
    with strategy:
        return float(strategy.collectives.sum(torch.ones(1, device=strategy.device)))


def _problems() -> Iterator[str]:
    if sys.version_info < FORKS_SAFELY:
        fixed = ".".join(map(str, FORKS_SAFELY))
        yield (
            f"a data worker or rank that Python {platform.python_version()} forks may hang at its "
            f"start (CPython's issue 112275), until it is started again; use {fixed} or newer"
        )
    if not present("auto") and any(Path("/dev").glob("nvidia[0-9]*")):
        yield f"there is an NVIDIA GPU, and {why_none('auto')}; install torch's build for CUDA"
    if SHARED_MEMORY.is_dir() and _shared() < LEAST_SHARED:
        yield (
            f"{SHARED_MEMORY} has {size(_shared())}, which data workers may fill; use "
            "data.workers=0, or docker run --shm-size=1g"
        )
    for name, folder in (
        ("the current directory", Path()),
        ("TMPDIR", Path(tempfile.gettempdir())),
    ):
        free = shutil.disk_usage(folder).free
        if free < LEAST_DISK:
            yield f"{name} has {size(free)} free; make room, or use hydra.run.dir=DIR elsewhere"
        if not os.access(folder, os.W_OK):
            yield f"{name} can't be written; go to another one"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < LEAST_FILES:
        yield f"a process may open {files} files; ulimit -n {LEAST_FILES}"
    if environment.is_rank():
        try:
            environment.read_rank()
        except UserError:
            yield "RANK and WORLD_SIZE are set, and this is no rank; unset RANK WORLD_SIZE"
