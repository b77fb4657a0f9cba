"""`task.schedule` over an optimizer, and how any scheduler goes on in a resumed run."""

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from dpframe.errors import UserError
from dpframe.parameters import unwrapped
from dpframe.scheduler_lengths import LENGTHS
from dpframe.schedules import LRSchedule
from dpframe.task import Task

log = logging.getLogger("dpframe")
NO_OPTIONS = ("base_lrs", "last_epoch")  # the rates are the optimizer's options


class StepSchedule(LambdaLR):
    """torch's LambdaLR, stepped after each step of the optimizer."""

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule, steps: int) -> None:
        """`steps` of the whole training; 0: unknown."""
        self.total_steps = steps if schedule.needs_length else None
        self.described = f"{schedule} over {steps} steps" if self.total_steps else str(schedule)
        super().__init__(optimizer, partial(schedule.factor, steps=steps))


def schedule_over(optimizer: Optimizer, scheduler: Any, name: str, task: Task) -> StepSchedule:
    """The task's schedule as the optimizer's scheduler, which has none."""
    schedule = task.lr_schedule
    kind = task.own_class.__name__
    if not isinstance(schedule, LRSchedule):
        raise UserError(
            f"{kind}.lr_schedule={schedule} is no schedule; use e.g. "
            "dpframe.schedules.WarmupCosine(warmup=0.03)"
        )
    if task.optimizes_by_hand:
        raise UserError(
            f"task.schedule: {kind} steps its optimizers itself; schedule the rates in it, and "
            "leave task.schedule out"
        )
    if scheduler is not None:
        off = ", e.g. by task.scheduler=null" if task.make_scheduler else ""
        raise UserError(
            f"task.schedule: {kind} has a scheduler already; leave one of them out{off}"
        )
    steps = task.count_turns(name) if name else task.total_steps
    if schedule.needs_length and not task.total_steps:
        raise UserError(
            "task.schedule needs the length of training, and nothing says how long it will be; "
            "set trainer.max_steps"
        )
    return StepSchedule(optimizer, schedule, steps)


# ---- of a run that is resumed


def ends_with_training(scheduler: Any) -> bool:
    """Whether one of its lengths ends with the training that is done, or before twice as much."""
    has_known_end = getattr(scheduler, "total_steps", None) is not None
    lengths = _lengths_of(scheduler)
    return has_known_end or any(count <= length < 2 * count for _, length, count in lengths)


def warn_of_end(scheduler: Any) -> None:
    for name, length, count in _lengths_of(scheduler):
        if count == length:
            log.warning(
                "%s has come to the end of its %s=%s, and the run goes on with what torch does "
                "then; for a longer schedule set %s, and resume_anyway=true",
                *(type(scheduler).__name__, name, length, name),
            )


def _lengths_of(scheduler: Any) -> list[tuple[str, int, int]]:
    """Its lengths and those of its parts, by their names, each with how often that was stepped."""
    return [] if scheduler is None else list(_lengths_in(scheduler.state_dict()))


def _lengths_in(state: Any) -> Iterator[tuple[str, int, int]]:
    if isinstance(state, Mapping):
        for name, value in state.items():
            if name in LENGTHS and "last_epoch" in state and value is not None:
                yield name, value, state["last_epoch"]
            for part in value if isinstance(value, list) else ():
                yield from _lengths_in(part)


def by_arguments(options: dict[str, Any], scheduler: Any, make: Any) -> dict[str, Any]:
    """The options by the names of the class's arguments: torch keeps other things of some, e.g. of
    `pct_start`. As they are, where `make` is no partial with plain arguments."""
    _, given = unwrapped(make)
    taken = inspect.signature(type(scheduler)).parameters
    if not given or not given.keys() <= taken.keys() or _options_in(given) != given:
        return options
    typed = {name: given.get(name, each.default) for name, each in taken.items()}
    known = {name: options.get(name, value) for name, value in typed.items()}
    unknown = inspect.Parameter.empty  # the optimizer
    return {n: v for n, v in known.items() if n not in NO_OPTIONS and v is not unknown}


def options_of(scheduler: Any) -> dict[str, Any]:
    """What its constructor has decided: what is plain in the state of a new scheduler."""
    return {} if scheduler is None else _options_in(scheduler.state_dict())


def follows_count(scheduler: Any) -> bool:
    """Whether the rates follow from how often it was stepped, and from its options."""
    if (several := getattr(scheduler, "schedulers", None)) is not None:
        return all(map(follows_count, several))
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return scheduler is None
    parameters = inspect.signature(scheduler.step).parameters.values()
    takes_nothing = all(each.default is not each.empty for each in parameters)
    return isinstance(scheduler, LRScheduler) and takes_nothing


def go_on(scheduler: Any, saved: Any, before: dict[str, Any], steps: int) -> None:
    """Brings a new scheduler over a new optimizer, whose options are others than those `before`, to
    where the `saved` one was: it is stepped as often, or `steps` times if that had no counter. One
    that follows more than a count gets the saved state, with its own options.
    """
    if (several := getattr(scheduler, "schedulers", None)) is not None:
        of_saved, of_before = (
            dict(enumerate(each.get("several", ()))) for each in (saved or {}, before)
        )
        for number, each in enumerate(several):
            go_on(each, of_saved.get(number), of_before.get(number, {}), steps)
    elif follows_count(scheduler):
        count = _count(saved)
        _step(scheduler, steps if count is None else count)
    elif saved:
        own, options = scheduler.state_dict(), options_of(scheduler)
        changed = [name for name in options if options[name] != before.get(name)]
        scheduler.load_state_dict({**saved, **{name: own[name] for name in changed}})


def _step(scheduler: Any, steps: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the optimizer has made no step so far
            for _ in range(steps if scheduler is not None else 0):
                scheduler.step()
    except ValueError as error:  # e.g. of OneCycleLR, which is shorter
        raise UserError(
            f"resume: {type(scheduler).__name__} can't go on at its step {steps}: {error}"
        ) from error


def _count(saved: Any) -> int | None:
    """How often a scheduler was stepped, by its state; a ChainedScheduler's is in its parts."""
    if not isinstance(saved, Mapping):
        return None
    parts = next((value for value in saved.values() if isinstance(value, list) and value), [None])
    return saved["last_epoch"] if "last_epoch" in saved else _count(parts[0])


def _options_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _options_in(part)
            for name, part in value.items()
            if name not in NO_OPTIONS and not (str(name)[0] == "_" and _is_of_call(part))
        }
    if isinstance(value, list | tuple):
        return [_options_in(part) for part in value]
    return value if isinstance(value, bool | int | float | str) else None


def _is_of_call(value: Any) -> bool:
    """Whether a private value of torch's is a counter or a mark, or the newest rates."""
    is_rates = isinstance(value, list) and all(isinstance(each, float) for each in value)
    return isinstance(value, int) or (is_rates and bool(value))
