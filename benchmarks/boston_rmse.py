"""Prints the test error of recipe=boston over five seeds, beside ordinary least squares."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

from dpframe.recipes.boston import BostonData

SEEDS = range(5)


def main() -> None:
    print("| on the same 102 test rows | RMSE, $1000 |\n|---|--:|")
    print(f"| `recipe=boston` | {spoken(network_errors())} |", flush=True)
    print(f"| ordinary least squares | {least_squares_error():.3f} |", flush=True)
    raw = network_errors("data.normalize=false")
    print(f"| `recipe=boston data.normalize=false` | {spoken(raw)} |")


def network_errors(*overrides: str) -> list[float]:
    """Each seed's error after the last epoch: the best epoch would be chosen on the test rows."""
    with tempfile.TemporaryDirectory() as directory:
        seeds = ",".join(map(str, SEEDS))
        command = [sys.executable, "-m", "dpframe", "-m", "recipe=boston", "strategy=cpu"]
        command += [f"seed={seeds}", "logger=none", f"hydra.sweep.dir={directory}", *overrides]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
        summaries = [json.loads(p.read_text()) for p in Path(directory).glob("*/summary.json")]
    assert len(summaries) == len(SEEDS)
    # Validation and test are the same rows in this recipe.
    return [summary["metrics"]["val/rmse"] for summary in summaries]


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


def spoken(errors: list[float]) -> str:
    return f"{mean(errors):.2f} ± {stdev(errors):.2f}"


if __name__ == "__main__":
    main()
