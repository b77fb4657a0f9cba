"""What the README and the guides show is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpframe import checkpoint

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
EXAMPLES = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("examples/*/README.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def files_of(page: str) -> dict[str, str]:
    """The blocks after a `<!-- test: path -->`, by their paths."""
    found = re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)^```$", text_of(page), re.S | re.M)
    assert len(dict(found)) == len(found) == text_of(page).count("<!-- test:")
    return dict(found)


def commands_of(page: str) -> list[str]:
    """Every `dpframe …` line of a bash or console block, and of torchrun the same."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)^```$", text_of(page), re.S | re.M)
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    found = [re.search(r"^(?:\$ )?(?:.*-m )?dpframe (.*)", line) for line in lines]
    return [match[1].strip() for match in found if match]


def dpframe(line: str, *, at: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dpframe", *line.split()]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=at, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(params=PAGES)
def written(request, tmp_path) -> tuple[Path, str]:
    """A folder with the files that a page shows, and the page."""
    for name, text in files_of(request.param).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path, request.param


def test_every_test_that_the_table_of_faults_names_is_there():
    there = {
        name
        for path in ROOT.glob("tests/test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", text_of("docs/reliability.md")))
    assert named and named <= there, named - there


def test_the_two_commands_of_continuous_integration_are_there():
    """`.ci/run` takes the first and the second line that begin like this."""
    lines = re.findall(r"^pip install .*&&.*$", text_of("README.md"), re.M)
    assert lines == [
        "pip install -c constraints.txt -e . && python -m dpframe recipe=boston",
        "pip install -c constraints.txt -e '.[dev]' && python -m pytest",
    ]


# What is shown, and what it should print. Every file shown is in one of them.
SHOWN = {
    "dpframe --config-dir mine recipe=lines": ("", r"^step +batch 32 = 1 replica x 32$"),
    "dpframe --config-dir mine recipe=boston strategy=nightly strategy.hour=23": (
        "trainer.max_epochs=2",
        r"^every night at 23 o'clock, on c\w+",
    ),
    "dpframe --config-dir mine recipe=boston strategy=half trainer.gpus=2": (
        "trainer.max_epochs=2 trainer.accelerator=cpu",
        r"^strategy +Half on 2 x cpu$",
    ),
}


def test_what_can_be_written_can_be_run(written):
    folder, page = written
    ran = [shown for shown in SHOWN if shown in text_of(page).splitlines()]
    for shown in ran:
        more, printed = SHOWN[shown]
        ended = dpframe(f"{shown.removeprefix('dpframe ')} {more}", at=folder)
        assert ended.returncode == 0, ended.stderr
        assert re.search(printed, ended.stdout, re.M), ended.stdout
        assert re.search(r"^epoch \d+/\d+  step \d+  train/loss ", ended.stdout, re.M)
    assert len(ran) >= len([name for name in files_of(page) if name.endswith(".yaml")])


def test_the_python_that_the_readme_shows_trains(tmp_path):
    for name in ("mine/lines.py", "fit_lines.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files_of("README.md")[name])
    ended = subprocess.run(
        [sys.executable, "fit_lines.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.match(r"{'train/loss': \d.*'val/loss': \d", ended.stdout)


def test_every_command_that_is_shown_composes(written):
    folder, page = written
    for name in ("best", "last"):
        checkpoint.save({"task": {}}, folder / f"outputs/boston/1/checkpoints/{name}.ckpt")
    (folder / "outputs/boston/1/.hydra").mkdir()
    (folder / "outputs/boston/1/.hydra/overrides.yaml").write_text("- recipe=boston\n")
    for line in commands_of(page):
        words = line.replace("…", "1").replace("-m ", "").split()
        points = [word.split(",")[0] if is_sweep(word) else word for word in words]
        ended = dpframe(" ".join([*points, "-c job"]), at=folder)
        if line in refused(page):
            assert (ended.returncode, ended.stderr.rstrip()) == (2, refused(page)[line])
        else:
            assert ended.returncode == 0, f"{line}: {ended.stderr}"


def is_sweep(word: str) -> bool:
    return "=" in word and "[" not in word


def refused(page: str) -> dict[str, str]:
    """The commands that a page shows with their error."""
    return dict(re.findall(r"^ *\$ dpframe (.*)\n *(dpframe: .*)$", text_of(page), re.M))


def test_the_readme_shows_commands_and_a_mistake():
    """So that the test above can't pass over nothing."""
    assert len(commands_of("README.md")) >= 9
    assert len(refused("README.md")) == 1


def test_files_that_are_shown_agree():
    """A path means the same text on every page."""
    seen: dict[str, str] = {}
    for page in PAGES:
        for name, text in files_of(page).items():
            assert seen.setdefault(name, text) == text, f"{name} in {page}"


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    near = [link.partition("#")[0] for link in links if not re.match(r"https?://|#|mailto:", link)]
    missing = [link for link in near if not ((ROOT / page).parent / link).exists()]
    assert not missing
