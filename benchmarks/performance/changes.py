"""What changes cost: `python -m benchmarks.performance.changes COMMIT COMMIT …` runs them by turns.

Each commit is checked out beside the others; the table has its times over those of the first one.
"""

import statistics
import subprocess
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from benchmarks.performance import report
from benchmarks.performance.process import PROGRAMS, Program, Run, in_turns, noted
from benchmarks.performance.sections import DDP, images_of, made_up_images

ROOT = Path(__file__).resolve().parents[2]
MEASURES = (  # the column, the program, and what is read of its runs
    ("boston: a step", "boston", "epoch_step"),
    ("a whole run", "boston", "seconds"),
    ("until its first step", "boston", "begin"),
    ("MLP: a step", "mlp", "step"),
    ("LeNet: a step", "lenet", "step"),
    ("two ranks: a step", "ranks", "epoch_step"),
    ("a whole run", "ranks", "seconds"),
)


def main() -> None:
    parser = ArgumentParser("python -m benchmarks.performance.changes", description=__doc__)
    parser.add_argument("commits", nargs="+", help="the first one is what the others are beside")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place, made_up_images() as images:
        programs: list[Program] = []
        for commit in options.commits:
            folder = Path(place, commit)
            check_out(commit, folder)
            programs += programs_of(commit, folder, images)
        runs = in_turns(programs, options.rounds)
    text = table(options.commits, runs)
    print(text)
    if options.write:
        report.write("changes", f"{report.machine()}; {options.rounds} turns\n\n{text}")


def check_out(commit: str, folder: Path) -> None:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], input=archive.stdout, cwd=folder, check=True)


def programs_of(commit: str, folder: Path, images: str) -> list[Program]:
    few = ("trainer.max_epochs=4", "trainer.limit_train_batches=15")
    words: dict[str, tuple[str, ...]] = {
        "boston": ("recipe=boston",),
        "mlp": (f"--config-dir={PROGRAMS / 'conf'}", "recipe=mlp"),
        "lenet": (*images_of(images), *few),
        "ranks": DDP,
    }
    return [
        noted(*its, name=f"{commit} {name}", python_path=str(folder)) for name, its in words.items()
    ]


def table(commits: Sequence[str], runs: dict[str, list[Run]]) -> str:
    rows = [f"| commit | {' | '.join(column for column, _, _ in MEASURES)} |"]
    rows.append(f"|---|{'--:|' * len(MEASURES)}")
    first = commits[0]
    for commit in commits:
        cells = [subject(commit)]
        for _, program, measure in MEASURES:
            here, there = runs[f"{commit} {program}"], runs[f"{first} {program}"]
            ratio = statistics.median(report.ratios_of(here, there, measure))
            own = report.amount([getattr(run, measure) for run in here], measure)
            cells.append(own if commit == first else f"{ratio:.2f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def subject(commit: str) -> str:
    command = ["git", "log", "-1", "--format=%h %s", commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
