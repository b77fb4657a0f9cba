"""`dpframe runs`: the trainings below a directory as a table, or two of them side by side.

A run directory is data, maybe a stranger's: what is not as a run writes it is left out.
"""

import math
import os
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from dpframe.cli.results import short
from dpframe.config.earlier_run import NOT_TAKEN_OVER, saved_overrides
from dpframe.config.keys import dotted
from dpframe.config.overrides import key_of
from dpframe.errors import UserError, suggestion
from dpframe.loggers.formats import ruled
from dpframe.modes import provenance
from dpframe.util import files
from dpframe.values import shown

HELP = """\
dpframe runs [DIR] [--where KEY=VALUE] [--sort KEY] [--json]
dpframe runs A B [--json]

Lists the trainings below DIR, or below outputs and multirun, the newest last: the name, what was
typed beside the recipe, the best and the last value of what is monitored, steps, status and start.

  --where tags=ablation   those with this tag; also by name, recipe, status, or a key that was
                          typed, e.g. lr=0.01. * stands for any letters; several have all to hold
  --sort val/loss         the lowest first, by the best value where this was monitored, else by the
                          last; --sort=-val/accuracy: the highest first. Also name, status, steps,
                          epochs, seconds, when
  --json                  all that is known of each run, for programs

A and B are run directories or names: what they came to, and how their configs, versions and code
differ."""
PLACES = ("outputs", "multirun")
LARGEST = 100_000  # values of a config
NAMES = ("name", "tags", "notes")
PLAIN = ("name", "recipe", "status")
COUNTS = ("steps", "epochs", "seconds", "best_step")
SORTED = ("name", "status", "steps", "epochs", "seconds", "when")


@dataclass
class Run:
    """What is known of a training."""

    directory: str
    recipe: str = ""
    name: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    overrides: dict[str, str] = field(default_factory=dict)  # what was typed beside the recipe
    status: str = "killed"  # or running, finished, failed, interrupted
    when: str = ""
    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    best_metrics: dict[str, float] = field(default_factory=dict)  # all of that step
    metrics: dict[str, float] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        return self.best.get(metric, self.metrics.get(metric))

    def values(self, key: str) -> list[str]:
        """What --where compares."""
        if key == "tags":
            return self.tags
        if key in PLAIN:
            return [str(getattr(self, key))]
        typed = self.overrides.items()
        return [value for name, value in typed if name == key or name.endswith(f".{key}")]


def runs(words: Sequence[str], parser: ArgumentParser) -> str:
    """What the command prints."""
    parser.add_argument("places", nargs="*")
    parser.add_argument("--where", action="append", default=[])
    parser.add_argument("--sort")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    given = parser.parse_args(words)
    if given.help:
        return HELP
    if len(given.places) == 2:
        if given.where or given.sort:
            raise UserError("dpframe runs A B shows these two; leave out --where and --sort")
        return _compared(*map(_named, given.places), as_json=given.json)
    if len(given.places) > 2:
        raise UserError("dpframe runs: name one directory, or two runs to compare")
    found = _below(given.places or PLACES)
    if not found:
        places = " and ".join(given.places or PLACES)
        raise UserError(f"there is no run in {places}; name a directory: dpframe runs DIR")
    kept = _kept(found, given.where)
    if given.sort:
        kept = _sorted(kept, given.sort, found)
    if given.json:
        return files.json_text([asdict(run) for run in kept], indent=1)
    return _table(kept, (given.sort or "").lstrip("-"))


# ---- reading


def _below(places: Iterable[str]) -> list[Run]:
    """The trainings, the newest last."""
    found = []
    for place in places:
        for folder, folders, _ in os.walk(os.path.expanduser(place)):
            if ".hydra" in folders:
                folders.clear()  # a run has none in it
                run = _read(Path(folder))
                found += [run] if run is not None else []
    return sorted(found, key=lambda run: (run.when, run.directory))


def _named(word: str) -> Run:
    """A run by its directory, or the newest one of a name."""
    path = Path(os.path.expanduser(word))
    run = _read(path) if (path / ".hydra").is_dir() else None
    if run is not None:
        return run
    known = {run.name: run for run in _below(PLACES) if run.name}
    if word not in known:
        near = f"; {suggestion(word, known)}" if known else ""
        raise UserError(f"dpframe runs: {word} is neither a run's directory nor its name{near}")
    return known[word]


def _read(directory: Path) -> Run | None:
    """None: it is no training."""
    summary = files.json_object(directory / "summary.json")
    facts = summary if "mode" in summary else _config(directory)
    if facts.get("mode", "fit") != "fit":
        return None
    origin, tags = provenance.summarized(directory), facts.get("tags")
    time = datetime.fromtimestamp((directory / ".hydra").stat().st_mtime).astimezone()
    try:
        overrides = saved_overrides(directory)
    except UserError:
        overrides = []
    return Run(
        str(directory),
        recipe=str(facts.get("recipe") or ""),
        name=str(facts.get("name") or ""),
        tags=[str(tag) for tag in tags] if isinstance(tags, list) else [],
        notes=str(facts.get("notes") or ""),
        overrides={key_of(o): o.partition("=")[2] for o in overrides if _is_told(o)},
        status=_status(directory, summary, origin),
        when=str(origin.get("began") or time.isoformat(timespec="seconds")),
        best=_metrics(summary.get("best")),
        best_metrics=_metrics(summary.get("best_metrics", summary.get("best"))),
        metrics=_metrics(summary.get("metrics")),
        origin=origin,
        **_numbers({key: summary.get(key) for key in COUNTS}),
    )


def _status(directory: Path, summary: dict[str, Any], origin: dict[str, Any]) -> str:
    """A summary counts if it is of the start that origin.json is of, not of an earlier one."""
    of_summary = summary.get("origin")
    began = of_summary.get("began") if isinstance(of_summary, dict) else None
    if summary and began == origin.get("began"):
        return str(summary.get("status"))
    return "running" if files.is_claimed(directory) else "killed"


def _is_told(override: str) -> bool:
    """Whether a table has it: the other keys have columns of their own, or are of one start."""
    key = key_of(override)
    return key.split(".")[0] not in (*NOT_TAKEN_OVER, *NAMES, "recipe", "hydra")


def _config(directory: Path) -> dict[str, Any]:
    path = directory / ".hydra/config.yaml"
    try:
        content = yaml.safe_load(path.read_text(errors="replace")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _metrics(content: Any) -> dict[str, float]:
    pairs = content.items() if isinstance(content, dict) else ()
    return _numbers({name: math.nan if value is None else value for name, value in pairs})


def _numbers(content: Any) -> dict[str, Any]:
    pairs = content.items() if isinstance(content, dict) else ()
    return {str(name): value for name, value in pairs if type(value) in (int, float)}


# ---- choosing


def _kept(found: list[Run], conditions: Iterable[str]) -> list[Run]:
    kept = found
    for condition in conditions:
        key, equals, pattern = condition.partition("=")
        if not equals:
            raise UserError(f"--where {condition}: use KEY=VALUE, e.g. --where tags=ablation")
        known = {"tags", *PLAIN, *(name for run in found for name in run.overrides)}
        if key not in known and not any(run.values(key) for run in found):
            raise UserError(f"--where {condition}: no run has {key}; {suggestion(key, known)}")
        kept = [run for run in kept if any(fnmatchcase(v, pattern) for v in run.values(key))]
    return kept


def _sorted(kept: list[Run], word: str, found: list[Run]) -> list[Run]:
    """Those without a value last."""
    key, is_reversed = word.removeprefix("-"), word.startswith("-")
    known = {*SORTED, *(name for run in found for name in (*run.best, *run.metrics))}
    if key not in known:
        raise UserError(f"--sort {key}: no run has it; {suggestion(key, known)}")
    value = (lambda run: getattr(run, key)) if key in SORTED else (lambda run: run.value(key))
    there = [run for run in kept if _is_comparable(value(run))]
    rest = [run for run in kept if not _is_comparable(value(run))]
    return sorted(there, key=value, reverse=is_reversed) + rest


def _is_comparable(value: str | float | None) -> bool:
    return isinstance(value, str) or (value is not None and math.isfinite(value))


# ---- showing


def _table(kept: list[Run], metric: str) -> str:
    names = short({key: None for run in kept for key in run.overrides})
    monitored = {name for run in kept for name in run.best}
    if metric in SORTED or not metric:
        metric = monitored.pop() if len(monitored) == 1 else ""
    head = ("name", "typed", f"best {metric}".strip(), f"last {metric}".strip())
    rows = [
        (
            run.name,
            " ".join(f"{names[key]}={value}" for key, value in run.overrides.items()),
            *(_cell(run, values, metric) for values in (run.best, run.metrics)),
            str(run.steps),
            run.status,
            _minute(run.when),
            run.directory,
        )
        for run in kept
    ]
    return ruled([(*head, "steps", "status", "when", "directory"), *rows])


def _cell(run: Run, values: dict[str, float], metric: str) -> str:
    """Of one metric, or of what this run monitors, with its name."""
    if metric:
        return f"{values[metric]:.6g}" if metric in values else ""
    return " ".join(f"{name} {values[name]:.6g}" for name in run.best if name in values)


def _minute(when: str) -> str:
    return when[:16].replace("T", " ")


def _compared(one: Run, other: Run, *, as_json: bool) -> str:
    both = (one, other)
    configs = [dict(islice(dotted(_config(Path(run.directory))), LARGEST)) for run in both]
    origins = [provenance.flat(run.origin) for run in both]
    config, origin = _differing(configs), _differing(origins)
    for key in NAMES:
        config.pop(key, None)
    if as_json:
        found = {"runs": [asdict(run) for run in both], "config": config, "origin": origin}
        return files.json_text(found, indent=1)
    told = {key: [str(getattr(run, key)) for run in both] for key in ("directory", "recipe")}
    told |= {"tags": [",".join(run.tags) for run in both], "notes": [run.notes for run in both]}
    told |= {"status": [run.status for run in both], "when": [_minute(run.when) for run in both]}
    told |= {"steps": [str(run.steps) for run in both]}
    for what in ("best_metrics", "metrics"):
        values: list[dict[str, float]] = [getattr(run, what) for run in both]
        for name in dict.fromkeys([*values[0], *values[1]]):
            label = f"best {name}" if what == "best_metrics" else name
            told[label] = [f"{each[name]:.6g}" if name in each else "" for each in values]
    told |= {key: list(map(shown, pair)) for key, pair in (origin | config).items()}
    head = ("", *(run.name or Path(run.directory).name for run in both))
    return ruled([head, *((key, *pair) for key, pair in told.items() if any(pair))])


def _differing(pair: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys([*pair[0], *pair[1]])
    values = {key: [each.get(key) for each in pair] for key in keys}
    return {key: both for key, both in values.items() if both[0] != both[1]}
