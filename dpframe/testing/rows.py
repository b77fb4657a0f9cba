"""Checks of the rows: each once, in its order, and with its weight in a mean."""

from collections import Counter

from dpframe.testing import wrong
from dpframe.testing.evidence import Evidence
from dpframe.testing.found import SHOWN, TOLERANCE, Found, counted, shown
from dpframe.testing.measure import COUNTED, SIZES, VALIDATED_BATCH


def rows_once(evidence: Evidence) -> Found:
    wrongs = [_uneven(evidence, count) for count in SIZES]
    missed = [
        _miscounted(evidence.main["counted"][index], *sizes) for index, sizes in enumerate(COUNTED)
    ]
    cut, seen = ([cause for _, cause in found if cause] for found in (wrongs, missed))
    cause = cut[len(cut) // 2] if cut else "".join(seen[:1])
    most = max(rows for rows, _ in (*wrongs, *missed))
    compared = f"shares of {SIZES[0]} to {SIZES[-1]} rows, two epochs"
    return Found(compared, f"{counted(most, 'row')} wrong", cause)


def _uneven(evidence: Evidence, count: int) -> tuple[int, str]:
    """Whether the shares of so many rows are these rows, in their order."""
    shares = evidence.shares(count)
    rows = [row for share in shares for row in share]
    if rows == list(range(count)):
        return 0, ""
    seen = Counter(rows)
    wrong_rows = [row for row in {*range(count), *seen} if seen[row] != (row in range(count))]
    sizes = " ".join(str(len(share)) for share in shares)
    cause = f"of a batch of {counted(count, 'row')} the shares have {sizes}"
    if not wrong_rows:
        return 0, f"{cause}, but not in the batch's order: {shown(rows)}"
    if min(seen[row] for row in range(count)) > 0:
        even = len({len(share) for share in shares}) == 1
        why = "the shares are padded to one size" if even else "shares overlap"
        return len(wrong_rows), f"{cause}: {why}, row {shown(wrong_rows)} counts twice"
    return len(wrong_rows), f"{cause}: row {shown(wrong_rows)} is missing or twice there"


def _miscounted(moved: list[float], rows: int, batch_size: int, shuffle: bool) -> tuple[int, str]:
    """From how far SGD moved each row's weight to how often the row was seen.

    Where all are off by one factor the gradient is, not the rows: see `weights`.
    """
    tail = rows - rows % batch_size
    sizes = [batch_size if row < tail else rows - tail for row in range(rows)]
    times = [weight * size for weight, size in zip(moved, sizes, strict=True)]
    wrong_rows = [row for row in range(rows) if round(times[row]) != 1]
    if not wrong_rows or max(times) - min(times) < 1e-9:
        return 0, ""
    how = " ".join(f"{times[row]:.3g}" for row in wrong_rows[:SHOWN])
    return len(wrong_rows), (
        f"an epoch of {rows} rows in batches of {batch_size} counts row {shown(wrong_rows)} "
        f"{how} times in the gradients, not once"
    )


def predict_order(evidence: Evidence) -> Found:
    wrongs = [(n, rows) for n, rows in evidence.main["predicted"].items() if rows != list(range(n))]
    compared = f"predictions of {SIZES[0]} to {SIZES[-1]} rows"
    if not evidence.main["predicted"]:
        return Found(compared, "none", "predict gave nothing in the main process")
    if not wrongs:
        return Found(compared, "0 rows wrong")
    count, rows = wrongs[len(wrongs) // 2]
    if sorted(rows) == list(range(count)):
        why = "shares have to keep the batch's order, and gather the ranks'"
    else:
        why = "some are missing or twice there: see rows_once"
    moved = sum(row != place for place, row in enumerate(rows)) or abs(len(rows) - count)
    return Found(
        compared, f"{moved} rows wrong", f"{count} rows came as {shown(rows, len(rows))}: {why}"
    )


def validation(evidence: Evidence) -> Found:
    """The mean of 0², 1² … (n-1)² is (n-1)(2n-1)/6."""
    given: dict[int, float] = evidence.main["validation"]
    wanted = {n: (n - 1) * (2 * n - 1) / 6 for n in given}
    apart = {n: abs(given[n] - mean) / (mean or 1.0) for n, mean in wanted.items()}
    compared = f"means over {SIZES[0]} to {SIZES[-1]} rows"
    worst = max(apart, key=lambda n: apart[n] if apart[n] == apart[n] else float("inf"))
    if apart[worst] <= TOLERANCE:
        return Found(compared, f"{apart[worst]:.1e}")
    shown = 10 if not apart[10] <= TOLERANCE else worst
    why = wrong.mean_cause(given, VALIDATED_BATCH, evidence.cuts)
    cause = f"of 0² to {shown - 1}² the mean is {wanted[shown]:g}; it gave {given[shown]:.6g}"
    return Found(compared, f"{apart[worst]:.1e}", f"{cause}, {why}" if why else cause)
