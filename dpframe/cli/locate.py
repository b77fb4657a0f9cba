"""Finds what a `_target_` names: in source files, before any of it is imported, then by import."""

import ast
import importlib
import os
import pkgutil
import sys
import traceback
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, NamedTuple

import dpframe
from dpframe.cli import plugins
from dpframe.cli.refusal import first_line
from dpframe.errors import UserError, suggestion

MOST = 200  # names that are followed from one target to the next


def locate(path: str, where: str) -> Any:
    """Imports the class or function of a dotted path; `where` is the config key for errors."""
    parts = parts_of(path, where)
    found = _imported(parts[0], f"{where}={path}")
    if found is None:
        raise _no_module(path, where)
    for index, name in enumerate(parts[1:], 1):
        above = ".".join(parts[:index])
        is_ours = above != "dpframe" or _is_ours(name)
        if is_ours and not hasattr(found, name) and isinstance(found, types.ModuleType):
            _imported(f"{above}.{name}", f"{where}={path}")  # binds it in the package
        if not hasattr(found, name):
            names = [name for name in dir(found) if not name.startswith("_")]
            names += [
                module.name for module in pkgutil.iter_modules(getattr(found, "__path__", ()))
            ]
            raise no_attribute(above, name, names, f"{where}={path}")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise UserError(f"{where}={path} is a {kind}, which builds nothing; name a class")
    return found


def parts_of(path: str, where: str) -> list[str]:
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{where}={path} is not a dotted path; write package.module.Class")
    for part in parts:
        if part.startswith("__"):
            raise UserError(f"{where}={path}: {part} is Python's own; write package.module.Class")
    return parts


def see_current_directory(top: str) -> None:
    """Appends the current directory to `sys.path` once a config names a module that is only there.

    Not earlier, so that no file there stands in for a package that Hydra or torch tries to import.
    """
    if sys.flags.safe_path or spec_of(top) is not None:
        return
    here = os.getcwd()
    if here not in sys.path and PathFinder.find_spec(top, [here]) is not None:
        sys.path.append(here)


def refuse_missing(path: str, where: str) -> None:
    """Refuses a path whose top package is not there, without importing anything."""
    if spec_of(path.split(".")[0]) is None:
        raise _no_module(path, where)


def spec_of(name: str) -> ModuleSpec | None:
    """Where a module is. Unlike `importlib.util.find_spec`, this doesn't import its package."""
    parent, _, leaf = name.rpartition(".")
    try:
        if not parent:
            return find_spec(name)
        above = spec_of(parent)
        places = list(above.submodule_search_locations or ()) if above else []
        others = [finder for finder in sys.meta_path if finder is not PathFinder] if places else []
        # PathFinder would look the package of a whole name up in `sys.modules`.
        specs = [PathFinder.find_spec(leaf, places), *(f.find_spec(name, places) for f in others)]
        return next((spec for spec in specs if spec is not None), None)
    except (ImportError, ValueError, AttributeError):
        return None


def refuse_unsaid(path: str, where: str, kind: type) -> None:
    """Refuses a path whose source doesn't say that it is a `kind` or a function that returns one.

    Importing a module runs it, so its source is asked first.
    """
    parts = path.split(".")
    modules = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    module = next((name for name in modules if spec_of(name) is not None), "")
    if not module or module in sys.modules:
        return  # `locate` tells what is wrong, and importing runs nothing
    if module == path:
        raise UserError(f"{where}={path} is a module, which builds nothing; name a class")
    bindings, stars = _read(module, f"{where}={path}")
    name = path.removeprefix(f"{module}.").split(".")[0]
    if name not in bindings and not stars and "__getattr__" not in bindings:
        spec = spec_of(module)
        below = pkgutil.iter_modules(spec.submodule_search_locations) if spec else ()
        names = [*bindings, *(each.name for each in below)]
        raise no_attribute(module, name, names, f"{where}={path}")
    if not says(path, kind):
        hint = f", or add trusted_modules=[{parts[0]}] to the command"
        raise not_a_maker(f"{where}={path}", kind, hint)


def says(path: str, kind: type) -> bool:
    """Whether source files say that a path is a class below `kind` or a function returning one.

    Follows imports, base classes, `A = B` and return annotations to a name of dpframe's own.
    """
    waiting, seen, sources = [path], set[str](), dict[str, Source]()
    while waiting and len(seen) < MOST:
        path = waiting.pop()
        top = path.split(".")[0]
        if path in seen or top in sys.stdlib_module_names or top == "torch":
            continue
        seen.add(path)
        if top != "dpframe":
            waiting += _followed(path, sources)
        elif _is_below(path, kind):
            return True
    return False


def not_a_maker(given: str, kind: type, hint: str = "") -> UserError:
    name = kind.__name__
    return UserError(
        f"{given} is not a class of a dpframe {name}, and nothing says that it returns one; "
        f"annotate it with '-> {name}'{hint}"
    )


def no_attribute(above: str, name: str, names: list[str], given: str) -> UserError:
    near = suggestion(name, names)
    near = near if near.startswith("did") else "check its spelling"
    return UserError(f"{given}: {above} has no {name}; {near}")


class Source(NamedTuple):
    """A module's top-level names with the dotted paths that each refers to."""

    bindings: dict[str, list[str]]
    stars: list[str]  # modules of which all names are imported


def _followed(path: str, sources: dict[str, Source]) -> list[str]:
    """The paths that a path refers to. A name in a package comes before a submodule's name."""
    parts, found = path.split("."), []
    for length in range(1, len(parts)):
        module, name, rest = ".".join(parts[:length]), parts[length], parts[length + 1 :]
        if module not in sources:
            try:
                sources[module] = _read(module)
            except UserError:
                sources[module] = Source({}, [])
        found += [".".join([star, name, *rest]) for star in sources[module].stars]
        if name in sources[module].bindings:
            return found + [".".join([to, *rest]) for to in sources[module].bindings[name]]
    return found


def _read(module: str, given: str = "") -> Source:
    source = Source({}, [])
    spec = spec_of(module)
    package = module if spec and spec.submodule_search_locations else module.rpartition(".")[0]
    for node in _statements(_parsed(spec, given)):
        for name, *paths in _bound(node, module, package):
            if name == "*":
                source.stars.extend(paths)
            else:
                source.bindings.setdefault(name, []).extend(paths)
    return source


def _parsed(spec: ModuleSpec | None, given: str) -> ast.Module:
    """An empty module where there is no source, as of a compiled module or a folder."""
    try:
        text = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
        return ast.parse(text or "")
    except SyntaxError as error:
        assert spec is not None
        raise UserError(
            f"{given}: SyntaxError: {error.msg} ({spec.origin}, line {error.lineno})"
        ) from None
    except (RecursionError, MemoryError):  # the parser raises either
        assert spec is not None
        raise UserError(f"{given}: {spec.origin} is nested too deeply to be read") from None
    except (ImportError, AttributeError, OSError, ValueError):
        return ast.Module([], [])


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
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    yield name.id, *paths(node.value)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.split(".")[0]
            yield alias.asname or top, alias.name if alias.asname else top
    elif isinstance(node, ast.ImportFrom):
        try:
            origin = resolve_name("." * node.level + (node.module or ""), package)
        except ImportError:
            return
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


def _is_below(path: str, kind: type) -> bool:
    try:
        found = locate(path, "")
    except UserError:
        return False
    return isinstance(found, type) and issubclass(found, kind)


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


def _no_module(path: str, where: str) -> UserError:
    top = path.split(".")[0]
    names = [*(module.name for module in pkgutil.iter_modules()), *sys.modules]
    near = suggestion(top, (name for name in names if "." not in name and name[0] != "_"))
    near = near if near.startswith("did") else "is its folder on PYTHONPATH?"
    return UserError(f"{where}={path}: there is no module {top}; {near}")
