"""An optimizer's state: saved with the names of its weights, checked before a kernel reads it."""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from dpframe.data.module import leaves
from dpframe.parameters import updated_by

Named = Sequence[tuple[str, Tensor]]
NAMES = "param_names"  # of a group, as torch's own optimizers over named parameters have it
# What torch's optimizers keep for each weight: these numbers, and tensors of the weight's size.
NUMBERS = ("step", "eta", "mu", "mu_product")
FACTORS = ("row_var", "col_var")  # Adafactor's


class Mismatch(ValueError):
    """The state is of other weights than those of the optimizer."""


def named_state(named: Named, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the task's names of the weights. One that the task does not have is called
    by its number."""
    names = {id(weight): name for name, weight in reversed(named)}
    numbered = iter(enumerate(updated_by(optimizer)))
    return {
        **state,
        "param_groups": [
            {
                **group,
                NAMES: [
                    names.get(id(weight), f"#{number}")
                    for number, weight in islice(numbered, len(group["params"]))
                ],
            }
            for group in state["param_groups"]
        ],
    }


def fitting(named: Named, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state, if it is of this optimizer's weights, in the same groups and order. One
    without names only has to have as many, of the same sizes."""
    groups, here = saved["param_groups"], optimizer.param_groups
    here = named_state(named, optimizer, {"param_groups": here})["param_groups"]
    if len(groups) != len(here):
        raise Mismatch(f"the optimizer has {len(groups)} groups of weights there, {len(here)} here")
    for there, own in zip(groups, here, strict=True):
        if there.get("name") != own.get("name") or len(there["params"]) != len(own["params"]):
            raise Mismatch(f"{_described(there)} there, and {_described(own)} here")
        for name, mine in zip(there.get(NAMES, own[NAMES]), own[NAMES], strict=True):
            if name != mine:
                raise Mismatch(f"the optimizer has {name} there in the place of {mine}")
    numbers = chain.from_iterable(group["params"] for group in groups)
    weights = dict(zip(numbers, updated_by(optimizer), strict=True))
    for number, state in saved["state"].items():
        if number in weights:
            _check(state, weights[number], _name_of(weights[number], named), optimizer)
        elif isinstance(number, int):  # another one is an optimizer's own, of no weight
            raise Mismatch(f"the optimizer has state of a weight {number} there, of no group")
    unnamed = [{k: v for k, v in group.items() if k != NAMES} for group in groups]
    return {**saved, "param_groups": unnamed}


def _described(group: dict[str, Any]) -> str:
    name = f" {group['name']}" if "name" in group else ""
    return f"a group{name} of the optimizer has {len(group['params'])} weights"


def _name_of(weight: Tensor, named: Named) -> str:
    return next((name for name, other in named if other is weight), "a weight")


def _check(state: Any, weight: Tensor, name: str, optimizer: Optimizer) -> None:
    """Fused kernels read and write a state as if it had the weight's size, whatever it has. What
    an optimizer of another library, or a class of one's own, keeps is its own to check."""
    if isinstance(optimizer, LBFGS):
        _check_flat(state, optimizer)
        return
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for key, value in state.items() if is_torchs(optimizer) else ():
        if value is None and key == "momentum_buffer":  # there is none yet
            continue
        size, what = _size(key, weight), f"{key} of {name}"
        if not isinstance(value, Tensor):
            if key in NUMBERS and type(value) in (int, float) and not is_fused:
                continue
            raise Mismatch(f"the optimizer's {what} is a {type(value).__name__}, no tensor")
        if tuple(value.shape) != size:
            raise Mismatch(f"the optimizer's {what} has size {tuple(value.shape)}, not {size}")
        is_alike = _kind(value) == _kind(weight) and (value.layout == weight.layout or not is_fused)
        if key not in (*NUMBERS, *FACTORS) and not is_alike:
            kind = f"{value.dtype}, {value.layout}"
            raise Mismatch(f"the optimizer's {what} is {kind}, and the weight {weight.dtype}")


def is_torchs(optimizer: Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _size(key: str, weight: Tensor) -> tuple[int, ...]:
    whole = tuple(weight.shape)
    if key in NUMBERS:
        return ()
    if key == "row_var":
        return (*whole[:-1], 1)
    if key == "col_var":
        return (*whole[:-2], 1, *whole[-1:])
    return whole


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _check_flat(state: Any, optimizer: Optimizer) -> None:
    total = sum(w.numel() * (2 if w.is_complex() else 1) for w in updated_by(optimizer))
    for tensor in _tensors(state):
        if tensor.ndim and tuple(tensor.shape) != (total,):
            raise Mismatch(f"LBFGS keeps {tuple(tensor.shape)} numbers there, {total} here")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def keeps_own_type(key: str, optimizer: Optimizer) -> bool:
    """Whether its step takes this part of the state whatever the weight's type is."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    is_moment = key not in (*NUMBERS, *FACTORS) or (is_fused and key == "step")
    return not (is_moment and is_torchs(optimizer))


def computed_as(groups: list[dict[str, Any]], saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state with the implementation (`fused`, `foreach`) of these groups: torch keeps
    step counts where that needs them."""
    names = ("foreach", "fused", "capturable")
    here = [{name: group[name] for name in names if name in group} for group in groups]
    pairs = zip(saved["param_groups"], here, strict=True)
    return {**saved, "param_groups": [{**there, **own} for there, own in pairs]}
