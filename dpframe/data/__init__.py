"""Data: which rows make which global batch, each replica's exact share of it, and who reads it."""

from typing import TYPE_CHECKING

from dpframe.util.lazy import lazy

if TYPE_CHECKING:
    from dpframe.data.loader import Loader as Loader
    from dpframe.data.module import Batch as Batch
    from dpframe.data.module import DataModule as DataModule
    from dpframe.data.module import DataSets as DataSets
    from dpframe.data.module import Share as Share
    from dpframe.data.module import move as move
    from dpframe.data.module import placed as placed
    from dpframe.data.module import split as split
    from dpframe.data.order import permutation as permutation
    from dpframe.data.reading import Rows as Rows
    from dpframe.data.reading import is_tensors as is_tensors

_HOMES = {
    "Loader": "loader",
    **dict.fromkeys(("Batch", "DataModule", "DataSets", "Share"), "module"),
    **dict.fromkeys(("move", "placed", "split"), "module"),
    **dict.fromkeys(("Rows", "is_tensors"), "reading"),
    "permutation": "order",
}
# `dpframe.data.settings` never waits for torch.
__getattr__, __dir__ = lazy(__name__, [*_HOMES], _HOMES)
