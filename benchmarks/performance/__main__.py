"""Measures, prints the tables, and writes them into docs/performance.md: see there."""

from argparse import ArgumentParser

from benchmarks.performance import report
from benchmarks.performance.sections import SECTIONS

# How many turns each section takes.
QUICK = {"boston": 1, "ranks": 1, "answers": 2}
WEEKLY = {
    "boston": 7,
    "ranks": 5,
    "answers": 9,
    "lenet": 5,
    "larger": 5,
    "exact": 5,
    "growth": 7,
    "neighbours": 5,
}


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.performance", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three minutes: the rows that matter")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections alone")
    parser.add_argument("--rounds", type=int, help="turns of each program, for all sections")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args()
    rounds = QUICK if options.quick else WEEKLY
    missed = []
    for name in options.only or rounds:
        results = SECTIONS[name](options.rounds or rounds.get(name, 3))
        text = report.tables(results)
        print(f"{text}\n", flush=True)
        if options.write:
            report.write(name, text)
        missed += [result for result in results if result.is_met is False]
    for result in missed:
        print(f"missed: {result.section}: {result.name}: {result.ratio:.2f}, not {result.target}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
