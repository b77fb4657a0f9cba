"""Means over seeds or other keys, and what differs between runs in pairs, with numbers by hand."""

from pathlib import Path

import pytest

from dpframe.cli.means import PairedDifference, interval_of, rows_of
from dpframe.cli.outcome import Result
from dpframe.cli.results import Results
from dpframe.config.objective import Objective

LR, NET = "task.optimizer.lr", "task.net"
KEYS = ["seed", LR]
# The values of two rates for seeds 0, 1 and 2: their differences are 1, 2 and 3.
RATES = {"0.1": (10.0, 20.0, 30.0), "0.01": (11.0, 22.0, 33.0)}
HALF = 4.302653 / 3**0.5  # t of two degrees of freedom, times the standard error of 1, 2 and 3


def runs(*left_out: int) -> list[Result]:
    """Those that are left out have failed."""
    made = [
        Result(0, [f"seed={seed}", f"{LR}={rate}"], value=value, status="finished")
        for seed in range(3)
        for rate, value in ((rate, values[seed]) for rate, values in RATES.items())
    ]
    for number, run in enumerate(made, start=1):
        run.number, run.directory = number, f"{number - 1}_"
        if number in left_out:
            run.status, run.value = "failed", None
    return made


def results(made: list[Result], *, compare: str | None = LR, mode: str = "min") -> Results:
    objective = Objective("val/loss", mode)
    return Results(Path("here"), objective, [], {"recipe"}, "basic", compare=compare, runs=made)


def cells(made: Results) -> list[list[str]]:
    """Of the last table, without the rule."""
    rows = made.summary()[-1].splitlines()
    return [
        [cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows if row[0] != "-"
    ]


def test_a_difference_is_the_mean_of_pairs_with_its_interval_by_students_t():
    first, second = rows_of(runs(), KEYS, over=["seed"], compare=LR)
    assert (first.overrides, first.runs, first.difference) == ([f"{LR}=0.1"], [1, 3, 5], None)
    assert (first.mean, first.sd, second.mean, second.sd) == (20.0, 10.0, 22.0, 11.0)
    assert second.difference is not None
    assert second.difference.mean == 2.0
    assert second.difference.interval == pytest.approx((2 - HALF, 2 + HALF), rel=1e-6)
    assert second.difference.pairs == [(1, 2), (3, 4), (5, 6)]
    assert interval_of([4.0]) is None and interval_of([4.0, 4.0]) == (4.0, 4.0)


def test_the_table_has_the_first_value_first_whichever_is_best():
    for mode in ("min", "max"):
        assert cells(results(runs(), mode=mode)) == [
            ["lr", "val/loss, mean ± sd over seed", "runs", "difference to lr=0.1"]
            + ["95% interval", "pairs"],
            ["0.1", "20 ± 10", "3"],
            ["0.01", "22 ± 11", "3", "+2", "-0.4841 to +4.484", "3"],
        ]


def test_a_run_that_failed_costs_its_pair_and_the_table_says_so():
    (_, row) = rows_of(runs(3), KEYS, over=["seed"], compare=LR)
    assert row.runs == [2, 4, 6], "of the mean it is"
    assert row.difference is not None and row.difference.left_out == [(3, 4)]
    assert row.difference.pairs == [(1, 2), (5, 6)] and row.difference.mean == 2.0
    _, first, second = cells(results(runs(3)))
    assert first == ["0.1", "20 ± 14.1", "2 of 3"]
    assert second == ["0.01", "22 ± 11", "3", "+2", "-10.71 to +14.71", "2 of 3"]
    assert cells(results(runs(1, 3)))[-1][3:] == ["+3", "1 of 3"], "one pair has no interval"
    assert cells(results(runs(1, 3, 5)))[1:] == [
        ["0.1", "0 of 3"],
        ["0.01", "22 ± 11", "3", "0 of 3"],
    ]


@pytest.mark.parametrize("status", ["pruned", "running", "missing", "interrupted"])
def test_a_run_that_has_not_finished_is_in_no_mean_and_no_pair(status):
    made = runs()
    made[0].status = status
    first, second = rows_of(made, KEYS, over=["seed"], compare=LR)
    assert (first.runs, first.left_out) == ([3, 5], [1])
    assert second.difference is not None and second.difference.left_out == [(1, 2)]


def test_rows_are_compared_where_all_other_keys_are_the_same():
    """Unless means are taken over these, too."""
    made = []
    for net, more in (("small", 0.0), ("large", 100.0)):
        for run in runs():
            overrides = [*run.overrides, f"{NET}={net}"]
            value = (run.value or 0.0) * (1.0 if net == "small" else -1.0) + more
            made.append(Result(len(made) + 1, overrides, "", "finished", value))
    keys = [*KEYS, NET]
    rows = rows_of(made, keys, over=["seed"], compare=LR)
    assert [row.overrides for row in rows] == [
        [f"{LR}={rate}", f"{NET}={net}"] for net in ("small", "large") for rate in ("0.1", "0.01")
    ]
    found = [row.difference and row.difference.mean for row in rows]
    assert found == [None, 2.0, None, -2.0]
    first, second = rows_of(made, keys, over=["seed", NET], compare=LR)
    assert second.difference is not None and len(second.difference.pairs) == 6
    assert (second.difference.mean, len(first.runs)) == (0.0, 6)


def test_without_seeds_a_difference_is_of_single_runs():
    made = results(runs()[:2])
    made.fixed.add("seed")
    assert cells(made) == [
        ["lr", "val/loss", "runs", "difference to lr=0.1", "95% interval", "pairs"],
        ["0.1", "10", "1"],
        ["0.01", "11", "1", "+1", "1"],
    ]


def test_a_search_that_draws_no_two_runs_alike_has_nothing_to_compare():
    drawn = [("0", "sgd", "0.01"), ("1", "adam", "0.02"), ("2", "sgd", "0.03")]
    made = [
        Result(number, [f"seed={seed}", f"{NET}={net}", f"{LR}={rate}"], "", "finished", 1.0)
        for number, (seed, net, rate) in enumerate(drawn)
    ]
    said = f"sweep.compare={NET}: no two runs differ in it alone, so there are no pairs"
    searched = results(made, compare=NET)
    assert searched.means() == [] and searched.summary()[1:] == ["", said]


def test_of_runs_that_a_search_draws_twice_one_that_finished_is_in_the_pair():
    twice = Result(7, runs()[0].overrides, "", "failed")
    (_, row) = rows_of([*runs(), twice], KEYS, over=["seed"], compare=LR)
    assert isinstance(row.difference, PairedDifference) and (1, 2) in row.difference.pairs
    assert row.difference.left_out == []


def test_a_run_that_is_repeated_counts_once_in_the_mean_and_its_deviation():
    made = runs()
    repeated = [
        Result(7 + at, run.overrides, "", "finished", run.value) for at, run in enumerate(made)
    ]
    rows = rows_of([*made, *repeated], KEYS, over=["seed"], compare=LR)
    assert rows == rows_of(made, KEYS, over=["seed"], compare=LR)
    drawn = [*made[:1], *repeated[:1], *made[2:3]]
    (row,) = rows_of(drawn, KEYS, over=["seed"], compare=None)
    assert (row.runs, row.mean) == ([1, 3], 15.0) and row.sd == pytest.approx(50**0.5)
    alone = results([made[0], repeated[0]], compare=None)
    assert alone.means() == [], "one run has no mean of its own"


def test_of_repeated_runs_one_that_finished_is_in_the_mean():
    failed = Result(7, runs()[0].overrides, "", "failed")
    for made in ([failed, *runs()], [*runs(), failed]):
        row = rows_of(made, KEYS, over=["seed"], compare=None)[0]
        assert (sorted(row.runs), row.left_out) == ([1, 3, 5], [])


def test_a_row_that_the_first_value_is_missing_for_has_no_difference():
    made = [run for run in runs() if run.number in (1, 4, 6)]
    made[0].overrides.append(f"{NET}=small")
    for run in made[1:]:
        run.overrides.append(f"{NET}=large")
    rows = rows_of(made, [*KEYS, NET], over=["seed"], compare=LR)
    assert [row.difference for row in rows] == [None, None]
