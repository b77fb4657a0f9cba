"""States of a metric from all processes, put together by the share that added to them."""

import torch

from dpframe.exact import Exact
from dpframe.trainer.share_metrics import SHARES, joined


def test_entries_of_lists_come_in_the_order_of_the_shares():
    """Shares 0 and 2 were computed by one process, 1 by another; each has where its rows end."""
    first = {"preds": ["a", "b", "e", "f"]}
    second = {"preds": ["c", "d", "late"]}
    everywhere = [
        {"auc": first, SHARES: {"ends": {"auc": {"preds": [[0, 2], [2, 4]]}}}},
        {"auc": second, SHARES: {"ends": {"auc": {"preds": [[1, 2]]}}}},
    ]
    whole, rest = joined("auc", everywhere)
    assert whole["preds"] == ["a", "b", "c", "d", "e", "f", "late"]
    assert rest["preds"] == []


def test_sums_are_added_without_rounding():
    tenth = str(Exact.of(0.1))
    states = [
        {"mean": {"value": torch.tensor(0.0)}, SHARES: {"sums": {"mean": {"value": [tenth]}}}}
        for _ in range(3)
    ]
    whole, *_ = joined("mean", states)
    exact = Exact.of(0.1) + Exact.of(0.1) + Exact.of(0.1)
    assert float(whole["value"]) == float(torch.tensor(float(exact)))
