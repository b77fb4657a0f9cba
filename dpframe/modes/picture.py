"""Numbers as a picture that every browser shows: panels beside each other, with lines or dots."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, MARGIN = 480, 320, 50  # pixels of a panel
COLORS = ("steelblue", "firebrick", "seagreen", "darkorange", "purple", "dimgray")


class Series(NamedTuple):
    points: Sequence[tuple[float, float]]
    color: str = ""  # of the line that joins them; "": there is none
    name: str = ""  # beside the panel
    dots: Sequence[tuple[str, str]] = ()  # a point's color, and what a browser shows over it


@dataclass
class Panel:
    series: Sequence[Series]
    title: str = ""
    across: str = ""  # what the axes show
    up: str = ""
    ticks: Mapping[float, str] = field(default_factory=dict)  # labels, by the place on an axis
    heights: Mapping[float, str] = field(default_factory=dict)
    marked: float | None = None  # a place that a dashed line shows
    logarithmic: Collection[str] = ()  # of the axes, "across" and "up"


def svg(*panels: Panel) -> str:
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    back = '<rect width="100%" height="100%" fill="white"/>'
    drawn = (line for number, panel in enumerate(panels) for line in _draw(panel, WIDTH * number))
    return "\n".join([head, back, *drawn, "</svg>\n"])


def _draw(panel: Panel, left: float) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    across = [x for x, _ in points] + list(panel.ticks)
    up = [y for _, y in points] + list(panel.heights)
    bottom, right = HEIGHT - MARGIN, left + WIDTH - MARGIN

    def x_of(value: float) -> float:
        share = _share(value, across, is_logarithmic="across" in panel.logarithmic)
        return round(left + MARGIN + share * (WIDTH - 2 * MARGIN), 1)

    def y_of(value: float) -> float:
        share = _share(value, up, is_logarithmic="up" in panel.logarithmic)
        return round(bottom - share * (HEIGHT - 2 * MARGIN), 1)

    lines = [
        f'<path d="M{left + MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="black"/>',
        _text(left + WIDTH / 2, MARGIN / 2 - 5, panel.title),
        _text(left + WIDTH / 2, HEIGHT - 10, panel.across),
        _text(left + MARGIN, MARGIN - 10, panel.up),
        *(_text(x_of(place), bottom + 18, label) for place, label in panel.ticks.items()),
        *(_text(left + MARGIN / 2, y_of(place), said) for place, said in panel.heights.items()),
    ]
    for number, series in enumerate(panel.series):
        places = [(x_of(x), y_of(y)) for x, y in series.points]
        if series.color:
            path = " ".join(f"{x},{y}" for x, y in places)
            lines.append(f'<polyline points="{path}" fill="none" stroke="{series.color}"/>')
        if series.name:
            lines.append(_text(right, MARGIN + 16 * number, series.name, series.color))
        for (x, y), (color, title) in zip(places, series.dots, strict=bool(series.dots)):
            about = f"<title>{escape(title)}</title>"
            lines.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}">{about}</circle>')
    if panel.marked is not None:
        x = x_of(panel.marked)
        lines.append(f'<path d="M{x},{MARGIN} V{bottom}" stroke="firebrick" stroke-dasharray="4"/>')
        lines.append(_text(x, MARGIN - 5, f"{panel.marked:.3g}"))
    return lines


def _share(value: float, values: Sequence[float], *, is_logarithmic: bool) -> float:
    """Where a value lies among others, from 0 to 1."""
    low, high = min(values), max(values)
    if high <= low:
        return 0.5
    if is_logarithmic:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def _text(x: float, y: float, words: str, color: str = "black") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="{color}"'
    return f"<text {place}>{escape(words)}</text>"
