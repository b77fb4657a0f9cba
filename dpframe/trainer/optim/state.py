"""An optimizer's state: saved with the names of its weights, checked before a kernel reads it."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from dpframe.composite import parts_of
from dpframe.data.module import tensors_of
from dpframe.errors import listed
from dpframe.parameters import updated_by
from dpframe.strategies.weights import Weights

Named = Sequence[tuple[str, Tensor]]
NAMES = "param_names"  # of a group, as torch's own optimizers over named parameters have it
# What torch's optimizers keep for each weight: these numbers, and tensors of the weight's size.
NUMBERS = ("step", "eta", "mu", "mu_product")
FACTORS = ("row_var", "col_var")  # Adafactor's
Options = list[dict[str, Any]]
"""Of each group."""


class Mismatch(ValueError):
    """The state is of other weights than those of the optimizer."""


def named_state(named: Named, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the task's names of the weights. One that the task does not have is called
    by its number."""
    names = {id(weight): name for name, weight in reversed(named)}
    all_names = [names.get(id(w), f"#{n}") for n, w in enumerate(updated_by(optimizer))]
    groups = state["param_groups"]
    of_groups = _divided(all_names, groups)
    named_groups = [{**g, NAMES: own} for g, own in zip(groups, of_groups, strict=True)]
    return {**state, "param_groups": named_groups}


def fitted(
    named: Named, sharding: Weights, optimizer: Optimizer, saved: dict[str, Any]
) -> dict[str, Any]:
    """The saved state for the weights of here: matched by name, checked, cut as these are."""
    saved = _in_order(named, optimizer, saved)
    if sharding.cuts:
        states = dict(saved["state"])
        for number, weight in enumerate(updated_by(optimizer)):
            states[number] = {
                name: sharding.shard_like(value, weight) if isinstance(value, Tensor) else value
                for name, value in states.get(number, {}).items()
            }
        saved["state"] = {number: state for number, state in states.items() if state}
    return _computed_as(optimizer.param_groups, saved)


def keep_types(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restores the types that torch converts to the weight's, e.g. of NAdam's mu_product."""
    weights, owners = updated_by(optimizer), _owners_in(optimizer)
    for number, (weight, part) in enumerate(zip(weights, owners, strict=True)):
        kept = optimizer.state.get(weight, {})
        for name, value in saved["state"].get(number, {}).items():
            is_own = isinstance(value, Tensor) and _keeps_own_type(name, part)
            if is_own and value.dtype != kept[name].dtype:
                kept[name] = value.to(kept[name].device)


def _in_order(named: Named, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state in the order of this optimizer's weights and groups, if it fits them."""
    weights, groups = updated_by(optimizer), saved["param_groups"]
    owners = _owners_in(optimizer)
    places, order = _places(named, optimizer, saved), group_order(named, optimizer, saved)
    if isinstance(optimizer, LBFGS) and places != sorted(places):
        raise Mismatch("LBFGS keeps one state for all weights, whose order differs here")
    numbers = chain.from_iterable(group["params"] for group in groups)
    place_of = dict(zip(numbers, places, strict=True))
    states: dict[Any, Any] = {}
    for number, state in saved["state"].items():
        if number in place_of:
            place = place_of[number]
            _check(state, weights[place], _name_of(weights[place], named), owners[place])
            states[place] = state
        elif isinstance(number, int):
            raise Mismatch(
                f"the optimizer has state of a weight {number} there, which no group has"
            )
        else:
            states[number] = state  # an optimizer's own, of no weight
    _refuse_missing(states, named, optimizer)
    here = _divided(range(len(weights)), optimizer.param_groups)
    return {
        **saved,  # with what an optimizer of one's own has added
        "state": states,
        "param_groups": [
            {**{key: value for key, value in groups[number].items() if key != NAMES}, "params": own}
            for number, own in zip(order, here, strict=True)
        ],
    }


def options_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numbers, texts and tuples among them, e.g. `lr`, which may be a tensor, and `betas`."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if isinstance(value, tuple | bool | int | float | str | None)
            or (isinstance(value, Tensor) and value.ndim == 0)
        }
        for group in optimizer.param_groups
    ]


def have_same_rates(optimizer: Optimizer, made: Options, before: Options) -> bool:
    return all(
        own.get(name) == was.get(name)
        for own, was, part in zip(made, before, _of_groups(optimizer), strict=True)
        for name in {*own, *was}
        if _is_rate(name, part)
    )


def set_options(
    optimizer: Optimizer, made: Options, before: Options, now: Options, *, with_rates: bool
) -> None:
    """Gives the groups the options that were `made` differently from `before`; `with_rates`, also
    those that a scheduler decides. Either has the value of `now`, after the scheduler's steps.

    A rate that follows more than a count is changed in proportion."""
    groups, parts = optimizer.param_groups, _of_groups(optimizer)
    for group, part, own, was, values in zip(groups, parts, made, before, now, strict=True):
        for name, value in values.items():
            has_changed = own.get(name) != was.get(name)
            if with_rates and (_is_rate(name, part) or value != own.get(name)):
                group[name] = value
            elif has_changed and name == "lr" and was["lr"]:
                group["lr"] = group["lr"] * (own["lr"] / was["lr"])
            elif has_changed:
                group[name] = value


def _is_rate(option: str, optimizer: Optimizer) -> bool:
    """Whether it is `lr`, or what a scheduler has added to a group."""
    return option == "lr" or option not in optimizer.defaults


def group_order(named: Named, optimizer: Optimizer, saved: dict[str, Any]) -> list[int]:
    """Which saved group is the first, second, ... one here: the one of the same weights."""
    places = _places(named, optimizer, saved)
    left = dict(enumerate(_identities(places, saved["param_groups"])))
    order = []
    for name, own in _identities(_distinct(optimizer), optimizer.param_groups):
        same = next((number for number, other in left.items() if other == (name, own)), None)
        if same is None:
            first = _name_of(updated_by(optimizer)[own[0]], named) if own else "no weight"
            raise Mismatch(f"the optimizer's group of {first} has other weights there")
        del left[same]
        order.append(same)
    if left:
        raise Mismatch(f"the optimizer has {len(left)} more groups of weights there")
    return order


def _identities(places: list[int], groups: list[dict[str, Any]]) -> list[tuple[Any, list[int]]]:
    """What makes a group the same one: its name, if it has one, and its weights."""
    of_groups = zip(groups, _divided(places, groups), strict=True)
    return [(group.get("name"), sorted(own)) for group, own in of_groups]


def _places(named: Named, optimizer: Optimizer, saved: dict[str, Any]) -> list[int]:
    """For each saved weight its place among those of this optimizer: by name, or in a state
    without names by its own place."""
    weights, groups = updated_by(optimizer), saved["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    names = [name for group in groups for name in group.get(NAMES, ())]
    if not names and count == len(weights):
        return _distinct(optimizer)
    if len(names) != count:
        raise Mismatch(f"the optimizer has {count} weights there, {len(weights)} here")
    place_of = {f"#{place}": place for place in range(len(weights))}
    by_id = {id(weight): place for place, weight in enumerate(weights)}
    place_of |= {name: by_id[id(weight)] for name, weight in named if id(weight) in by_id}
    for name in names:
        if name not in place_of:
            raise Mismatch(f"the optimizer updates {name} there, and not here")
    return [place_of[name] for name in names]


def _distinct(optimizer: Optimizer) -> list[int]:
    """The places of all weights; of one that is there twice the last."""
    weights = updated_by(optimizer)
    by_id = {id(weight): place for place, weight in enumerate(weights)}
    return [by_id[id(weight)] for weight in weights]


def _divided(values: Sequence[Any], groups: Sequence[dict[str, Any]]) -> list[list[Any]]:
    rest = iter(values)
    return [list(islice(rest, len(group["params"]))) for group in groups]


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


def _refuse_missing(states: dict[Any, Any], named: Named, optimizer: Optimizer) -> None:
    """By what torch's optimizer keeps of a weight after a step with the options of here."""
    kept: dict[Any, set[str]] = {}
    owners = _owners_in(optimizer)
    weights = ((group, weight) for group in optimizer.param_groups for weight in group["params"])
    for number, (group, weight) in enumerate(weights):
        state = states.get(number)
        # Of a weight without a gradient so far there is none.
        if state and is_torchs(owners[number]):
            kind = id(group), weight.ndim, weight.dtype, weight.device
            if kind not in kept:
                kept[kind] = _kept(owners[number], group, weight)
            if missing := sorted(kept[kind] - state.keys()):
                what = f"{listed(missing, 3)} of {_name_of(weight, named)}"
                raise Mismatch(f"the optimizer has no {what} there")


def _kept(optimizer: Optimizer, group: dict[str, Any], weight: Tensor) -> set[str]:
    """A step of one number tells. Nothing, where the step takes no such weight."""
    kind: Any = type(optimizer)
    one = torch.zeros((1,) * weight.ndim, dtype=weight.dtype, device=weight.device)
    one.grad = torch.zeros_like(one)
    with suppress(RuntimeError, TypeError, ValueError):
        other = kind([one])
        other.param_groups[0].update({key: group[key] for key in group if key != "params"})
        other.step()
        return {*other.state[one]}
    return set()


def _of_groups(optimizer: Optimizer) -> list[Optimizer]:
    """For each group the part that updates it."""
    return [part for part in parts_of(optimizer) for _ in part.param_groups]


def _owners_in(optimizer: Optimizer) -> list[Optimizer]:
    """For each weight the part that updates it."""
    return [part for part in parts_of(optimizer) for _ in updated_by(part)]


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
    for tensor in tensors_of(state):
        if tensor.ndim and tuple(tensor.shape) != (total,):
            raise Mismatch(f"LBFGS keeps {tuple(tensor.shape)} numbers there, {total} here")


def _keeps_own_type(key: str, optimizer: Optimizer) -> bool:
    """Whether its step takes this part of the state whatever the weight's type is."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    is_moment = key not in (*NUMBERS, *FACTORS) or (is_fused and key == "step")
    return not (is_moment and is_torchs(optimizer))


def _computed_as(groups: list[dict[str, Any]], saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state with the implementation (`fused`, `foreach`) of these groups: torch keeps
    step counts where that needs them."""
    names = ("foreach", "fused", "capturable")
    here = [{name: group[name] for name in names if name in group} for group in groups]
    pairs = zip(saved["param_groups"], here, strict=True)
    return {**saved, "param_groups": [{**there, **own} for there, own in pairs]}
