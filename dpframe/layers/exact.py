"""Which layers of a task are computed for the whole batch, and which are each replica's own.

As torch.nn.utils.parametrize does it, only the class of a layer changes: its names in checkpoints
stay, and so does what it is, e.g. for `isinstance`.
"""

import logging
from copy import deepcopy
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from dpframe.layers.batch_norm import OfAllRows, is_shared
from dpframe.layers.dropout import ALPHA, keep_rows, scale
from dpframe.rows import buffers_kept, current_share, is_backward, ongoing, outside_of_graphs

log = logging.getLogger("dpframe")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ALPHAS = (nn.AlphaDropout, nn.FeatureAlphaDropout)
# By how many dimensions their inputs have.
BY_CHANNEL = {nn.Dropout1d: (3,), nn.Dropout2d: (3, 4), nn.Dropout3d: (5,)}
OWN_NAMES = {"key", "row_dim", "row_blocks", "row_name", "row_told"}  # attributes of RowDropout
DROPOUTS = (nn.Dropout, *BY_CHANNEL, *ALPHAS)


class Exact(nn.Module):
    """Is put before a layer's own class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> Any:
        """In a file it is a layer of its own class."""
        state = {name: value for name, value in vars(self).items() if name not in OWN_NAMES}
        return object.__new__, (own_class(self),), state


class GlobalBatchNorm(Exact):
    """A BatchNorm, also of another library, whose statistics are those of the global batch."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if current_share.gathered is None:
            return self._of_batch(x, *args, **kwargs)
        with buffers_kept(self):  # the forward, which is computed again, has counted these rows
            return self._of_batch(x, *args, **kwargs)

    def _of_batch(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        uses_batch = self.training or self.running_mean is None
        if ongoing.watch is None and not (uses_batch and is_shared()):
            return super().forward(x, *args, **kwargs)
        call = GlobalBatchNorm.of_all_rows
        if torch.compiler.is_compiling():
            call = outside_of_graphs("batch_norm", call)
        return call(self, x, *args, **kwargs)

    def of_all_rows(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with OfAllRows() as batch_norms:
            y = super().forward(x, *args, **kwargs)
        if ongoing.watch is not None and not batch_norms.count:
            ongoing.watch.unlike.add(self)
        return y


class Synced(nn.BatchNorm1d):
    """Stands for a SyncBatchNorm, which torch refuses on the CPU, in modules and in DDP."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2) if x.ndim > 3 else x).view_as(x)


class RowDropout(Exact):
    """A dropout layer that drops each row in the same way on any number of replicas."""

    row_dim: int | None  # the dimension of its input that is the rows; None: nothing has told
    row_blocks: bool  # whether a block of it is known to be a row, not each place alone
    key: int
    row_name: str
    row_told: list[str]  # what it is that has told that it is each replica's own

    def forward(self: Any, x: Tensor) -> Tensor:
        if ongoing.watch is not None:  # also of one that drops nothing yet
            ongoing.watch.note(self, x)
            return x
        if not self.training or not self.p:
            return super().forward(x)
        is_outside = not (torch.compiler.is_compiling() or current_share.rows or is_backward())
        if self.row_dim is None or is_outside or not self._has_known_rows(x):
            if not (is_outside or self.row_told or torch.compiler.is_compiling()):
                self._tell()
            return super().forward(x)
        of = own_class(self)
        channels = issubclass(of, (*BY_CHANNEL, nn.FeatureAlphaDropout))
        kept = keep_rows(x, self.p, self.row_dim, self.key, channels=channels)
        if issubclass(of, ALPHAS):
            if self.p == 1:
                return x * 0.0
            a = ((ALPHA * ALPHA * self.p + 1) * (1 - self.p)) ** -0.5
            return torch.where(kept, x * a, -ALPHA * a) + ALPHA * a * self.p
        if self.inplace:
            return x.mul_(kept.to(x.dtype) * scale(self.p))
        return torch.where(kept, x * scale(self.p), 0.0)

    def _has_known_rows(self: Any, x: Tensor) -> bool:
        """Rows that are repeated may come in turns, or as blocks of the same one."""
        if self.row_blocks or torch.compiler.is_compiling():
            return True
        places, rows = x.shape[self.row_dim], current_share.rows
        return places == rows or not rows or places % rows > 0  # which keep_rows refuses

    def _tell(self: Any) -> None:
        """Of a layer that the trial has not met so, e.g. of a later epoch."""
        self.row_told.append("the step")
        strategy = current_share.context.strategy
        if strategy is not None and strategy.replicas > 1 and strategy.is_main:
            log.warning(
                f"{self.row_name}: its dropout is each replica's own, as the trial before the run "
                f"has not {'called it' if self.row_dim is None else 'given it several of a row'}"
            )

    def takes(self, dim: int, ndim: int) -> bool:
        """Whether dimension `dim` of inputs with `ndim` dimensions may be the rows."""
        of = own_class(self)
        if issubclass(of, nn.FeatureAlphaDropout):
            return dim == 0 and ndim > 1
        dims = [dims for kind, dims in BY_CHANNEL.items() if issubclass(of, kind)]
        return not dims or (dim == 0 and ndim in dims[0])


def convert(task: nn.Module, *, batch_norm: bool, dropout: bool) -> None:
    """Gives the layers of a task these classes, or their own ones again."""
    for name, module in task.named_modules():
        known = vars(module).get("row_dim"), vars(module).get("row_blocks", False)
        if isinstance(module, Exact):
            _become(module, own_class(module))
            for each in OWN_NAMES & vars(module).keys():
                del vars(module)[each]
        kind: Any = type(module)
        if batch_norm and isinstance(module, BATCH_NORMS):
            is_synced = kind is nn.SyncBatchNorm
            _become(module, put_before(GlobalBatchNorm, Synced if is_synced else kind))
        elif dropout and isinstance(module, DROPOUTS) and is_torchs(module):
            _become(module, put_before(RowDropout, kind))
            own = {"key": crc32(name.encode()), "row_name": name, "row_told": []}
            vars(module).update(own, row_dim=known[0], row_blocks=known[1])


def drops_by_row(task: nn.Module) -> bool:
    return any(isinstance(module, RowDropout) for module in task.modules())


def gathering_norms(task: nn.Module, strategy: Any) -> int:
    """How many BatchNorms gather in training what other replicas have."""
    norms = (module for module in task.modules() if isinstance(module, GlobalBatchNorm))
    return sum(norm.training for norm in norms) if strategy.replicas > 1 else 0


def _become(module: Any, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def own_class(module: Exact) -> Any:
    kind = type(module).__bases__[1]
    return nn.SyncBatchNorm if kind is Synced else kind


@cache
def put_before(first: Any, kind: Any) -> type[nn.Module]:
    """A class that is `first` and then `kind`, under the name of that."""
    shown: Any = nn.SyncBatchNorm if kind is Synced else kind
    names = {"__module__": shown.__module__, "__qualname__": shown.__qualname__}
    return type(shown.__name__, (first, kind), names)


def is_torchs(module: nn.Module) -> bool:
    """Whether a dropout layer computes as torch's."""
    return any(type(module).forward is each.forward for each in DROPOUTS)
