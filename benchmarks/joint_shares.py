"""Whether the shares of a batch have the same bits when they are computed together.

Each operation is computed share by share, then of the rows of all shares at once, and by
torch.func.vmap over the shares, which also gives each share's own gradient of the weights.
"""

import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

SHARES = 8
ROWS = 2  # of a share
HEADER = (
    "| operation | all rows at once: output | gradient of the input | vmap: output "
    "| gradient of the input | of the weights |\n|---|---|---|---|---|---|"
)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


OPERATIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "GELU": (nn.GELU(), (128, 96)),
    "LayerNorm": (nn.LayerNorm(96), (128, 96)),
    "softmax": (nn.Softmax(dim=-1), (128, 96)),
    "Linear 96 to 384": (nn.Linear(96, 384), (128, 96)),
    "Linear 13 to 32, of rows": (nn.Linear(13, 32), (13,)),
    "attention, 4 heads": (Attention(), (4, 128, 24)),
    "Conv2d 3x3, 8 to 16": (nn.Conv2d(8, 16, 3), (8, 14, 14)),
    "GroupNorm": (nn.GroupNorm(2, 8), (8, 14, 14)),
}


def compare(module: nn.Module, shape: tuple[int, ...]) -> list[bool]:
    """Whether each column has the bits of share by share."""
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    x = torch.randn(SHARES, ROWS, *shape)
    towards = torch.randn_like(module(x.flatten(0, 1))).unflatten(0, (SHARES, ROWS))

    def loss(weights: Any, x: Tensor, towards: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(module, weights, (x,))
        return (output * towards).sum(), output

    gradients: Callable[..., Any] = grad_and_value(loss, argnums=(0, 1), has_aux=True)
    alone = [gradients(weights, *share) for share in zip(x, towards, strict=True)]
    outputs = torch.stack([output for _, (_, output) in alone])
    of_input = torch.stack([mine for (_, mine), _ in alone])
    (_, rows_input), (_, rows_output) = gradients(weights, x.flatten(0, 1), towards.flatten(0, 1))
    (of_weights, vmap_input), (_, vmap_output) = vmap(gradients, (None, 0, 0))(weights, x, towards)
    return [
        torch.equal(rows_output.view_as(outputs), outputs),
        torch.equal(rows_input.view_as(of_input), of_input),
        torch.equal(vmap_output, outputs),
        torch.equal(vmap_input, of_input),
        all(
            torch.equal(of_weights[name], torch.stack([own[name] for (own, _), _ in alone]))
            for name in weights
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser("python -m benchmarks.joint_shares", description=__doc__)
    parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # vmap has a slow way for some operations
    torch.manual_seed(0)
    print(HEADER)
    for name, (module, shape) in OPERATIONS.items():
        cells = ["same" if same else "other bits" for same in compare(module, shape)]
        if not list(module.parameters()):
            cells[-1] = "-"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
