"""The optimizers and schedulers that a task's `configure_optimizer` returns."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from dpframe.errors import UserError, miscalled
from dpframe.lightning_names import refusal
from dpframe.parameters import updated_by
from dpframe.task import Task
from dpframe.trainer.lr_schedule import schedule_over

RETURNS_OPTIMIZER = (
    "return one optimizer, (optimizer, scheduler), or a dict with one of these for each name"
)


class Made(NamedTuple):
    optimizer: Optimizer
    scheduler: Any  # or None
    needs_closure: bool


def optimizers_of(task: Task) -> dict[str, Made]:
    """The task's optimizers by their names; one alone has the name ""."""
    returned = task.configure_optimizer()
    if not isinstance(returned, dict):
        return {"": _made("", returned, returned, task)}
    named = {name: _made(name, part, returned, task) for name, part in returned.items()}
    owners: dict[int, str] = {}
    for name, made in named.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(
                f"{_method(task)} named an optimizer {name!r}; use a name such as generator"
            )
        for weight in updated_by(made.optimizer):
            if owners.setdefault(id(weight), name) != name:
                raise UserError(
                    f"{_method(task)}: the optimizers {owners[id(weight)]} and {name} have a "
                    "weight in common; give each weight to one of them"
                )
    if not named:
        raise UserError(f"{_method(task)} returned an empty dict; {RETURNS_OPTIMIZER}")
    return named


def _made(name: str, part: Any, returned: Any, task: Task) -> Made:
    is_pair = isinstance(part, tuple) and len(part) == 2
    optimizer, scheduler = part if is_pair else (part, None)
    is_other = isinstance(scheduler, Optimizer | type)
    is_scheduler = scheduler is None or all(
        callable(getattr(scheduler, method, None))
        for method in ("step", "state_dict", "load_state_dict")
    )
    if not isinstance(optimizer, Optimizer) or is_other or not is_scheduler:
        raise UserError(f"{_method(task)} returned {_kind(returned)}; {RETURNS_OPTIMIZER}")
    # Of the class: a scheduler has wrapped the optimizer's own step, which then shows its self.
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required not in ([], ["closure"]):
        raise UserError(
            f"{type(optimizer).__name__}.step needs a {required[0]}, and dpframe calls it without; "
            "use an optimizer whose step() needs nothing, e.g. torch.optim.Adam"
        )
    if task.lr_schedule is not None:
        scheduler = schedule_over(optimizer, scheduler, name, task)
    return Made(optimizer, scheduler, bool(required))


def check_signature(task: Task, turns: Sequence[str]) -> None:
    """Refuses a training_step that can't be called as the Trainer calls it."""
    if inspect.getattr_static(task, "automatic_optimization") is False:
        raise refusal(type(task), "automatic_optimization")
    called = ("batch", "turn") if any(turns) else ("batch",)
    try:
        inspect.signature(task.training_step).bind(*called)
    except TypeError:
        why = f", as there are the optimizers {', '.join(turns)}" if any(turns) else ""
        raise miscalled(task, "training_step", called, why) from None


def _method(task: Task) -> str:
    return f"{type(task).__name__}.configure_optimizer"


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {type(v).__name__}' for name, v in value.items())}}}"
    kinds = [type(part).__name__ for part in value] if isinstance(value, list | tuple) else []
    if isinstance(value, tuple):
        return f"({', '.join(kinds)})"
    return f"[{', '.join(kinds)}]" if isinstance(value, list) else f"a {type(value).__name__}"
