"""torch's schedulers as a config has them: lengths that it leaves out, schedulers in a scheduler.

A length is that of the training, or within a SequentialLR that of the stretch between milestones.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    PolynomialLR,
    SequentialLR,
)

from dpframe.composite import Composite, name_of
from dpframe.errors import UserError
from dpframe.parameters import unwrapped

NAMES = {CosineAnnealingLR: "T_max", PolynomialLR: "total_iters"}  # of the length of each
OF_PARTS = {**NAMES, LinearLR: "total_iters"}  # which alone may be a warm-up
LENGTHS = ("total_steps", "T_max", "total_iters")
Make = Callable[..., LRScheduler]
Length = Callable[[str], int]
"""From the key that is not given to its value: how often the scheduler will be stepped."""


def scheduler_over(optimizer: Optimizer, make: Make, length: Length, key: str) -> LRScheduler:
    """What a partial makes for this optimizer."""
    found: list[int] = []

    def noted(where: str) -> int:
        found.append(length(where))
        return found[-1]

    scheduler = _make(optimizer, make, noted, key, NAMES)
    if found:  # it ends with the training, as a OneCycleLR does, which has this attribute
        vars(scheduler).setdefault("total_steps", found[0])
    return scheduler


def is_filled_in(kind: Any, argument: str) -> bool:
    """Whether a config may leave it out."""
    of_sequence = argument == "milestones" and _is_a(kind, SequentialLR)
    return of_sequence or argument == "total_steps" or _length_name(kind, NAMES) == argument


def _make(
    optimizer: Optimizer, make: Make, length: Length, key: str, names: dict[type[Any], str]
) -> LRScheduler:
    kind, given = unwrapped(make)
    _refuse_momentum(optimizer, make, key)
    if _is_a(kind, SequentialLR):
        return make(optimizer, **_sequence(optimizer, given, length, key))
    if _is_a(kind, ChainedScheduler):
        parts = _parts(given, key)
        chained = [_make(optimizer, part, length, where, NAMES) for where, part in parts]
        return make(schedulers=chained, optimizer=optimizer)
    name = _length_name(make, names)
    if name is None or name in given or (name == "total_steps" and "epochs" in given):
        return make(optimizer)
    return make(optimizer, **{name: length(f"{key}.{name}")})


def _refuse_momentum(optimizer: Optimizer, make: Make, key: str) -> None:
    """Of OneCycleLR and CyclicLR, which would move `betas` or `momentum`, whichever all groups
    have."""
    cycles = signature(make).parameters.get("cycle_momentum")
    if isinstance(optimizer, Composite) and cycles is not None and cycles.default:
        raise UserError(
            f"{key}: {unwrapped(make)[0].__name__} cycles one momentum, and {name_of(optimizer)} "
            f"have others each; set {key}.cycle_momentum=false"
        )


def _sequence(
    optimizer: Optimizer, given: dict[str, Any], length: Length, key: str
) -> dict[str, Any]:
    """The schedulers and the milestones of a SequentialLR."""
    parts = _parts(given, key)
    milestones = given.get("milestones")
    if milestones is None:
        milestones = _ends(parts[:-1], key)
    elif any(isinstance(each, float) and each < 1 for each in milestones):
        total = length(f"{key}.milestones")
        milestones = [round(m * total) if m < 1 else int(m) for m in milestones]
    if len(milestones) != len(parts) - 1 or any(end < start for start, end in pairwise(milestones)):
        raise UserError(
            f"{key}.milestones={list(milestones)} do not fit {len(parts)} schedulers; use one "
            "fewer than these, each later than the one before"
        )
    starts = [0, *milestones]
    made = []
    for number, (where, part) in enumerate(parts):

        def stretch(missing: str, start: int = starts[number], number: int = number) -> int:
            end = length(missing) if number == len(milestones) else milestones[number]
            return max(1, end - start)

        made.append(_make(optimizer, part, stretch, where, OF_PARTS))
    return {"schedulers": made, "milestones": milestones}


def _ends(parts: Sequence[tuple[str, Make]], key: str) -> list[int]:
    """Where each of these ends, by the lengths that they are given."""
    ends, end = [], 0
    for where, part in parts:
        given = getattr(part, "keywords", {})
        own = next((given[name] for name in LENGTHS if name in given), None)
        if own is None:
            raise UserError(
                f"{key}.milestones is missing, and {where} has no length of its own; set "
                f"milestones, in steps or as shares such as 0.1"
            )
        end += own
        ends.append(end)
    return ends


def _parts(given: dict[str, Any], key: str) -> list[tuple[str, Make]]:
    """The partials that make a scheduler's schedulers, each with its key."""
    parts = given.get("schedulers")
    if not isinstance(parts, list | tuple) or not parts or not all(map(callable, parts)):
        raise UserError(
            f"{key}.schedulers is no list of schedulers; name the class of each, with "
            "_partial_: true"
        )
    return [(f"{key}.schedulers[{number}]", part) for number, part in enumerate(parts)]


def _length_name(make: Any, names: dict[type[Any], str]) -> str | None:
    taken = signature(make).parameters
    if "total_steps" in taken:
        return "total_steps"
    of = unwrapped(make)[0]
    own = (name for kind, name in names.items() if _is_a(of, kind) and name in taken)
    return next(own, None)


def _is_a(kind: Any, wanted: type[Any]) -> bool:
    return isinstance(kind, type) and issubclass(kind, wanted)
