"""Seeds Python, NumPy and torch, and derives seeds that depend on nothing but their numbers."""

import os
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)  # for CUDA too, once there is any
    reseed(seed)


def reseed(seed: int) -> None:
    """Cheap enough for each epoch: `torch.manual_seed` makes a stack trace while CUDA is unused."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


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
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first matmul
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def random_state() -> dict[str, object]:
    """The state of every generator, in plain containers that a checkpoint can hold."""
    version, internal, gauss = random.getstate()
    state: dict[str, object] = {
        # As bytes: 625 numbers one by one take longer to save than a small model.
        "python": [version, array("Q", internal).tobytes(), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()  # data_parallel draws on several
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tobytes(), position, has_gauss, cached]
    return state


def restore_random_state(state: dict) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(array("Q", internal)), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, index)
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(
            (name, numpy.frombuffer(keys, numpy.uint32), position, has_gauss, cached)
        )


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Runs a block with every generator seeded from `numbers`, then puts them back."""
    before = random_state()
    reseed(mix(*numbers))
    try:
        yield
    finally:
        restore_random_state(before)
