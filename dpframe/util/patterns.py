"""What patterns of names match: parameters and modules; and the blocks that a model has."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain

from torch import Tensor, nn

from dpframe.errors import UserError, nearest

Patterns = str | Sequence[str]
VECTORS = "1d"  # stands for what has one dimension: biases, and the weights of norms


def match_parameters(
    named: Iterable[tuple[str, Tensor]],
    patterns: Patterns,
    *,
    key: str,
    within: nn.Module | None = None,
) -> list[Tensor]:
    """The tensors whose names match, or are in a module whose name does, or of the modules `within`
    whose class, or a base of it, has that name; `!net.head` leaves out again what an earlier
    pattern has matched."""
    named = list(named)
    by_class = {} if within is None else _by_class(within)
    found: dict[int, Tensor] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        wanted = str(pattern).removeprefix("!")
        of_class = {
            id(t) for m in by_class.get(wanted, ()) for t in chain(m.parameters(), m.buffers())
        }
        matched = {
            id(tensor): tensor
            for name, tensor in named
            if id(tensor) in of_class or _matches(name, tensor, wanted)
        }
        if not matched:
            raise UserError(
                f"{key}={pattern} matches no parameter; {_near(wanted, named, by_class)}"
            )
        if wanted == pattern:
            found |= matched
        else:
            found = {number: found[number] for number in found if number not in matched}
    return list(found.values())


def match_names(named: Iterable[tuple[str, object]], patterns: Patterns, *, key: str) -> set[str]:
    """Likewise, of tensors in a state dict or several."""
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    found = {id(tensor) for tensor in match_parameters(tensors, patterns, key=key)}
    return {name for name, tensor in tensors if id(tensor) in found}


def blocks(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What is computed again, or sharded, as a whole: the outermost modules that are made of others
    and lie in a ModuleList or Sequential, but for a ModuleList or Sequential of such modules."""
    for part_name, part in module.named_children():
        path = f"{name}.{part_name}".lstrip(".")
        is_composite = any(True for _ in part.children())
        if _is_list(module) and is_composite and not (_is_list(part) and any(blocks(part))):
            yield path, part
        else:
            yield from blocks(part, path)


def match_modules(task: nn.Module, pattern: str, *, key: str) -> list[tuple[str, nn.Module]]:
    """The outermost modules whose name matches, or whose class has that name; of a list, which is
    never called, its modules. `key` is the config's, for the error."""
    found: list[tuple[str, nn.Module]] = []
    named = dict(task.named_modules())
    del named[""]
    for name, module in named.items():
        is_meant = fnmatchcase(name, pattern) or type(module).__name__ == pattern
        if is_meant and not any(name.startswith(f"{n}.") for n, _ in found):
            is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
            parts = [(f"{name}.{part}", child) for part, child in module.named_children()]
            found += [(name, module)] if is_called else parts
    if not found:
        near = nearest(pattern.rstrip(".*"), named)
        hint = (
            f"did you mean {near}?" if near else f"there is, e.g., {next(iter(named), 'nothing')}"
        )
        raise UserError(f"{key}={pattern} matches no module of {type(task).__name__}; {hint}")
    return found


def _matches(name: str, tensor: Tensor, pattern: str) -> bool:
    if pattern == VECTORS:
        return tensor.ndim < 2
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _by_class(root: nn.Module) -> dict[str, list[nn.Module]]:
    """A strategy may have given a module a class of its own, whose base is the task's."""
    found: dict[str, list[nn.Module]] = {}
    for module in root.modules():
        for kind in type(module).__mro__[:-2]:  # but for Module and object
            found.setdefault(kind.__name__, []).append(module)
    return found


def _near(pattern: str, named: Sequence[tuple[str, Tensor]], classes: Iterable[str]) -> str:
    """A hint among names and their prefixes, since there may be thousands of names."""
    known = {VECTORS, *classes}
    for name, _ in named:
        parts = name.split(".")
        known |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    near = nearest(pattern.rstrip(".*"), known)
    return f"did you mean {near}?" if near else f"there is, e.g., {named[0][0]}"


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)
