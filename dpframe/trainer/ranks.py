"""Where a Trainer runs: its strategy, and the processes that this launches for a program."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dpframe import seeding
from dpframe.errors import UserError, first_line
from dpframe.launch import interpreter, local, parcel, signals
from dpframe.launch.parcel import Parcel
from dpframe.loggers import Logger
from dpframe.parameters import first_hooked
from dpframe.strategies import by_name
from dpframe.strategies.base import Strategy
from dpframe.strategies.single import auto
from dpframe.trainer.callback import Callback
from dpframe.trainer.compute.placement import process_settings, use_process_settings
from dpframe.trainer.predictions import on_cpu
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import OF_PLUGINS, TrainerSettings, plugin


def choose_strategy(strategy: Strategy | str | None, settings: TrainerSettings) -> Strategy:
    if strategy is None:
        return auto(settings.gpus, settings.accelerator)
    if isinstance(strategy, str):
        return by_name(strategy, settings.gpus, settings.accelerator)
    if not strategy.is_set_up:
        _refuse_other_devices(strategy, settings)
    return strategy


def put_around(strategy: Strategy, settings: TrainerSettings, seed: int) -> Strategy:
    """The strategy itself, or what a plugin that a setting asks for puts around it."""
    for key in OF_PLUGINS:
        if getattr(settings, key) is not None:
            strategy = plugin(key).put_around(strategy, settings, seed)
    if settings.deterministic:
        seeding.refuse_nondeterminism(strategy.device)
    return strategy


def _refuse_other_devices(strategy: Strategy, settings: TrainerSettings) -> None:
    """In a config both have one value; from Python each is made with its own."""
    for key, unset in (("gpus", None), ("accelerator", "auto")):
        there, here = getattr(strategy, key, unset), getattr(settings, key)
        if here not in (unset, there):
            raise UserError(
                f"TrainerSettings({key}={here!r}) but the strategy is "
                f"{strategy.name}({key}={there!r}); pass {key} only to the strategy"
            )


# ---- processes of a Trainer in a program of its own


@dataclass
class SoFar:
    """What a Trainer has come to, which its hooks and steps may read."""

    metrics: dict[str, float]
    progress: Progress
    checkpoint: str | None


@dataclass
class Ended(SoFar):
    """What a mode has come to in the main process."""

    value: Any  # that it returned
    stop_reason: str
    weights: dict[str, Any] | None  # after a fit
    callbacks: list[dict[str, Any]]  # and loggers: the attributes of each that can be sent


class Ranks:
    """Each of the processes makes its own Trainer, and draws as this one would."""

    def __init__(self, make: Callable[..., Any], strategy: Strategy, parts: dict[str, Any]) -> None:
        """`make(strategy=…, **parts)` is a Trainer."""
        self._make = make
        self._strategy = strategy
        self._parts = parts
        self._random_state = seeding.random_state([])

    def run(self, so_far: SoFar, mode: str, *args: Any, **options: Any) -> Ended:
        """In processes that a new interpreter starts, which can fork them: see `interpreter`."""
        if name := first_hooked(self._parts["task"]):
            raise UserError(
                f"{name} has a hook, which the ranks that this program starts would not have; call "
                "register_hook in the task's on_fit_start"
            )
        set_here = self._random_state, process_settings(), torch.get_default_dtype()
        call = so_far, mode, args, options
        work = self._make, self._strategy, self._parts, set_here, call
        with ExitStack() as opened:
            theirs, ours = (
                None if self._strategy.spans_machines else opened.enter_context(parcel.in_memory())
                for _ in range(2)
            )
            try:
                there = parcel.pack(work, theirs)
            except UserError as error:
                raise UserError(
                    f"{parcel.unpackable(self._parts, 'Trainer')} can't be sent to the ranks of "
                    f"{self._strategy.name}: {first_line(error.__cause__ or error)}; start them by "
                    "the command or by torchrun, where each makes its own"
                ) from error
            ended: Ended = interpreter.call(_launch, self._strategy, there, ours).unpack()
        parts = [*self._parts["callbacks"], *self._parts["loggers"]]
        for part, attributes in zip(parts, ended.callbacks, strict=True):
            vars(part).update(attributes)
        return ended


def _launch(strategy: Strategy, work: Parcel, path: str | None) -> Parcel:
    local.allow_fork()
    answer: Parcel = strategy.launch(_run_mode, work, path)
    return answer


def _run_mode(work: Parcel, path: str | None) -> Parcel | None:
    """In each of them; the main one packs what the mode has come to."""
    make, strategy, parts, set_there, call = work.unpack(owns_main=True)
    random_state, settings, dtype = set_there
    so_far, mode, args, options = call
    if os.environ.get("RANK", "0") != "0":  # no line is printed by each of them
        logging.getLogger("dpframe").setLevel(logging.ERROR)
    seeding.restore_random_state(random_state, [])
    use_process_settings(settings)
    torch.set_default_dtype(dtype)
    with (
        signals.watched(parts["settings"].hang_seconds),
        make(**parts, strategy=strategy, interruption=signals.current()) as made,
    ):
        made.strategy.collectives.sum_numbers([0.0])  # all have unpacked theirs
        if strategy.is_main:
            work.drop()
        made.metrics, made.checkpoint = so_far.metrics, so_far.checkpoint
        made.progress.load_state_dict(so_far.progress.state_dict())
        value = getattr(made, mode)(*args, **options)
        weights = None
        if mode == "fit":  # a program that has no GPU open gets no tensor of one
            state = made.state_dict(whole=False)
            weights = made.strategy.sharding.whole(state.get("averaged", state["task"]))
            weights = on_cpu(weights)
        ended = Ended(
            made.metrics,
            made.progress,
            made.checkpoint,
            value,
            made.stop_reason,
            weights,
            [attributes_of(part) for part in (*parts["callbacks"], *parts["loggers"])],
        )
        return parcel.pack(ended, path) if strategy.is_main else None


def attributes_of(part: Callback | Logger) -> dict[str, Any]:
    """Those that it lets be pickled, and that can be for another process."""
    state = part.__getstate__()
    values = state if isinstance(state, dict) else vars(part)
    return {name: value for name, value in values.items() if parcel.is_packable(value)}
