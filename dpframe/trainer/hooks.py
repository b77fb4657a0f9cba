"""The hooks of a task and of its callbacks, in their order; and what they log, the same in all."""

import inspect
import logging
import math
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dis import get_instructions
from inspect import isfunction, unwrap
from itertools import chain
from types import CodeType
from typing import Any
from weakref import ref

import torch

from dpframe.data import Batch
from dpframe.errors import UserError, listed, refuse_miscalled, suggestion, unmeasured
from dpframe.launch.watchdog import beat
from dpframe.strategies.base import Strategy
from dpframe.strategies.collectives import Collectives
from dpframe.task import Task
from dpframe.trainer.callback import HOOKS, Callback
from dpframe.trainer.checks.hook_draws import WITHIN_EPOCH, heard
from dpframe.trainer.profile import timed
from dpframe.trainer.settings import TrainerSettings

Hook = Callable[..., None]
AROUND_VALIDATION = (
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_epoch_end",
)
ENDS = ("on_validation_end", "on_test_end", "on_predict_end", "on_epoch_end", "on_fit_end")
"""Where hooks may call the task, e.g. to draw samples, in one process alone."""
TOLERANCE = 1e-6  # of what processes log: other devices may round differently
SHOWN = 3  # numbers that were logged
UNSEEN = ", and no callback is seen to log it (one that does so by a function sets logs = True)"

log = logging.getLogger("dpframe")


class Hooks:
    """Lists of the methods that are overridden, by the hook's name."""

    def __init__(
        self,
        task: Task,
        callbacks: Sequence[Callback],
        strategy: Strategy,
        settings: TrainerSettings,
    ) -> None:
        """`callbacks` are in their order: see `in_order`."""
        self._task = task
        self._strategy = strategy
        self._parts = [task, *callbacks]
        self._lists = overridden(self._parts)
        self.log_check: LogCheck | None = None
        if strategy.world_size > 1 and not all(map(is_own, chain(*self._lists.values()))):
            self.log_check = LogCheck(strategy.collectives)
            readers = [c for c in callbacks if c.runs_last or c.reads_metrics]
            others = callbacks[: len(callbacks) - len(readers)]
            self._lists = overridden([task, *others, self.log_check, *readers])
        check = settings.share_check
        if strategy.world_size > 1 and check != "off" and not strategy.has_fixed_shares:
            for name in WITHIN_EPOCH:
                hooks = self._lists[name]
                self._lists[name] = [
                    hook if is_own(hook) else heard(hook, name, strategy, check) for hook in hooks
                ]
        for name, hooks in self._lists.items():
            self._lists[name] = [
                timed("callbacks", hook, is_profiled=settings.profile) for hook in hooks
            ]

    def __getitem__(self, name: str) -> list[Hook]:
        """For the hot path, which calls these itself."""
        return self._lists[name]

    def bound(self, trainer: Any, *names: str) -> list[list[Hook]]:
        """By names, those that take what is left of the arguments, for parts that have no Trainer.
        They do not keep it: its workers end with its last use, not with a garbage collection."""
        refer = ref(trainer)

        def bind(hook: Hook) -> Hook:
            return lambda *args: hook(refer(), *args)

        return [[bind(hook) for hook in self._lists[name]] for name in names]

    def call(self, name: str, trainer: Any, *args: Any) -> None:
        for hook in self._lists[name]:
            beat()
            with self._weights_for(name, hook):
                hook(trainer, *args)

    def call_on_main(self, name: str, trainer: Any, *args: Any) -> None:
        """All processes take part in gathering sharded weights, and the main one calls."""
        if self._strategy.is_main:
            trainer.is_on_main_alone = self._strategy.world_size > 1
            try:
                self.call(name, trainer, *args)
            finally:
                trainer.is_on_main_alone = False
            return
        for hook in self._lists[name]:
            with self._weights_for(name, hook):
                pass

    def _weights_for(self, name: str, hook: Hook) -> AbstractContextManager[None]:
        """Within, a hook that may run the task has its whole weights."""
        sharding = self._strategy.sharding
        if not sharding.whole_in_hooks or not may_run_task(name, hook):
            return nullcontext()
        return sharding.whole_weights(self._task)

    def after_batch(self, name: str, trainer: Any) -> Callable[[Batch, list[Any]], None] | None:
        """What an evaluation calls after each batch; None where no hook does anything."""
        hooks = self._lists[name]

        def after_batch(batch: Batch, outputs: list[Any]) -> None:
            for hook in hooks:
                hook(trainer, batch, outputs)

        return after_batch if hooks else None

    def refuse_misspelt(self, monitored: Iterable[tuple[str, str]], measured: list[str]) -> None:
        """Metrics that callbacks and schedulers wait for, by their keys, and that nothing
        measures."""
        for key, name in monitored:
            if not (name in measured or name.startswith("train/") or self.may_log(name)):
                has_others = not all(map(is_own, chain(*self._lists.values())))
                raise unmeasured(key, name, measured, UNSEEN if has_others else "")

    def may_log(self, name: str) -> bool:
        """Whether a hook could add this number by `trainer.log`."""
        hooks = overridden([part for part in self._parts if logs(part)])
        return any(hooks[at] for at in (AROUND_VALIDATION if name.startswith("val/") else HOOKS))


def in_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """Those that read metrics after those that add some, and then those that run last."""
    return sorted(callbacks, key=lambda callback: (callback.runs_last, callback.reads_metrics))


def name_callback(error: BaseException) -> None:
    """Adds to an error which callback it is of, and in which of its hooks."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name, first = frame.f_code.co_name, frame.f_code.co_varnames[:1]
        owner = frame.f_locals.get(first[0]) if first else None
        if name in HOOKS and isinstance(owner, Callback):
            found = f"{type(error).__name__} in {name} of the callback {type(owner).__name__}"
    if found:
        error.add_note(found)


def logs(part: object) -> bool:
    """Whether hooks of it log numbers: its class says so, or a method of it reads `trainer.log`."""
    said = getattr(type(part), "logs", None)
    if isinstance(said, bool):
        return said
    found = chain.from_iterable(vars(kind).values() for kind in type(part).__mro__)
    methods = [unwrap(each) for each in found if isfunction(each)]
    return any(isfunction(method) and _reads_log(method.__code__) for method in methods)


def _reads_log(code: CodeType) -> bool:
    """As an attribute: a global of this name is e.g. a logger."""
    read = [each.opname for each in get_instructions(code) if each.argval == "log"]
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return any(name != "LOAD_GLOBAL" for name in read) or any(map(_reads_log, inner))


def end_by(error: BaseException, ends: Iterable[Callable[[], object]]) -> None:
    """Calls what is to come after the error."""
    for end in ends:
        try:
            end()
        except Exception as second:
            if not isinstance(error, torch.AcceleratorError):
                raise
            log.warning("%s", second)  # the same dead device; the first error tells more


def is_own(hook: Hook) -> bool:
    """Whether a hook is one of dpframe's callbacks'."""
    return hook.__module__.partition(".")[0] == "dpframe"


def may_run_task(name: str, hook: Hook) -> bool:
    """Whether a hook is at an end and is a recipe's or a user's, not a callback of dpframe's."""
    return name in ENDS and (not is_own(hook) or hook.__module__.startswith("dpframe.recipes."))


def overridden(parts: Iterable[object]) -> dict[str, list[Hook]]:
    """The methods of a task and its callbacks by hook. One with another name or other arguments is
    refused."""
    hooks: dict[str, list[Hook]] = {name: [] for name in HOOKS}
    for part in parts:
        kind = type(part)
        for name in dir(kind):
            method = getattr(kind, name) if name.startswith("on_") else None
            if not callable(method) or method is getattr(Callback, name, None):
                continue
            if name not in HOOKS:
                raise UserError(
                    f"{kind.__name__}.{name} is no hook and would never be called; "
                    f"{suggestion(name, HOOKS)}"
                )
            if not is_own(method):
                called = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
                refuse_miscalled(part, name, *called)
            hooks[name].append(getattr(part, name))
    return hooks


class LogCheck:
    """Runs after the hooks that may log and before early stopping and checkpoints, which would
    decide differently in processes with other numbers."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._names = 0  # a checksum of all that were logged, in their order
        self._sum = self._size = 0.0
        self._newest: dict[str, float] = {}  # since all processes agreed

    def add(self, numbers: dict[str, float]) -> None:
        self._names = zlib.crc32(repr(list(numbers)).encode(), self._names)
        for value in filter(math.isfinite, numbers.values()):
            self._sum += value
            self._size += abs(value)
        self._newest.update(numbers)

    def on_validation_end(self, *_: object) -> None:
        collectives, processes = self._collectives, self._collectives.world_size
        names, total = collectives.sum_numbers([float(self._names), self._sum])
        differs = abs(total - processes * self._sum) > TOLERANCE * processes * self._size
        if names != processes * self._names or differs:
            pairs = [f"{name}={value:.6g}" for name, value in self._newest.items()]
            raise UserError(
                f"trainer.log got {listed(pairs, SHOWN) or 'nothing'} on rank {collectives.rank}, "
                "and something else on another one; call it on all ranks with the same numbers, "
                "e.g. those of one rank by trainer.strategy.collectives.broadcast"
            )
        self._sum = self._size = 0.0
        self._newest.clear()

    on_test_end = on_epoch_end = on_validation_end
