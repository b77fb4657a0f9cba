"""Which devices a job gets: what was asked for, what there is, and the rehearsal on the CPU."""

import os
import platform
import sys
import warnings

import torch

from dpframe.devices.accelerator import cores
from dpframe.errors import UserError, first_line
from dpframe.launch import environment

Gpus = int | str | list[int] | None
"""A count, numbers of devices, `all`, or `auto` and None: as the strategy likes."""
REPLICAS_PER_CORE = 8  # of a rehearsal; more are refused before any starts
REHEARSED_REPLICAS = 2  # where neither a count nor a device says how many
HIDES = {  # the variables by which devices are kept from a process
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
}
CLUSTERS = {"SLURM_JOB_ID": "Slurm", "KUBERNETES_SERVICE_HOST": "Kubernetes"}
GIVEN = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")  # what Slurm says of GPUs that a job has


def choose(gpus: Gpus, accelerator: str, *, default: int | None) -> list[torch.device]:
    """One device a replica. `default` is how many where `gpus` is null; None: all there are."""
    there = [] if accelerator == "cpu" else present(accelerator)
    asked = count_of(gpus, len(there))
    count = asked or default or len(there) or REHEARSED_REPLICAS
    if not there:
        if accelerator == "auto":
            refuse_lost_devices()
        if count > REPLICAS_PER_CORE and count > (limit := REPLICAS_PER_CORE * cores()):
            raise UserError(
                f"trainer.gpus={count} asks for {count} replicas on {cores()} CPU cores, at most "
                f"{limit} are sane; use fewer"
            )
        return [torch.device("cpu")] * count
    numbers = gpus if isinstance(gpus, list) else []
    if asked is None and count > len(there) == 1 and _limits(there[0].type):
        return there * count  # each of torchrun's ranks sees a device of its own alone
    if count > len(there) or any(number >= len(there) for number in numbers):
        what = (
            f"trainer.gpus={gpus}"
            if asked
            else f"{environment.find_launcher()} started {count} ranks"
        )
        use = f"trainer.gpus={len(there)}" if asked else environment.count_option(len(there))
        raise UserError(
            f"{what} but {_count_devices(there)}; use {use}, or trainer.accelerator=cpu to rehearse"
        )
    return [there[number] for number in numbers] or there[:count]


def count_of(gpus: Gpus, available: int) -> int | None:
    """How many replicas `gpus` asks for; None: the strategy decides."""
    if gpus == "all":
        return available or REHEARSED_REPLICAS
    if isinstance(gpus, list):
        return len(gpus)
    return None if isinstance(gpus, str) else gpus


def present(accelerator: str) -> list[torch.device]:
    """The devices that torch can use here; refuses a kind that was asked for and is not there."""
    built = torch.accelerator.current_accelerator()
    if built is not None and accelerator in ("auto", built.type):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a driver that is too old: why_none says it
            # A driver may tell of devices that torch can't use.
            count = torch.accelerator.device_count()
            if count and torch.accelerator.is_available():
                return [torch.device(built.type, index) for index in range(count)]
    if accelerator == "auto":
        return []
    raise UserError(
        f"trainer.accelerator={accelerator} but {why_none(accelerator)}; "
        "use trainer.accelerator=auto, or cpu to rehearse"
    )


def why_none(accelerator: str) -> str:
    """Why torch has no such device here, as far as anybody knows."""
    built = torch.accelerator.current_accelerator()
    if built is None:
        return f"torch {torch.__version__} is built for the CPU alone"
    kind = built.type.upper()
    if accelerator not in ("auto", built.type):
        return f"torch {torch.__version__} is built for {kind} devices"
    limits = _limits(built.type)
    module = torch.get_device_module(built)
    try:
        if hasattr(module, "init"):
            module.init()
    except RuntimeError as error:  # e.g. a driver that is too old for this torch
        said = first_line(error).partition(". ")[0]
        return f"torch can use no {kind} device{limits and f' ({limits})'}: {said}"
    return f"this machine has no {kind} device{limits and f' ({limits})'}"


def refuse_lost_devices() -> None:
    """In a job of a cluster, where nobody reads the line of a rehearsal."""
    where = next((name for variable, name in CLUSTERS.items() if variable in os.environ), "")
    if where and torch.accelerator.current_accelerator() is not None:
        raise UserError(
            f"{why_none('auto')}, and this is a job of {where}, which might train on the CPU for "
            "days; give it devices that work, or set trainer.accelerator=cpu"
        )


def announce(devices: list[torch.device], accelerator: str, *, kind: str) -> None:
    """The loud line of a job that would have taken GPUs and runs on the CPU."""
    if accelerator == "auto" and devices[0].type == "cpu":
        count, are_many = len(devices), len(devices) > 1
        print(
            f"*** REHEARSAL ON THE CPU: {why_none(accelerator)}, so {count} {kind}"
            f"{'s stand' if are_many else ' stands'} in for {count} GPU{'s' * are_many} ***",
            file=sys.stderr,
            flush=True,
        )


def model(device: torch.device) -> str:
    """What computes: devices of two names round in two ways."""
    if device.type == "cpu":
        return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def use_threads(count: int) -> None:
    """No call where nothing changes: torch's makes matrix products within its own parallel loops,
    e.g. those of attention, slower by a half, even with the number that there was."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _count_devices(there: list[torch.device]) -> str:
    limits = _limits(there[0].type)
    count = f"{len(there)} {there[0].type.upper()} device{'s' if len(there) > 1 else ''}"
    return f"this machine has {count}{limits and f' ({limits})'}"


def _limits(kind: str) -> str:
    """The variables that are set and say which devices this process may see."""
    return " ".join(
        f"{name}={os.environ[name]}" for name in HIDES.get(kind, ()) if name in os.environ
    )
