"""Trains each recipe on every strategy in float64 and prints how far its numbers are from cpu's.

All of it runs on the CPU, as real gloo ranks (ddp) or virtual replicas (data_parallel). The recipe
shapes is left out: it trains nothing, so it has no loss.
"""

import math
import sys
from argparse import ArgumentParser

from run_dpframe import summaries

EPOCHS = {"boston": 100, "lenet": 2}  # lenet's own 30 would take minutes a row
STRATEGIES = ("data_parallel", "ddp")
REPLICAS = (2, 3, 4)
TOLERANCE = 1e-12
HEADER = (
    "| recipe | strategy | replicas | train/loss | val/loss | largest difference from cpu |\n"
    "|---|---|--:|--:|--:|--:|"
)

Metrics = dict[str, float]


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--replicas", nargs="+", type=int, default=list(REPLICAS))
    parser.add_argument("--epochs", type=int, help=f"of each run; without it {spoken(EPOCHS)}")
    options = parser.parse_args(arguments)
    epochs = {recipe: options.epochs or EPOCHS[recipe] for recipe in options.recipe}
    print(f"Float64, seed 0, {spoken(epochs)}; differences are relative, over all metrics.\n")
    print(HEADER, flush=True)
    others = [(strategy, count) for strategy in options.strategy for count in options.replicas]
    differing = []
    for recipe, count in epochs.items():
        cpu = train(recipe, "cpu", 1, count)
        for strategy, replicas in [("cpu", 1), *others]:
            metrics = cpu if strategy == "cpu" else train(recipe, strategy, replicas, count)
            difference = largest_difference(metrics, cpu)
            cells = [recipe, strategy, str(replicas)]
            cells += [f"{metrics.get(name, math.nan):.9g}" for name in ("train/loss", "val/loss")]
            cells.append(f"{difference:.0e}" if difference else "0")
            print(f"| {' | '.join(cells)} |", flush=True)
            if not difference <= TOLERANCE:  # written so that NaN fails too
                differing.append(f"{recipe} {strategy} x {replicas}")
    if differing:
        print(f"more than {TOLERANCE:g} from cpu: {', '.join(differing)}", file=sys.stderr)
    return 1 if differing else 0


def train(recipe: str, strategy: str, replicas: int, epochs: int) -> Metrics:
    (summary,) = summaries(
        *(f"recipe={recipe}", f"strategy={strategy}", f"trainer.gpus={replicas}"),
        *("trainer.accelerator=cpu", "trainer.precision=64", f"trainer.max_epochs={epochs}"),
    )
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


def spoken(epochs: dict[str, int]) -> str:
    return ", ".join(f"{recipe} {count} epochs" for recipe, count in epochs.items())


if __name__ == "__main__":
    raise SystemExit(main())
