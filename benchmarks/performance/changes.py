"""What changes cost: `python -m benchmarks.performance.changes COMMIT COMMIT …` runs them by turns.

Each commit is checked out beside the others; the table has its times over those of the first one.
"""

import statistics
import subprocess
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.performance import report
from benchmarks.performance.process import PROGRAMS, Program, Run, in_turns, noted
from benchmarks.performance.sections import DDP, made_up_images

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
    with checked_out(options.commits) as folders, made_up_images() as images:
        programs = [
            program
            for commit, folder in zip(options.commits, folders, strict=True)
            for program in programs_of(commit, folder, images)
        ]
        runs = in_turns(programs, options.rounds)
    text = table(options.commits, runs)
    print(text)
    if options.write:
        report.write("changes", f"{report.machine()}; {options.rounds} turns\n\n{text}")


def programs_of(commit: str, folder: Path, images: str) -> list[Program]:
    config = f"--config-dir={PROGRAMS / 'conf'}"
    words = {
        "boston": ["recipe=boston"],
        "mlp": [config, "recipe=mlp"],
        "lenet": [
            *("recipe=lenet", f"data.root={images}", "data.batch_size=256"),
            *("trainer.max_epochs=4", "trainer.limit_train_batches=15"),
        ],
        "ranks": list(DDP),
    }
    return [
        noted(*its, name=f"{commit} {name}", python_path=str(folder)) for name, its in words.items()
    ]


def table(commits: Sequence[str], runs: dict[str, list[Run]]) -> str:
    rows = [f"| commit | {' | '.join(column for column, _, _ in MEASURES)} |"]
    rows.append(f"|---|{'--:|' * len(MEASURES)}")
    for commit in commits:
        cells = []
        for _, program, measure in MEASURES:
            here = [getattr(run, measure) for run in runs[f"{commit} {program}"]]
            first = [getattr(run, measure) for run in runs[f"{commits[0]} {program}"]]
            ratios = [one / other for one, other in zip(here, first, strict=True)]
            is_seconds = measure in report.UNITS
            amount = statistics.median(here)
            shown = f"{amount:.2f} s" if is_seconds else f"{amount:,.0f} us"
            cells.append(shown if commit == commits[0] else f"{statistics.median(ratios):.2f}")
        subject = git("log", "-1", "--format=%h %s", commit)
        rows.append(f"| {subject} | {' | '.join(cells)} |")
    return "\n".join(rows)


@contextmanager
def checked_out(commits: Sequence[str]) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        folders = [Path(place, commit) for commit in commits]
        for commit, folder in zip(commits, folders, strict=True):
            folder.mkdir()
            archive = subprocess.run(
                ["git", "archive", commit], cwd=ROOT, capture_output=True, check=True
            )
            subprocess.run(["tar", "-x"], input=archive.stdout, cwd=folder, check=True)
        yield folders


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
