"""Dropout by row: masks do not depend on how rows are shared, and are random."""

import copy
import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpframe import UserError, dropout_rows
from dpframe.data import Share
from dpframe.layers.dropout import keep_rows
from dpframe.layers.exact import RowDropout, convert
from dpframe.rows import current_share
from dpframe.task import TaskContext

ROWS = 7
KINDS = {
    "Dropout": (nn.Dropout(0.3), (4,)),
    "of places": (nn.Dropout(0.3), (4, 5)),
    "in place": (nn.Dropout(0.3, inplace=True), (4,)),
    "Dropout1d": (nn.Dropout1d(0.5), (6, 5)),
    "Dropout2d": (nn.Dropout2d(0.5), (6, 5, 2)),
    "Dropout3d": (nn.Dropout3d(0.5), (6, 5, 2, 2)),
    "AlphaDropout": (nn.AlphaDropout(0.2), (8,)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.4), (6, 5)),
}


def of_rows(places: Sequence[int], total: int = ROWS, *, seed: int = 0, batch: int = 0) -> Any:
    """For a `with`: a step of these rows of a batch."""
    context = TaskContext(seed=seed)
    context.batch_index = batch
    return current_share.of(Share(None, len(places), total, places), context, "")


def by_row(layer: nn.Module, dim: int = 0) -> Any:
    task = nn.Sequential(copy.deepcopy(layer))
    convert(task, batch_norm=False, dropout=True)
    task[0].row_dim, task[0].row_blocks = dim, True
    return task[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_dropped_alike_in_any_share(kind):
    layer, sizes = KINDS[kind]
    x = torch.randn(ROWS, *sizes).double()
    with of_rows(range(ROWS)):
        whole = by_row(layer)(x.clone())
    assert not torch.equal(whole, x)
    for cut in ([range(3), range(3, 7)], [range(n, n + 1) for n in range(7)]):
        parts = []
        for places in cut:
            with of_rows(places):
                parts.append(by_row(layer)(x[places.start : places.stop].clone()))
        assert torch.equal(torch.cat(parts), whole)
    with of_rows([4, 1]):
        assert torch.equal(by_row(layer)(x[[4, 1]]), whole[[4, 1]])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_what_torch_would_give(kind):
    """Its numbers are one of two, as torch's: what is dropped, and what is kept, scaled."""
    layer, sizes = KINDS[kind]
    x = torch.rand(1, *sizes).add(1).expand(4096, *sizes).contiguous().double()
    with of_rows(range(4096), 4096):
        ours = by_row(layer)(x.clone())
    theirs = copy.deepcopy(layer).train()(x.clone())
    assert {round(v, 6) for v in ours.flatten().tolist()} == {
        round(v, 6) for v in theirs.flatten().tolist()
    }
    of_channel = (ours - theirs.amin(0)).flatten(2) if ours.ndim > 2 else None
    if "Feature" in type(layer).__name__ or type(layer).__name__[-1] == "d":
        assert ((of_channel == 0).all(2) == (of_channel == 0).any(2)).all()
    share = float((ours == theirs.amin(0)).double().mean())
    assert abs(share - layer.p) < 5 * math.sqrt(layer.p * (1 - layer.p) / 4096)


def test_rows_may_be_any_dimension_and_have_places_each():
    x = torch.randn(3, ROWS, 2)
    with of_rows(range(ROWS)):
        whole = dropout_rows(x, 0.5, dim=1)
    with of_rows(range(2, 5)):
        assert torch.equal(dropout_rows(x[:, 2:5], 0.5, dim=1), whole[:, 2:5])
    blocks = torch.randn(ROWS * 4, 3)
    with of_rows(range(ROWS)):
        whole = dropout_rows(blocks, 0.5)
    with of_rows(range(2, 5)):
        assert torch.equal(dropout_rows(blocks[8:20], 0.5), whole[8:20])


def test_a_row_that_is_padded_further_has_the_same_mask():
    x = torch.ones(ROWS, 9, 4)
    with of_rows(range(ROWS)):
        whole = dropout_rows(x)
    with of_rows(range(2)):
        assert torch.equal(dropout_rows(x[:2, :6]), whole[:2, :6])


def masks(calls: int, rows: int, numbers: int, p: float) -> Tensor:
    """1 where a number is dropped, by calls, rows and numbers."""
    found = []
    for call in range(calls):
        with of_rows(range(rows), rows, batch=call):
            found.append(~keep_rows(torch.empty(rows, numbers), p, 0, 1))
    return torch.stack(found).double()


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5])
def test_numbers_are_dropped_independently_of_each_other(p):
    """Of 6.5 million: how often both of a pair are dropped, in the same call, row or place, and
    how often all four of two rows and two places are. Standard deviations from what is expected."""
    drawn = masks(200, 64, 512, p)
    assert abs(off(drawn, p)) < 4
    for dim in range(3):
        for lag in (1, 2, 3, 7, 8, 16, 32):
            size = drawn.shape[dim] - lag
            pairs = drawn.narrow(dim, 0, size) * drawn.narrow(dim, lag, size)
            assert abs(off(pairs, p**2)) < 4.5, (dim, lag)
    for rows, places in ((1, 1), (1, 2), (3, 1), (2, 7)):
        of_rows_ = drawn[:, rows:] * drawn[:, :-rows]
        assert abs(off(of_rows_[:, :, places:] * of_rows_[:, :, :-places], p**4)) < 4.5
    for dim in (0, 1, 2):  # sums vary as those of independent numbers do
        sums = drawn.sum(dim)
        ratio = float(sums.var()) / (drawn.shape[dim] * p * (1 - p))
        assert 0.95 < ratio < 1.05, (dim, ratio)


def off(drawn: Tensor, p: float) -> float:
    count = drawn.numel()
    return (float(drawn.sum()) - count * p) / math.sqrt(count * p * (1 - p))


def test_linear_keys_would_drop_neighbours_together(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr("dpframe.layers.dropout._keys_of_range", lambda a, b, _: torch.arange(a, b))
    with pytest.raises(AssertionError):
        test_numbers_are_dropped_independently_of_each_other(0.1)


def test_a_mask_follows_from_the_seed_the_batch_the_layer_and_the_call():
    x = torch.ones(ROWS, 64)
    first, other = by_row(nn.Dropout()), by_row(nn.Dropout())
    other.key = 5

    def drawn(layer: Any = first, **options: int) -> list[Tensor]:
        with of_rows(range(ROWS), **options):
            return [layer(x), layer(x)]

    assert all(map(torch.equal, drawn(), drawn()))
    found = [*drawn(), *drawn(seed=1), *drawn(batch=1), *drawn(other)]
    assert len({tuple(each.flatten().tolist()) for each in found}) == 8


def test_a_probability_of_0_or_1_and_evaluation_draw_nothing():
    x = torch.randn(ROWS, 3)
    with of_rows(range(ROWS)):
        assert dropout_rows(x, 0.0) is x and dropout_rows(x, training=False) is x
        assert not dropout_rows(x, 1.0).any()
        assert not by_row(nn.AlphaDropout(1.0))(x).any()
        assert torch.equal(by_row(nn.Dropout()).eval()(x), x)
        with pytest.raises(UserError, match="dropout_rows got p=1.5; use a number from 0 to 1"):
            dropout_rows(x, 1.5)
        with pytest.raises(UserError, match=r"shape \(5, 3\) for a share of 7 rows; make these"):
            dropout_rows(x[:5])
    with pytest.raises(UserError, match="was used outside of a step"):
        dropout_rows(x)


def test_a_layer_is_torchs_own_outside_of_a_step_in_a_file_and_where_rows_are_unknown():
    layer = by_row(nn.Dropout(0.5))
    x = torch.ones(1000)
    torch.manual_seed(0)
    ours = layer(x)
    torch.manual_seed(0)
    assert torch.equal(ours, nn.Dropout(0.5)(x))
    assert type(pickle.loads(pickle.dumps(layer))) is nn.Dropout
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is nn.Dropout
    assert isinstance(copy.deepcopy(layer), RowDropout) and isinstance(layer, nn.Dropout)
    task = nn.Sequential(layer)
    convert(task, batch_norm=False, dropout=False)
    assert type(layer) is nn.Dropout and vars(layer).keys() == vars(nn.Dropout()).keys()


class Doubled(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_dropout_layer_of_ones_own_computes_as_it_does():
    task = nn.Sequential(Doubled(), type("Named", (nn.Dropout,), {})())
    convert(task, batch_norm=False, dropout=True)
    assert type(task[0]) is Doubled and isinstance(task[1], RowDropout)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_drops_what_the_cpu_drops(kind):
    layer, sizes = KINDS[kind]
    x = torch.randn(ROWS, *sizes)
    with of_rows(range(ROWS)):
        wanted = by_row(layer)(x.clone())
    with of_rows(range(ROWS)):
        assert torch.equal(by_row(layer).cuda()(x.cuda()).cpu(), wanted)
