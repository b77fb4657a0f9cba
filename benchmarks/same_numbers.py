"""Trains each recipe on every strategy in float64 and prints how far its numbers are from cpu's.

All of it runs on the CPU, as real gloo ranks (ddp) or virtual replicas (data_parallel). The recipe
shapes is left out: it trains nothing, so it has no loss.
"""

import json
import math
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EPOCHS = {"boston": 100, "lenet": 2}  # lenet's own 30 would take minutes a row
STRATEGIES = ("data_parallel", "ddp")
REPLICAS = (2, 3, 4)
TOLERANCE = 1e-12
HEADER = (
    "| recipe | strategy | replicas | train/loss | val/loss | largest difference from cpu |\n"
    "|---|---|--:|--:|--:|--:|"
)

Metrics = dict[str, float]


class Row(NamedTuple):
    recipe: str
    strategy: str
    replicas: int
    metrics: Metrics
    difference: float


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    epochs = {recipe: options.epochs or EPOCHS[recipe] for recipe in options.recipe}
    print(f"Float64, seed 0, {spoken(epochs)}; differences are relative, over all metrics.\n")
    print(HEADER, flush=True)
    differing = []
    for recipe in epochs:
        for row in rows(recipe, epochs[recipe], options.strategy, options.replicas):
            print(line(row), flush=True)
            if not row.difference <= TOLERANCE:  # written so that NaN fails too
                differing.append(f"{row.recipe} {row.strategy} x {row.replicas}")
    if differing:
        print(f"more than {TOLERANCE:g} from cpu: {', '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


def parse(arguments: list[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--replicas", nargs="+", type=int, default=list(REPLICAS))
    parser.add_argument("--epochs", type=int, help=f"of each run; without it {spoken(EPOCHS)}")
    return parser.parse_args(arguments)


def rows(recipe: str, epochs: int, strategies: list[str], replicas: list[int]) -> Iterator[Row]:
    cpu = train(recipe, "cpu", 1, epochs)
    yield Row(recipe, "cpu", 1, cpu, 0.0)
    for strategy in strategies:
        for count in replicas:
            metrics = train(recipe, strategy, count, epochs)
            yield Row(recipe, strategy, count, metrics, largest_difference(metrics, cpu))


def train(recipe: str, strategy: str, replicas: int, epochs: int) -> Metrics:
    """The metrics of a run of its own, as its summary.json has them."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "dpframe", f"recipe={recipe}", f"strategy={strategy}"]
        command += [f"trainer.gpus={replicas}", "trainer.accelerator=cpu", "trainer.precision=64"]
        command += [f"trainer.max_epochs={epochs}", "logger=none", f"hydra.run.dir={directory}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
        summary = json.loads(Path(directory, "summary.json").read_text())
    assert summary["replicas"] == replicas, summary
    return summary["metrics"]


def largest_difference(metrics: Metrics, expected: Metrics) -> float:
    """Relative; infinite where one has a metric that the other lacks, or a NaN."""
    if metrics.keys() != expected.keys():
        return math.inf
    return max(relative(metrics[name], expected[name]) for name in expected)


def relative(value: float, expected: float) -> float:
    if value == expected:
        return 0.0
    difference = abs(value - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(difference) else difference


def line(row: Row) -> str:
    losses = [f"{row.metrics.get(name, math.nan):.9g}" for name in ("train/loss", "val/loss")]
    difference = f"{row.difference:.0e}" if row.difference else "0"
    return f"| {' | '.join([row.recipe, row.strategy, str(row.replicas), *losses, difference])} |"


def spoken(epochs: dict[str, int]) -> str:
    return ", ".join(f"{recipe} {count} epochs" for recipe, count in epochs.items())


if __name__ == "__main__":
    raise SystemExit(main())
