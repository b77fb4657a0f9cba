"""Which names a config may call: those of its own parts' packages, torch.nn, torch.optim, a few."""

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from dpframe.cli import known, source
from dpframe.cli.locate import (
    locate,
    no_attribute,
    parts_of,
    refuse_misspelt,
    see_current_directory,
)
from dpframe.errors import UserError, suggestion

OURS = ("Task", "DataModule", "Callback", "Logger", "Strategy")
SYSTEM = {"posix": "os", "nt": "os", "_io": "io", "_pickle": "pickle", "_thread": "threading"}
NEVER_WHOLE = {"torch", "dpframe"}  # a part from there vouches for nothing


@dataclass(frozen=True)
class Trust:
    """What is defined in `packages` may be called, be it reached through them or `reached`.

    `typed` are those of `packages` that the command line names. Nothing is imported from within
    `closed`: the run directory or the checkpoint's folder that a run starts from.
    """

    packages: frozenset[str] = frozenset()
    reached: frozenset[str] = frozenset()
    typed: frozenset[str] = frozenset()
    closed: tuple[Path, ...] = ()

    def part(self, path: str, where: str, kind: type) -> Any:
        """A slot's own target, which has to be of its kind; its source says so first."""
        top = parts_of(path, where)[0]
        if top in sys.stdlib_module_names or top == "torch":
            owner = "PyTorch's" if top == "torch" else "Python's"
            raise UserError(
                f"{where}={path} is {owner} own, so it is not a dpframe {kind.__name__}"
            )
        if _is_within(path, "dpframe.testing"):  # a logger of there writes wherever it is told to
            raise UserError(f"{where}={path} is for tests, so it is not a dpframe {kind.__name__}")
        see_current_directory(top)
        self._refuse_closed(path, where)
        if not self._names(path):
            _refuse_unsaid(path, where, kind.__name__)
        target = locate(path, where)
        if isinstance(target, type):
            if not issubclass(target, kind):
                raise UserError(f"{where}={path} is not a dpframe {kind.__name__}")
        elif not (_says_it_makes(target, kind) or self._defines(target)):
            raise _not_a_maker(f"{path}{_really(path, target)}", where, kind.__name__)
        return target

    def within(self, path: str, target: Any) -> "Trust":
        """With the package that a part comes from: what else is in there, it could call itself."""
        places = [_package_of(_real_name(target)), _package_of(path)]
        package, reached = ({place} - NEVER_WHOLE for place in places)
        return replace(self, packages=self.packages | package, reached=self.reached | reached)

    def nested(self, path: str, where: str) -> Any:
        """What a node inside a part calls. Nothing is imported to look at a name from elsewhere."""
        top = parts_of(path, where)[0]
        if path in known.names():
            return known.names()[path]
        may_import = (*self.packages, *self.reached, "dpframe")
        if not any(_is_within(path, name) for name in may_import):
            _refuse_misspelt(path, where)
            raise _refusal(path, path, where)
        see_current_directory(top)
        self._refuse_closed(path, where)
        target = locate(path, where)
        if path not in self.packages and not self.allows(target):
            raise _refusal(path, _real_name(target), where)
        return target

    def target(self, path: str, where: str) -> Any:
        """What has been checked already."""
        return known.names()[path] if path in known.names() else locate(path, where)

    def refuse_returned(self, value: Any, path: str, where: str) -> None:
        """A node may give another one a function, a class or a module only if it may be called."""
        is_code = isinstance(value, type | types.ModuleType | functools.partial)
        if is_code or inspect.isroutine(value) or "__wrapped__" in getattr(value, "__dict__", ()):
            name = value.__name__ if isinstance(value, types.ModuleType) else _real_name(value)
            if not self._names(name) and not self.allows(value):
                raise _refusal(f"{path}(…)", name, where)

    def allows(self, target: Any) -> bool:
        """By what it is, through every wrapper and partial, whatever name led here."""
        while not known.has(target):
            if isinstance(target, functools.partial):
                target = target.func
                continue
            if not (self._defines(target) or _is_ours(target)):
                return False
            if isinstance(target, type) or not hasattr(target, "__wrapped__"):
                return True
            target = target.__wrapped__
        return True

    def _defines(self, target: Any) -> bool:
        return self._names(_real_name(target))

    def _names(self, name: str) -> bool:
        return any(_is_within(name, package) for package in self.packages)

    def _refuse_closed(self, path: str, where: str) -> None:
        if not self.closed or any(_is_within(path, name) for name in self.typed):
            return
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            file = source.file_of(".".join(parts[:length]))
            if file is not None and _is_in(file, self.closed):
                raise UserError(
                    f"{where}={path} is in {file}, beside what this run starts from; if you know "
                    f"what it does, add trusted_modules=[{parts[0]}] to the command"
                )


def _is_in(file: Path, folders: Iterable[Path]) -> bool:
    """Or a link in there that leads to it."""
    places = (file.absolute(), file.resolve())
    return any(place.is_relative_to(folder) for place in places for folder in folders)


def _refuse_unsaid(path: str, where: str, kind: str) -> None:
    """A module is run when it is imported: its source has to say that there is such a part."""
    module = source.module_of(path)
    if module in sys.modules or source.spec_of(module) is None:
        return  # `locate` tells what is wrong
    if source.spec_of(path) is not None:
        raise UserError(f"{where}={path} is a module, nothing to build from")
    if not source.has(path):
        above = (
            path[: path.index(".", len(module) + 1)] if path.count(".", len(module) + 1) else path
        )
        raise no_attribute(module, above.rpartition(".")[2], source.names_in(module), path, where)
    if not source.makes(path, kind):
        source.refuse_unparsable(module, where, path)
        raise _not_a_maker(path, where, kind, hint=f", or add trusted_modules=[{_key(path)}]")


def _not_a_maker(what: str, where: str, kind: str, hint: str = "") -> UserError:
    return UserError(
        f"{where}={what} is no class of a dpframe {kind}, and nothing says that it makes one; "
        f"annotate it with '-> {kind}'{hint}"
    )


def _refuse_misspelt(path: str, where: str) -> None:
    """Of what is known, the nearest name; of the rest, whether there is such a package."""
    parts = path.split(".")
    for index in range(1, len(parts) if parts[0] == "torch" else 0):
        above, name = ".".join(parts[:index]), parts[index]
        names = known.below(above)
        if above not in sys.modules:  # a class
            return
        if name not in names:
            is_there = name in vars(sys.modules[above]) or source.spec_of(f"{above}.{name}")
            if not is_there and suggestion(name, names).startswith("did"):
                raise no_attribute(above, name, names, path, where)
            return
    if known.below(path):
        raise UserError(f"{where}={path} is a module, nothing to build from")
    refuse_misspelt(path, where)


def _is_ours(target: Any) -> bool:
    """A recipe's parts, and classes that are meant as parts; not the command or the loader."""
    name = _real_name(target)
    if not _is_within(name, "dpframe") or _is_within(name, "dpframe.testing"):
        return False
    if any(part.startswith("_") for part in name.split(".")):
        return False
    if inspect.isfunction(target):
        return _is_within(name, "dpframe.recipes") and "." not in target.__qualname__
    import dpframe

    kinds = tuple(getattr(dpframe, kind) for kind in OURS)
    from torch import nn
    from torch.utils.data import Dataset, Sampler

    return isinstance(target, type) and issubclass(target, (*kinds, nn.Module, Dataset, Sampler))


def _real_name(target: Any) -> str:
    """Its module and name as they were defined: 'posix.system' is 'os.system' here."""
    owner = getattr(target, "__self__", None)
    if isinstance(target, functools.partial):
        return "functools.partial"
    has_name = (
        isinstance(target, type) or inspect.isroutine(target) or hasattr(target, "__wrapped__")
    )
    named = target if has_name else type(target)  # an object with __call__
    name = str(getattr(named, "__qualname__", ""))
    module = getattr(named, "__module__", None)
    if not isinstance(module, str):  # a method that is written in C
        module = (getattr(named, "__objclass__", None) or _definer(owner, name)).__module__
    return f"{SYSTEM.get(module, module)}.{name}"


def _definer(owner: Any, name: str) -> type:
    """The class that a method bound to `owner` is from."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    leaf = name.rpartition(".")[2]
    return next((kind for kind in classes if leaf in vars(kind)), type(owner))


def _really(path: str, target: Any) -> str:
    name = _real_name(target)
    return "" if name == path or _shortened(name, path) else f" is {name}, which"


def _refusal(path: str, name: str, where: str) -> UserError:
    if _shortened(name, path):
        name = path
    what = f"{where}={path}" if path == name else f"{where}={path} is {name}, which"
    if name == "functools.partial":
        hint = "write _partial_: true beside the _target_ that it is for"
    else:
        hint = f"if you know what it does, add trusted_modules=[{_key(name)}] to the command"
    is_not = "is none of the names that a config may call"
    return UserError(f"{what} {is_not}; {hint}")


def _shortened(name: str, path: str) -> bool:
    """Whether a path is the usual way to say a name, as torch.load for torch.serialization.load."""
    top, leaf = name.split(".")[0], name.rpartition(".")[2]
    return path.split(".")[0] == top and path.rpartition(".")[2] == leaf


def _key(name: str) -> str:
    """A package that was installed, or one name of Python's own and of torch."""
    top = name.split(".")[0]
    if top not in sys.stdlib_module_names and top not in NEVER_WHOLE:
        return _package_of(name)
    return name


def _package_of(name: str) -> str:
    """Its top package; below a namespace that several packages share, one of them."""
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names or not rest:
        return name
    module = sys.modules.get(top)
    try:
        places = list(getattr(module or importlib.util.find_spec(top), "__path__", []))
    except (ImportError, ValueError):
        places = []
    is_shared = getattr(module, "__file__", None) is None and len(places) > 1
    return f"{top}.{rest[0]}" if is_shared else top


def _says_it_makes(target: Any, kind: type) -> bool:
    if not isinstance(target, types.FunctionType | types.MethodType):
        return False
    try:
        made = get_type_hints(target).get("return")
    except Exception:
        return False  # annotations that don't resolve say nothing
    return isinstance(made, type) and issubclass(made, kind)


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


NOBODY = Trust()
