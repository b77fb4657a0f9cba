"""What a run was: the commit and the changes of its code, versions, and its command."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from command import attempts, write

from dpframe.modes import provenance
from dpframe.modes.provenance import Git

START = ["recipe=boston", "trainer.max_steps=2", "logger=none", "callbacks.progress=null"]
START += ["hydra.run.dir=run"]
FORMER = {"torch": "2.0.0", "gone": "1.0"}


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path):
    write(tmp_path, {"code.py": "a = 1\n"})
    for words in (["init", "--quiet"], ["add", "code.py"], ["commit", "--quiet", "-m", "first"]):
        git(tmp_path, *words)
    return tmp_path


def test_a_run_keeps_its_commit_its_changes_its_versions_and_its_command(repository):
    write(repository, {"code.py": "a = 2\n"})
    (done,) = attempts([START], repository, SECRET_TOKEN="canary")
    assert done.code == 0, done.err
    written = (repository / "run/.hydra/origin.json").read_text()
    origin, commit = json.loads(written), git(repository, "rev-parse", "HEAD")
    assert origin["commit"] == commit and "-a = 1\n+a = 2\n" in origin["diff"]
    assert origin["command"] == f"dpframe {' '.join(START)}"
    assert {"torch", "dpframe"} <= origin["packages"].keys() and "canary" not in written
    git(repository, "checkout", "--quiet", "code.py")
    (repository / "diff").write_text(origin["diff"])
    git(repository, "apply", "diff")
    assert (repository / "code.py").read_text() == "a = 2\n"
    summary = json.loads((repository / "run/summary.json").read_text())
    del origin["diff"]
    assert summary["origin"] == origin | {"is_dirty": True}


def test_an_evaluation_and_a_resume_say_in_a_line_where_they_differ_from_the_run(repository):
    test = ["mode=test", "checkpoint=run/checkpoints/best.ckpt"]
    _, alike = attempts([START, test], repository)
    assert "its run had" not in alike.out
    path = repository / "run/.hydra/origin.json"
    origin = json.loads(path.read_text())
    path.write_text(json.dumps(origin | {"packages": FORMER}))
    now, first = origin["packages"]["torch"], origin["commit"][:12]
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "second")
    second = git(repository, "rev-parse", "HEAD")[:12]
    write(repository, {"code.py": "a = 3\n"})
    tested, resumed = attempts([test, ["resume=run", "trainer.max_steps=3"]], repository)
    commits = f"commit {first}, now {second}"
    line = f"its run had {commits}; torch 2.0.0, now {now}; other uncommitted changes\n"
    assert f"checkpoint=run/checkpoints/best.ckpt: {line}" in tested.out
    assert f"resume=run/checkpoints/last.ckpt: {line}" in resumed.out
    assert json.loads((path.parent / "origin-1.json").read_text())["packages"] == FORMER


@pytest.mark.parametrize("text", ["", "[]", "{", '{"packages": 3, "commit": 5}'])
def test_a_damaged_origin_is_none(tmp_path, text):
    write(tmp_path, {".hydra/origin.json": text})
    assert provenance.differences(provenance.read(tmp_path), {"python": "3"}) == ""
    assert provenance.differences({}, provenance.read(tmp_path)) == ""


def test_a_pipe_in_place_of_an_origin_is_not_waited_for(tmp_path):
    (tmp_path / ".hydra").mkdir()
    os.mkfifo(tmp_path / ".hydra/origin.json")
    assert provenance.read(tmp_path) == provenance.read(None) == {}


def test_without_git_or_a_repository_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Git(is_asked=True) as none, Git(is_asked=False) as unasked:
        assert none.answer(60) == unasked.answer() == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    with Git(is_asked=True) as missing:
        assert missing.answer(60) == {}


def test_a_git_that_does_not_end_is_not_waited_for(tmp_path, monkeypatch):
    write(tmp_path, {"git": "#!/bin/sh\necho 123\nexec tail -f /dev/null\n"})
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with Git(is_asked=True) as slow:
        assert slow.answer() == {}


def test_a_diff_is_cut_where_it_is_too_long(repository, monkeypatch):
    write(repository, {"code.py": "x" * 2 * provenance.LARGEST})
    monkeypatch.chdir(repository)
    with Git(is_asked=True) as asked:
        diff = asked.answer(60)["diff"]
    assert diff.endswith("x\n… cut after 1,000,000 bytes\n")
    assert len(diff) < provenance.LARGEST + 40
