"""A sweep as a picture that every browser shows: the metric over each key that differs."""

import math
from html import escape

from dpframe.cli.outcome import Result
from dpframe.cli.results import Results, short

WIDTH, HEIGHT, MARGIN = 480, 320, 50  # pixels of a panel
WIDEST = 12  # letters of a label
LOGARITHMIC = 10.0  # from this ratio of the largest to the smallest on
COLORS = {"finished": "steelblue", "pruned": "silver"}


def svg(results: Results) -> str:
    """The best run is red, a pruned one grey. "" where no run has a value."""
    runs = [run for run in reversed(results.ranked()) if run.value is not None]
    names = short(results.keys())
    if not runs or not names:
        return ""
    best = results.best
    size = f'width="{WIDTH * len(names)}" height="{HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    )
    lines = [head, '<rect width="100%" height="100%" fill="white"/>']
    for number, (key, name) in enumerate(names.items()):
        lines += _panel(results, runs, best, key, name, left=WIDTH * number)
    return "\n".join([*lines, "</svg>\n"])


def _panel(
    results: Results, runs: list[Result], best: Result | None, key: str, name: str, *, left: int
) -> list[str]:
    values = [float(run.value or 0) for run in runs]
    texts = [run.values.get(key, "") for run in runs]
    places = _places(texts)
    across, up = (min(places), max(places)), (min(values), max(values))
    labels = dict(sorted(zip(places, map(_shorten, texts), strict=True)))
    few = labels if len(labels) <= 6 else {at: labels[at] for at in across}
    bottom, right = HEIGHT - MARGIN, left + WIDTH - MARGIN

    def x_of(place: float) -> float:
        return round(left + MARGIN + _share(place, *across) * (WIDTH - 2 * MARGIN), 1)

    def y_of(value: float) -> float:
        return round(bottom - _share(value, *up) * (HEIGHT - 2 * MARGIN), 1)

    lines = [
        f'<path d="M{left + MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="black"/>',
        _text(left + WIDTH / 2, MARGIN / 2 - 5, results.objective.metric),
        _text(left + WIDTH / 2, HEIGHT - 10, _shorten(name)),
        *(_text(x_of(place), bottom + 18, label) for place, label in few.items()),
        *(_text(left + MARGIN / 2, y_of(v), f"{v:.4g}") for v in set(up)),
    ]
    for run, place, value in zip(runs, places, values, strict=True):
        color = "firebrick" if run is best else COLORS.get(run.status, "silver")
        about = f"<title>{escape(f'{results.title(run)}: {value:.6g}')}</title>"
        where = f'cx="{x_of(place)}" cy="{y_of(value)}" r="4"'
        lines.append(f'<circle {where} fill="{color}">{about}</circle>')
    return lines


def _places(texts: list[str]) -> list[float]:
    """Numbers to scale; names in turn."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        places = {name: float(at) for at, name in enumerate(dict.fromkeys(reversed(texts)))}
        return [places[text] for text in texts]


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between the others, from 0 to 1; by its logarithm where they span much."""
    if high <= low:
        return 0.5
    if low > 0 and high / low >= LOGARITHMIC:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def _shorten(words: str) -> str:
    return words if len(words) <= WIDEST else f"{words[: WIDEST - 1]}…"


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(words)}</text>'
