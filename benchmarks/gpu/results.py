"""What the turns say: medians and ratios of a contest, and all that is not as it should be."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.formulas import largest_difference, utilization
from benchmarks.performance.process import Run
from benchmarks.performance.report import Result, compared

OURS = "dpframe"
Record = dict[str, Any]


def contests_of(records: Sequence[Record]) -> list[Record]:
    """Of each contest its rows, one a way, and how ours compares with each other way."""
    told = [record for record in records if record["kind"] == "contest"]
    return [contest_of(contest, records) for contest in told]


def contest_of(contest: Record, records: Sequence[Record]) -> Record:
    its = [record for record in records if record.get("contest") == contest["name"]]
    turns: dict[str, dict[int, Record]] = {}
    for record in its:
        if record["kind"] == "turn":
            turns.setdefault(record["way"], {})[record["number"]] = record
    losses = first_losses(turns.get(OURS, {}))
    return {
        "name": contest["name"],
        "title": contest["title"],
        "unit": contest["unit"],
        "gpu": contest["gpu"],
        "parameters": contest["parameters"],
        "has_formula": bool(contest["flops_per_step"]),
        "tolerance": contest["tolerance"],
        "least_utilization": contest["least_utilization"],
        "ways": [row(contest, way, list(its.values()), losses) for way, its in turns.items()],
        "ratios": [r._asdict() for r in ratios(contest, turns)],
        "failures": [record for record in its if record["kind"] == "failure"],
    }


def row(contest: Record, way: str, turns: list[Record], losses: list[float]) -> Record:
    """`difference` is the largest between its epochs' losses and ours; `agrees`: it is small."""
    seconds = [turn["step_seconds"] for turn in turns]
    median = statistics.median(seconds)
    difference = largest_difference(losses, turns[0]["losses"])
    flops = contest["flops_per_step"]
    return {
        "way": way,
        "turns": len(turns),
        "step_seconds": median,
        "least": min(seconds),
        "most": max(seconds),
        "units_per_second": contest["units_per_step"] / median,
        "utilization": utilization(flops, median, contest["gpu"]) if flops else None,
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "difference": difference,
        "agrees": difference is not None and difference <= contest["tolerance"],
    }


def ratios(contest: Record, turns: dict[str, dict[int, Record]]) -> list[Result]:
    """Of our step to each other's, turn by turn."""
    mine = turns.get(OURS, {})
    found = []
    for way, its in turns.items():
        common = sorted(mine.keys() & its.keys())
        if way != OURS and common:
            pair = [[as_run(each[n]) for n in common] for each in (mine, its)]
            aim = contest["aims"].get(way)
            found.append(compared(contest["title"], way, *pair, "step", aim))
    return found


def as_run(turn: Record) -> Run:
    return Run(turn["step_seconds"], step=1e6 * turn["step_seconds"])


def first_losses(turns: dict[int, Record]) -> list[float]:
    return turns[min(turns)]["losses"] if turns else []


def problems(sections: Sequence[Record], contests: Sequence[Record]) -> list[str]:
    """A line each; none where all was measured, and all is as it should be."""
    lines = [f"{s['name']}: {s['state']}" for s in sections if s["state"] != "done"]
    for section in sections:
        for record in section["records"]:
            if record["kind"] == "test":
                lines += problems_of_tests(record)
    for contest in contests:
        lines += [f"{contest['title']}: {line}" for line in problems_of(contest)]
    return lines


def problems_of_tests(record: Record) -> list[str]:
    counts = record["counts"]
    broken = counts["failures"] + counts["errors"]
    lines = [f"tests: {broken} failed"] if broken else []
    lines += [] if any(counts.values()) else ["tests: none ran"]
    return lines if record["is_whole"] else [*lines, "tests: stopped before their end"]


def problems_of(contest: Record) -> list[str]:
    lines = [f"{f['way']} failed: {f['text']}" for f in contest["failures"]]
    for way in contest["ways"]:
        if not way["agrees"]:
            lines.append(f"{way['way']} does not train the same thing")
        least, share = contest["least_utilization"], way["utilization"]
        if way["way"] == OURS and least is not None and share is not None and share < least:
            lines.append(f"MFU {share:.2f}, not {least:.2f}")
    for ratio in contest["ratios"]:
        if ratio["target"] is not None and ratio["ratio"] > ratio["target"]:
            lines.append(f"{ratio['ratio']:.3f} of {ratio['name']}, not {ratio['target']:.2f}")
    return lines
