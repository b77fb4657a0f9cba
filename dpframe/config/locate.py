"""Finds what a `_target_` names: in source files, before any of it is imported, then by import."""

import ast
import importlib
import os
import pkgutil
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

import dpframe
from dpframe.config import plugins
from dpframe.errors import UserError, first_line, nearest

LIGHTNING = ("lightning", "pytorch_lightning")  # the packages of one library
MOST = 200  # names that are followed from one target to the next
Bindings = dict[str, list[str]]  # a module's names, each with the dotted paths that it refers to


def locate(path: str, where: str) -> Any:
    """Imports the class or function of a dotted path; `where` is the config key for errors."""
    parts, given = parts_of(path, where), f"{where}={path}"
    target = _imported(parts[0], given)
    if target is None:
        raise no_module(path, where)
    for index, name in enumerate(parts[1:], 1):
        above = ".".join(parts[:index])
        is_package = isinstance(target, types.ModuleType) and (above != "dpframe" or _is_ours(name))
        if is_package and not hasattr(target, name):
            _imported(f"{above}.{name}", given)  # binds it in the package
        if not hasattr(target, name):
            raise _no_attribute(above, name, dir(target), getattr(target, "__path__", ()), given)
        target = getattr(target, name)
    if not callable(target):
        raise UserError(f"{given} is a {type(target).__name__}, which builds nothing; name a class")
    return target


def parts_of(path: str, where: str) -> list[str]:
    parts = path.split(".")
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise UserError(f"{where}={path} is not a dotted path; write package.module.Class")
    return parts


def see_own_folders(top: str, config_dir: Path | None = None) -> None:
    """Appends the current directory, or the folder that the `--config-dir` is in, to `sys.path`.

    Only once a config names a module that is only there, so that no file there stands in for a
    package that Hydra or torch tries to import.
    """
    if spec_of(top) is not None:
        return
    folders = [] if sys.flags.safe_path else [os.getcwd()]
    folders += [] if config_dir is None else [str(config_dir.parent)]
    for folder in folders:
        if folder not in sys.path and PathFinder.find_spec(top, [folder]) is not None:
            sys.path.append(folder)
            return


def spec_of(name: str) -> ModuleSpec | None:
    """Where a module is. Unlike `importlib.util.find_spec`, this doesn't import its package."""
    parent, _, leaf = name.rpartition(".")
    try:
        if not parent:
            return find_spec(name)
        above = spec_of(parent)
        places = list(above.submodule_search_locations or ()) if above else []
        finders = sys.meta_path if places else []
        # PathFinder would look the package of a whole name up in `sys.modules`.
        specs = (f.find_spec(leaf if f is PathFinder else name, places) for f in finders)
        return next((spec for spec in specs if spec is not None), None)
    except (ImportError, ValueError, AttributeError):
        return None


def refuse_unsaid(path: str, where: str, kind: type | str) -> None:
    """Refuses a path whose source doesn't say that it is a `kind` or a function that returns one.

    Importing a module runs it, so its source is asked first.
    """
    given, parts = f"{where}={path}", path.split(".")
    modules = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    spec, module = next(((s, name) for name in modules if (s := spec_of(name))), (None, ""))
    if spec is None or module in sys.modules:
        return  # `locate` tells what is wrong, and importing runs nothing
    if module == path:
        raise UserError(f"{given} is a module, which builds nothing; name a class")
    bindings = _bindings(module, given)
    name = path.removeprefix(f"{module}.").split(".")[0]
    if not {name, "*", "__getattr__"} & bindings.keys():
        folders = spec.submodule_search_locations or ()
        raise _no_attribute(module, name, bindings, folders, given)
    if not says(path, kind):
        raise not_a_maker(given, kind, f", or add trusted_modules=[{parts[0]}] to the command")


def says(path: str, kind: type | str) -> bool:
    """Whether source files say that a path is a class below `kind` or a function returning one.
    A class of Lightning's is told by its name, as nothing needs to be imported for that.

    Follows imports, base classes, `A = B` and return annotations to a name of dpframe's own.
    """
    waiting, seen, sources = [path], set[str](), dict[str, Bindings]()
    while waiting and len(seen) < MOST:
        path = waiting.pop()
        top = path.split(".")[0]
        if path in seen or top in sys.stdlib_module_names or top == "torch":
            continue
        seen.add(path)
        if top in LIGHTNING and path.rpartition(".")[2] == kind:
            return True
        if top != "dpframe":
            waiting += _followed(path, sources)
            continue
        with suppress(UserError):
            target = locate(path, "")
            is_class = isinstance(target, type)
            if is_class and isinstance(kind, type) and issubclass(target, kind):
                return True
    return False


def parameters_of(path: str) -> tuple[list[str], bool]:
    """What a class or a function takes, as its source says: nothing is imported for it.

    Also whether these are all: not where the rest goes to a base class that nobody can read.
    """
    waiting, seen, names = [path], set[str](), list[str]()
    while waiting and len(seen) < MOST:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        function = _definition(path)
        if isinstance(function, ast.ClassDef):
            if function.decorator_list:  # e.g. a dataclass
                break
            of_class = (each for each in function.body if isinstance(each, ast.FunctionDef))
            function = next((each for each in of_class if each.name == "__init__"), None)
        if isinstance(function, ast.FunctionDef):
            arguments = function.args
            plain = [*arguments.args, *arguments.kwonlyargs]
            names += [each.arg for each in plain if each.arg not in ("self", *names)]
            if arguments.kwarg is None:
                return names, True
        waiting = _meant(path) + waiting
    return names, False


def not_a_maker(given: str, kind: type | str, hint: str = "") -> UserError:
    name = kind if isinstance(kind, str) else kind.__name__
    what = name if name == kind else f"dpframe {name}"
    if name == "Callback" and says(given.partition("=")[2], name):
        return UserError(
            f"{given} is a Callback of Lightning's; docs/from-lightning.md lists dpframe's, e.g. "
            "callbacks=ema"
        )
    return UserError(
        f"{given} is not a {what}; annotate a function that returns one with '-> {name}'{hint}"
    )


def no_module(path: str, where: str) -> UserError:
    top = path.split(".")[0]
    names = [*(module.name for module in pkgutil.iter_modules()), *sys.modules]
    return _unknown(f"{where}={path}: there is no module {top}", top, names)


def _no_attribute(
    above: str, name: str, names: Iterable[str], folders: Iterable[str], given: str
) -> UserError:
    """`folders` have the modules of a package."""
    places = list(folders)
    names = [*names, *(module.name for module in pkgutil.iter_modules(places))]
    where = f"{above} is {places[0]}; " if places else ""  # another one of its name may be meant
    return _unknown(f"{given}: {above} has no {name}", name, names, where)


def _unknown(line: str, name: str, names: Iterable[str], where: str = "") -> UserError:
    plain = (each for each in names if "." not in each and each[0] != "_")
    near = nearest(name, plain, cutoff=0.7)
    hint = f"did you mean {near}?" if near else f"{where}check it, and PYTHONPATH"
    return UserError(f"{line}; {hint}")


def _followed(path: str, sources: dict[str, Bindings]) -> list[str]:
    """The paths that a path refers to. A name in a package comes before a submodule's name."""
    parts, paths = path.split("."), list[str]()
    for length in range(1, len(parts)):
        module, name, rest = ".".join(parts[:length]), parts[length], parts[length + 1 :]
        if module not in sources:
            sources[module] = {}
            with suppress(UserError):
                sources[module] = _bindings(module)
        bindings = sources[module]
        paths += [".".join([star, name, *rest]) for star in bindings.get("*", ())]
        if name in bindings:
            return paths + [".".join([to, *rest]) for to in bindings[name]]
    return paths


def _bindings(module: str, given: str = "") -> Bindings:
    """What is bound at a module's top level; under `*` the modules whose names are all imported.

    Nothing where there is no source, e.g. of a compiled module or a folder.
    """
    spec, tree, bindings = spec_of(module), _tree(module, given), Bindings()
    is_package = spec is not None and spec.submodule_search_locations
    package = module if is_package else module.rpartition(".")[0]
    for node in _statements(tree):
        for name, *paths in _bound(node, module, package):
            bindings.setdefault(name, []).extend(paths)
    return bindings


def _tree(module: str, given: str = "") -> ast.Module:
    """The syntax tree of a module's source; empty where there is none."""
    spec = spec_of(module)
    try:
        text = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
        return ast.parse(text or "", spec.origin or "")  # type: ignore[union-attr]
    except (
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:  # too deep: the parser raises either
        raise UserError(f"{given}: {module} can't be read: {first_line(error)}") from None
    except (ImportError, AttributeError, OSError, ValueError):
        return ast.Module([], [])


def _meant(path: str) -> list[str]:
    """The paths that a path refers to in the innermost module that it names; a class's bases."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module, name, rest = ".".join(parts[:length]), parts[length], parts[length + 1 :]
        if spec_of(module) is not None:
            with suppress(UserError):
                bindings = _bindings(module)
                tops = bindings.get(name) or [f"{star}.{name}" for star in bindings.get("*", ())]
                return [".".join([top, *rest]) for top in tops]
    return []


def _definition(path: str) -> ast.ClassDef | ast.FunctionDef | None:
    module, _, name = path.rpartition(".")
    found = None
    with suppress(UserError):
        for node in _statements(_tree(module)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                found = node
    return found


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements at the top level, with both branches of each `if` and `try`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.stmt | ast.ExceptHandler):
                yield node
                if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    waiting.append(node)


def _bound(node: ast.AST, module: str, package: str) -> Iterator[tuple[str, ...]]:
    """The names that a statement binds, each with the dotted paths that it refers to."""

    def paths(*expressions: ast.AST | None) -> list[str]:
        return [f"{module}.{name}" for name in map(_dotted, expressions) if name]

    if isinstance(node, ast.ClassDef):
        yield node.name, *paths(*node.bases)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, *paths(node.returns)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            names = (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
            yield from ((name, *paths(node.value)) for name in names)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.split(".")[0]
            yield alias.asname or top, alias.name if alias.asname else top
    elif isinstance(node, ast.ImportFrom):
        with suppress(ImportError):  # from above the top package
            origin = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                is_star = alias.name == "*"
                yield alias.asname or alias.name, origin if is_star else f"{origin}.{alias.name}"


def _dotted(node: ast.AST | None) -> str:
    """`a.b.C`, `"a.b.C"` in quotes and `a.b.C[T]` as a.b.C; anything else is no name."""
    if isinstance(node, ast.Subscript):
        node = node.value
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ".".join([node.id, *names]) if isinstance(node, ast.Name) else ""


def _is_ours(name: str) -> bool:
    """Whether a module of dpframe has this name. In a checkout dpframe's `__path__` has the whole
    folder, for the sake of recipes/, and what else lies there is the user's."""
    folder = str(Path(dpframe.__file__).parent)
    return name == "recipes" or PathFinder.find_spec(name, [folder]) is not None


def _imported(name: str, given: str) -> Any:
    """None where there is no such module; an ImportError inside it is a line with its place."""
    try:
        return importlib.import_module(name)
    except (ImportError, SyntaxError) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            return None
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if "importlib" not in frame.filename][-1]
        said, file, line = first_line(error), last.filename, last.lineno
        if isinstance(error, SyntaxError):
            said, file, line = error.msg, error.filename or file, error.lineno
        kind, whose = type(error).__name__, plugins.origin_of(name)
        raise UserError(f"{given}{whose}: {kind}: {said} ({file}, line {line})") from error
