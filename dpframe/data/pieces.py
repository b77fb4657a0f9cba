"""A share in pieces of so many rows at most, whose gradients add up to those of the share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dpframe.data.module import OfSets, Pieces, Share, cuts


class Cut(NamedTuple):
    """How the shares of a batch are cut: each into as many pieces, on all ranks."""

    most: int  # rows of a piece
    replicas: int
    share: int  # rows that a replica may have of any batch, where ranks read rows of their own

    def of(self, shares: Share | list[Share], rows: int) -> Sequence[Any]:
        """The pieces of a batch of `rows`, each as a strategy's `to_device` has given the batch."""
        largest = max(-(-rows // self.replicas), self.share)
        count = -(-largest // self.most)
        if isinstance(shares, Share):
            return in_pieces(shares, self.most, count)
        by_replica = [in_pieces(share, self.most, count) for share in shares]
        return [list(pieces) for pieces in zip(*by_replica, strict=True)]


def in_pieces(share: Share, most: int, count: int) -> list[Share]:
    """The last of them may be empty. A batch that is not cut yet is a list of tensors."""
    pieces = []
    for number, cut in enumerate(cuts(share.rows, most)):
        part = slice(cut[0], cut[-1] + 1)
        if isinstance(share.batch, Pieces):
            batch: Any = share.batch[number]
        elif len(cut) == share.rows:
            batch = share.batch
        else:
            batch = [tensor[part] for tensor in share.batch]
        places = None if share.places is None else share.places[part]
        if isinstance(share.places, OfSets) and places is not None:
            places = OfSets(places)
        pieces.append(Share(batch, len(cut), share.total, places))
    nothing = Share(None, 0, share.total, None if share.places is None else [])
    return pieces + [nothing] * (count - len(pieces))
