"""States of a metric from all processes, put together by the share that added to them."""

import torch

from dpframe.plugins.logical.exact import Exact
from dpframe.plugins.logical.metrics import ShareMetrics

METRICS = ShareMetrics(lambda: (), lambda metric, states: None)


def test_entries_of_lists_come_in_the_order_of_the_shares():
    """Shares 0 and 2 were computed by one process, 1 by another; each has where its rows end."""
    states = [{"preds": ["a", "b", "e", "f"]}, {"preds": ["c", "d", "late"]}]
    ends = [[0, 2], [2, 4]], [[1, 2]]
    beside = [{"ends": {"auc": {"preds": each}}} for each in ends]
    whole, rest = METRICS.joined("auc", states, beside)
    assert whole["preds"] == ["a", "b", "c", "d", "e", "f", "late"]
    assert rest["preds"] == []


def test_sums_are_added_without_rounding():
    tenth = Exact.of(0.1).floats()
    states = [{"value": torch.tensor(0.0)}] * 3
    beside = [{"sums": {"mean": {"value": [tenth]}}}] * 3
    whole, *_ = METRICS.joined("mean", states, beside)
    assert float(whole["value"]) == float(torch.tensor(float(Exact.sum([0.1] * 3))))
