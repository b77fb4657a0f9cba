"""A sweep as a picture: the metric over each key that differs."""

from dpframe.cli.results import Result, Results, short
from dpframe.modes.picture import Panel, Series
from dpframe.modes.picture import svg as draw

WIDEST = 12  # letters of a label
LOGARITHMIC = 10.0  # from this ratio of the largest to the smallest on
COLORS = {"finished": "steelblue", "pruned": "silver"}


def svg(results: Results) -> str:
    """The best run is red, a pruned one grey. "" where no run has a value."""
    runs = [run for run in reversed(results.ranked()) if run.value is not None]
    names = short(results.keys())
    if not runs or not names:
        return ""
    return draw(*(_panel(results, runs, key, name) for key, name in names.items()))


def _panel(results: Results, runs: list[Result], key: str, name: str) -> Panel:
    values = [float(run.value or 0) for run in runs]
    texts = [run.values.get(key, "") for run in runs]
    places = _places(texts)
    labels = dict(sorted(zip(places, map(_shorten, texts), strict=True)))
    few = labels if len(labels) <= 6 else {at: labels[at] for at in (min(labels), max(labels))}
    dots = [
        (
            "firebrick" if run is results.best else COLORS.get(run.status, "silver"),
            f"{results.title(run)}: {run.value:.6g}",
        )
        for run in runs
    ]
    return Panel(
        [Series(list(zip(places, values, strict=True)), dots=dots)],
        title=results.objective.metric,
        across=_shorten(name),
        ticks=few,
        heights={value: f"{value:.4g}" for value in (min(values), max(values))},
        logarithmic=[
            axis for axis, numbers in (("across", places), ("up", values)) if _spans_much(numbers)
        ],
    )


def _places(texts: list[str]) -> list[float]:
    """Numbers to scale; names in turn."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        names = list(dict.fromkeys(reversed(texts)))
        return [float(names.index(text)) for text in texts]


def _spans_much(numbers: list[float]) -> bool:
    return min(numbers) > 0 and max(numbers) / min(numbers) >= LOGARITHMIC


def _shorten(words: str) -> str:
    return words if len(words) <= WIDEST else f"{words[: WIDEST - 1]}…"
