"""Losses over learning rates as a picture: characters for the screen, SVG for a file."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

NEAR = 4  # points on each side that a smoothed one is the mean of
COLUMNS, LINES = 64, 10
WIDTH, HEIGHT, MARGIN = 640, 400, 60  # pixels


class Point(NamedTuple):
    rate: float
    loss: float


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Means of near points: as many on each side, so that the curve is not shifted."""
    means = []
    for at, point in enumerate(points):
        reach = min(NEAR, at, len(points) - 1 - at)
        near = points[at - reach : at + reach + 1]
        means.append(Point(point.rate, sum(each.loss for each in near) / len(near)))
    return means


def chart(points: Sequence[Point], marked: float | None) -> list[str]:
    """Lines of text; `marked` is a learning rate."""
    means = smoothed(points)
    low, high = _range(means)
    place = _places(points, COLUMNS - 1)
    grid = [[" "] * COLUMNS for _ in range(LINES)]
    for point in means:
        height = (min(point.loss, high) - low) / (high - low)
        grid[round((1 - height) * (LINES - 1))][place(point.rate)] = "*"
    if marked is not None:
        column = place(marked)
        for line in grid:
            line[column] = "|" if line[column] == " " else line[column]
    labels = {0: f"{high:.4g}", LINES - 1: f"{low:.4g}"}
    lines = [f"{labels.get(n, ''):>9} {''.join(line)}".rstrip() for n, line in enumerate(grid)]
    first, last = f"{points[0].rate:.3g}", f"{points[-1].rate:.3g}"
    return [f"{'loss':>9}", *lines, f"{'':10}{first}{last:>{COLUMNS - len(first)}}"]


def svg(points: Sequence[Point], marked: float | None, title: str) -> str:
    """A picture that every browser shows: the losses in grey, their means in blue."""
    means = smoothed(points)
    low, high = _range(means)
    place = _places(points, WIDTH - 2 * MARGIN)

    def line(curve: Sequence[Point], style: str) -> str:
        at = " ".join(
            f"{MARGIN + place(rate)},{_height(min(max(loss, low), high), low, high)}"
            for rate, loss in curve
        )
        return f'<polyline points="{at}" fill="none" {style}/>'

    def text(x: float, y: float, words: str) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="middle">{words}</text>'

    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    parts = [
        f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="black"/>',
        line(points, 'stroke="silver"'),
        line(means, 'stroke="steelblue" stroke-width="2"'),
        text(WIDTH / 2, MARGIN / 2, escape(title)),
        text(MARGIN, bottom + 20, f"{points[0].rate:.3g}"),
        text(right, bottom + 20, f"{points[-1].rate:.3g}"),
        text(WIDTH / 2, bottom + 40, "learning rate"),
        text(MARGIN / 2, MARGIN, f"{high:.4g}"),
        text(MARGIN / 2, HEIGHT / 2, "loss"),
        text(MARGIN / 2, bottom, f"{low:.4g}"),
    ]
    if marked is not None:
        x = MARGIN + place(marked)
        parts += [
            f'<path d="M{x},{MARGIN} V{bottom}" stroke="firebrick" stroke-dasharray="4"/>',
            text(x, MARGIN - 5, f"{marked:.3g}"),
        ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _height(loss: float, low: float, high: float) -> float:
    return round(HEIGHT - MARGIN - (loss - low) / (high - low) * (HEIGHT - 2 * MARGIN), 1)


def _range(means: Sequence[Point]) -> tuple[float, float]:
    """The range that is drawn: a loss far above the first one is cut off."""
    losses = [point.loss for point in means]
    low, first = min(losses), means[0].loss
    high = min(max(losses), first + (first - low) / 2) if first > low else max(losses)
    return low, high if high > low else low + 1


def _places(points: Sequence[Point], width: int) -> "Places":
    return Places(math.log(points[0].rate), math.log(points[-1].rate), width)


class Places(NamedTuple):
    """Where a rate lies, on a logarithmic axis."""

    first: float
    last: float
    width: int

    def __call__(self, rate: float) -> int:
        span = self.last - self.first
        return round((math.log(rate) - self.first) / span * self.width) if span else 0
