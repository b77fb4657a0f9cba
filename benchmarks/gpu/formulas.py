"""Numbers that follow from others: the share of a GPU's peak, and how long it was idle."""

from collections.abc import Iterable

from dpframe.devices.peaks import peak_flops


def flops_per_token(parameters: int, layers: int, heads: int, width: int, tokens: int) -> int:
    """Of a transformer's forward and backward, 6N + 12LHQT: each parameter takes 6 operations, and
    attention 12 for each layer, number of the width (heads x numbers of a head), and token seen."""
    return 6 * parameters + 12 * layers * heads * (width // heads) * tokens


def utilization(flops: float, seconds: float, gpu: str) -> float | None:
    """The share of the GPU's peak that `flops` in `seconds` are: MFU."""
    peak = peak_flops(gpu)
    return None if peak is None else flops / seconds / peak


def idle_share(busy: Iterable[tuple[float, float]]) -> float | None:
    """How much of the time from the first beginning to the last end no interval covers."""
    intervals = sorted(busy)
    if not intervals:
        return None
    first, reached = intervals[0]
    covered = reached - first
    for begin, end in intervals[1:]:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - covered / (reached - first) if reached > first else None


def largest_difference(losses: list[float], others: list[float]) -> float | None:
    """Of two curves, relative to where the first one begins; None if they have no common length."""
    if not losses or len(losses) != len(others) or not losses[0]:
        return None
    return max(abs(a - b) for a, b in zip(losses, others, strict=True)) / abs(losses[0])
