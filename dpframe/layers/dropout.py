"""Dropout by row: a row has the same mask on whichever replica and device it is computed.

The mask is a fact of the seed, the step, the layer and the row's place in its batch.

Each number of a row has two random integers, `a` and `b`, and each row a `key`: it is dropped
where `a * key + b` is small. So a replica draws for one row, whatever the number of its rows. The
integers are hashes of where the number is in its row, so they do not depend on how long it is.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dpframe import seeding
from dpframe.errors import UserError
from dpframe.rows import (
    CurrentShare,
    current_share,
    outside_of_graphs,
    refuse_unlike_forward,
)

KEPT_NUMBERS = 1 << 16  # of a row, up to which its hashes are kept from call to call
ALPHA = 1.7580993408473766  # AlphaDropout gives what it drops minus this
OF_FUNCTIONS = 0  # the key of what dropout_rows draws
# Of splitmix64, in which nearby numbers become distant ones.
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def dropout_rows(x: Tensor, p: float = 0.5, dim: int = 0, training: bool = True) -> Tensor:
    """As torch.nn.functional.dropout, in a step: each row of the batch is dropped in the same way
    on any number of replicas, and on any device.

    Dimension `dim` of `x` is the rows of this step's share, or a multiple of them: a block for
    each row. What is drawn follows from the seed, the batch and how often the step has called it.
    """
    if not training or p == 0:
        return x
    if not 0 <= p <= 1:
        raise UserError(f"dropout_rows got p={p}; use a number from 0 to 1")
    kept = keep_rows(x, p, dim % x.ndim, OF_FUNCTIONS)
    return torch.where(kept, x * scale(p), 0.0)


def scale(p: float) -> float:
    """Of what is kept."""
    return 1 / (1 - p) if p < 1 else 0.0


def keep_rows(x: Tensor, p: float, dim: int, layer: int, *, channels: bool = False) -> Tensor:
    """Which numbers of `x` the layer keeps in this call; `channels`: of each of these all."""
    share = current_share
    if torch.compiler.is_compiling():  # in which sizes may be any
        if share.seed is None:  # a model of one's own is compiled
            outside_of_graphs("begin", begin_in_graph)(share, x.device)
        hashes, rows = _hashes, share.keys.shape[0]
    else:
        refuse_unlike_forward("dropout by row")
        if share.seed is None or (rows := len(share.keys)) != share.rows:
            begin(share, x.device)
            rows = share.rows
        hashes = _kept_hashes
    if x.shape[dim] % rows:
        raise UserError(
            f"dropout by row got a tensor of shape {tuple(x.shape)} for a share of {rows} rows; "
            f"make these rows, or a multiple of them, its dimension {dim}, e.g. drop before "
            "self.all_gather"
        )
    sizes = [*x.shape[: dim + 2]] if channels else [*x.shape]
    shape = sizes + [1] * (x.ndim - len(sizes))
    of_row = (*sizes[:dim], x.shape[dim] // rows, *sizes[dim + 1 :])
    before = len(sizes[:dim])
    call = share.calls.get(layer, 0)
    share.calls[layer] = call + 1
    seed = share.seed + seeding.mix(layer, call)
    if isinstance(seed, int):
        seed = _signed(seed)
    bits = hashes(of_row, x.device) ^ seed
    bits = bits * FIRST
    bits = (bits ^ (bits >> 29)) * SECOND
    bits = (bits ^ (bits >> 32)).unsqueeze(before)
    a, b = bits.to(torch.int32), (bits >> 32).to(torch.int32)
    keys = share.keys.view(-1, *[1] * (len(sizes) - before))
    drawn = torch.addcmul(b, a, keys)
    # Of the 2**32 integers, from -2**31 on, the first p are dropped.
    least = min(round(p * 2**32), 2**32 - 1) - 2**31
    kept = drawn >= least if p < 1 else torch.zeros_like(drawn, dtype=torch.bool)
    return kept.reshape(shape)


def begin(share: CurrentShare, device: torch.device) -> None:
    """Before the first call in a step."""
    if not share.rows:
        raise UserError(
            "dropout by row was used outside of a step, where rows have no places in a batch"
        )
    if not share.total or share.places is None:
        raise UserError(
            "dropout by row can't be computed where ranks have rows of their own; use "
            "trainer.dropout=replica, or give all rows in each process"
        )
    context = share.context
    by = () if share.turn is None else (context.epoch, crc32(share.turn.encode()))
    share.seed = seeding.mix(context.seed, *by, context.batch_index)
    places = share.places
    if isinstance(places, range):
        share.keys = _keys_of_range(places.start, places.stop, device)
    else:
        share.keys = _keys(torch.as_tensor(places, device=device))


def begin_in_graph(share: CurrentShare, device: torch.device) -> None:
    """Likewise, for a graph, in which a number would be a constant. `device` may have no index: in
    a replica's thread it is the replica's GPU."""
    zero = torch.zeros((), dtype=torch.int64, device=device.type)
    begin(share, zero.device)
    share.seed = zero + share.seed


@lru_cache(64)
def _keys_of_range(first: int, end: int, device: torch.device) -> Tensor:
    return _keys(torch.arange(first, end, device=device))


def _keys(places: Tensor) -> Tensor:
    """Near places have distant keys: with linear ones, neighbours would be dropped together."""
    return _scrambled((places.long() + 1) * STEP).to(torch.int32)


def _kept_hashes(sizes: Sequence[int], device: torch.device) -> Tensor:
    count = 1
    for size in sizes:
        count *= size
    return (_cached_hashes if count <= KEPT_NUMBERS else _hashes)(sizes, device)


def _hashes(sizes: Sequence[int], device: torch.device) -> Tensor:
    """A random number for each place in a row, which does not depend on the sizes."""
    total: Any = 0
    for dim, size in enumerate(sizes):
        along = torch.arange(size, device=device) * ODD[dim]
        total = along if dim == 0 else total.unsqueeze(-1) + along
    return _scrambled(total)


_cached_hashes = lru_cache(32)(_hashes)


def _scrambled(bits: Tensor) -> Tensor:
    bits = (bits ^ (bits >> 30)) * FIRST
    bits = (bits ^ (bits >> 27)) * SECOND
    return bits ^ (bits >> 31)


def _signed(number: int) -> int:
    """As 64 bits hold it."""
    return (number + 2**63) % 2**64 - 2**63


ODD = [_signed(2 * seeding.mix(dim) + 1) for dim in range(16)]  # a factor for each dimension
