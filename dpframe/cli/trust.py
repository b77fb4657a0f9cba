"""Which names a config may call: those of its own parts' packages, torch.nn, torch.optim, a few."""

import functools
import importlib.util
import inspect
import sys
import types
from dataclasses import dataclass
from typing import Any, get_type_hints

from dpframe.cli.locate import locate, refuse_misspelt
from dpframe.errors import UserError

HARMLESS = {f"builtins.{name}" for name in ("dict", "list", "tuple", "set", "frozenset")}
HARMLESS |= {"builtins.range", "builtins.slice", "collections.OrderedDict"}
TORCH = ("torch.nn", "torch.optim")
# Functions elsewhere in torch.nn and torch.optim are methods, or tools for their own modules.
TORCH_FUNCTIONS = (
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.utils",
    "torch.optim.swa_utils",
)
OURS = ("Task", "DataModule", "Callback", "Logger", "Strategy")
SYSTEM = {"posix": "os", "nt": "os", "_io": "io", "_pickle": "pickle", "_thread": "threading"}
NEVER_WHOLE = {"torch", "dpframe"}  # a part from there vouches for nothing


@dataclass(frozen=True)
class Trust:
    """What is defined in `packages` may be called, be it reached through them or `reached`."""

    packages: frozenset[str] = frozenset()
    reached: frozenset[str] = frozenset()

    def part(self, path: str, where: str, kind: type) -> Any:
        """A slot's own target, which has to be of its kind."""
        top = path.split(".")[0]
        if top in sys.stdlib_module_names:
            raise UserError(f"{where}={path} is Python's own, not a dpframe {kind.__name__}")
        target = locate(path, where)
        if isinstance(target, type):
            if not issubclass(target, kind):
                raise UserError(f"{where}={path} is not a dpframe {kind.__name__}")
        elif not (_says_it_makes(target, kind) or self._defines(target)):
            raise UserError(
                f"{where}={path}{_really(path, target)} is no class, and nothing says that it "
                f"makes a dpframe {kind.__name__}; annotate it with '-> {kind.__name__}'"
            )
        return target

    def within(self, path: str, target: Any) -> "Trust":
        """With the package that a part comes from: what else is in there, it could call itself."""
        places = [_package_of(_real_name(target)), _package_of(path)]
        package, reached = ({place} - NEVER_WHOLE for place in places)
        return Trust(self.packages | package, self.reached | reached)

    def nested(self, path: str, where: str) -> Any:
        """What a node inside a part calls. Nothing is imported to look at a name from elsewhere."""
        may_import = (*self.packages, *self.reached, *NEVER_WHOLE, *HARMLESS)
        if not any(_is_within(path, name) for name in may_import):
            refuse_misspelt(path, where)
            raise _refusal(path, path, where)
        target = locate(path, where)
        if path not in self.packages and not self.allows(target):
            raise _refusal(path, _real_name(target), where)
        return target

    def allows(self, target: Any) -> bool:
        """By where it is defined, through every wrapper, whatever name led here."""
        while True:
            is_known = _real_name(target) in HARMLESS or self._defines(target)
            if not (is_known or _is_of_torch(target) or _is_ours(target)):
                return False
            if isinstance(target, type) or not hasattr(target, "__wrapped__"):
                return True
            target = target.__wrapped__

    def _defines(self, target: Any) -> bool:
        return any(_is_within(_real_name(target), package) for package in self.packages)


def _is_of_torch(target: Any) -> bool:
    name = _real_name(target)
    if isinstance(target, types.BuiltinFunctionType):
        functional = sys.modules.get("torch.nn.functional")
        is_operator = name.startswith(("torch._C._nn.", "torch._VariableFunctionsClass."))
        return is_operator and getattr(functional, target.__name__, None) is target
    if not any(_is_within(name, place) for place in TORCH):
        return False
    if isinstance(target, types.FunctionType):
        is_method = "." in target.__qualname__ and "<locals>" not in target.__qualname__
        return not is_method and any(_is_within(name, place) for place in TORCH_FUNCTIONS)
    makes_itself = inspect.ismethod(target) and isinstance(target.__self__, type)
    return isinstance(target, type) or makes_itself  # as Embedding.from_pretrained does


def _is_ours(target: Any) -> bool:
    """A recipe's parts, and classes that are meant as parts; not the command or the loader."""
    name = _real_name(target)
    if not _is_within(name, "dpframe") or _is_within(name, "dpframe.recipes"):
        return _is_within(name, "dpframe.recipes")
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
