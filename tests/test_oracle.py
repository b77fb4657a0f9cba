"""Killed after any step and resumed, a run ends as if nothing had happened: to the bit."""

import csv
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import environment
from disk import library
from forked import server
from oracle import ROWS, STEPS, begin, saves
from small import is_same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dpframe import checkpoint
from dpframe.checkpoint import seal

TESTS = Path(__file__).resolve().parent
TIMED = "step/samples_per_second"


Point = list[Any]  # a step, and whether it is killed after the step's checkpoint or before it


def killed_and_resumed(root: Path, ranks: int, chains: list[list[Point]], bug: str = "") -> None:
    """A directory a chain: killed at its points, each time resumed in another process."""
    for points in [[], *chains]:
        directory = root / name_of(points)
        directory.mkdir()
        for kill in [*points, None]:
            job = server().Process(target=begin, args=(ranks, str(directory), kill, bug))
            job.start()
            job.join(100)
            assert job.exitcode == (0 if kill is None else -signal.SIGKILL), (points, kill)


def name_of(points: list[Point]) -> str:
    return "-".join(map(str, points[-1])) if points else "whole"


def ending(directory: Path) -> dict[str, Any]:
    """All that a finished run leaves behind, less what a clock decides."""
    state = checkpoint.load(directory / "checkpoints" / "last.ckpt")
    best = checkpoint.load(directory / "checkpoints" / "best.ckpt")
    for one in (state, best):
        del one["progress"]["seconds"], one["progress"]["data_seconds"], one["file"]
        one["progress"]["logged"].pop(TIMED, None)
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    return {"last": state, "best": best, "kept": kept, "metrics": done(directory)}


def done(directory: Path) -> dict[str, float]:
    return json.loads((directory / "done.json").read_text())


def curve(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag != TIMED]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def table(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k != TIMED} for row in csv.DictReader(file)]


def rows_read_to_the_end(directory: Path) -> list[int]:
    files = directory.glob("reads-to-the-end-*")
    return [int(row) for file in files for row in file.read_text().split()]


BEFORE_AND_AFTER = [[step, is_after] for step in range(1, STEPS + 1) for is_after in (False, True)]


@pytest.mark.parametrize(
    "ranks, points",
    [(ranks, [p for p in BEFORE_AND_AFTER if sum(p) % 2 == ranks % 2]) for ranks in (1, 2)],
)
def test_killed_after_any_step_a_run_ends_as_if_nothing_had_happened(tmp_path, ranks, points):
    """In three runs, the last after steps 3, 7 and 12: the first two are within an epoch."""
    chains = [points[:3], points[3:7], points[7:]]
    killed_and_resumed(tmp_path, ranks, chains)
    whole = tmp_path / "whole"
    end, drawn, rows = ending(whole), curve(whole), table(whole)
    assert end["last"]["progress"]["global_step"] == STEPS
    assert [int(row["step"]) for row in rows] == sorted({int(row["step"]) for row in rows})
    for chain in chains:
        directory = tmp_path / name_of(chain)
        assert is_same(ending(directory), end), chain
        assert curve(directory) == drawn, chain
        assert table(directory) == rows, chain
        resumed = directory / "resumed-at"  # none where each kill came before a file was written
        step = int(resumed.read_text()) if resumed.exists() else 0
        assert step <= chain[-1][0]
        skipped = step // 4 * ROWS + step % 4 * 8  # an epoch has four steps, of 8 8 8 2 rows
        # The first batch is read once more, as its rows are seen to draw.
        again = min(8, ROWS - step % 4 * 8) if step < STEPS else 0
        assert len(rows_read_to_the_end(directory)) == 3 * ROWS - skipped + again, chain


@pytest.mark.parametrize("bug", ["no random state", "two batches skipped"])
def test_the_comparison_notices_a_resume_that_forgets(tmp_path, bug):
    """A random state is needed within an epoch: the newest file there may be that of its start."""
    points = [[6, True], [7, True], [11, True], [12, False]]
    killed_and_resumed(tmp_path, 1, [[point] for point in points], bug)
    found = [tmp_path / name_of([point]) for point in points]
    within = [one for one in found if int((one / "resumed-at").read_text()) % 4]
    assert within
    assert not any(is_same(ending(one), ending(tmp_path / "whole")) for one in within)


CLOCKED = ("seconds", "samples_per_second", "data_wait_share", "origin")


def left(run: Path) -> dict[str, Any]:
    """All that the command leaves in a run's directory, less what a clock decides, and the origins
    of the starts before, which are as many as there were."""
    summary = json.loads((run / "summary.json").read_text())
    (run / "done.json").write_text(json.dumps(summary["metrics"]))
    files = {str(path.relative_to(run)) for path in run.rglob("*")}
    notes = [(run / ".hydra" / name).read_text() for name in ("config.yaml", "overrides.yaml")]
    return {
        **ending(run),
        "notes": notes,
        "summary": {name: value for name, value in summary.items() if name not in CLOCKED},
        "files": sorted(name for name in files if "events." not in name and "origin-" not in name),
        "curve": curve(run),
        "table": table(run),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is the Linux linker's")
def test_a_resume_that_is_killed_at_a_change_to_its_files_is_resumed_from_there(tmp_path):
    """At every thirteenth, two of them in a run; each of them takes three minutes."""
    done = subprocess.run(
        [sys.executable, TESTS / "killed.py", json.dumps([str(tmp_path), 13])],
        env=environment(LD_PRELOAD=library(tmp_path)),
        stdout=subprocess.PIPE,
        timeout=250,
    )
    assert done.returncode == 0
    codes = json.loads(done.stdout)
    assert len(codes) > 4
    assert set(map(tuple, codes.values())) == {(-signal.SIGKILL, -signal.SIGKILL, 0)}
    wanted = left(tmp_path / "whole" / "run")
    for number in codes:
        found = left(tmp_path / number / "run")
        different = [name for name in wanted if not is_same(found[name], wanted[name])]
        assert not different, (number, different)


def test_killed_at_any_moment_of_a_save_the_file_is_the_old_one_or_the_new_one(tmp_path):
    folder, moments = tmp_path / "checkpoints", random.Random(5)
    newest = 0
    for _ in range(12):
        receiver, sender = server().Pipe(duplex=False)
        process = server().Process(target=saves, args=(folder, sender))
        process.start()
        sender.close()
        receiver.recv()
        time.sleep(moments.uniform(0.0, 0.05))  # the moment, not a wait for something
        process.kill()
        process.join()
        for path in folder.glob("*.ckpt"):
            state = checkpoint.load(path)
            assert torch.equal(state["task"]["w"], torch.full((50_000,), float(state["n"])))
        last = folder / "last.ckpt"
        if last.exists():
            n = checkpoint.load(last)["n"]
            assert n >= newest
            newest = n
        assert len(list(folder.glob(".*.part"))) <= 2
    assert newest > 12 and seal.damage(last) == ""
