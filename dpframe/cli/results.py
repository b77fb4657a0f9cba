"""What a sweep's runs came to: sweep.json, which a later sweep goes on from, a table and a CSV.

While the sweep runs, each change is a line of sweep.jsonl, so that n runs write n times a line.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpframe.callbacks.monitor import PRUNED
from dpframe.config.objective import Objective
from dpframe.config.overrides import key_of
from dpframe.errors import UserError, printable
from dpframe.loggers.formats import ruled, table_text
from dpframe.util import files

NAME = "sweep.json"
JOURNAL = "sweep.jsonl"  # what has changed since that was written: a `Result` a line
DONE = ("finished", "pruned")
STATES = ("missing", "running", *DONE, "failed", "interrupted")


@dataclass
class Result:
    """One run of a sweep; `number` counts from 1: Hydra's job.num + 1."""

    number: int
    overrides: list[str]
    directory: str = ""  # its name in the sweep's
    status: str = "missing"
    value: float | None = None  # the best of the metric
    seconds: float | None = None
    reason: str = ""  # why it has failed

    @property
    def values(self) -> dict[str, str]:
        return {key_of(override): override.partition("=")[2] for override in self.overrides}

    @property
    def is_done(self) -> bool:
        return self.status in DONE


class Outcome(NamedTuple):
    """What one run came to."""

    status: str
    value: float | None = None
    reason: str = ""


def outcome_of(summary: dict[str, Any], metric: str) -> Outcome:
    """A run has failed if what it is compared by is not finite: it has diverged, and -inf would be
    the best of all. Some modes measure nothing."""
    if summary.get("status") in ("failed", "interrupted"):
        return Outcome(summary["status"], reason=summary["reason"])
    value = summary.get("best", {}).get(metric, summary.get("metrics", {}).get(metric))
    if value is not None and not math.isfinite(value):
        return Outcome("failed", reason=f"{metric} is {value}")
    is_pruned = summary.get("stopped", "").startswith(PRUNED)
    return Outcome("pruned" if is_pruned else "finished", value)


@dataclass
class Seeds:
    """Runs that differ by their seed alone."""

    overrides: list[str]
    runs: list[int]
    mean: float
    sd: float


@dataclass
class Results:
    """The runs of a sweep so far, and the files that tell them."""

    directory: Path
    objective: Objective
    typed: list[str]  # the overrides of the sweep
    fixed: set[str]  # keys with one value for all runs
    sweeper: str
    total: int | None = None  # None: the sweeper alone knows
    runs: list[Result] = field(default_factory=list)
    has_begun: bool = False
    _known: dict[str, None] = field(default_factory=dict)  # what the first runs set
    _seen: int = 0  # so many runs

    # ---- what differs

    def keys(self) -> list[str]:
        """What the runs differ by."""
        for run in self.runs[self._seen :]:
            self._known |= dict.fromkeys(run.values)
        self._seen = len(self.runs)
        return [key for key in self._known if key not in self.fixed]

    def title(self, result: Result) -> str:
        """`run 3 of 6: lr=0.01 seed=1`"""
        names, values = short(self.keys()), result.values
        differing = [f"{name}={values[key]}" for key, name in names.items() if key in values]
        of = f" of {self.total}" if self.total is not None else ""
        return printable(f"run {result.number}{of}: {' '.join(differing)}".rstrip(": "))

    # ---- what came out

    def ranked(self) -> list[Result]:
        """The best first, and last those without a value."""
        sign = -1 if self.objective.mode == "max" else 1

        def place(run: Result) -> tuple[bool, float, int]:
            return run.value is None, sign * (run.value or 0.0), run.number

        return sorted(self.runs, key=place)

    @property
    def best(self) -> Result | None:
        return next((run for run in self.ranked() if run.status == "finished"), None)

    @property
    def failed(self) -> list[Result]:
        return [run for run in self.runs if run.status == "failed"]

    def seeds(self) -> list[Seeds]:
        """Means over seeds, the best first."""
        if "seed" not in self.keys():
            return []
        groups: dict[tuple[str, ...], list[Result]] = {}
        for run in self.runs:
            is_measured = run.value is not None and math.isfinite(run.value)
            if run.status == "finished" and is_measured:
                rest = tuple(o for o in run.overrides if key_of(o) not in self.fixed | {"seed"})
                groups.setdefault(rest, []).append(run)
        several = {rest: runs for rest, runs in groups.items() if len(runs) > 1}
        found = [_of_seeds(rest, runs) for rest, runs in several.items()]
        return sorted(found, key=lambda each: each.mean, reverse=self.objective.mode == "max")

    # ---- on the screen and in files

    def table(self) -> str:
        names = short(self.keys())
        is_measured = any(run.value is not None for run in self.runs)
        metrics = (self.objective.metric,) * is_measured
        head = ("run", *names.values(), *metrics, "seconds", "status", "directory")
        rows = [
            (
                str(run.number),
                *(run.values.get(key, "") for key in names),
                *(_number(run.value) for _ in metrics),
                "" if run.seconds is None else f"{run.seconds:.1f}",
                run.status,
                run.directory,
            )
            for run in self.ranked()
        ]
        return ruled([head, *rows])

    def summary(self) -> list[str]:
        """The best run, and means over seeds."""
        lines, metric = [], self.objective.metric
        if (best := self.best) is not None and best.value is not None:
            of = self.title(best).partition(" of ")[0].partition(":")[0]
            path = self.directory / best.directory
            lines.append(f"best: {of}, {metric} {_number(best.value)}, {printable(str(path))}")
        if means := self.seeds():
            names = short([key for key in self.keys() if key != "seed"])
            head = (*names.values(), f"{metric}, mean ± sd over seeds", "runs")
            rows = [
                (
                    *(Result(0, mean.overrides).values.get(key, "") for key in names),
                    f"{_number(mean.mean)} ± {mean.sd:.3g}",
                    str(len(mean.runs)),
                )
                for mean in means
            ]
            lines += ["", ruled([head, *rows])]
        return lines

    def ending(self, result: Result) -> str:
        """`run 3 of 6: lr=0.01 seed=1: finished, val/loss 14.7, 3.2 s`"""
        value = f", {self.objective.metric} {_number(result.value)}" * (result.value is not None)
        reason = f", {printable(result.reason)}" * bool(result.reason)
        seconds = f"{result.seconds or 0.0:.1f} s"
        return f"{self.title(result)}: {result.status}{value}{reason}, {seconds}"

    def save(self) -> None:
        """At the beginning and the end of a sweep."""
        best = self.best
        content = {
            "overrides": self.typed,
            "sweeper": self.sweeper,
            "metric": self.objective.metric,
            "mode": self.objective.mode,
            "best": None if best is None else best.number,
            "seeds": [asdict(each) for each in self.seeds()],
            "runs": [asdict(run) for run in self.runs],
        }
        files.write_text(self.directory / NAME, json.dumps(content, indent=1) + "\n")
        (self.directory / JOURNAL).unlink(missing_ok=True)

    def note(self, result: Result) -> None:
        """When a run begins and ends, so that a sweep that is killed can be gone on with."""
        if not self.has_begun:
            self.save()
        self.has_begun = True
        with open(self.directory / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(asdict(result)) + "\n")

    def save_table(self) -> None:
        keys = self.keys()
        head = ["run", *keys, self.objective.metric, "seconds", "status", "directory", "reason"]
        rows: list[list[Any]] = [
            [run.number, *(run.values.get(key) for key in keys)]
            + [run.value, run.seconds, run.status, run.directory, run.reason]
            for run in self.ranked()
        ]
        files.write_text(self.directory / "sweep.csv", table_text([head, *rows]))


@dataclass
class Earlier:
    """An earlier sweep's sweep.json and sweep.jsonl. A stranger may have written them."""

    overrides: list[str]
    sweeper: str
    runs: list[Result]


def read_earlier(directory: Path) -> Earlier:
    path = directory / NAME
    if not path.is_file():
        raise UserError(
            f"sweep.resume={directory}: there is no {NAME} in it; name a sweep's directory"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {run["number"]: run for run in [*content["runs"], *_noted(directory)]}
        runs = [Result(**run) for run in known.values()]
        overrides, sweeper = content["overrides"], content["sweeper"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} can't be read: {error}; use another sweep's directory") from None
    texts = [sweeper, *overrides, *(word for run in runs for word in run.overrides)]
    texts += [text for run in runs for text in (run.directory, run.reason, run.status)]
    numbers = [n for run in runs for n in (run.value, run.seconds) if n is not None]
    is_sound = all(isinstance(text, str) for text in texts) and isinstance(overrides, list)
    is_sound &= all(isinstance(run.overrides, list) for run in runs)
    is_sound &= all(type(number) in (int, float) for number in numbers)
    is_sound &= all(type(run.number) is int and run.status in STATES for run in runs)
    if not is_sound:
        raise UserError(f"{path} is not as a sweep writes it; use another sweep's directory")
    return Earlier(overrides, sweeper, runs)


def _noted(directory: Path) -> list[Any]:
    """The lines of the journal; one that a killed sweep has not ended is none."""
    path = directory / JOURNAL
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def short(keys: Iterable[str]) -> dict[str, str]:
    """The shortest unique endings of keys: `lr` for task.optimizer.lr."""
    keys, names = list(keys), {}
    for key in keys:
        words = key.lstrip("+~").split(".")
        ends = [".".join(words[at:]) for at in reversed(range(len(words)))]
        others = [f".{other.lstrip('+~')}" for other in keys if other != key]
        unique = (end for end in ends if not any(other.endswith(f".{end}") for other in others))
        names[key] = next(unique, key.lstrip("+~"))
    return names


def _of_seeds(overrides: Sequence[str], runs: list[Result]) -> Seeds:
    values = [run.value for run in runs if run.value is not None]
    numbers = [run.number for run in runs]
    return Seeds(list(overrides), numbers, statistics.mean(values), statistics.stdev(values))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
