"""What loggers get besides scalars, in one form each: a tensor or an array is checked here."""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpframe.errors import UserError

CELLS = (bool, int, float, str, type(None))
MARGIN = 1e-3  # by which rounding may leave a range
THRESHOLDS = np.linspace(0, 1, 127)  # of a precision-recall curve: as many as TensorBoard's
COUNTS = ("true positives", "false positives", "true negatives", "false negatives")
TINY = 1e-12


def image(name: str, value: Any) -> NDArray[np.uint8]:
    """[height, width, channels], from [H, W], [C, H, W] or [N, C, H, W], which becomes a grid."""
    told = f"trainer.log_image({name!r})"
    pixels = _array(told, value)
    shape = pixels.shape
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    pixels = _grid(pixels) if pixels.ndim == 4 and pixels.size else pixels
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3, 4) or not pixels.size:
        is_last = len(shape) == 3 and shape[-1] in (1, 3, 4)
        fix = (
            "put the channels first, e.g. image.permute(2, 0, 1)"
            if is_last
            else ("pass [H, W], [C, H, W] or [N, C, H, W] with 1, 3 or 4 channels")
        )
        raise UserError(f"{told} got the shape {shape}; {fix}")
    if pixels.dtype == bool:
        pixels = pixels.astype(np.uint8) * 255
    elif pixels.dtype.kind == "f":
        _refuse_outside(told, pixels, 0, "scale them to 0..1, e.g. (image + 1) / 2")
        pixels = (pixels.clip(0, 1) * 255 + 0.5).astype(np.uint8)
    elif pixels.dtype != np.uint8:
        raise UserError(f"{told} got {pixels.dtype} values; pass floats from 0 to 1, or uint8")
    return np.ascontiguousarray(pixels.transpose(1, 2, 0))


def figure(name: str, value: Any) -> Any:
    if not (hasattr(value, "savefig") and hasattr(value, "canvas")):
        kind = type(value).__name__
        raise UserError(f"trainer.log_figure({name!r}) got {kind}; pass a figure of matplotlib's")
    return value


def close(figure: Any) -> None:
    """Pyplot would keep it until the program ends."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)


def histogram(name: str, value: Any) -> NDArray[Any]:
    """The finite values in one row; it may be empty."""
    values = _array(f"trainer.log_histogram({name!r})", value).ravel()
    values = values if values.dtype.kind == "f" else values.astype(np.float64)
    return values[np.isfinite(values)]


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"trainer.log_text({name!r}) got {kind}; pass text, e.g. str(value)")
    return value


def audio(name: str, value: Any, sample_rate: int) -> tuple[NDArray[np.int16], int]:
    """[samples, channels], from [samples] or [channels, samples]; and the samples a second."""
    told = f"trainer.log_audio({name!r})"
    samples = _array(told, value)
    shape = samples.shape
    samples = samples[None] if samples.ndim == 1 else samples
    if samples.ndim != 2 or samples.shape[0] not in (1, 2) or not samples.size:
        raise UserError(f"{told} got the shape {shape}; pass [samples], or [1 or 2, samples]")
    if samples.dtype.kind == "f":
        _refuse_outside(told, samples, -1, "divide them by the largest")
        samples = (samples.clip(-1, 1) * 32767).round().astype(np.int16)
    elif samples.dtype != np.int16:
        raise UserError(f"{told} got {samples.dtype} values; pass floats from -1 to 1, or int16")
    try:
        rate = operator.index(sample_rate)
    except TypeError:
        rate = 0
    if rate < 1:
        raise UserError(f"{told} got sample_rate={sample_rate}; pass the samples a second, a count")
    return np.ascontiguousarray(samples.T), rate


Table = tuple[list[str], list[list[Any]]]


def table(name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Checks rows: a list with a number, a text or None for each column."""
    told = f"trainer.log_table({name!r})"
    names = [str(column) for column in columns]
    cells = [[_cell(told, cell) for cell in row] for row in rows]
    for number, row in enumerate(cells):
        if len(row) != len(names):
            counts = f"{len(names)} columns, but row {number} has {len(row)}"
            raise UserError(f"{told} has {counts}; pass a cell for each column")
    return names, cells


def pr_curve(name: str, labels: Any, scores: Any, weights: Any = None) -> NDArray[np.float64]:
    """[4, thresholds]: the true and false positives, the true and false negatives of each."""
    told = f"trainer.log_pr_curve({name!r})"
    labels, scores = _array(told, labels).ravel(), _array(told, scores).ravel()
    weights = np.ones(len(scores)) if weights is None else _array(told, weights).ravel()
    if not len(labels) == len(scores) == len(weights):
        lengths = f"{len(labels)} labels, {len(scores)} scores and {len(weights)} weights"
        raise UserError(f"{told} got {lengths}; pass as many of each")
    if not np.isin(labels, (0, 1)).all():
        raise UserError(f"{told} got other labels than 0 and 1; pass those of one class")
    if scores.size:
        _refuse_outside(told, scores, 0, "pass probabilities, e.g. scores.sigmoid()")
    at = np.searchsorted(THRESHOLDS, scores.clip(0, 1), side="right") - 1
    of_labels = [
        np.bincount(at, weights * (labels == is_true), len(THRESHOLDS)) for is_true in (1, 0)
    ]
    positives = np.cumsum(np.stack(of_labels)[:, ::-1], axis=1)[:, ::-1]
    negatives = positives[:, :1] - positives
    return np.concatenate([positives, negatives[::-1]])


def precision_recall(curve: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """0 where there is nothing to divide by."""
    true, false, _, missed = curve
    return true / np.maximum(true + false, TINY), true / np.maximum(true + missed, TINY)


FORMS: Mapping[str, Callable[..., Any]] = {
    form.__name__: form for form in (image, figure, histogram, text, audio, table, pr_curve)
}


def _array(told: str, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = value.float() if value.dtype.itemsize < 4 and value.is_floating_point() else value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise UserError(f"{told} got {type(value).__name__}; pass a tensor or an array of numbers")
    return array


def _refuse_outside(told: str, values: NDArray[Any], least: int, fix: str) -> None:
    low, high = float(values.min()), float(values.max())
    if not (least - MARGIN <= low and high <= 1 + MARGIN):  # so that NaN is refused, too
        raise UserError(f"{told} got values from {low:.4g} to {high:.4g}; {fix}")


def _grid(images: NDArray[Any]) -> NDArray[Any]:
    """[N, C, H, W] as one picture, about as many across as down."""
    count, channels, height, width = images.shape
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    whole = np.zeros((down * across, channels, height, width), images.dtype)
    whole[:count] = images
    whole = whole.reshape(down, across, channels, height, width).transpose(2, 0, 3, 1, 4)
    return whole.reshape(channels, down * height, across * width)


def _cell(told: str, cell: Any) -> Any:
    if hasattr(cell, "item"):
        with suppress(RuntimeError, ValueError):  # more than one number: it is refused below
            cell = cell.item()
    if not isinstance(cell, CELLS):
        raise UserError(f"{told} has a {type(cell).__name__} in a cell; pass numbers or text")
    return cell
