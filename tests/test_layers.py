"""The house: floors import only from below, heavy dependencies have one owner, doors are public."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dpframe

ROOT = Path(dpframe.__file__).parent
FLOORS = {
    "cli": 6,
    "plugins": 6,
    "modes": 5,
    "config": 4,
    "trainer": 2,
    "callbacks": 3,
    "task": 1,
    "named_metrics": 1,
    "supervised": 1,
    "rows": 1,
    "layers": 1,
    "strategies": 1,
    "checkpoint": 1,
}  # everything else is on floor 0
GROUND = {"data", "devices", "errors", "launch", "loggers", "metrics", "seeding", "util", "values"}
GROUND |= {
    "adapter",
    "composite",
    "lightning_names",
    "parameters",
    "scheduler_lengths",
    "schedules",
    "sums",
}
ENTRANCES = {
    "__init__",
    "__main__",
    "lightning",
    "plugin",
    "testing",
}  # may import anything of ours
OWNERS = {
    "hydra": ["cli", "config"],
    "omegaconf": ["cli", "config"],
    "torch.distributed": [
        "checkpoint.sharded",
        "launch.rank_errors",
        "launch.local",
        "launch.peers",
        "plugins.ray.strategy",
        *(f"strategies.{n}" for n in ("absent", "ddp", "fsdp", "group", "processes", "sharding")),
    ],
    "tensorboard": ["loggers"],
    "torch.utils.tensorboard": ["loggers.tensorboard"],
    "wandb": ["loggers.wandb"],
    "mlflow": ["loggers.mlflow"],
    "ray": ["plugins.ray.strategy"],
    "rich": ["callbacks.screen"],
}
FILES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] not in ("conf", "recipes")
)
# The one import that climbs, within a function: a program's Trainer shows how far it is.
CLIMBS = {ROOT / "trainer" / "loop.py": "dpframe.callbacks.display"}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def names(path: Path, *, hints: bool = False) -> list[tuple[str, bool]]:
    """What a file imports, at its top or within functions, and whether at its top; with `hints`
    also what it imports for type checkers alone. What is in CLIMBS is left out."""
    tree = tree_of(path)
    package = ".".join(("dpframe", *path.relative_to(ROOT).parts[:-1]))
    found = _imports(tree, package, at_top=True, hints=hints)
    climbs = CLIMBS.get(path, "none")
    return [(name, at_top) for name, at_top in found if at_top or not is_within(name, climbs)]


def _imports(
    node: ast.AST, package: str, *, at_top: bool, hints: bool
) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        is_hint = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if is_hint and not hints:
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
        yield from _imports(child, package, at_top=at_top and not is_function, hints=hints)


def room(name: str) -> str:
    """The file or folder right under dpframe/."""
    return name.removeprefix("dpframe").lstrip(".").split(".")[0]


def is_within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")


@pytest.mark.whole
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
@pytest.mark.whole
def test_a_heavy_dependency_has_one_owner(dependency):
    users = [
        module
        for module, path in MODULES.items()
        if any(is_within(name, dependency) for name, _ in names(path))
    ]
    assert users, f"nothing uses {dependency}: is it spelt as the code spells it?"
    assert [u for u in users if not any(is_within(u, o) for o in OWNERS[dependency])] == []


def test_there_is_no_cycle_of_imports_nor_of_type_hints():
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
    for name, _ in names(path, hints=True):
        name = name.removeprefix("dpframe.")
        if path.name == "callback.py" and is_within(name, "trainer"):
            continue  # the one hint that points upwards: a callback's hooks take the Trainer
        if name in MODULES:
            found.add(name)
        elif f"{name}.__init__" in MODULES and not is_within(above, name):
            found.add(f"{name}.__init__")
    return found


# What has no door in torch.accelerator and torch.get_device_module: the reason, by the module.
MAY_NAME_CUDA: dict[str, str] = {}


def test_devices_are_asked_by_doors_that_all_kinds_have():
    named = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.Attribute, ast.Import, ast.ImportFrom))
        and re.search(r"\btorch\.(cuda|mps|xpu)\b|\bis_cuda\b", ast.unparse(node))
    }
    assert named == set(MAY_NAME_CUDA)


# Whether a class overrides what it inherits is asked here alone.
ASKS_WHAT_IS_OVERRIDDEN = {
    "data.source": "a DataLoader that reads in a way of its own can not be read by ours",
    "data.module": "DataModule.has_own says which of its methods a kind of data has written",
    "data.reading": "a TensorDataset with a __getitem__ of its own is not read as tensors",
    "task": "Task.has_own says which of its steps a task has written",
    "plugins.lightning.module": "what a module overrides of Lightning's is called, or refused",
}


@pytest.mark.whole
def test_nobody_asks_for_the_type_of_a_strategy_nor_what_a_class_overrides():
    asked = {
        (module, f"{module}, line {node.lineno}: {ast.unparse(node)}")
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if asks_for_type(node)
    }
    listed = {module for module, _ in asked} & set(ASKS_WHAT_IS_OVERRIDDEN)
    assert sorted(text for module, text in asked if module not in listed) == []
    assert listed == set(ASKS_WHAT_IS_OVERRIDDEN)


def asks_for_type(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
        subject, kinds = map(ast.unparse, node.args)
        return "strategy" in subject.lower() and kinds != "str"  # text is its name
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "type":
        return "strategy" in ast.unparse(node).lower()
    if not isinstance(node, ast.Compare):
        return False
    sides = [overridable(side) for side in (node.left, *node.comparators)]
    return any(left and left == right for left, right in zip(sides, sides[1:], strict=False))


def overridable(side: ast.expr) -> str:
    """The `step` of `type(x).step`, `Kind.step`, `getattr(type(x), "step")` or `getattr(x, s)`."""
    if isinstance(side, ast.Attribute):
        owner = ast.unparse(side.value)
        is_class = owner.startswith("type(") or owner.rpartition(".")[2][:1].isupper()
        return side.attr if is_class or owner in ("kind", "cls") else ""
    if isinstance(side, ast.Call) and ast.unparse(side.func) == "getattr":
        return ast.unparse(side.args[1])
    return ""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("type(strategy).reduce is Strategy.reduce", True),
        ("type(self.strategy).reduce is not dpframe.Strategy.reduce", True),
        ("getattr(type(callback), name) is not getattr(Callback, name)", True),
        ("isinstance(trainer.strategy, DDP)", True),
        ("type(strategy) is DDP", True),
        ("strategy.device.type == 'cuda'", False),
        ("strategy.dtype == precision.dtype", False),
        ("isinstance(strategy, str)", False),
    ],
)
def test_each_way_to_ask_for_a_type_is_seen(text, expected):
    assert any(map(asks_for_type, ast.walk(ast.parse(text)))) is expected


def test_the_trainer_knows_no_strategy_but_the_simplest():
    known = {name for path in (ROOT / "trainer").glob("*.py") for name, _ in names(path)}
    assert {n for n in known if is_within(n, "dpframe.strategies")} <= {
        "dpframe.strategies",
        "dpframe.strategies.by_name",  # as a program names it
        "dpframe.strategies.base",
        "dpframe.strategies.base.Strategy",
        "dpframe.strategies.data_parallel",  # by which the share check computes shares that gather
        "dpframe.strategies.data_parallel.DataParallel",
        "dpframe.strategies.data_parallel.Replicas",
        "dpframe.strategies.collectives",  # what all of them have
        "dpframe.strategies.collectives.Collectives",
        "dpframe.strategies.devices",  # no strategy: what there is on this machine
        "dpframe.strategies.devices.use_threads",
        "dpframe.strategies.single",  # which one it is, where a program names none
        "dpframe.strategies.single.auto",
    }


def test_no_module_of_the_trainer_but_the_loop_and_the_hooks_knows_the_trainer():
    knows = [
        path.name
        for path in sorted((ROOT / "trainer").glob("*.py"))
        if path.name not in ("__init__.py", "loop.py", "callback.py", "hooks.py")
        and {"Trainer", "trainer"} & {n.id for n in _names_in(path)}
    ]
    assert knows == []


def _names_in(path: Path) -> Iterator[ast.Name]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name):
            yield node
        elif isinstance(node, ast.arg):
            yield ast.Name(node.arg)
            if isinstance(node.annotation, ast.Constant):
                yield ast.Name(str(node.annotation.value))


def test_every_module_says_first_what_it_is():
    silent = [name for name, path in MODULES.items() if not first_line(path).endswith((".", ":"))]
    assert silent == []


def first_line(path: Path) -> str:
    return (ast.get_docstring(tree_of(path)) or "").split("\n")[0]


def test_importing_what_reads_a_command_imports_no_torch():
    code = "import sys, dpframe, dpframe.trainer.settings, dpframe.cli.main; "
    command = [sys.executable, "-c", f"{code}sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command).returncode == 0


# ---- public doors

# A name that another library does not document: the reason that dpframe uses it. At most eight.
FOR_SPEED = {  # which docs/performance.md tells
    "torch._dynamo": "keeps a second of imports out of a start",
    "__dynamo_disable": "as torch._dynamo",
    "_opt_called": "tells a scheduler that the optimizer stepped, which no wrapper of torch's does",
    "_step_supports_amp_scaling": "has GradScaler not wait for the GPU; fused=True sets it, too",
}
PRIVATE = FOR_SPEED | {
    "_pg_registry": "keeps a process group, and its threads, to the interpreter's end",
    "_version": "tells that a tensor was written to, without a copy of it",
    "_orig_mod": "is in the names of what a compiled module has saved",
}
DOCUMENTED = {"_exit", "_asdict", "_fields", "_make", "_replace"}  # of os, and of named tuples
WORDS = {"_sitebuiltins.py", "_batch_end", "_skip"}  # a file of Python's; the ends of names
SETTINGS = {"sys.stdout", "sys.stderr", "tempfile.tempdir", "torch.backends.cudnn.benchmark"}
SETTINGS |= {"sys.modules['__main__']"}  # in the interpreter of a program: the program's own


def test_each_private_name_of_another_library_is_listed_with_its_reason():
    """A row goes with its last use. A name that is not here needs another, public way."""
    found = {(name, module) for module, path in MODULES.items() for name in private_names(path)}
    listed = {pair for pair in found if pair[0] in PRIVATE}
    assert len(PRIVATE) <= 8
    assert sorted(found - listed) == []
    assert sorted(set(PRIVATE) - {name for name, _ in listed}) == [], "nothing uses it any more"


def test_the_private_names_that_are_for_speed_are_told():
    house = ROOT.parent
    page = (house / "docs" / "performance.md").read_text()
    told = page.partition("## What makes it fast")[2].partition("\n| what |")[0]
    assert set(re.findall(r"`((?:torch\.)?_\w+)`", told)) == set(FOR_SPEED)
    assert len(FOR_SPEED) == 4 and "[four private names]" in (house / "README.md").read_text()


def private_names(path: Path) -> Iterator[str]:
    """What a file uses of others that begins with an underscore, what it changes in their modules,
    and ctypes."""
    tree = tree_of(path)
    ours = set(defined(tree))
    others = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if not is_within(alias.name, "dpframe")
    }
    libraries = sys.stdlib_module_names | {owner.split(".")[0] for owner in OWNERS}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            if node.attr not in (
                names_of_ours() if whole.startswith(("self.", "super()")) else ours
            ):
                is_chain = whole.replace(".", "").isidentifier() and whole.split(".")[0] in others
                names = [whole if is_chain else node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_path = "." in node.value and node.value.split(".")[0] in libraries
            if (is_path or node.value.isidentifier()) and node.value not in names_of_ours() | WORDS:
                names = [node.value]
        else:
            yield from changes(node, others)
        yield from filter(None, map(private_part, names))


def private_part(name: str) -> str | None:
    """A dotted name up to its first private part, if it has one and is not dpframe's."""
    parts = name.split(".")
    private = [place for place, part in enumerate(parts) if is_private(part)]
    if is_within(name, "dpframe") or not (private or parts[0] == "ctypes"):
        return None
    return ".".join(parts[: private[0] + 1]) if private and parts[0] != "ctypes" else "ctypes"


def changes(node: ast.AST, others: set[str]) -> Iterator[str]:
    """`module.x = ...`, `setattr(module, ...)` and `vars(module)` of other libraries' modules."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "vars"):
        owner = ast.unparse(node.args[0])
        if owner in others - {"sys"}:
            yield f"{ast.unparse(node.func)}({owner})"
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)) else []:
        name = ast.unparse(target)
        if isinstance(target, (ast.Attribute, ast.Subscript)) and name not in SETTINGS:
            is_changed = name.startswith("sys.modules[") or isinstance(target, ast.Attribute)
            if is_changed and name.split(".")[0] in others and not is_private(name.split(".")[-1]):
                yield name


def is_private(name: str) -> bool:
    """But for protocols as `__init__`, and Hydra's keys as `_target_`."""
    return name.startswith("_") and not name.endswith("_") and name not in DOCUMENTED


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


@cache
def names_of_ours() -> frozenset[str]:
    return frozenset(name for path in FILES for name in defined(tree_of(path)))


def test_hydra_imports_nothing_of_dpframe_with_the_launcher_of_sweeps():
    """It does so at every start."""
    path = ROOT.parent / "hydra_plugins" / "dpframe_launcher" / "__init__.py"
    imported = _imports(tree_of(path), "hydra_plugins.dpframe_launcher", at_top=True, hints=True)
    assert {name.split(".")[0] for name, _ in imported} == {"collections", "typing", "hydra"}


# ---- sizes

FILE, CLASS, METHODS = 450, 350, 25  # lines, lines, methods and properties
LARGER = {  # a file or a class, and why it may be so
    "trainer.loop": "the loop and the four modes, which a reader follows from top to bottom",
    "trainer.loop.Trainer": "as its file",
}


def test_files_and_classes_stay_as_large_as_a_reader_keeps_in_mind():
    large = {name for name, path in MODULES.items() if len(path.read_text().splitlines()) > FILE}
    large |= {
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and (len(methods_of(node)) > METHODS or node.end_lineno - node.lineno >= CLASS)
    }
    assert large == set(LARGER)


def methods_of(node: ast.ClassDef) -> list[str]:
    """Without those that Python calls."""
    named = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
    return [name for name in named if not name.startswith("__")]


# ---- English

RIDDLES = r"\b(anew|lest|hitherto|thereof|mend|mends|mended|of ours)\b"


def test_what_is_written_uses_the_words_of_the_field():
    house = ROOT.parent
    folders = ("dpframe", "recipes", "conf", "docs", "examples", "benchmarks")
    paths = [path for folder in folders for path in (house / folder).rglob("*.*")]
    paths += [house / "README.md", house / "CONTRIBUTING.md"]
    riddles = [
        f"{path.relative_to(house)}, line {number}: {line.strip()}"
        for path in paths
        if path.suffix in (".py", ".md", ".yaml")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(RIDDLES, line, re.I)
    ]
    assert riddles == []


def test_a_public_class_says_in_a_sentence_what_it_is():
    """Of recipes the docstring of the file does."""
    silent = [
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_" and not ast.get_docstring(node)
    ]
    assert silent == []
