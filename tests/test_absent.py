"""A rank without rows gives zeros for the weights that the others' loss reaches."""

import torch
from torch import nn

from dpframe.strategies.absent import find_reached


def test_the_weights_that_a_loss_reaches_are_found():
    used, unused = nn.Linear(2, 2), nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    loss = frozen(used(torch.ones(1, 2))).sum() + 0 * unused.bias.detach().sum()
    assert find_reached(loss) == {id(used.weight), id(used.bias)}
