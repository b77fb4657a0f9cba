"""New parts of a run: from the user's own folder, and from installed packages."""

import os
import re
from pathlib import Path
from textwrap import dedent

import pytest
from command import ROOT, Attempt, attempts, cold_attempts, dpframe, environment
from command import write as write_as_it_is

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


def run(lines: list[tuple[str, ...]], at: Path, site: Path | None = None) -> list[Attempt]:
    """Each line in the same process, where what is installed in `site` can be imported."""
    path = f"{ROOT}{os.pathsep}{site}" if site else str(ROOT)
    return attempts([list(line) for line in lines], at, PYTHONPATH=path)


def output(attempt: Attempt) -> str:
    assert attempt.code == 0, attempt.err
    return attempt.out


def refusal(attempt: Attempt) -> str:
    """One line, and no more."""
    assert (attempt.code, attempt.err.count("\n")) == (2, 1), attempt.err
    return attempt.err.removeprefix("dpframe: ").rstrip()


def write(folder: Path, files: dict[str, str]) -> None:
    write_as_it_is(folder, {name: dedent(text).lstrip() for name, text in files.items()})


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


def test_a_class_and_a_yaml_are_a_strategy_whose_settings_are_typed(nightly):
    start = ("--config-dir", "mine", "recipe=boston", "strategy=nightly", *QUICK)
    refused = {
        "strategy.hour=late": r"strategy.hour=late is \w+( \w+)?; \w+ a whole number",
        "strategy.hour=7.5": r"strategy.hour=7.5 is a \w+; \w+ a whole number",
        "strategy.hours=7": r"strategy.hours=7: .+ did you mean strategy.hour\?",
        "+strategy.minute=7": r"strategy.minute: Speaking takes no such argument; .+",
    }
    more = ((), ("strategy.hour=7",), *((word,) for word in refused))
    plain, typed, *others = run([(*start, *words) for words in more], nightly)
    assert "night at 22" in output(plain) and "night at 7" in output(typed)
    for said, attempt in zip(refused.values(), others, strict=True):
        assert re.fullmatch(said, refusal(attempt))


def test_recipes_callbacks_and_loggers_come_from_there_too(folder):
    write(folder, {"mine/parts.py": PARTS, **options("mine.parts", "mine/")})
    words = ("--config-dir", "mine", "recipe=lines", "callbacks=shout", "logger=paper")
    (done,) = run([words], folder)
    assert "done after 6 steps" in output(done)
    assert "paper has True at 6" in output(done)


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
    (done,) = run([(*words, "strategy.hour=3")], folder, moon)
    assert "moon at 3" in output(done)
    assert "done after 6 steps" in output(done)
    assert "paper has True at 6" in output(done)


def test_its_parts_are_in_the_ranks(folder, moon):
    words = ("recipe=lines", "strategy=ddp", "trainer.gpus=2", "callbacks=shout", "logger=paper")
    path = f"{ROOT}{os.pathsep}{moon}"
    done = dpframe(*words, cwd=folder, env=environment(PYTHONPATH=path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done after 6 steps") == 2
    assert done.stdout.count("paper has True at 6") == 1


def test_the_whole_command_line_knows_its_options_and_imports_nothing_of_it(folder, moon):
    (moon / "moon" / "__init__.py").write_text("raise SystemExit('imported')\n")
    lines = [
        ("--help",),
        ("recipe=lines", "strategy=moonlight", "-c", "job"),
        ("recipe=lines", "strategy=moonligth"),
        ("strategy=moonlight",),
        ("recipe=boston", *QUICK),
        ("recipe=boston", "strategy=moonlight", *QUICK),
    ]
    path = f"{ROOT}{os.pathsep}{moon}"
    light, heavy = cold_attempts([list(line) for line in lines[:4]], folder, PYTHONPATH=path)
    page, job, misspelt, without = light
    assert heavy == []
    assert "strategy=moonlight      Says so. (dpframe-moon 1.0)\n" in page.out
    assert "recipe=lines   A line. (dpframe-moon 1.0)\n" in page.out
    assert re.search(r"callbacks=shout +\(dpframe-moon 1.0\)\n", page.out)
    assert "strategy=cpu            One process on the CPU.\n" in page.out
    assert "_target_: moon.light.Speaking" in output(job)
    near = "did you mean moonlight? (there is: auto, cpu, data_parallel, ddp, moonlight,"
    assert near in refusal(misspelt)
    assert "boston, lenet, lines, shapes" in refusal(without)
    line = "dpframe recipe=lines strategy=mo"
    given = {"cwd": folder, "env": environment(PYTHONPATH=path, COMP_LINE=line)}
    assert dpframe("-sc", "query=bash", **given).stdout.split() == ["strategy=moonlight"]
    other, imported = run(lines[4:], folder, moon)
    assert output(other) == "" and "imported" in imported.err


def test_a_package_that_fails_is_named_only_when_it_is_asked_for(folder, moon, site):
    files = {
        "dusk/__init__.py": '"""Fine."""\n',
        "dusk/core.py": "import os\n\nimport wishful_driver\n",
        "dusk/conf/strategy/dusk.yaml": strategy("dusk.core"),
    }
    install(site, "dpframe-dusk", files, conf="dusk.conf", version="0.3")
    start = ("recipe=boston", *QUICK)
    lines = [("-h",), *((*start, f"strategy={name}") for name in ("moonlight", "dusk"))]
    page, good, broken = run(lines, folder, site)
    assert "strategy=dusk           Says so. (dpframe-dusk 0.3)" in page.out
    assert "(dpframe-moon 1.0)" in page.out
    assert "moon at 22" in output(good)
    assert refusal(broken) == (
        "strategy._target_=dusk.core.Speaking of dpframe-dusk 0.3: ModuleNotFoundError: "
        f"No module named 'wishful_driver' ({site}/dusk/core.py, line 3)"
    )


def test_broken_metadata_is_passed_over_and_one_name_in_two_packages_refused(folder, moon, site):
    notes = "odd-1.0.dist-info"
    write(site, {f"{notes}/entry_points.txt": "[dpframe.plugins]\nno equals sign\n"})
    write(site, {"bare-1.0.dist-info/entry_points.txt": "[dpframe.plugins]\na = moon.conf\n"})
    write(site, {f"{notes}/METADATA": "Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n"})
    ours = strategy("moon2.light")
    files = {"moon2/__init__.py": "", "moon2/conf/strategy/moonlight.yaml": ours}
    files["moon2/conf/strategy/cpu.yaml"] = ours
    install(site, "dpframe-moon2", files, conf="moon2.conf", version="2.1")
    write(folder, {"mine/strategy/moonlight.yaml": strategy("mine.own")})
    job = ("recipe=lines", "-c", "job")
    lines = [("-h",), job, (*job, "strategy=moonlight"), (*job, "strategy=cpu")]
    lines.append(("--config-dir", "mine", *job, "strategy=moonlight"))
    page, other, both, packaged, nearer = run(lines, folder, site)
    assert "(dpframe-moon 1.0, dpframe-moon2 2.1)" in output(page)
    assert "(dpframe-moon2 2.1)" not in output(page)
    assert other.code == 0
    assert refusal(both) == (
        "strategy=moonlight is in dpframe-moon 1.0 and dpframe-moon2 2.1; uninstall one, or copy "
        f"the file that you mean, e.g. {site}/moon/conf/strategy/moonlight.yaml, into your "
        "--config-dir"
    )
    assert "_target_: dpframe.strategies.single.CPU" in output(packaged)
    assert "_target_: mine.own.Speaking" in output(nearer)


def test_what_lies_in_the_current_directory_was_not_installed(folder):
    """Else it would bring options, and vouch for torch as a whole."""
    files = {"moon/conf/strategy/moonlight.yaml": strategy("moon.light"), "moon/__init__.py": ""}
    install(folder, "dpframe-moon", files, conf="moon.conf")
    install(folder, "dpframe-torch", {}, conf="torch.conf")
    for path in ("", f"{ROOT}:{folder}", f"{ROOT}::{folder}"):
        done = dpframe("--help", cwd=folder, env=environment(PYTHONPATH=path))
        assert done.returncode == 0 and "moonlight" not in done.stdout
