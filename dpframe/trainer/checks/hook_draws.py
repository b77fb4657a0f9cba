"""Hooks of a batch and of a step that draw random numbers: each rank draws others there."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from dpframe import seeding
from dpframe.errors import UserError
from dpframe.strategies.base import Strategy

WITHIN_EPOCH = ("on_batch_start", "on_batch_end", "on_before_step", "on_step_end")
CALLS = 50  # that are looked at; each look takes some 50 us

log = logging.getLogger("dpframe")


def heard(hook: Any, name: str, strategy: Strategy, share_check: str) -> Callable[..., None]:
    """The hook of this name, which says once if one of its first calls draws."""
    part, left = getattr(hook, "__self__", None), CALLS  # None of a function

    def call(*args: Any) -> None:
        nonlocal left
        if not left:
            hook(*args)
            return
        left -= 1
        before = seeding.random_state(strategy.local_devices)
        hook(*args)
        if not _is_same(before, seeding.random_state(strategy.local_devices)):
            left = 0
            kind = getattr(part, "own_class", None) or type(part)
            _tell(name if part is None else f"{kind.__name__}.{name}", strategy, share_check)

    return call


def _tell(of: str, strategy: Strategy, share_check: str) -> None:
    said = (
        f"{of} draws random numbers, which differ between ranks, so the curve changes if it "
        "depends on them: draw from a torch.Generator that all ranks seed alike, e.g. by "
        "trainer.global_step"
    )
    if share_check == "strict":
        raise UserError(said)
    if strategy.is_main:
        log.warning(said)


def _is_same(one: Any, other: Any) -> bool:
    """Of parts of random states; the devices' may be first used in between."""
    if isinstance(one, dict):
        return all(_is_same(one[name], other.get(name)) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return all(map(_is_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
