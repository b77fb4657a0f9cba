"""The optimizers that a task's `configure_optimizer` returns, and their fused kernels."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dpframe.composite import name_of, parts_of
from dpframe.errors import UserError, refuse_miscalled
from dpframe.lightning_names import refusal
from dpframe.parameters import has_sparse, updated_by
from dpframe.task import Task
from dpframe.trainer.optim.schedule import schedule_over

RETURNS_OPTIMIZER = (
    "return one optimizer, (optimizer, scheduler), or a dict with one of these for each name"
)
MOST = ("SGD", "Adam", "AdamW")
FUSED = {  # the optimizers that have fused kernels, by device; None: all that take the argument
    "cpu": None,
    "cuda": None if torch.__version__ >= "2.13" else MOST,  # before, Adagrad has none there
    "mps": MOST,
    "xpu": MOST,
}
FUSED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Made(NamedTuple):
    """An optimizer as the task made it, and its schedule."""

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
        raise UserError(f"{_method(task)} returned {kind_of(returned)}; {RETURNS_OPTIMIZER}")
    parts = parts_of(optimizer)
    needs_closure = [part for part in parts if _needs_closure(part)]
    if needs_closure and len(parts) > 1:
        raise UserError(
            f"{name_of(optimizer)} step together, and {type(needs_closure[0]).__name__} computes "
            "the gradients of a step several times; use another optimizer in its place"
        )
    if task.lr_schedule is not None:
        scheduler = schedule_over(optimizer, scheduler, name, task)
    return Made(optimizer, scheduler, bool(needs_closure))


def _needs_closure(optimizer: Optimizer) -> bool:
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
    return bool(required)


def check_signature(task: Task, turns: Sequence[str]) -> None:
    """Refuses a training_step that can't be called as the Trainer calls it."""
    if inspect.getattr_static(task, "automatic_optimization") is False:
        raise refusal(type(task), "automatic_optimization")
    called = ("batch", "turn") if any(turns) else ("batch",)
    why = f", as there are the optimizers {', '.join(turns)}" if any(turns) else ""
    refuse_miscalled(task, "training_step", *called, why=why)


def _method(task: Task) -> str:
    return f"{type(task).__name__}.configure_optimizer"


def kind_of(value: Any) -> str:
    """What was returned, in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {type(v).__name__}' for name, v in value.items())}}}"
    kinds = [type(part).__name__ for part in value] if isinstance(value, list | tuple) else []
    if isinstance(value, tuple):
        return f"({', '.join(kinds)})"
    return f"[{', '.join(kinds)}]" if isinstance(value, list) else f"a {type(value).__name__}"


# ---- one kernel for all weights, where torch has one that takes them


def fuse(optimizer: Optimizer, model: nn.Module, kinds: Sequence[str] | None = None) -> bool:
    """Has an optimizer of torch use its fused kernels: one call for all weights, not ten for each.

    They round differently in the last digit. Not where the user chose an implementation, nor for
    weights or gradients that the kernels can't take; if `kinds` are given, for these alone.
    """
    defaults, groups = optimizer.defaults, optimizer.param_groups
    choices = ("fused", "foreach", "capturable", "differentiable")
    is_chosen = defaults.get("fused", False) is not None or any(map(defaults.get, choices))
    is_chosen |= any(group.get("fused") is not None or group.get("foreach") for group in groups)
    is_stock = type(optimizer).__module__.startswith("torch.optim.")
    # What is frozen has no gradient: the kernels leave it out, whatever its type.
    weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
    kind = type(optimizer).__name__
    have = [name for name, those in FUSED.items() if those is None or kind in those]
    is_stock &= kinds is None or kind in kinds
    fits = all(w.device.type in have and w.dtype in FUSED_DTYPES for w in weights)
    if kind == "SGD":  # on the CPU it leaves out vectors of 16 bits: pytorch/pytorch#191763
        fits &= all(w.device.type != "cpu" or w.dtype.itemsize > 2 for w in weights)
    if is_chosen or not is_stock or not fits or has_sparse(model):
        return False
    for group in groups:
        group["fused"] = True
    for weight in updated_by(optimizer):  # Adagrad has made its own for other kernels
        if state := optimizer.state.get(weight):
            state["step"] = state["step"].to(weight.device, torch.float32)
    _skips_by_itself(optimizer, True)
    return True


def unfuse_late(optimizer: Optimizer) -> bool:
    """Before a step: takes `fused` from the groups whose step can't be; True: look again.

    SGD's kernel takes the momenta of all weights that have a gradient, or of none. A momentum
    begins with its weight's first gradient, e.g. when the weight is thawed. A step in which one
    begins is GradScaler's to skip: torch would leave it in memory that nobody has written.
    """
    looks_again = begins = False
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        has_begun = ["momentum_buffer" in optimizer.state.get(w, ()) for w in group["params"]]
        pairs = zip(group["params"], has_begun, strict=True)
        updated = {begun for weight, begun in pairs if weight.grad is not None}
        group["fused"] = None if len(updated) > 1 else True
        begins |= False in updated
        looks_again |= begins or not all(has_begun)
    _skips_by_itself(optimizer, not begins)
    return looks_again


def _skips_by_itself(optimizer: Optimizer, does: bool) -> None:
    """Fused kernels skip a step whose gradients are not finite, so that GradScaler does not read
    from the GPU whether to. `fused=True` in the constructor sets the same."""
    optimizer._step_supports_amp_scaling = does  # type: ignore[attr-defined]
