"""What a module's source says of a name: asked before the module is imported, which runs it."""

import ast
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from dpframe.errors import UserError

DEEPEST = 20  # names that lead to another, one by one
MOST = 1000  # names that are followed in all
Seen = set[tuple[str, ...]]


def spec_of(name: str) -> ModuleSpec | None:
    """Where a module is; unlike `importlib.util.find_spec`, without importing what it is in."""
    parent, _, leaf = name.rpartition(".")
    try:
        if not parent:
            return find_spec(name)
        above = spec_of(parent)
        places = list(above.submodule_search_locations or ()) if above else []
        others = [finder for finder in sys.meta_path if finder is not PathFinder]
        specs = [_in_folder(name, places), *(f.find_spec(name, places) for f in others if places)]
    except (ImportError, ValueError, AttributeError):
        return None
    return next((spec for spec in specs if spec is not None), None)


def file_of(name: str) -> Path | None:
    """A module's file, or the folder of a package that has none."""
    spec = spec_of(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    return (
        Path(spec.origin)
        if spec.has_location and spec.origin
        else Path(places[0])
        if places
        else None
    )


def module_of(path: str) -> str:
    """The module that the last name of a dotted path is in, as far as files tell."""
    parts = path.split(".")
    lengths = range(len(parts) - 1, 0, -1)
    names = (".".join(parts[:length]) for length in lengths)
    return next((name for name in names if spec_of(name) is not None), parts[0])


def names_in(module: str) -> list[str]:
    """What it binds, and the modules below it."""
    spec = spec_of(module)
    below = pkgutil.iter_modules(spec.submodule_search_locations) if spec else ()
    return [*_Source(module).bindings, *(found.name for found in below)]


def has(path: str) -> bool:
    """Whether there is such a name, or there may be: a module can get names from anywhere."""
    module = module_of(path)
    rest = path.removeprefix(module).strip(".").split(".")
    source = _Source(module)
    return rest[0] in source.bindings or source.is_open


def makes(path: str, kind: str) -> bool:
    """Whether it is a class below dpframe's `kind`, or a function that says that it makes one."""
    try:
        return _makes(path, kind, 0, set())
    except RecursionError:  # an expression of a thousand parts
        return False


def _makes(path: str, kind: str, depth: int, seen: Seen) -> bool:
    """`seen` are the names that were followed before: each is followed once, as `A = A | A` is."""
    parts = path.split(".")
    if parts[0] == "dpframe" and parts[-1] == kind:
        return True
    if parts[0] in sys.stdlib_module_names or depth > DEEPEST:
        return False
    for length in range(1, len(parts)):
        source = _Source(".".join(parts[:length]))
        if parts[length] in source.bindings:
            return source.leads(parts[length:], kind, depth, seen)
        paths = (".".join([star, *parts[length:]]) for star in source.stars)
        if any(_makes(each, kind, depth + 1, seen) for each in paths if _is_new(seen, each)):
            return True
    return False


def _is_new(seen: Seen, *name: str) -> bool:
    if name in seen or len(seen) >= MOST:
        return False
    seen.add(name)
    return True


def refuse_unparsable(module: str, where: str, path: str) -> None:
    spec = spec_of(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        raise UserError(
            f"{where}={path}: SyntaxError: {error.msg} ({spec.origin}, line {error.lineno})"
        ) from None
    except (RecursionError, MemoryError):  # MemoryError is the parser's word for it, too
        raise UserError(f"{where}={path}: {spec.origin} is nested too deeply to be read") from None
    except (OSError, ValueError):
        return


class _Source:
    """One module's top level, both ways of an `if` and a `try`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec = spec_of(name)
        self.bindings: dict[str, list[ast.AST]] = {}
        self.stars: list[str] = []
        tree = _parsed(self.spec)
        self.is_open = tree is None
        for node in _statements(tree.body if tree else []):
            self._read(node)
        self.is_open |= "__getattr__" in self.bindings or bool(self.stars)

    def _read(self, node: ast.stmt) -> None:
        for name, bound in _bound(node):
            self.bindings.setdefault(name, []).append(bound)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            self.stars.append(self._absolute(node))

    def leads(self, parts: list[str], kind: str, depth: int, seen: Seen) -> bool:
        return _is_new(seen, self.name, *parts) and any(
            self._leads(bound, parts, kind, depth + 1, seen)
            for bound in self.bindings.get(parts[0], [])
        )

    def _leads(self, bound: ast.AST, parts: list[str], kind: str, depth: int, seen: Seen) -> bool:
        """`parts` begin with the name that is bound here."""
        rest = parts[1:]
        if depth > DEEPEST:
            return False
        if isinstance(bound, ast.alias):
            return _makes(".".join([bound.name, *rest]), kind, depth, seen)
        if isinstance(bound, ast.ImportFrom):
            name = next(a.name for a in bound.names if (a.asname or a.name) == parts[0])
            return _makes(".".join([self._absolute(bound), name, *rest]), kind, depth, seen)
        if isinstance(bound, ast.ClassDef) and rest:
            within = [
                b for node in _statements(bound.body) for n, b in _bound(node) if n == rest[0]
            ]
            return any(self._leads(each, rest, kind, depth, seen) for each in within)
        if isinstance(bound, ast.ClassDef):
            return any(self._says(base, kind, depth, seen) for base in bound.bases)
        if isinstance(bound, ast.FunctionDef):
            return (
                not rest
                and bound.returns is not None
                and self._says(bound.returns, kind, depth, seen)
            )
        return isinstance(bound, ast.expr) and self._says(bound, kind, depth, seen, rest)

    def _says(
        self, node: ast.AST, kind: str, depth: int, seen: Seen, rest: Sequence[str] = ()
    ) -> bool:
        """An expression: a name, an annotation in quotes, `A | None`, `Base[T]`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            tree = _tree(node.value)
            only = tree.body[0] if tree and tree.body else None
            return isinstance(only, ast.Expr) and self._says(only.value, kind, depth + 1, seen)
        if isinstance(node, ast.BinOp):
            return any(self._says(side, kind, depth, seen) for side in (node.left, node.right))
        if isinstance(node, ast.Subscript):
            return self._says(node.value, kind, depth, seen)
        names = list(rest)
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        return isinstance(node, ast.Name) and self.leads([node.id, *names], kind, depth, seen)

    def _absolute(self, node: ast.ImportFrom) -> str:
        package = self.name if self.spec and self.spec.submodule_search_locations else ""
        parts = (package or self.name.rpartition(".")[0]).split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])


def _in_folder(name: str, places: list[str]) -> ModuleSpec | None:
    portions: list[str] = []
    for place in places:
        finder = pkgutil.get_importer(place)
        spec = finder.find_spec(name) if finder is not None else None  # type: ignore[call-arg]
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or ()) if spec else ()
    if not portions:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = portions
    return spec


def _parsed(spec: ModuleSpec | None) -> ast.Module | None:
    """None where there is no source: what it has can't be told."""
    if spec is None or spec.origin is None or not spec.has_location:
        return ast.Module([], []) if spec is not None and spec.submodule_search_locations else None
    try:
        text = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    except (ImportError, AttributeError, SyntaxError, OSError):
        return None
    return None if text is None else _tree(text)


def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    waiting = body[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            waiting += [inner for block in blocks for inner in block][::-1]


def _bound(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """The names that a statement gives something to, and what tells it."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, node
    elif isinstance(node, ast.Import):
        for each in node.names:
            top = each.name.split(".")[0]
            yield each.asname or top, each if each.asname else ast.alias(top)
    elif isinstance(node, ast.ImportFrom):
        for each in node.names:
            yield each.asname or each.name, node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    yield name.id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value or node.target


def current_directory_has(top: str) -> str | None:
    """The current directory, where a module of this name is in it."""
    try:
        here = os.getcwd()
    except OSError:
        return None
    return here if _in_folder(top, [here]) is not None else None
