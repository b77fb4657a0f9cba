"""The weights of all ranks, which have to stay the same: by a checksum of their bits."""

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpframe.errors import UserError, listed
from dpframe.strategies.base import Strategy
from dpframe.strategies.collectives import Collectives
from dpframe.trainer.calendar import EpochEnd
from dpframe.trainer.evaluation import Placed
from dpframe.trainer.progress import Progress
from dpframe.trainer.settings import TrainerSettings

FEW = 1 << 12  # numbers that are not worth a sum of their own
CHUNK = 1 << 18  # numbers that are looked at together: it bounds the memory
HALF = 1 << 32

log = logging.getLogger("dpframe")


class Apart(NamedTuple):
    """A weight that differs between these ranks and rank 0, and by how much of its size."""

    name: str
    ranks: list[int]
    distance: float
    is_rounding: bool  # as devices of two kinds may leave


def check_epoch(
    placed: Placed, settings: TrainerSettings, progress: Progress, end: EpochEnd
) -> None:
    """When 1, 2, 4, 8 … epochs are over, i.e. often in a short run and seldom in a long one; before
    they are validated and saved."""
    if end.is_whole and end.epochs & (end.epochs - 1) == 0:
        check(placed, settings, progress)


def check(placed: Placed, settings: TrainerSettings, progress: Progress) -> None:
    """All ranks end together, or none."""
    strategy, mode = placed.strategy, settings.share_check
    if mode == "off" or strategy.world_size == 1 or not strategy.has_alike_weights:
        return
    found = find_apart(placed.task, strategy)
    if found is None:
        return
    said = (
        f"{found.name} of rank {listed(found.ranks, 3)} is not rank 0's after step "
        f"{progress.global_step} (they differ by {100 * found.distance:.3g}%), so that each rank "
        "trains a model of its own; change weights on all ranks alike, by what a torch.Generator "
        "draws that they seed alike, e.g. by trainer.global_step"
    )
    if mode == "on" and not found.is_rounding or mode == "strict":
        raise UserError(f"{said}; trainer.share_check=warn trains on")
    if strategy.is_main:
        log.warning(said)


@torch.no_grad()
def find_apart(module: nn.Module, strategy: Strategy) -> Apart | None:
    """The first weight that differs by more than rounding, or else by that. Every rank calls it."""
    collectives = strategy.collectives
    kinds = Tensor, nn.Parameter  # what else there is may have bits of a form of its own
    named = [pair for pair in module.named_parameters() if type(pair[1]) in kinds]
    weights = [weight.detach() for _, weight in named]
    if _is_same(checksum(weights, strategy.device), collectives):
        return None
    sums = [checksum([weight], strategy.device) for weight in weights]
    of_ranks = zip(*collectives.gather(sums), strict=False)
    differing = [index for index, each in enumerate(of_ranks) if len(set(each)) > 1]
    found = None
    for index in collectives.broadcast(differing):
        name, weight = named[index][0], weights[index]
        collectives.broadcast_tensors([of_main := weight.clone()])
        own = _distance(weight, of_main)
        offs: Sequence[float] = collectives.broadcast(collectives.gather(own))
        if ranks := [rank for rank, off in enumerate(offs) if off != 0]:  # not only by a sign of 0
            apart = Apart(name, ranks, max(offs), max(offs) <= _rounding(weight.dtype))
            if not apart.is_rounding:
                return apart
            found = found or apart
    return found


def _is_same(number: int, collectives: Collectives) -> bool:
    """Whether all have the same one; all of them know, after one reduction. Floats hold halves of
    it without rounding."""
    halves = [0.0] * (2 * collectives.world_size)
    at = 2 * collectives.rank
    halves[at : at + 2] = map(float, divmod(number % HALF**2, HALF))
    sums = collectives.sum_numbers(halves)
    return len(set(zip(sums[::2], sums[1::2], strict=True))) == 1


def checksum(weights: Sequence[Tensor], device: torch.device) -> int:
    """Of all bits and their places: an exact one, so it is the same on any device."""
    parts = [part.to(device) for weight in weights for part in _condensed(weight)]
    return int(_sum(torch.cat([torch.zeros(1, dtype=torch.int64, device=device), *parts])))


def _condensed(weight: Tensor) -> Iterator[Tensor]:
    """Its bits as whole numbers, and their sums where they are many."""
    content = weight.flatten().view(torch.uint8)
    if content.storage_offset() % 4:  # a part of something, which can't be viewed
        content = content.clone()
    whole = len(content) // 4 * 4
    for chunk in content[:whole].view(torch.int32).split(CHUNK):
        yield chunk if len(chunk) <= FEW else _sum(chunk)[None]
    yield content[whole:]


def _sum(numbers: Tensor) -> Tensor:
    """Times an odd number for its place, by which no bit is lost."""
    return numbers.long().mul_(_odd(len(numbers), numbers.device)).sum()  # in a copy, or its own


@lru_cache(2)  # of the chunks of a large weight, and of all together
def _odd(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, device=device)


def _distance(own: Tensor, of_main: Tensor) -> float:
    """The largest difference, by the largest number."""
    difference = size = 0.0
    parts = (each.flatten().split(CHUNK) for each in (own, of_main))
    for mine, theirs in zip(*parts, strict=True):
        mine, theirs = mine.to(torch.complex128), theirs.to(torch.complex128)
        difference = max(difference, float((mine - theirs).abs().nan_to_num(torch.inf).max()))
        size = max(size, float(theirs.abs().max()))
    return difference / size if size else float(difference != 0)


def _rounding(dtype: torch.dtype) -> float:
    """What it may add up to in a long run, of a weight's largest number."""
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    return 0.0 if is_exact else torch.finfo(dtype).eps ** 0.5
