"""CONTRIBUTING.md, pre-commit and continuous integration say what the tests and pins say."""

import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import pytest_xdist_auto_num_workers
from long import LONG, lines_of
from quick import FILES, SLOW_FILES, TESTS
from test_layers import FLOORS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()
TOOLS = ("ruff check", "ruff format", "mypy")


def test_contributing_fits_on_a_screen_and_names_the_floors():
    assert len(PAGE.splitlines()) <= 50
    floors = dict(re.findall(r"^(\d)  (\w+(?:  \w+)*)(?: {3,}.*)?$", PAGE, re.M))
    named = {room: int(floor) for floor, rooms in floors.items() for room in rooms.split("  ")}
    assert {room: floor for room, floor in named.items() if floor} == FLOORS


def test_the_changelog_is_grouped_by_what_was_added_changed_removed_and_fixed():
    heads = r"##? .+|### (Added|Changed|Removed|Fixed)|\*\*.+\*\*( \(.+\))?|<!-- releases -->"
    known = rf"{heads}|(- |  ).+|The first whole dpframe\.|What a user notices.*|"
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(known, line)] == []
    entries = [line for line in lines if line.startswith("- ")]
    assert len(set(entries)) == len(entries)


def test_a_line_of_the_next_release_is_a_file_whose_name_has_its_group():
    names = {path.name for path in (ROOT / "changes").iterdir()} - {"README.md"}
    groups = "|".join(each["directory"] for each in PROJECT["tool"]["towncrier"]["type"])
    assert [name for name in names if not re.fullmatch(rf"[\w-]+\.({groups})\.md", name)] == []


def test_contributing_shows_the_commands_of_continuous_integration():
    for command in ("python -m pytest -m quick", "python -m pytest ", ".ci/run", *TOOLS):
        assert command in PAGE
    assert all(f"\n{tool}" in CI for tool in TOOLS)
    assert CI.rstrip().endswith('-c "$test_command"'), "pytest's summary is the last thing shown"


def test_pre_commit_runs_the_installed_tools():
    """They are pinned in constraints.txt alone, so the versions can't differ."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = config["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    assert [hook["name"] for hook in local["hooks"]] == list(TOOLS)
    assert all(hook["entry"].startswith(hook["name"]) for hook in local["hooks"])


def test_every_development_tool_is_pinned_and_nothing_twice():
    pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    extras = PROJECT["project"]["optional-dependencies"]
    required = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["release"]]
    required += PROJECT["build-system"]["requires"]
    assert {re.match(r"[\w-]+", line)[0] for line in required} - {*pins} == set()
    names = Counter(re.sub("[-_]+", "-", name).lower() for name in pins)
    assert [name for name, count in names.items() if count > 1] == []


def test_the_page_of_installing_has_every_extra():
    table = (ROOT / "docs/install.md").read_text().partition("| extra |")[2]
    named = {name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in row.split(", ")}
    assert named == {f"`{extra}`" for extra in PROJECT["project"]["optional-dependencies"]}


def test_every_action_is_a_commit_with_its_version_beside_it():
    """A tag may move to other code."""
    workflows = [path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")]
    actions = [line for text in workflows for line in re.findall(r"uses: *(.+)", text)]
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+"
    assert len(actions) >= 10
    assert [line for line in actions if not re.fullmatch(pinned, line)] == []


def test_the_linter_reads_the_oldest_python():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")


@pytest.mark.parametrize(
    ("arguments", "marker", "workers"),
    [
        (["tests/test_x.py::y"], "", 0),
        (["tests"], "quick", None),
        (["tests"], "", len(os.sched_getaffinity(0)) + 1),
    ],
)
def test_a_named_file_runs_in_one_process_and_the_suite_on_all_cores(arguments, marker, workers):
    config = SimpleNamespace(args=arguments, option=SimpleNamespace(markexpr=marker))
    assert pytest_xdist_auto_num_workers(config) == workers


@pytest.mark.whole
def test_the_quick_tests_are_there_and_cover_every_module():
    texts = {path.stem[5:]: path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    tests = {file: set(re.findall(r"^def (test_\w+)", text, re.M)) for file, text in texts.items()}
    assert TESTS - set.union(*tests.values()) == set(), "these tests are gone"
    quick = {file for file in tests if file in FILES or tests[file] & TESTS}
    assert texts.keys() - quick <= SLOW_FILES, "no test of these files is quick"
    imports = [line for file in quick for line in texts[file].splitlines() if "import" in line]
    for room in (*FLOORS, "data", "metrics", "seeding", "checkpoint", "loggers", "errors"):
        assert any(re.search(rf"dpframe.*\b{room}\b", line) for line in imports), room


@pytest.mark.whole
def test_the_long_tests_are_there_and_leave_some_of_their_file_to_the_suite():
    texts = {path.stem[5:]: path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    for file in LONG:
        tests = set(re.findall(r"^def test_(\w+)", texts[file], re.M))
        assert {line.partition("[")[0] for line in lines_of(file)} <= tests, file
        assert tests - {*lines_of(file)}, file
