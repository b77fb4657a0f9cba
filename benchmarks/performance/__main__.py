"""Measures, prints the tables, and writes them into docs/performance.md: see there."""

import os
import time
from argparse import ArgumentParser, Namespace

from benchmarks.performance import document, process
from benchmarks.performance.sections import SECTIONS

# How many turns each section takes.
QUICK = {"boston": 1, "ranks": 1, "answers": 2, "neighbours": 1}  # two minutes
WEEKLY = {
    "boston": 8,
    "ranks": 5,
    "answers": 9,
    "calls": 1,
    "lenet": 5,
    "growth": 11,
    "neighbours": 7,
}
CALM = 0.5  # of the cores: what runs beside makes times worth nothing


def main() -> int:
    options = parse()
    if options.work:
        process.count_work()
    wanted = QUICK if options.quick else WEEKLY
    found, where = document.load()
    missed = []
    for name, rounds in wanted.items():
        if name not in (options.only or wanted):
            continue
        wait_until_calm(options.patience)
        where[name] = document.machine() + (", seconds of work" if options.work else "")
        found[name] = SECTIONS[name](options.rounds or rounds, is_quick=options.quick)
        print(document.tables({name: found[name]}, where), flush=True)
        missed += [result for result in found[name] if result.is_met is False]
        if options.write:
            document.save(in_order(found), where)
    for result in missed:
        print(f"missed: {result.section}: {result.name}: {result.ratio:.2f}, not {result.target}")
    return 1 if missed else 0


def parse() -> Namespace:
    parser = ArgumentParser("python -m benchmarks.performance", description=__doc__)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true", help="two minutes: the rows that matter most")
    size.add_argument("--weekly", action="store_true", help="all of them, in half an hour")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections alone")
    parser.add_argument("--rounds", type=int, help="turns of each program, for all sections")
    parser.add_argument("--work", action="store_true", help="processors' time, on a busy machine")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds to wait for a calm machine"
    )
    return parser.parse_args()


def in_order(found: document.Found) -> document.Found:
    return {name: found[name] for name in SECTIONS if name in found}


def wait_until_calm(seconds: float) -> None:
    until = time.monotonic() + seconds
    while os.getloadavg()[0] > CALM * (os.cpu_count() or 1) and time.monotonic() < until:
        time.sleep(5)


if __name__ == "__main__":
    raise SystemExit(main())
