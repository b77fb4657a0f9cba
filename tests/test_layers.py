"""The house: floors import only from below, heavy dependencies have one owner."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpframe

ROOT = Path(dpframe.__file__).parent
FLOORS = {
    "cli": 5,
    "plan": 4,
    "trainer": 3,
    "callbacks": 2,
    "task": 1,
    "strategies": 1,
}  # everything else is on floor 0
GROUND = {"data", "metrics", "seeding", "checkpoint", "loggers", "errors"}
GROUND |= {
    "files",
    "heartbeat",
    "adam",
    "lean",
    "orphans",
    "interruption",
    "seal",
    "order",
    "reading",
    "workers",
}
ENTRANCES = {"__init__", "__main__", "testing"}  # may import anything of ours
OWNERS = {
    "hydra": ["cli"],
    "omegaconf": ["cli"],
    "torch.distributed": [f"strategies.{n}" for n in ("ddp", "direct", "supervisor", "fault")],
    "tensorboard": ["loggers"],
    "rich": ["callbacks.progress"],
}
FILES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] not in ("conf", "recipes")
)
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}


def names(path: Path) -> Iterator[tuple[str, bool]]:
    """What a file imports, at its top or within functions, but not for type checkers alone; and
    whether at its top."""
    tree = ast.parse(path.read_text())
    package = ".".join(("dpframe", *path.relative_to(ROOT).parts[:-1]))
    yield from _imports(tree, package, at_top=True)


def _imports(node: ast.AST, package: str, *, at_top: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, at_top) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            if child.level:
                above = package.split(".")[: len(package.split(".")) - child.level + 1]
                module = ".".join([*above, module] if module else above)
            yield module, at_top
            yield from ((f"{module}.{alias.name}", at_top) for alias in child.names)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports(child, package, at_top=at_top and not is_function)


def room(name: str) -> str:
    """The file or folder right under dpframe/."""
    return name.removeprefix("dpframe").lstrip(".").split(".")[0]


def is_within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")


def test_every_module_has_a_floor():
    assert {room(name) for name in MODULES} - ENTRANCES == set(FLOORS) | GROUND


def test_modules_import_only_from_below():
    climbs = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name, _ in names(path)
        if is_within(name, "dpframe")
        and room(name) not in ("", room(module))
        and room(module) not in ENTRANCES
        and not is_below(room(name), room(module))
    ]
    assert climbs == []


def is_below(name: str, module: str) -> bool:
    """Rooms of one floor may see each other on floor 0 and 1; cycles are another test's."""
    here, there = FLOORS.get(module, 0), FLOORS.get(name, 0)
    return there < here or (there == here and here <= 1) or name not in set(FLOORS) | GROUND


@pytest.mark.parametrize("dependency", OWNERS)
def test_a_heavy_dependency_has_one_owner(dependency):
    users = [
        module
        for module, path in MODULES.items()
        if any(is_within(name, dependency) for name, _ in names(path))
    ]
    assert users, f"nothing uses {dependency}: is it spelt as the code spells it?"
    assert [u for u in users if not any(is_within(u, o) for o in OWNERS[dependency])] == []


def test_there_is_no_cycle_of_imports_at_the_top_of_files():
    graph = {module: _targets(path) - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in graph[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def _targets(path: Path) -> set[str]:
    found = set()
    above = ".".join(path.relative_to(ROOT).parts[:-1])  # `from here import sibling` names it too
    for name, at_top in names(path):
        name = name.removeprefix("dpframe.")
        if at_top and name in MODULES:
            found.add(name)
        elif at_top and f"{name}.__init__" in MODULES and not is_within(above, name):
            found.add(f"{name}.__init__")
    return found


def test_the_trainer_never_asks_for_the_type_of_a_strategy():
    asked = [
        f"{path.name}, line {node.lineno}"
        for path in (ROOT / "trainer").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "issubclass")
        and "strategy" in ast.unparse(node.args[0]).lower()
    ]
    assert asked == []
    known = {name for path in (ROOT / "trainer").glob("*.py") for name, _ in names(path)}
    assert {n for n in known if is_within(n, "dpframe.strategies")} <= {
        "dpframe.strategies.base",
        "dpframe.strategies.base.Strategy",
        "dpframe.strategies.auto",  # which one it is, where a program names none
        "dpframe.strategies.auto.auto",
    }


def test_every_module_says_first_what_it_is():
    silent = [
        module
        for module, path in MODULES.items()
        if not (ast.get_docstring(ast.parse(path.read_text())) or "")
        .split("\n")[0]
        .endswith((".", ":"))
    ]
    assert silent == []


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


@pytest.mark.parametrize("module", ["dpframe", "dpframe.trainer.settings", "dpframe.cli.main"])
def test_importing_it_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
