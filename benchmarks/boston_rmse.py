"""Prints the test error of recipe=boston over five seeds, beside ordinary least squares."""

from statistics import mean, stdev

import torch
from run_dpframe import summaries
from torch import Tensor

from dpframe.recipes.boston import BostonData

SEEDS = "0,1,2,3,4"


def main() -> None:
    print("| on the same 102 test rows | RMSE, $1000 |\n|---|--:|")
    print(f"| `recipe=boston` | {network_error()} |", flush=True)
    print(f"| ordinary least squares | {least_squares_error():.3f} |", flush=True)
    raw = network_error("data.normalize=false")
    print(f"| `recipe=boston data.normalize=false` | {raw} |")


def network_error(*words: str) -> str:
    """After the last epoch: the best epoch would be chosen on the test rows."""
    runs = summaries("-m", "recipe=boston", "strategy=cpu", f"seed={SEEDS}", *words)
    assert len(runs) == 5
    # Validation and test are the same rows in this recipe.
    errors = [summary["metrics"]["val/rmse"] for summary in runs]
    return f"{mean(errors):.2f} ± {stdev(errors):.2f}"


def least_squares_error() -> float:
    data = BostonData()
    data.setup()
    features, target = (tensor.double() for tensor in data.train_dataset().tensors)
    weights = torch.linalg.lstsq(with_ones(features), target).solution
    features, target = (tensor.double() for tensor in data.test_dataset().tensors)
    return (with_ones(features) @ weights - target).square().mean().sqrt().item()


def with_ones(features: Tensor) -> Tensor:
    """A last column for the intercept."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


if __name__ == "__main__":
    main()
