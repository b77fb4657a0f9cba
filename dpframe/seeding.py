"""Seeds Python, NumPy and torch, and derives seeds that depend on nothing but their numbers."""

import os
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dpframe.devices.accelerator import in_use


def seed_everything(seed: int, devices: Sequence[torch.device] | None = None) -> None:
    torch.manual_seed(seed)  # for all devices, even those that are not used yet
    reseed(seed, devices)


def reseed(seed: int, devices: Sequence[torch.device] | None = None) -> None:
    """Several `devices` draw different numbers, by their positions; None: all draw the same ones.

    Cheap enough for each epoch: `torch.manual_seed` makes a stack trace while CUDA is unused."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for position, device in enumerate(in_use() if devices is None else devices):
        if device.type != "cpu":
            of_device = mix(seed, position) if position and devices is not None else seed
            _seed_device(device, of_device)
    np.random.seed(seed % 2**32)


def _seed_device(device: torch.device, seed: int) -> None:
    """Without making it the current one, which takes memory on a GPU that is not used."""
    module = torch.get_device_module(device)
    if hasattr(module, "default_generators"):
        module.init()  # there are none before
        module.default_generators[device.index].manual_seed(seed)
    else:
        module.manual_seed(seed)


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers; near numbers give far seeds (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def refuse_nondeterminism(device: torch.device) -> None:
    """From here on torch raises where it has no deterministic kernel."""
    fix_workspaces(device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def fix_workspaces(device: torch.device) -> None:
    """Before the first matrix product on a GPU: which kernels it has depends on their size."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def random_state(devices: Sequence[torch.device] | None = None) -> dict[str, Any]:
    """The state of every generator, in plain containers that a checkpoint can hold.

    `devices` are those of this process, None: all there are. Their states are kept by position:
    another process may have others."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        # As bytes: 625 numbers one by one take longer to save than a small model.
        "python": [version, array("Q", internal).tobytes(), gauss],
        "torch": torch.get_rng_state(),
    }
    accelerators = [d for d in (in_use() if devices is None else devices) if d.type != "cpu"]
    if accelerators:
        kind = accelerators[0].type
        module = torch.get_device_module(kind)
        state["devices"] = [kind, [module.get_rng_state(device) for device in accelerators]]
    of_numpy: Any = np.random.get_state()
    state["numpy"] = [of_numpy[0], of_numpy[1].tobytes(), *of_numpy[2:]]
    return state


def restore_random_state(
    state: dict[str, Any], devices: Sequence[torch.device] | None = None
) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(array("Q", internal)), gauss))
    torch.set_rng_state(state["torch"])
    kind, kept = state.get("devices", ["", []])
    here = in_use() if devices is None else devices
    for device, device_state in zip(here, kept, strict=False):
        if device.type == kind:
            torch.get_device_module(kind).set_rng_state(device_state, device)
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), position, has_gauss, cached))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Runs a block with every generator seeded from `numbers`, then puts them back."""
    with kept():
        reseed(mix(*numbers))
        yield


@contextmanager
def kept() -> Iterator[None]:
    """Puts every generator back after the block."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)
