"""A sweep as a picture that every browser shows: the metric over each key that differs."""

import math
from html import escape

from dpframe.cli.results import Result, Results, short

WIDTH, HEIGHT, MARGIN = 320, 260, 50  # pixels of a panel
LOGARITHMIC = 10.0  # from this ratio of the largest to the smallest on
COLORS = {"finished": "steelblue", "pruned": "silver"}


def svg(results: Results) -> str:
    """The best run is red, a pruned one grey. "" where no run has a value."""
    runs = [run for run in reversed(results.ranked()) if run.value is not None]
    names = short(results.keys())
    if not runs or not names:
        return ""
    panels = [
        _panel(results, runs, key, name, WIDTH * number)
        for number, (key, name) in enumerate(names.items())
    ]
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    fonts = 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *panels, "</svg>\n"])


def _panel(results: Results, runs: list[Result], key: str, name: str, left: int) -> str:
    values = [run.value for run in runs if run.value is not None]
    shares = _shares([run.values.get(key, "") for run in runs])
    heights = _shares([str(value) for value in values])
    inner = (WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN)
    parts = [
        f'<path d="M{left + MARGIN},{MARGIN} V{HEIGHT - MARGIN} h{inner[0]}" fill="none" '
        'stroke="black"/>',
        _text(left + WIDTH / 2, HEIGHT - 10, name),
        _text(left + WIDTH / 2, MARGIN / 2, results.objective.metric),
        _text(left + MARGIN / 2, HEIGHT - MARGIN, f"{min(values):.4g}"),
        _text(left + MARGIN / 2, MARGIN, f"{max(values):.4g}"),
    ]
    labels = {share: run.values.get(key, "") for share, run in zip(shares, runs, strict=True)}
    for share in sorted(labels) if len(labels) <= 6 else (min(labels), max(labels)):
        x = left + MARGIN + share * inner[0]
        parts.append(_text(x, HEIGHT - MARGIN + 15, labels[share]))
    for run, share, height in zip(runs, shares, heights, strict=True):
        x, y = left + MARGIN + share * inner[0], HEIGHT - MARGIN - height * inner[1]
        color = "firebrick" if run is results.best else COLORS.get(run.status, "silver")
        title = f"<title>{escape(results.title(run))}: {run.value:.6g}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}">{title}</circle>')
    return "\n".join(parts)


def _shares(texts: list[str]) -> list[float]:
    """Where each lies from 0 to 1: numbers to scale, by their logarithms where they span much."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        names = list(dict.fromkeys(reversed(texts)))
        numbers = [float(names.index(text)) for text in texts]
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low >= LOGARITHMIC:
        numbers = [math.log(number) for number in numbers]
        low, high = min(numbers), max(numbers)
    return [(number - low) / (high - low) if high > low else 0.5 for number in numbers]


def _text(x: float, y: float, words: str) -> str:
    shown = words if len(words) <= 12 else f"{words[:11]}…"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(shown)}</text>'
