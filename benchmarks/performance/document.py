"""Writes what was found into docs/performance.md, between its markers, and draws it."""

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.performance.peers import versions
from benchmarks.performance.result import Result

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "performance.md", DOCS / "performance.svg"
FOUND = Path(__file__).with_name("found.json")
BEGIN, END = "<!-- begin: python -m benchmarks.performance -->", "<!-- end -->"
HEADER = "| beside | dpframe | it | ratio | half of the turns | target | met |\n"
HEADER += "|---|--:|--:|--:|--:|--:|---|"
ROW, WIDTH, LEFT, RIGHT = 22, 860, 400, 130  # pixels of the picture
FONT = "font-family='sans-serif' font-size='13'"
OURS, MISSED, THEIRS = "#2a6fb0", "#b0542a", "#d8d8d8"

Found = dict[str, list[Result]]


def load() -> tuple[Found, dict[str, str]]:
    """What was found before, by section, and where and when each was."""
    if not FOUND.is_file():
        return {}, {}
    content = json.loads(FOUND.read_text())
    found = {name: [Result(*row) for row in rows] for name, rows in content["found"].items()}
    return found, content["where"]


def save(found: Found, where: dict[str, str]) -> None:
    FOUND.write_text(json.dumps({"where": where, "found": found}, indent=1) + "\n")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(found, where)}\n{END}{after}")
    PICTURE.write_text(picture([result for results in found.values() for result in results]))


def tables(found: Found, where: dict[str, str]) -> str:
    parts = []
    for name, results in found.items():
        for section in dict.fromkeys(result.section for result in results):
            of_it = [result for result in results if result.section == section]
            beside = max(result.beside for result in of_it)
            others = f"; others kept {beside:.1f} cores busy" if beside else ""  # or not looked at
            said = f"{where[name]}{others}"
            rows = [line(result) for result in of_it]
            parts.append(
                "\n".join([f"**{section[0].upper()}{section[1:]}**, {said}\n", HEADER, *rows])
            )
    return "\n\n".join(parts)


def line(result: Result) -> str:
    if result.theirs is None:
        limit = f"{result.target:g} {result.unit}"
        spread = f"{result.low:.2f} to {result.high:.2f} {result.unit}"
        values = [amount(result.ours, result.unit), "", "", spread, limit]
    else:
        target = "" if result.target is None else f"{result.target:.2f}"
        spread = f"{result.low:.2f} to {result.high:.2f}" if result.turns > 1 else ""
        values = [amount(value, result.unit) for value in (result.ours, result.theirs)]
        values += [f"{result.ratio:.2f}", spread, target]
    met = {None: "", True: "yes", False: "**no**"}[result.is_met]
    return f"| {' | '.join([result.name, *values, met])} |"


def amount(value: float, unit: str) -> str:
    return f"{value:,.2f} {unit}" if unit == "s" else f"{value:,.0f} {unit}"


def machine() -> str:
    """In words, with the time: numbers are only good where they were taken."""
    words = [f"{os.cpu_count()} cores", platform.machine(), f"Python {platform.python_version()}"]
    words += [f"{name} {version}" for name, version in versions().items()]
    return f"{time.strftime('%Y-%m-%d')}: {', '.join(words)}"


def picture(results: Sequence[Result]) -> str:
    """A bar a comparison, as long as the ratio, and a line where the target is."""
    rows = [result for result in results if result.theirs is not None and result.unit != "calls"]
    height = ROW * (len(rows) + 2)
    begin = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' {FONT}>"
    title = "dpframe / the other: shorter is better; the grey bar is the other, the mark the target"
    parts = [begin, "<rect width='100%' height='100%' fill='white'/>"]
    parts.append(f"<text x='8' y='{ROW - 6}' font-weight='bold'>{title}</text>")
    for index, result in enumerate(rows, 1):
        parts += bar(result, index * ROW)
    return "\n".join([*parts, "</svg>"]) + "\n"


def bar(result: Result, top: int) -> Iterable[str]:
    room = (WIDTH - LEFT - RIGHT) / 1.2  # of a ratio of one; what is longer is cut off
    kind = result.section.partition(",")[0]
    colour = MISSED if result.is_met is False else OURS
    length = min(result.ratio, 1.2) * room
    yield f"<text x='8' y='{top + 15}'>{escaped(f'{kind}: {result.name}')[:62]}</text>"
    yield f"<rect x='{LEFT}' y='{top + 3}' width='{room:.0f}' height='16' fill='{THEIRS}'/>"
    yield f"<rect x='{LEFT}' y='{top + 6}' width='{length:.0f}' height='10' fill='{colour}'/>"
    if result.target is not None:
        at = LEFT + min(result.target, 1.2) * room
        yield f"<rect x='{at:.0f}' y='{top + 1}' width='2' height='20' fill='black'/>"
    yield f"<text x='{WIDTH - RIGHT + 10}' y='{top + 15}'>{result.ratio:.2f} x</text>"


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
