"""What a sweep's runs came to: sweep.json, which a later sweep goes on from, a table and a CSV.

While the sweep runs, each change is a line of sweep.jsonl, so that n runs write n times a line.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dpframe.cli.means import Row, rows_of
from dpframe.cli.outcome import STATES, Result
from dpframe.config.objective import Objective
from dpframe.errors import UserError, printable
from dpframe.loggers.formats import ruled, table_text
from dpframe.util import files
from dpframe.util.terminal import coloured

NAME = "sweep.json"
JOURNAL = "sweep.jsonl"  # what has changed since that was written: a `Result` a line


@dataclass
class Results:
    """The runs of a sweep so far, and the files that tell them."""

    directory: Path
    objective: Objective
    typed: list[str]  # the overrides of the sweep
    fixed: set[str]  # keys with one value for all runs
    sweeper: str
    over: Sequence[str] = ("seed",)  # keys over which means are taken
    compare: str | None = None  # the key whose values are compared
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

    def means(self) -> list[Row]:
        """Means over seeds, the best first; where a key is compared, its first value first."""
        rows = rows_of(self.runs, self.keys(), over=self.over, compare=self.compare)
        if any(row.difference is not None for row in rows):
            return rows
        is_averaged = bool({*self.over} & {*self.keys()})
        if not is_averaged or not any(len(row.runs) > 1 for row in rows):
            return []
        sign = -1 if self.objective.mode == "max" else 1
        return sorted(rows, key=lambda row: (row.mean is None, sign * (row.mean or 0.0)))

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
            line = f"best: {of}, {metric} {_number(best.value)}, {printable(str(path))}"
            lines.append(coloured(line, "green"))
        means = self.means()
        if means:
            lines += ["", self._table_of(means)]
        if self.compare is not None and not any(row.difference for row in means):
            said = "no two runs differ in it alone, so there are no pairs"
            lines += ["", f"sweep.compare={self.compare}: {said}"]
        return lines

    def _table_of(self, means: Sequence[Row]) -> str:
        names = short(self.keys())
        over = [names.pop(key) for key in self.over if key in names]
        spread = f", mean ± sd over {', '.join(over)}" if over else ""
        head = [*names.values(), f"{self.objective.metric}{spread}", "runs"]
        rows = [
            [
                *(values.get(key, "") for key in names),
                _number(row.mean) + (f" ± {row.sd:.3g}" if row.sd is not None else ""),
                _counted(row.runs, row.left_out),
            ]
            for row in means
            for values in [Result(0, row.overrides).values]
        ]
        if self.compare is not None and any(row.difference for row in means):
            first = self.runs[0].values.get(self.compare, "")
            head += [f"difference to {names[self.compare]}={first}", "95% interval", "pairs"]
            for cells, row in zip(rows, means, strict=True):
                cells += _differing(row)
        return ruled([tuple(head), *map(tuple, rows)])

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
            "over": list(self.over),
            "compare": self.compare,
            "means": [asdict(each) for each in self.means()],
            "runs": [asdict(run) for run in self.runs],
        }
        files.write_text(self.directory / NAME, files.json_text(content, indent=1) + "\n")
        (self.directory / JOURNAL).unlink(missing_ok=True)

    def note(self, result: Result) -> None:
        """When a run begins and ends, so that a sweep that is killed can be gone on with."""
        if not self.has_begun:
            self.save()
        self.has_begun = True
        with open(self.directory / JOURNAL, "a", encoding="utf-8") as journal:
            journal.write(files.json_text(asdict(result)) + "\n")

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
        raise UserError(f"{path} is not what a sweep writes; use another sweep's directory")
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


def _differing(row: Row) -> list[str]:
    """The cells of a row's difference to the first one."""
    if (difference := row.difference) is None:
        return ["", "", ""]
    mean, interval = difference.mean, difference.interval
    return [
        "" if mean is None else f"{mean:+.4g}",
        "" if interval is None else f"{interval[0]:+.4g} to {interval[1]:+.4g}",
        _counted(difference.pairs, difference.left_out),
    ]


def _counted(there: Sequence[object], left_out: Sequence[object]) -> str:
    of = f" of {len(there) + len(left_out)}" if left_out else ""
    return f"{len(there)}{of}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
