"""A Trainer in a program of its own: its modes run in processes that its strategy launches."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dpframe import seeding
from dpframe.errors import UserError
from dpframe.launch import fresh, signals
from dpframe.strategies.base import Strategy
from dpframe.trainer.predictions import on_cpu
from dpframe.trainer.progress import Progress


@dataclass
class Ended:
    """What a mode has come to in the main process."""

    value: Any  # that it returned
    metrics: dict[str, float]
    progress: Progress
    checkpoint: str | None
    stop_reason: str
    weights: dict[str, Any] | None  # after a fit
    callbacks: list[dict[str, Any]]  # the attributes of each that can be sent


class Ranks:
    """Each of the processes makes its own Trainer, and draws as this one would."""

    def __init__(self, make: Callable[..., Any], strategy: Strategy, parts: dict[str, Any]) -> None:
        """`make(strategy=…, **parts)` is a Trainer."""
        self._make = make
        self._strategy = strategy
        self._parts = parts
        self.callbacks: list[Any] = parts["callbacks"]
        self._random_state = seeding.random_state([])

    def run(self, mode: str, *args: Any, **options: Any) -> Ended:
        work = self._make, self._strategy, self._parts, self._random_state, mode, args, options
        return fresh.unpack(self._strategy.launch_apart(_run_mode, *work))


def _run_mode(
    make: Callable[..., Any],
    strategy: Strategy,
    parts: dict[str, Any],
    random_state: dict[str, Any],
    mode: str,
    args: tuple,
    options: dict[str, Any],
) -> bytes:
    """In each of them; the main one packs what the mode has come to."""
    seeding.restore_random_state(random_state, [])
    with (
        signals.watched(parts["settings"].hang_seconds),
        make(**parts, strategy=strategy, interruption=signals.current()) as made,
    ):
        value = getattr(made, mode)(*args, **options)
        weights = None
        if mode == "fit":  # a program that has no GPU open gets no tensor of one
            weights = on_cpu(made.state_dict()["task"])
        ended = Ended(
            value,
            made.metrics,
            made.progress,
            made.checkpoint,
            made.stop_reason,
            weights,
            [sendable(vars(callback)) for callback in parts["callbacks"]],
        )
        return fresh.pack(ended) if strategy.is_main else b""


def sendable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that can be pickled for another process."""
    kept = {}
    for name, value in values.items():
        with suppress(UserError):
            fresh.pack(value)
            kept[name] = value
    return kept
