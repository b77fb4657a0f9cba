"""The blocks of a model: the modules that are computed again, or sharded, as a whole."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from dpframe.errors import UserError, nearest


def blocks(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are made of others and lie in a ModuleList or Sequential, but for
    a ModuleList or Sequential of such modules."""
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


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)
