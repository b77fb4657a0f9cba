"""Student's t distribution, without a library."""

import math

HALVINGS = 60  # of an angle, which then has all the digits of a float


def t_around_zero(share: float, degrees: int) -> float:
    """The t for which this share of the distribution lies between -t and t, e.g. 0.95."""
    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        angle = (low + high) / 2
        if _share_within(angle, degrees) < share:
            low = angle
        else:
            high = angle
    return math.tan(low) * math.sqrt(degrees)


def _share_within(angle: float, degrees: int) -> float:
    """The share between -t and t, where t is tan(angle) * sqrt(degrees). For whole degrees of
    freedom it is a finite sum: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd, square = degrees % 2, math.cos(angle) ** 2
    term, total = math.sin(angle) * (math.cos(angle) if odd else 1.0), 0.0
    for n in range(1 + odd, degrees, 2):
        total += term
        term *= square * n / (n + 1)
    return (angle + total) * 2 / math.pi if odd else total
