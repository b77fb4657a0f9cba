"""New parts of a run: from the user's own folder, and from installed packages."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

QUICK = ("trainer.max_epochs=1", "logger=none", "callbacks=none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the command runs."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder on the path that packages are installed into; its name is an awkward one."""
    (tmp_path / "site, packages=1").mkdir()
    return tmp_path / "site, packages=1"


def dpframe(*words: str, at: Path, site: Path | None = None, **variables: str) -> "Ended":
    environment = {**os.environ, "PYTHONPATH": str(site or ""), **variables}
    command = [sys.executable, "-m", "dpframe", *words]
    return Ended(
        subprocess.run(
            command, cwd=at, env=environment, capture_output=True, text=True, timeout=200
        )
    )


class Ended:
    def __init__(self, process: subprocess.CompletedProcess) -> None:
        self.code = process.returncode
        self.output = process.stdout
        self.errors = process.stderr

    def succeeded(self) -> str:
        assert self.code == 0, self.errors
        return self.output

    def refused(self) -> str:
        """One line, and no more."""
        assert (self.code, self.errors.count("\n")) == (2, 1), self.errors
        return self.errors.removeprefix("dpframe: ").rstrip()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text).lstrip())


def install(site: Path, name: str, files: dict[str, str], *, conf: str, version="1.0") -> None:
    """What pip leaves behind: the package, and its metadata beside it."""
    stem = name.replace("-", "_")
    notes = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "entry_points.txt": f"[dpframe.plugins]\nanything = {conf}\n",
    }
    write(site, {**files, **{f"{stem}-{version}.dist-info/{n}": t for n, t in notes.items()}})


def speaking(word: str) -> str:
    return f"""
    import dpframe

    class Speaking(dpframe.Strategy):
        def __init__(self, gpus=None, accelerator="auto", hour: int = 22) -> None:
            super().__init__(gpus, accelerator)
            self.hour = hour

        def setup(self) -> None:
            super().setup()
            print(f"{word} at {{self.hour}}")
    """


def strategy(target: str) -> str:
    return f"# Says so.\n_target_: {target}.Speaking\nhour: 22\n"


PARTS = """
import dpframe
import torch
from torch.utils.data import TensorDataset

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


def options(module: str, place: str = "") -> dict[str, str]:
    """A recipe, a callback and a logger."""
    recipe = f"""
    # @package _global_
    # A line.
    recipe: lines
    task:
      _target_: {module}.Lines
      net: {{_target_: torch.nn.Linear, in_features: 1, out_features: 1}}
      optimizer: {{_target_: torch.optim.SGD, _partial_: true, lr: 0.1}}
    data: {{_target_: {module}.LinesData, batch_size: 20}}
    trainer: {{max_epochs: 2}}
    """
    shout = f"defaults: [default]\nshout: {{_target_: {module}.Shout, word: done}}\n"
    paper = f"paper: {{_target_: {module}.Paper}}\n"
    made = {"recipe/lines.yaml": recipe, "callbacks/shout.yaml": shout, "logger/paper.yaml": paper}
    return {f"{place}{name}": text for name, text in made.items()}


# From the user's own folder


@pytest.fixture
def nightly(folder: Path) -> Path:
    config = strategy("mine.night")
    write(folder, {"mine/night.py": speaking("night"), "mine/strategy/nightly.yaml": config})
    return folder


def test_a_class_and_a_yaml_are_a_strategy(nightly):
    words = ("--config-dir", "mine", "recipe=boston", "strategy=nightly", *QUICK)
    assert "night at 22" in dpframe(*words, at=nightly).succeeded()
    assert "night at 7" in dpframe(*words, "strategy.hour=7", at=nightly).succeeded()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("strategy.hour=late", r"strategy.hour=late is \w+( \w+)?; give a whole number"),
        ("strategy.hour=7.5", r"strategy.hour=7.5 is a \w+; give a whole number"),
        ("strategy.hours=7", r"strategy.hours=7: .+ did you mean strategy.hour\?"),
        ("+strategy.minute=7", r"strategy.minute: Speaking takes no such argument; .+"),
    ],
)
def test_its_settings_are_typed(nightly, given, said):
    words = ("--config-dir", "mine", "recipe=boston", "strategy=nightly", *QUICK, given)
    assert re.fullmatch(said, dpframe(*words, at=nightly).refused())


def test_recipes_callbacks_and_loggers_come_from_there_too(folder):
    write(folder, {"mine/parts.py": PARTS, **options("mine.parts", "mine/")})
    words = ("--config-dir", "mine", "recipe=lines", "callbacks=shout", "logger=paper")
    output = dpframe(*words, at=folder).succeeded()
    assert "done after 6 steps" in output
    assert "paper has True at 6" in output


# From installed packages


@pytest.fixture
def moon(site: Path) -> Path:
    """A package with one of everything, that can't be imported by accident."""
    conf = {"moon/conf/strategy/moonlight.yaml": strategy("moon.light"), "moon/__init__.py": ""}
    files = {"moon/light.py": speaking("moon"), "moon/parts.py": PARTS, **conf}
    install(
        site, "dpframe-moon", {**files, **options("moon.parts", "moon/conf/")}, conf="moon.conf"
    )
    return site


def test_an_installed_package_brings_its_parts(folder, moon):
    words = ("recipe=lines", "strategy=moonlight", "callbacks=shout", "logger=paper")
    output = dpframe(*words, "strategy.hour=3", at=folder, site=moon).succeeded()
    assert "moon at 3" in output
    assert "done after 6 steps" in output
    assert "paper has True at 6" in output


def test_its_parts_are_in_the_ranks(folder, moon):
    words = ("recipe=lines", "strategy=ddp", "trainer.gpus=2", "callbacks=shout", "logger=paper")
    output = dpframe(*words, at=folder, site=moon).succeeded()
    assert output.count("done after 6 steps") == 2
    assert output.count("paper has True at 6") == 1


def test_the_whole_command_line_knows_its_options(folder, moon):
    known = {"at": folder, "site": moon}
    page = dpframe("--help", **known).succeeded()
    assert "strategy=moonlight      Says so. (dpframe-moon 1.0)\n" in page
    assert "recipe=lines   A line. (dpframe-moon 1.0)\n" in page
    assert re.search(r"callbacks=shout +\(dpframe-moon 1.0\)\n", page)
    assert "strategy=cpu            One process on the CPU.\n" in page
    job = dpframe("recipe=lines", "strategy=moonlight", "-c", "job", **known).succeeded()
    assert "_target_: moon.light.Speaking" in job
    error = dpframe("recipe=lines", "strategy=moonligth", **known).refused()
    assert "did you mean moonlight? (there is: auto, cpu, data_parallel, ddp, moonlight," in error
    assert "boston, lenet, lines, shapes" in dpframe("strategy=moonlight", **known).refused()
    line = "dpframe recipe=lines strategy=mo"
    words = dpframe("-sc", "query=bash", COMP_LINE=line, **known).succeeded()
    assert words.split() == ["strategy=moonlight"]


def test_no_package_is_imported_before_it_is_asked_for(folder, moon):
    (moon / "moon" / "__init__.py").write_text("raise SystemExit('imported')\n")
    known = {"at": folder, "site": moon}
    assert "moonlight" in dpframe("--help", **known).succeeded()
    dpframe("recipe=lines", "strategy=moonlight", "-c", "job", **known).succeeded()
    dpframe("recipe=boston", *QUICK, **known).succeeded()
    assert "imported" in dpframe("recipe=boston", "strategy=moonlight", **known).errors


def test_help_imports_no_torch(folder, moon):
    page = dpframe("--help", at=folder, site=moon, PYTHONPROFILEIMPORTTIME="1")
    assert "moonlight" in page.succeeded()
    imported = {line.rpartition("|")[2].strip() for line in page.errors.splitlines()}
    assert "dpframe.cli.plugins" in imported
    assert not {"torch", "numpy", "tensorboard", "rich", "moon"} & imported


def test_a_package_that_fails_to_import_is_named_when_it_is_asked_for(folder, moon, site):
    files = {
        "dusk/__init__.py": '"""Fine."""\n',
        "dusk/core.py": "import os\n\nimport wishful_driver\n",
        "dusk/conf/strategy/dusk.yaml": strategy("dusk.core"),
    }
    install(site, "dpframe-dusk", files, conf="dusk.conf", version="0.3")
    known = {"at": folder, "site": site}
    assert "strategy=dusk           Says so. (dpframe-dusk 0.3)" in dpframe("-h", **known).output
    dpframe("recipe=boston", "strategy=moonlight", *QUICK, **known).succeeded()
    error = dpframe("recipe=boston", "strategy=dusk", *QUICK, **known).refused()
    assert error == (
        "strategy._target_=dusk.core.Speaking of dpframe-dusk 0.3: ModuleNotFoundError: "
        f"No module named 'wishful_driver' ({site}/dusk/core.py, line 3)"
    )


def test_a_package_without_its_folder_is_named_where_an_option_is_unknown(folder, moon, site):
    install(site, "dpframe-dusk", {"dusk/__init__.py": ""}, conf="dusk.conf")
    install(site, "dpframe-dawn", {}, conf="dawn")
    known = {"at": folder, "site": site}
    page = dpframe("--help", **known).succeeded()
    assert "moonlight" in page
    assert "dusk" not in page
    dpframe("recipe=boston", "strategy=moonlight", *QUICK, **known).succeeded()
    error = dpframe("recipe=boston", "strategy=dusk", **known).refused()
    assert error.startswith("strategy=dusk: there is no such strategy; ")
    assert error.endswith(
        "; the package dpframe-dawn 1.0 has no folder dawn, dpframe-dusk 1.0 has no folder "
        "dusk.conf: install it again"
    )


def test_two_packages_with_one_name_are_refused_when_it_is_asked_for(folder, moon, site):
    files = {"moon2/__init__.py": "", "moon2/conf/strategy/moonlight.yaml": strategy("moon2.light")}
    install(site, "dpframe-moon2", files, conf="moon2.conf", version="2.1")
    known = {"at": folder, "site": site}
    assert "(dpframe-moon 1.0, dpframe-moon2 2.1)" in dpframe("--help", **known).succeeded()
    dpframe("recipe=lines", "-c", "job", **known).succeeded()
    error = dpframe("recipe=lines", "strategy=moonlight", **known).refused()
    assert error == (
        "strategy=moonlight is in dpframe-moon 1.0 and dpframe-moon2 2.1; uninstall one, or copy "
        f"the file that you mean, {site}/moon/conf/strategy/moonlight.yaml say, into your "
        "--config-dir"
    )
    write(folder, {"mine/strategy/moonlight.yaml": strategy("mine.own")})
    words = ("--config-dir", "mine", "recipe=lines", "strategy=moonlight", "-c", "job")
    assert "_target_: mine.own.Speaking" in dpframe(*words, **known).succeeded()


def test_no_package_takes_the_name_of_one_of_ours(folder, site):
    files = {"moon/__init__.py": "", "moon/conf/strategy/cpu.yaml": strategy("moon.light")}
    install(site, "dpframe-moon", files, conf="moon.conf")
    known = {"at": folder, "site": site}
    job = dpframe("recipe=boston", "strategy=cpu", "-c", "job", **known).succeeded()
    assert "_target_: dpframe.strategies.cpu.CPU" in job
    assert "dpframe-moon" not in dpframe("--help", **known).succeeded()


def test_broken_metadata_is_no_reason_to_stop(folder, moon, site):
    notes = "odd-1.0.dist-info"
    write(site, {f"{notes}/entry_points.txt": "[dpframe.plugins]\nno equals sign\n"})
    write(site, {"bare-1.0.dist-info/entry_points.txt": "[dpframe.plugins]\na = moon.conf\n"})
    write(site, {f"{notes}/METADATA": "Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n"})
    assert "(dpframe-moon 1.0)" in dpframe("--help", at=folder, site=site).succeeded()


def test_what_lies_in_the_current_directory_was_not_installed(folder):
    """Else it would bring options, and vouch for torch as a whole."""
    files = {"moon/conf/strategy/moonlight.yaml": strategy("moon.light"), "moon/__init__.py": ""}
    install(folder, "dpframe-moon", files, conf="moon.conf")
    install(folder, "dpframe-torch", {}, conf="torch.conf")
    for path in ("", folder, f":{folder}"):
        assert "moonlight" not in dpframe("--help", at=folder, PYTHONPATH=str(path)).succeeded()
