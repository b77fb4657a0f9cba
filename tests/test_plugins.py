"""New parts of a run: from the user's own folder, and from installed packages."""

import os
import re
from pathlib import Path
from textwrap import dedent

import forked
import pytest
from attempted import Attempt
from command import CONFS, ROOT, attempts, cold_attempts, dpframe
from command import write as write_as_it_is

QUICK = ("trainer.max_epochs=1", "logger=none", "callbacks=none")
PARTS = """
import dpframe
import torch
from torch.utils.data import TensorDataset

class Speaking(dpframe.Strategy):
    def __init__(self, gpus=None, accelerator="auto", hour: int = 22) -> None:
        super().__init__(gpus, accelerator)
        self.hour = hour

    def setup(self) -> None:
        super().setup()
        print(f"{__name__} at {self.hour}")

class Lines(dpframe.Task):
    def training_step(self, batch):
        x, y = batch
        return {"loss": (self.net(x) - y).square().mean()}

class LinesData(dpframe.DataModule):
    def train_dataset(self):
        x = torch.linspace(-1, 1, 60).reshape(-1, 1)
        return TensorDataset(x, 3 * x)

class Shout(dpframe.Callback):
    def __init__(self, word: str) -> None:
        self.word = word

    def on_fit_end(self, trainer) -> None:
        print(f"{self.word} after {trainer.global_step} steps")

class Paper(dpframe.Logger):
    def log(self, scalars, *, step) -> None:
        print(f"paper has {'train/loss' in scalars} at {step}")
"""


def strategy(module: str) -> str:
    return f"# Says so.\n_target_: {module}.Speaking\nhour: 22\n"


def options(module: str) -> dict[str, str]:
    recipe = f"""
    # @package _global_
    # A line.
    task:
      _target_: {module}.Lines
      net: {{_target_: torch.nn.Linear, in_features: 1, out_features: 1}}
      optimizer: {{_target_: torch.optim.SGD, _partial_: true, lr: 0.1}}
    data: {{_target_: {module}.LinesData, batch_size: 20}}
    trainer: {{max_epochs: 2}}
    """
    shout = f"defaults: [default]\nshout: {{_target_: {module}.Shout, word: done}}\n"
    return {
        "recipe/lines.yaml": recipe,
        "strategy/nightly.yaml": strategy(module),
        "callbacks/shout.yaml": shout,
        "logger/paper.yaml": f"paper: {{_target_: {module}.Paper}}\n",
    }


def write(folder: Path, files: dict[str, str]) -> None:
    write_as_it_is(folder, {name: dedent(text).lstrip() for name, text in files.items()})


def install(site: Path, package: str, files: dict[str, str], *, version: str = "1.0") -> None:
    """What pip leaves behind: the package, and its metadata beside it."""
    notes = {
        "METADATA": f"Metadata-Version: 2.1\nName: dpframe-{package}\nVersion: {version}\n",
        "entry_points.txt": f"[dpframe.plugins]\nanything = {package}.conf\n",
    }
    write(site, {f"{package}/__init__.py": "", **{f"{package}/{n}": t for n, t in files.items()}})
    write(site, {f"dpframe_{package}-{version}.dist-info/{n}": t for n, t in notes.items()})


MOON = {f"conf/{name}": text for name, text in options("moon.parts").items()}
MOON["conf/strategy/both.yaml"] = strategy("moon.parts")
MINE = ("--config-dir", "mine")
JOB = ("recipe=boston", "-c", "job")
ALL = ("recipe=lines", "strategy=nightly", "callbacks=shout", "logger=paper")
NIGHTLY = ("recipe=boston", "strategy=nightly", *QUICK)
COMMANDS = {
    "help": ("-h",),
    "mine": (*MINE, *ALL, "strategy.hour=7"),
    "installed": (*ALL, "strategy.hour=3"),
    "text": (*MINE, *NIGHTLY, "strategy.hour=late"),
    "fraction": (*MINE, *NIGHTLY, "strategy.hour=7.5"),
    "misspelt": (*MINE, *NIGHTLY, "strategy.hours=7"),
    "unknown": (*MINE, *NIGHTLY, "+strategy.minute=7"),
    "fails": ("recipe=boston", "strategy=dusk", *QUICK),
    "both": (*JOB, "strategy=both"),
    "ours": (*JOB, "strategy=cpu"),
    "nearer": (*MINE, *JOB, "strategy=both"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the command runs, with a folder of configs and a module in it."""
    folder = tmp_path_factory.mktemp("here")
    own = options("mine.parts") | {"strategy/both.yaml": strategy("mine.parts")}
    write(folder, {"mine/parts.py": PARTS, **{f"mine/{name}": text for name, text in own.items()}})
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder of installed packages, whose own name is an awkward one."""
    site = tmp_path_factory.mktemp("site") / "site, packages=1"
    install(site, "moon", {"parts.py": PARTS, **MOON})
    theirs = {f"conf/strategy/{name}.yaml": strategy("moon2.light") for name in ("both", "cpu")}
    install(site, "moon2", theirs, version="2.1")
    dusk = {"core.py": "import os\n\nimport wishful_driver\n"}
    install(site, "dusk", dusk | {"conf/strategy/dusk.yaml": strategy("dusk.core")}, version="0.3")
    # One that is installed without its folder, and metadata that is broken.
    write(site, {"noon-1.0.dist-info/entry_points.txt": "[dpframe.plugins]\na = noon.conf\n"})
    write(site, {"noon-1.0.dist-info/METADATA": "Name: noon\nVersion: 1.0\n"})
    write(site, {"odd-1.0.dist-info/entry_points.txt": "[dpframe.plugins]\nno equals sign\n"})
    write(site, {"odd-1.0.dist-info/METADATA": "Name: odd\nVersion: 1.0\n"})
    write(site, {"bare-1.0.dist-info/entry_points.txt": "[dpframe.plugins]\na = moon.conf\n"})
    return site


@pytest.fixture(scope="module")
def done(folder, site) -> dict[str, Attempt]:
    """All of COMMANDS, in one process where what is installed in `site` can be imported."""
    path = f"{ROOT}{os.pathsep}{site}"
    lines = [list(line) for line in COMMANDS.values()]
    return dict(zip(COMMANDS, attempts(lines, folder, PYTHONPATH=path), strict=True))


def output(attempt: Attempt) -> str:
    assert attempt.code == 0, attempt.err
    return attempt.out


def refusal(attempt: Attempt) -> str:
    """One line, and no more."""
    assert (attempt.code, attempt.err.count("\n")) == (2, 1), attempt.err
    return attempt.err.removeprefix("dpframe: ").rstrip()


@pytest.mark.parametrize(
    ("name", "module", "hour"), [("mine", "mine", 7), ("installed", "moon", 3)]
)
def test_a_folder_or_an_installed_package_brings_its_parts(done, name, module, hour):
    """A class and a YAML are a strategy; recipes, callbacks and loggers likewise."""
    told = output(done[name])
    assert f"{module}.parts at {hour}" in told
    assert "done after 6 steps" in told and "paper has True at 6" in told


def test_the_settings_of_a_strategy_are_typed(done):
    refused = {
        "text": r"strategy.hour=late is text; use a whole number",
        "fraction": r"strategy.hour=7.5 is a fraction; use a whole number",
        "misspelt": r"strategy.hours: Speaking takes no such argument; did you mean hour\?",
        "unknown": r"strategy.minute: Speaking takes no such argument; .+",
    }
    for name, line in refused.items():
        assert re.fullmatch(line, refusal(done[name]))


def test_its_parts_are_in_the_ranks(folder, site):
    words = ("recipe=lines", "strategy=ddp", "trainer.gpus=2", "callbacks=shout", "logger=paper")
    ran = forked.run(words, folder, PYTHONPATH=str(site))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("done after 6 steps") == 2
    assert ran.stdout.count("paper has True at 6") == 1


def test_the_whole_command_line_knows_its_options_and_imports_nothing_of_it(tmp_path):
    install(tmp_path / "site", "moon", {"parts.py": PARTS, **MOON})
    (tmp_path / "site/moon/__init__.py").write_text("raise SystemExit('imported')\n")
    path = f"{ROOT}{os.pathsep}{tmp_path / 'site'}"
    nightly = ["recipe=lines", "strategy=nightly"]
    lines = [["-h"], [*nightly, "-c", "job"], [nightly[0], "strategy=nightli"], nightly[1:]]
    cold, heavy = cold_attempts(lines, tmp_path, PYTHONPATH=path)
    page, job, misspelt, without = cold
    assert heavy == []
    assert "strategy=nightly        Says so. (dpframe-moon 1.0)\n" in page.out
    assert re.search(r"recipe=lines +A line\. \(dpframe-moon 1\.0\)\n", page.out)
    assert re.search(r"callbacks=shout +\(dpframe-moon 1.0\)\n", page.out)
    assert "strategy=cpu            One process on the CPU.\n" in page.out
    assert "_target_: moon.parts.Speaking" in output(job)
    near = "did you mean nightly? (there is: auto, both, cpu, data_parallel, ddp, fsdp, nightly,"
    assert near in refusal(misspelt)
    recipes = sorted(
        ["lines", *(path.stem for conf in CONFS for path in conf.glob("recipe/*.yaml"))]
    )
    assert ", ".join(recipes) in refusal(without)
    given = {"PYTHONPATH": path, "COMP_LINE": "dpframe recipe=lines strategy=ni"}
    query = dpframe("-sc", "query=bash", cwd=tmp_path, **given)
    assert query.stdout.split() == ["strategy=nightly"]
    begun = [["recipe=boston", *QUICK], list(NIGHTLY)]
    other, imported = attempts(begun, tmp_path, PYTHONPATH=path)
    assert "imported" not in output(other) and "imported" in imported.err


def test_a_package_that_fails_is_named_only_when_it_is_asked_for(done, site):
    page = output(done["help"])
    assert "strategy=dusk           Says so. (dpframe-dusk 0.3)" in page
    assert "(dpframe-moon 1.0)" in page and "noon" not in page
    assert refusal(done["fails"]) == (
        "strategy._target_=dusk.core.Speaking of dpframe-dusk 0.3: ModuleNotFoundError: "
        f"No module named 'wishful_driver' ({site}/dusk/core.py, line 3)"
    )


def test_a_name_in_two_packages_is_refused_and_what_is_nearer_wins(done, site):
    page = output(done["help"])
    assert "(dpframe-moon 1.0, dpframe-moon2 2.1)" in page and "(dpframe-moon2 2.1)" not in page
    assert refusal(done["both"]) == (
        "strategy=both is in dpframe-moon 1.0 and dpframe-moon2 2.1; uninstall one, or copy "
        f"the file that you mean, e.g. {site}/moon/conf/strategy/both.yaml, into your "
        "--config-dir"
    )
    assert "moon2" not in output(done["ours"])
    assert "_target_: mine.parts.Speaking" in output(done["nearer"])


def test_what_lies_in_the_current_directory_was_not_installed(tmp_path):
    """Else it would bring options, and vouch for torch as a whole."""
    install(tmp_path, "moon", {"conf/strategy/moonlight.yaml": strategy("moon.light")})
    write(tmp_path, {"t-1.0.dist-info/entry_points.txt": "[dpframe.plugins]\na = torch.conf\n"})
    write(tmp_path, {"t-1.0.dist-info/METADATA": "Name: t\nVersion: 1.0\n"})
    for path in ("", f"{ROOT}:{tmp_path}", f"{ROOT}::{tmp_path}"):
        shown = dpframe("--help", cwd=tmp_path, PYTHONPATH=path)
        assert shown.returncode == 0 and "moonlight" not in shown.stdout


PROJECT = """
[project]
name = "dpframe_moon"
version = "0.9"
[project.entry-points."dpframe.plugins"]
anything = "moon.conf"
"""


def test_the_project_in_the_current_directory_brings_its_options_where_it_is_not_installed(
    tmp_path, site
):
    own = options("moon.parts") | {"strategy/cpu.yaml": strategy("moon.parts")}
    files = {f"moon/conf/{name}": text for name, text in own.items()}
    write(tmp_path, {"pyproject.toml": PROJECT, "moon/parts.py": PARTS, **files})
    trained, page, ours = attempts([[*ALL], ["-h"], [*JOB, "strategy=cpu"]], tmp_path)
    assert "moon.parts at 22" in output(trained)
    assert "strategy=nightly        Says so. (dpframe_moon 0.9)\n" in page.out
    assert "moon" not in output(ours), "dpframe's own option is nearer"
    (elsewhere,) = attempts([["-h"]], tmp_path / "moon")
    assert "moon" not in elsewhere.out
    other = PROJECT.replace("dpframe_moon", "dpframe-moon").replace("0.9", "2")
    write(tmp_path, {"pyproject.toml": other})
    (page,) = attempts([["-h"]], tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{site}")
    assert "(dpframe-moon 1.0, dpframe-moon2 2.1)" in page.out and "moon 2)" not in page.out


@pytest.mark.parametrize(
    "text", ["[project", '[project.entry-points."dpframe.plugins"]\na = "m"', "dpframe.plugins = 1"]
)
def test_a_pyproject_of_another_kind_brings_nothing(text, tmp_path):
    write(tmp_path, {"pyproject.toml": text, "m/strategy/nightly.yaml": strategy("m.parts")})
    (page,) = attempts([["-h"]], tmp_path)
    assert "nightly" not in output(page)
