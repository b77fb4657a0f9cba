"""The benchmarks run, and the one that compares numbers fails when they differ."""

import math
import subprocess
import sys
from pathlib import Path
from shutil import which
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
CPU = {"train/loss": 2.0, "val/loss": 0.0}


@pytest.fixture
def same_numbers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return pytest.importorskip("same_numbers")


def test_same_numbers_prints_a_row_a_run_and_succeeds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "same_numbers.py", "--recipe", "boston", "--epochs", "1"]
        + ["--strategy", "data_parallel", "--replicas", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split(" | ")[:3] for line in done.stdout.splitlines() if "boston |" in line]
    assert rows == [["| boston", "cpu", "1"], ["| boston", "data_parallel", "3"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metrics", "code"),
    [
        (CPU, 0),
        (CPU | {"train/loss": 2.0 * (1 + 1e-13)}, 0),
        (CPU | {"train/loss": 2.0 * (1 + 3e-12)}, 1),
        (CPU | {"val/loss": 1e-300}, 1),
        (CPU | {"train/loss": math.nan}, 1),
        (CPU | {"val/mae": 1.0}, 1),
        ({"train/loss": 2.0, "val/mae": 0.0}, 1),
    ],
    ids=["equal", "rounding", "a digit", "not zero", "nan", "one more", "another name"],
)
def test_a_planted_difference_fails(
    same_numbers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    metrics: dict[str, float],
    code: int,
) -> None:
    def train(recipe: str, strategy: str, replicas: int, epochs: int) -> dict[str, float]:
        return metrics if (recipe, strategy, replicas) == ("lenet", "ddp", 4) else CPU

    monkeypatch.setattr(same_numbers, "train", train)
    assert same_numbers.main([]) == code
    printed = capsys.readouterr()
    assert printed.out.count("\n| boston |") == printed.out.count("\n| lenet |") == 7
    assert printed.err == ("more than 1e-12 from cpu: lenet ddp x 4\n" if code else "")


def test_a_run_that_fails_is_told_with_its_command(same_numbers: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"recipe=boston strategy=cpu (.|\n)*ended with 2"):
        same_numbers.train("boston", "cpu", 2, 1)


def test_a_slow_link_has_a_row_for_a_method_and_leaves_no_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if lacking := [name for name in ("ip", "unshare", "tc") if which(name) is None]:
        pytest.skip(f"needs {', '.join(lacking)} (Debian's iproute2 and util-linux)")
    bridge = ["unshare", "--net", "ip", "link", "add", "x", "type", "bridge"]
    if subprocess.run(bridge, capture_output=True).returncode:
        pytest.skip("needs root and network namespaces")
    monkeypatch.syspath_prepend(FOLDER)
    slow_link = pytest.importorskip("slow_link")
    monkeypatch.setattr(slow_link, "LOOK", 10)
    assert slow_link.main(["--method", "ddp", "--steps", "10", "--mbit", "500", "--loss", "0"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    name, seconds, steps, _, sent, _ = row.strip("| ").split(" | ")
    assert (name, seconds, steps) == ("ddp", "not reached", "10")
    assert int(sent.replace(",", "")) > 4 * 129_068  # LeNet's gradients, and what goes with them
    hosts = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not set(slow_link.HOSTS) & set(hosts.split())


def test_least_squares_is_what_the_split_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    boston_rmse = pytest.importorskip("boston_rmse")
    assert boston_rmse.least_squares_error() == pytest.approx(4.493, abs=5e-4)


def test_operations_are_compared_share_by_share_and_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    joint_shares = pytest.importorskip("joint_shares")
    assert joint_shares.main([]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = {cells[0]: cells[1:] for cells in (row.strip("| ").split(" | ") for row in rows)}
    assert cells["GELU"] == ["same"] * 4 + ["-"]
    assert list(cells) == list(joint_shares.OPERATIONS)
