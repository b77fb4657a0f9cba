"""Random networks with BatchNorm and dropout: the same on any number of replicas, or told."""

import pytest
from layer_fuzz import fuzz

from dpframe.strategies import DDP, DataParallel


@pytest.mark.parametrize(
    ("strategy", "first", "count"), [(DataParallel(2, "cpu"), 22, 8), (DDP(2, "cpu"), 0, 8)]
)
def test_a_random_network_is_the_same_or_told(strategy, first, count):
    assert fuzz([f"0 {number}" for number in range(first, first + count)], strategy) == []
