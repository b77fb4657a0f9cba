"""Groups of parameters with options or an optimizer of their own, by patterns of their names."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import warn_if_has_hooks

from dpframe.composite import Composite
from dpframe.errors import UserError, suggestion
from dpframe.util.patterns import Patterns, match_parameters

GROUPS = "task.optimizer.groups"


Named = Iterable[tuple[str, Tensor]]
Makes = Callable[..., Any]


class Group(NamedTuple):
    """One of `groups`, as it was given."""

    match: Patterns
    options: dict[str, Any]
    make: Makes | None = None  # an optimizer of its own


def grouped(
    named: Named, groups: Mapping[str, Any], *, key: str, within: nn.Module
) -> list[dict[str, Any]]:
    """Parameter groups, those that nothing matches first.

    A parameter in several of `groups` has the options of all; of one option, the last one's.
    A group is called as the one of `groups` that says its learning rate.
    """
    read = _read(groups, key)
    for name, group in read.items():
        if group.make is not None:
            raise UserError(
                f"{key}.{name} names an optimizer of its own; such groups are for task.optimizer"
            )
    return _with_options(_members(named, read, key, within), read)


def optimizer_over(
    make: Makes, named: Named, *, key: str = GROUPS, within: nn.Module | None = None
) -> Optimizer:
    """What a partial makes for these parameters; `groups` among its keywords are made first. Groups
    that are partials make the optimizers of what they match, all of which step together.

    Frozen ones are among them, since they may thaw later: they have no gradient, and an optimizer
    leaves out what has none.
    """
    named = list(named)
    groups, make = groups_of(make), _without(make, "groups")
    if groups is None:
        return make(list({id(tensor): tensor for _, tensor in named}.values()))
    read = _read(groups, key)
    by_maker: dict[str, dict[tuple[str, ...], list[Tensor]]] = {"": {}}
    for names, tensors in _members(named, read, key, within).items():
        owner = next((name for name in names if read[name].make), "")
        by_maker.setdefault(owner, {})[names] = tensors
    parts = [
        _part((owner and read[owner].make) or make, members, read, key)
        for owner, members in by_maker.items()
        if members
    ]
    return parts[0] if len(parts) == 1 else Composite(parts)


def groups_of(make: Any) -> Any:
    """The `groups` of a partial, which may be one of a partial; None: it has none."""
    return unwrapped(make)[1].get("groups")


def _read(groups: Any, key: str) -> dict[str, Group]:
    """Those that are not switched off."""
    if not isinstance(groups, Mapping):
        raise UserError(f"{key}={groups}; map a name to each group's match and options")
    read = {}
    for name, group in groups.items():
        if group is None:
            continue
        said = unwrapped(group)[1] if isinstance(group, partial) else group
        if not isinstance(said, Mapping) or "match" not in said:
            raise UserError(f"{key}.{name} has no match; name its parameters, e.g. match: net.head")
        if isinstance(group, partial):
            read[name] = Group(said["match"], {}, _without(group, "match"))
        else:
            read[name] = Group(said["match"], {k: v for k, v in said.items() if k != "match"})
    return read


def _members(
    named: Named, groups: Mapping[str, Group], key: str, within: nn.Module | None
) -> dict[tuple[str, ...], list[Tensor]]:
    """The parameters by the groups that they are in, those of none first."""
    named = list(named)
    owners: dict[int, list[str]] = {}
    for name, group in groups.items():
        where = f"{key}.{name}.match"
        for tensor in match_parameters(named, group.match, key=where, within=within):
            owners.setdefault(id(tensor), []).append(name)
    members: dict[tuple[str, ...], list[Tensor]] = {(): []}
    for path, tensor in {id(tensor): (path, tensor) for path, tensor in named}.values():
        names = tuple(owners.get(id(tensor), ()))
        if len(makers := [name for name in names if groups[name].make]) > 1:
            raise UserError(
                f"{key}.{makers[0]} and {makers[1]} name an optimizer each, and {path} is in both; "
                f"leave it out of one: match: [..., '!{path}']"
            )
        members.setdefault(names, []).append(tensor)
    return {names: tensors for names, tensors in members.items() if tensors}


def _with_options(
    members: Mapping[tuple[str, ...], list[Tensor]], groups: Mapping[str, Group]
) -> list[dict[str, Any]]:
    made = []
    for names, tensors in members.items():
        maker = [name for name in names if groups[name].make]
        options: dict[str, Any] = {"name": maker[0]} if maker else {}
        for name in names:
            own = groups[name].options
            options |= {"name": name, **own} if "lr" in own else own
        made.append({"params": tensors, **options})
    return made


def _part(
    make: Makes,
    members: Mapping[tuple[str, ...], list[Tensor]],
    groups: Mapping[str, Group],
    key: str,
) -> Optimizer:
    """The optimizer of these parameters, which has what the groups set."""
    optimizer = make(_with_options(members, groups))
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"{key}: {optimizer!r:.100} is no optimizer; name a class of torch.optim, e.g. "
            "torch.optim.Muon"
        )
    some = next(iter(members.values()))[0]
    for name in dict.fromkeys(chain.from_iterable(members)):
        options = groups[name].options
        for option in options.keys() - optimizer.defaults.keys():
            kind = type(optimizer).__name__
            raise UserError(
                f"{key}.{name}.{option}: {kind} has no such option for a group; "
                f"{suggestion(option, optimizer.defaults)}"
            )
        make([some], **options)  # an optimizer checks the values of its own arguments alone
    return optimizer


def unwrapped(make: Any) -> tuple[Any, dict[str, Any]]:
    """What a partial calls, and with which keywords; it may be one of a partial."""
    keywords: dict[str, Any] = {}
    while isinstance(make, partial):
        make, keywords = make.func, {**make.keywords, **keywords}
    return make, keywords


def _without(make: Any, keyword: str) -> Any:
    if not isinstance(make, partial):
        return make
    keywords = {name: value for name, value in make.keywords.items() if name != keyword}
    plain = type(make)(_without(make.func, keyword), *make.args, **keywords)
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
            if any("hook" in str(warning.message) for warning in caught):  # or of other threads
                return name
    return None
