"""gpu.json as a page: what was measured, what is missing and why."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.performance.report import HEADER, Result

Record = dict[str, Any]
WAYS = ("way", "ms a step", "range", "{unit} a second", "MFU", "peak memory", "loss apart by")


def page(report: Record) -> str:
    parts = [
        f"# {report['title']}",
        f"{report['when']}, `{report['command']}`, {report['seconds']:.0f} s",
        "\n".join(f"- {line}" for line in report["problems"]) or "All is as it should be.",
        table(
            ("section", "state", "seconds", "at most"),
            [
                (s["name"], s["state"], f"{s['seconds']:.0f}", f"{s['limit']:.0f}")
                for s in report["sections"]
            ],
        ),
    ]
    for section in report["sections"]:
        parts += section_parts(section, report["contests"])
    return "\n\n".join(parts) + "\n"


def section_parts(section: Record, contests: Sequence[Record]) -> Iterable[str]:
    yield f"## {section['name']}"
    if section["state"] == "left out":
        yield "Left out: the time was over."
    elif section["state"] != "done":
        why = "It failed" if section["state"] == "failed" else "Its time was over"
        yield f"{why} after {section['seconds']:.0f} s. The last that it wrote:"
        yield f"```\n{section['error']}\n```"
    records = section["records"]
    yield from (record["text"] for record in records if record["kind"] == "note")
    facts = [record for record in records if record["kind"] == "fact"]
    if facts:
        yield table(("what", "", "note"), [(f["name"], amount(f), f["note"]) for f in facts])
    for record in records:
        if record["kind"] == "test":
            yield ", ".join(f"{count} {name}" for name, count in record["counts"].items())
            if not record["is_whole"]:
                yield "The tests were stopped before their end, as their time was over."
            if record["failures"]:
                yield "\n".join(f"- {line}" for line in record["failures"])
    named = [record["name"] for record in records if record["kind"] == "contest"]
    for contest in contests:
        if contest["name"] in named:
            yield from contest_parts(contest)


def contest_parts(contest: Record) -> Iterable[str]:
    yield f"**{contest['title']}**, {contest['parameters']:,} parameters"
    header = [cell.format(unit=contest["unit"]) for cell in WAYS]
    yield table(header, [cells(way) for way in contest["ways"]])
    if contest["ratios"]:
        yield "\n".join([HEADER, *(str(Result(**ratio)) for ratio in contest["ratios"])])
    for way in contest["ways"]:
        if not way["agrees"]:
            yield f'**{way["way"]} does not train the same thing**: see "loss apart by".'
    for failure in contest["failures"]:
        yield f"**{failure['way']} failed**: {failure['text']}"
    yield (
        "\"Loss apart by\" is the largest difference between its epochs' losses and dpframe's, "
        f"relative to the first epoch's; up to {contest['tolerance']:.0%} it is the same curve."
    )
    if contest["has_formula"] and all(way["utilization"] is None for way in contest["ways"]):
        gpu = contest["gpu"] or "a CPU"
        yield f"No MFU: the peak of {gpu} is not in dpframe/devices/peaks.py."


def cells(way: Record) -> list[str]:
    share, apart = way["utilization"], way["difference"]
    return [
        way["way"],
        f"{1e3 * way['step_seconds']:,.3f}",
        f"{1e3 * way['least']:,.3f} to {1e3 * way['most']:,.3f}",
        f"{way['units_per_second']:,.0f}",
        "" if share is None else f"{share:.1%}",
        f"{way['peak_bytes'] / 2**30:.2f} GiB" if way["peak_bytes"] else "",
        "" if apart is None else f"{apart:.2%}",
    ]


def amount(fact: Record) -> str:
    value = fact["value"]
    if isinstance(value, float):
        value = f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{'unknown' if value is None else value} {fact['unit']}".strip()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
