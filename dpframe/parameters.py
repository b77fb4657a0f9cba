"""Groups of parameters with options of their own, by patterns of their names."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import warn_if_has_hooks

from dpframe.errors import UserError, suggestion
from dpframe.util.patterns import match_parameters

GROUPS = "task.optimizer.groups"


def grouped(
    named: Iterable[tuple[str, Tensor]], groups: Mapping[str, Any], *, key: str = GROUPS
) -> list[dict[str, Any]]:
    """Parameter groups, those that nothing matches first.

    A parameter in several of `groups` has the options of all; of one option, the last one's.
    A group is called as the one of `groups` that says its learning rate.
    """
    named = list(named)
    if not isinstance(groups, Mapping):
        raise UserError(f"{key}={groups}; map a name to each group's match and options")
    owners: dict[int, list[str]] = {}
    for name, group in groups.items():
        if group is None:  # switched off
            continue
        if not isinstance(group, Mapping) or "match" not in group:
            raise UserError(f"{key}.{name} has no match; name its parameters, e.g. match: net.head")
        for tensor in match_parameters(named, group["match"], key=f"{key}.{name}.match"):
            owners.setdefault(id(tensor), []).append(name)
    made: dict[tuple[str, ...], dict[str, Any]] = {(): {"params": []}}
    for tensor in {id(tensor): tensor for _, tensor in named}.values():
        names = tuple(owners.get(id(tensor), ()))
        if names not in made:
            options: dict[str, Any] = {}
            for name in names:
                options |= {"name": name} if "lr" in groups[name] else {}
                options |= {k: v for k, v in groups[name].items() if k != "match"}
            made[names] = {"params": [], **options}
        made[names]["params"].append(tensor)
    return [group for group in made.values() if group["params"]]


def optimizer_over(
    make: Callable[..., Optimizer], named: Iterable[tuple[str, Tensor]], *, key: str = GROUPS
) -> Optimizer:
    """What a partial makes for these parameters; `groups` among its keywords are made first.

    Frozen ones are among them, since they may thaw later: they have no gradient, and an optimizer
    leaves out what has none.
    """
    named = list(named)
    groups, make = groups_of(make), _without_groups(make)
    if groups is None:
        return make(list({id(tensor): tensor for _, tensor in named}.values()))
    optimizer = make(grouped(named, groups, key=key))
    for name, group in groups.items():
        options = {option: value for option, value in (group or {}).items() if option != "match"}
        for option in options.keys() - optimizer.defaults.keys():
            kind = type(optimizer).__name__
            raise UserError(
                f"{key}.{name}.{option}: {kind} has no such option for a group; "
                f"{suggestion(option, optimizer.defaults)}"
            )
        make([named[0][1]], **options)  # an optimizer checks the values of its own arguments alone
    return optimizer


def groups_of(make: Any) -> Any:
    """The `groups` of a partial, which may be one of a partial; None: it has none."""
    if not isinstance(make, partial):
        return None
    return make.keywords.get("groups", groups_of(make.func))


def _without_groups(make: Any) -> Any:
    if not isinstance(make, partial):
        return make
    keywords = {name: value for name, value in make.keywords.items() if name != "groups"}
    plain = type(make)(_without_groups(make.func), *make.args, **keywords)
    vars(plain).update(vars(make))  # the key in the config of what `build` has made
    return plain


def updated_by(optimizer: Optimizer) -> list[Any]:
    """Its parameters, group by group."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def has_sparse(module: nn.Module) -> bool:
    """Whether the module makes sparse gradients: its embeddings say so."""
    return any(getattr(part, "sparse", False) for part in module.modules())


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


class Watched:
    """Weights, and whether they were changed in place since `begin`, e.g. within a step.

    A look takes less than a millisecond for 10,000 weights: there may be two in each step."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pairs = [pair for pair in named if version_of(pair[1]) is not None]
        self._names, self._weights = [name for name, _ in pairs], [weight for _, weight in pairs]
        self._before: list[int] = []

    def begin(self) -> None:
        self._before = self._versions()

    def changed(self) -> str:
        """The name of one that was changed; empty if none was."""
        now = self._versions()
        if now == self._before:
            return ""
        three = zip(self._names, self._before, now, strict=True)
        return next(name for name, before, after in three if before != after)

    def _versions(self) -> list[int]:
        return [weight._version for weight in self._weights]


def first_hooked(module: nn.Module) -> str | None:
    """The name of a weight that has a hook by `register_hook`: no copy of it has that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, weight in module.named_parameters():
            warn_if_has_hooks(weight)
            if caught:
                return name
    return None
