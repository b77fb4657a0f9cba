"""What extends dpframe imports it by its public packages and `dpframe.plugin` alone."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from command import ROOT, environment
from test_contributing import PROJECT

from dpframe.config import modes, plugins
from dpframe.trainer import settings

pytestmark = pytest.mark.whole
PUBLIC = [f"dpframe{name}" for name in ("", ".callbacks", ".loggers", ".strategies", ".testing")]
PUBLIC += ["dpframe.plugin"]
PLUGINS = {
    folder.name: folder
    for folder in ROOT.glob("dpframe/plugins/*")
    if (folder / "__init__.py").is_file()
}
BRINGS = {"huggingface", "lab", "lightning", "logical", "ray", "verify"}
# What one plugin alone needs of the core, and why. Two that need the same ask for a name in
# `dpframe.plugin`.
FRIENDS = {
    "huggingface": {},
    "verify": {
        "dpframe.errors": "OutOfMemory: a course that does not fit is no failed check",
        "dpframe.metrics": "Means: the reference's are those of the loop",
        "dpframe.layers.exact": "the reference has the layers of a run",
        "dpframe.trainer.checks.own": "which layers are each replica's own",
        "dpframe.strategies.base": "NO_GATHER: a refusal that a check expects",
        "dpframe.task": "TaskContext: the reference runs a task without a Trainer",
        "dpframe.trainer.compute": "dynamo: the reference imports as little as the loop",
        "dpframe.trainer.checks.draws": "NotCompared: what the share check could not compare",
        "dpframe.trainer.evaluation": "restore_modes: as around the loop's validation",
        "dpframe.trainer.checks.few_rows": "picked: the rows that the share check tries",
        "dpframe.trainer.optim.modes": "Modes: the reference validates at the weights of a run's",
        "dpframe.trainer.optim.schedule": "StepSchedule: the reference steps it by itself",
        "dpframe.trainer.optim.optimizers": "optimizers_of: as the loop makes them",
        "dpframe.trainer.outputs": "what a step returns is read as the loop reads it",
        "dpframe.trainer.compute.placement": "with_default_dtype: the reference's precision",
        "dpframe.trainer.predictions": "by_rows, join: the reference's predictions",
        "dpframe.trainer.checks.put_back": "put_back: what a tried step leaves behind",
        "dpframe.trainer.step": "EvalStep: a step of the task without a replica",
        "dpframe.trainer.checks.trial": "Trial: the share check's, of a recipe to judge",
        "dpframe.trainer.optim.step": "of_turn: settings of one of several optimizers",
    },
    "lab": {
        "dpframe": "__version__: what mode=doctor tells",
        "dpframe.util": "files: an export is written as a checkpoint is",
        "dpframe.devices.accelerator": "cores: what mode=doctor tells",
        "dpframe.config.build": "check_targets: of each strategy to compare, before any trains",
        "dpframe.config.loader": "ConfigLoader: composes the job of each strategy to compare",
        "dpframe.config.overrides": "key_of, value_of: what was typed",
        "dpframe.data.module": "mapped: the inputs of an exported program",
        "dpframe.modes.measure": "devices_of, lasting_bytes: how much fits",
        "dpframe.strategies.devices": "what mode=doctor tells of this machine",
        "dpframe.strategies.processes": "backends: what mode=doctor tells",
        "dpframe.values": "ABOVE_0: the range of a setting",
        "dpframe.trainer.feed": "evaluated: a batch to export by",
        "dpframe.trainer.compute.placement": "process_settings_restored: between trainings",
    },
    "lightning": {
        "dpframe.devices.accelerator": "has_float64: where weights of rows are summed",
        "dpframe.data.preparation": "run_once: prepare_data of theirs",
        "dpframe.metrics": "described: what is wrong with a number that they log",
        "dpframe.trainer.resume.attributes": "what a checkpoint keeps of a module of theirs",
        "dpframe.trainer.checks.in_place": "InPlace: gradients that their hooks change",
        "dpframe.trainer.optim.optimizers": "kind_of: what their configure_optimizers returned",
    },
    "logical": {
        "dpframe.parameters": "has_sparse: gradients that can't be added up",
        "dpframe.strategies.base": "FREEZE_ALIKE: what ranks that freeze other weights do",
        "dpframe.strategies.devices": "model: devices of other kinds round otherwise",
        "dpframe.trainer.settings": "BY_SPEED, CUDA_GRAPH_MODES: what settings mean",
    },
    "ray": {
        "dpframe.checkpoint": "seal: the newest checkpoint that is whole",
        "dpframe.errors": "Interrupted: a signal to the driver",
        "dpframe.launch.rank_errors": "a worker's error is told as a rank's",
        "dpframe.launch.rank": "a worker does what a rank does",
        "dpframe.launch.signals": "SIGNALS, Interruption: of the wait for workers",
        "dpframe.strategies.devices": "announce: a rehearsal is told",
        "dpframe.strategies.processes": "backend_of: of the workers' devices",
    },
}


def imported(code: str) -> Iterator[tuple[str, str]]:
    """(module, name) of what comes from dpframe."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and re.match(r"dpframe\b", node.module or ""):
            for each in node.names:
                yield node.module or "", each.name
        elif isinstance(node, ast.Import):
            for each in node.names:
                if re.match(r"dpframe\b", each.name):
                    yield each.name, ""


def by_a_back_door(code: str) -> set[str]:
    """What is imported of neither a public package nor the recipes."""
    names = {module: {*import_module(module).__all__, ""} for module in PUBLIC}
    return {
        f"{module}: {name}"
        for module, name in imported(code)
        if name not in names.get(module, ()) and not module.startswith("dpframe.recipes.")
    }


def guides() -> Iterator[tuple[str, str]]:
    """Documents' programs, the examples, the recipes, and what `dpframe new` writes."""
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            yield page.name, code
    for pattern in ("examples/**/*.py", "recipes/*.py", "dpframe/cli/project/**/*.py.txt"):
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), path.read_text().replace("NAME", "name")


def test_documents_examples_recipes_and_new_projects_come_by_the_front_door():
    found = {}
    for name, code in guides():
        try:
            if back := by_a_back_door(code):
                found[name] = back
        except SyntaxError:  # a part of a program
            continue
    assert found == {}
    assert len(list(guides())) > 60


@pytest.mark.parametrize("plugin", sorted(BRINGS))
def test_a_plugin_comes_by_the_front_door_or_as_a_friend_with_a_reason(plugin):
    code = [path.read_text() for path in sorted(PLUGINS[plugin].rglob("*.py"))]
    own = f"dpframe.plugins.{plugin}"
    back = {each.split(":")[0] for text in code for each in by_a_back_door(text)}
    assert {module for module in back if not f"{module}.".startswith(f"{own}.")} == FRIENDS[
        plugin
    ].keys()


def test_each_entry_point_of_dpframes_own_is_known_where_it_is_missing():
    points = PROJECT["project"]["entry-points"]
    assert points["dpframe.modes"].keys() == modes.UNINSTALLED.keys() - {"plan"}
    options = {
        f"{path.parent.name}={path.stem}"
        for folder in points["dpframe.plugins"].values()
        for path in (ROOT / folder.replace(".", "/")).glob("*/*.yaml")
    }
    assert options == {*plugins.OPTIONS}
    assert points["dpframe.settings"].keys() == {*settings.OF_PLUGINS}


def test_nothing_of_the_core_imports_a_plugin():
    """But the public names that stand for one, when they are used."""
    doors = {"lightning.py", "testing.py", "strategies/__init__.py"}
    for path in sorted((ROOT / "dpframe").rglob("*.py")):
        name = str(path.relative_to(ROOT / "dpframe"))
        if not name.startswith("plugins/") and name not in doors:
            assert not [
                m for m, _ in imported(path.read_text()) if m.startswith("dpframe.plugins")
            ], name


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of this one but the plugins, beside links to the other packages."""
    folder = tmp_path_factory.mktemp("core")
    no_plugins = shutil.ignore_patterns("plugins", "__pycache__")
    for name in ("dpframe", "conf", "recipes", "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=no_plugins)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "site").mkdir()
    for packages in {path for path in map(Path, sys.path) if path.name == "site-packages"}:
        for each in packages.iterdir():
            link = folder / "site" / each.name
            if not re.match(r"(_*editable_*)?dpframe|.*\.pth$", each.name) and not link.exists():
                link.symlink_to(each)
    return folder


def without_plugins(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a module where no installation of dpframe is found, nor its entry points."""
    path = os.pathsep.join([str(core), str(core / "site")])
    return subprocess.run(
        [sys.executable, "-S", "-m", *words],
        cwd=core,
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
    )


def test_the_command_does_without_the_plugins_and_says_which_is_missing(core):
    page = without_plugins(core, "dpframe", "--help").stdout
    assert re.findall(r"^  mode=(\w+)", page, re.M) == ["fit", "validate", "test", "predict"]
    assert "mode=verify" not in page and "mode=test checkpoint=best" in page
    assert "recipe=boston" in page and "recipe=lightning" not in page and "strategy=ray" not in page
    for word in ("mode=verify", "recipe=lightning", "strategy=ray", "trainer.logical_replicas=2"):
        refused = without_plugins(core, "dpframe", "recipe=boston", word)
        assert refused.returncode == 2
        assert refused.stderr == (
            f"dpframe: {word.removesuffix('=2')} is not installed; it is one of dpframe's plugins, "
            "which this installation lacks; install dpframe again\n"
        )


def test_the_cores_own_tests_pass_without_the_plugins(core):
    """Some of them: all take as long as with the plugins."""
    files = [f"tests/test_{name}.py" for name in ("trainer", "hooks", "data")]
    ran = without_plugins(core, "pytest", "-q", "-p", "no:cacheprovider", "-n0", *files)
    assert ran.returncode == 0, ran.stdout[-2000:]
