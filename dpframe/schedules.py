"""How learning rates change from step to step: what `task.schedule` may be.

A schedule is a function of the step alone, a factor of each parameter group's own rate, so that
groups keep their proportions and a run that is resumed is where it was.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dpframe.errors import UserError, not_one_of, suggestion

UNTIMED = 10_000  # steps: the time scale of an InverseSqrt without warm-up, as Hugging Face has it
SHAPES = ("linear", "cosine", "sqrt")


class LRSchedule:
    """For one of your own, override `factor`."""

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in vars(self).items())
        return f"{type(self).__name__}({given})"

    def factor(self, step: int, steps: int) -> float:
        """The factor of the rates at this step of `steps`; the first step is 0."""
        raise NotImplementedError

    @property
    def needs_length(self) -> bool:
        """Whether `factor` depends on `steps`, which a stream's training may not know."""
        return True


@dataclass(frozen=True)
class Warmed(LRSchedule):
    """A schedule whose rate rises at first."""

    warmup: float = 0.03

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class _RisesAndFalls(Warmed):
    falls: ClassVar[str]
    final: float = 0.0

    def factor(self, step: int, steps: int) -> float:
        start = count(self.warmup, steps)
        fall = _fall(self.falls, step, start, steps)
        return min(_rise(step, start), _between(self.final, fall))


class WarmupCosine(_RisesAndFalls):
    """Falls by a half cosine."""

    falls = "cosine"


class Linear(_RisesAndFalls):
    """Falls in a straight line."""

    falls = "linear"


@dataclass(frozen=True)
class WSD(Warmed):
    """Warm-up, stable, decay."""

    decay: float = 0.2
    final: float = 0.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = (self.warmup, self.decay)
        if all(map(_is_share, parts)) and sum(parts) > 1:
            raise UserError(
                f"task.schedule.warmup={self.warmup} and task.schedule.decay={self.decay} are more "
                "than all steps; use shares that add up to 1 or less"
            )

    def factor(self, step: int, steps: int) -> float:
        fall = _fall(self.shape, step, steps - count(self.decay, steps), steps)
        return min(_rise(step, count(self.warmup, steps)), _between(self.final, fall))


@dataclass(frozen=True)
class Constant(Warmed):
    """Stays as it is."""

    def factor(self, step: int, steps: int) -> float:
        return _rise(step, count(self.warmup, steps))

    @property
    def needs_length(self) -> bool:
        return _is_share(self.warmup)


@dataclass(frozen=True)
class InverseSqrt(Warmed):
    """Falls by one over the square root of the steps."""

    timescale: int | None = None

    def factor(self, step: int, steps: int) -> float:
        start = count(self.warmup, steps)
        scale = self.timescale or start or UNTIMED
        return min(_rise(step, start), math.sqrt(scale / (scale + max(0, step - start))))

    @property
    def needs_length(self) -> bool:
        return _is_share(self.warmup)


KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (WarmupCosine, Linear, WSD, Constant, InverseSqrt)
}


def count(part: float, steps: int) -> int:
    """The steps of a part of training: a share of them up to 1.0, or a number of steps."""
    return round(part * steps) if _is_share(part) else int(part)


def is_ours(node: Mapping[str, Any]) -> bool:
    return str(node.get("_target_")).startswith(f"{__name__}.")


def check_schedule(node: Mapping[str, Any]) -> None:
    """Refuses in a config what no schedule of dpframe's can be."""
    module, _, name = str(node["_target_"]).rpartition(".")
    if name not in KINDS:
        near = suggestion(name, KINDS)
        raise UserError(f"task.schedule._target_={module}.{name}: there is no such class; {near}")
    given = {key: value for key, value in node.items() if key != "_target_"}
    known = [each.name for each in fields(KINDS[name])]
    for key in given:
        if key not in known:
            near = suggestion(key, known).replace("mean ", "mean task.schedule.")
            raise UserError(f"task.schedule.{key}: {name} takes no such argument; {near}")
    KINDS[name](**given)


def _is_share(part: float) -> bool:
    """As elsewhere, 1.0 is all and 1 is one."""
    return isinstance(part, float) and part <= 1


def _rise(step: int, warmup: int) -> float:
    """No step has a rate of 0, and the first after `warmup` steps has the whole rate."""
    return min(1.0, (step + 1) / (warmup + 1))


def _fall(shape: str, step: int, start: int, end: int) -> float:
    """From 1 at `start` to 0 at `end`, which is after the last step."""
    done = min(1.0, max(0, step - start) / max(1, end - start)) if end > start else 0.0
    if shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - (math.sqrt(done) if shape == "sqrt" else done)


def _between(final: float, factor: float) -> float:
    return final + (1 - final) * factor


def _check(schedule: Any) -> None:
    for key, value in vars(schedule).items():
        where = f"task.schedule.{key}={value}"
        if key == "shape":
            if value not in SHAPES:
                raise not_one_of("task.schedule.shape", value, SHAPES)
            continue
        if key == "timescale" and value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "final":
            if not is_number or not 0 <= value <= 1:
                raise UserError(f"{where} is out of range; use a part of the peak, 0 to 1")
        elif key == "timescale":
            if not is_number or value < 1:
                raise UserError(f"{where} is out of range; use 1 or more steps, or null")
        elif not is_number or not value >= 0 or (value > 1 and not float(value).is_integer()):
            raise UserError(
                f"{where} is out of range; use a share of all steps such as 0.03, or a whole "
                "number of steps"
            )
