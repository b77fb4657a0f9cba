"""`dpframe new` writes a project that works as it stands: its own test says so."""

import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from textwrap import dedent

import jsonschema
import pytest
from command import ROOT, attempts, cold_attempts, cold_dpframe, environment
from forked import fresh
from omegaconf import OmegaConf

from dpframe.config.json_schema import json_schema


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new")
    (done,), heavy = cold_attempts([["new", "weather_forecast"]], folder)
    assert (done.code, done.err, heavy) == (0, "", [])
    commands = ["  cd weather_forecast", "  dpframe recipe=weather_forecast"]
    assert done.out.splitlines()[1:3] == commands
    return folder / "weather_forecast"


@pytest.mark.whole
def test_a_new_projects_own_test_passes(project):
    code, printed = fresh(own_test, folder=project)
    assert code == 0 and "3 passed" in printed, printed


def own_test():
    sys.path.insert(0, "")  # as `python -m pytest` has it
    with redirect_stdout(StringIO()) as printed:
        code = pytest.main(["-q", "-p", "no:cacheprovider"])
    return int(code), printed.getvalue()


def test_the_class_that_its_recipe_shows_trains(project):
    """In place of dpframe.Supervised."""
    text = (project / "weather_forecast" / "recipe.py").read_text().split('"""')[1]
    shown = re.search(r"^    class Curve.*?(?=^\w)", text, re.M | re.S)[0]
    place = project / "weather_forecast" / "own.py"
    place.write_text(f"import dpframe\n\n{dedent(shown)}")
    own = [
        "~task.loss",
        "task._target_=weather_forecast.own.Curve",
        "experiment=weather_forecast_quick",
    ]
    (done,) = attempts([["recipe=weather_forecast", *own]], project)
    place.unlink()
    assert done.code == 0 and "val/loss" in done.out, done.err


def test_an_editor_is_told_where_the_schema_of_its_configs_is(project):
    settings = json.loads((project / ".vscode" / "settings.json").read_text())
    (globs,) = settings["yaml.schemas"].values()
    files = [file for glob in globs for file in project.glob(glob)]
    schema = json_schema(str(project / "weather_forecast" / "conf"))
    for file in files:
        _, line, *_ = file.read_text().splitlines()
        there = file.parent / line.removeprefix("# yaml-language-server: $schema=")
        assert there.resolve() == project / "dpframe.schema.json"
        jsonschema.validate(OmegaConf.to_container(OmegaConf.load(file)), schema)
    assert len(files) == 2


@pytest.mark.whole
def test_ruff_finds_nothing_in_a_new_project(project):
    for words in (
        ["check"],
        ["check", "--select", "E,F,I,UP,B,SIM,RET,C4,PIE"],
        ["format", "--check"],
    ):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "."]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_nothing_in_a_new_project(project):
    """By dpframe's own settings, which are stricter, and with what `mypy` has left in its cache."""
    words = ["mypy", "--config-file", "pyproject.toml", project / "weather_forecast"]
    done = subprocess.run(
        [sys.executable, "-m", *words, project / "tests"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found in 4 source files" in done.stdout


def test_help_has_an_installed_projects_options(project, tmp_path):
    pip = ["pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *pip, str(project)], check=True)
    shown = cold_dpframe("--help", cwd=tmp_path.parent, PYTHONPATH=f"{ROOT}:{tmp_path}").stdout
    for group, name in (("recipe", ""), ("callbacks", "_norm"), ("experiment", "_quick")):
        option = f"{group}=weather_forecast{name}"
        assert option in " ".join(shown.split())
    assert shown.count("(weather_forecast 0.1.0)") == 3


def test_its_help_writes_nothing(tmp_path):
    for done in attempts([["new", "--help"], ["--help", "new", "waves"]], tmp_path):
        assert done.code == 0 and done.out.startswith("dpframe new NAME") and not done.files


def test_what_can_not_be_a_project_is_refused_in_one_line(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").touch()
    mistakes = {
        "there": "there is there already; name another",
        "my-project": "a project is a Python package; name it by letters, digits and _",
        "a" * 300: "can't be written: File name too long; name another",
        f"{'a' * 300}/mine": "mine can't be written: File name too long; name another",
        "class": "a project is a Python package",
        "nan": "recipe=nan is no text to Hydra; use another name",
        "NULL": "recipe=NULL is no text to Hydra; use another name",
        "json": "there is another module json; use another name",
        "hydra": "there is another module hydra; use another name",
        "boston": "recipe=boston is dpframe's own; use another name",
        "one two": "name one project, e.g. dpframe new mine",
        "": "name one project, e.g. dpframe new mine",
        "there/notes/mine": "there/notes/mine can't be written: Not a directory; name another",
    }
    for done, says in zip(
        attempts([["new", *words.split()] for words in mistakes], tmp_path),
        mistakes.values(),
        strict=True,
    ):
        assert done.code == 2 and says in done.err and done.err.count("\n") == 1, (says, done)
        assert done.files == ["there"]
