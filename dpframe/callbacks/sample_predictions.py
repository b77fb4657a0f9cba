"""The first rows of the validation set with what the task predicts for them."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpframe.callbacks.counts import predict_shares
from dpframe.data import Batch
from dpframe.trainer.callback import Callback
from dpframe.values import refuse_below

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

DIGITS = 4
LONGEST = 8  # numbers of a row that are shown


class SamplePredictions(Callback):
    """Pictures as `val/samples/<part>`, all else as the table `val/samples`."""

    def __init__(self, rows: int = 8) -> None:
        refuse_below("callbacks.sample_predictions.rows", rows)
        self.rows = rows

    def on_validation_start(self, trainer: "Trainer") -> None:
        self.batches: list[list[dict[str, Any]]] = []  # the parts of each share, by name
        self.missing = self.rows

    def on_validation_batch_end(
        self, trainer: "Trainer", batch: Batch, outputs: list[dict[str, Any]]
    ) -> None:
        if self.missing <= 0:
            return
        self.missing -= batch.rows
        shares = []
        for inputs, predicted in predict_shares(trainer, batch):
            parts = dict([*name_parts("batch", inputs), *name_parts("predicted", predicted)])
            shares.append({name: take(part, self.rows) for name, part in parts.items()})
        self.batches.append(shares)

    def on_validation_end(self, trainer: "Trainer") -> None:
        processes = trainer.strategy.collectives.gather(self.batches)
        shares = [share for parts in zip(*processes, strict=True) for share in chain(*parts)]
        columns: dict[str, list[Any]] = {}
        for name in shares[0] if shares else ():
            rows = [row for share in shares for row in share[name]][: self.rows]
            if is_image(rows[0]):
                trainer.log_image(f"val/samples/{name}", scale(torch.stack(rows)))
            else:
                columns[name] = [format_cell(row) for row in rows]
        if columns:
            rows = list(zip(*columns.values(), strict=True))
            trainer.log_table("val/samples", list(columns), rows)


def name_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a batch that have an entry a row, by name: batch_0, batch_label, …"""
    if isinstance(value, (dict, tuple)) or (isinstance(value, list) and not is_rows(value)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            yield from name_parts(f"{name}_{key}", part)
    elif is_rows(value):
        yield name, value


def is_rows(value: Any) -> bool:
    """A tensor, or a list of texts or numbers."""
    if isinstance(value, list):
        return all(isinstance(row, (str, int, float)) for row in value)
    return isinstance(value, Tensor) and value.ndim > 0


def take(value: Any, rows: int) -> Any:
    value = value[:rows]
    return value.detach().cpu() if isinstance(value, Tensor) else value


def is_image(row: Any) -> bool:
    return isinstance(row, Tensor) and row.ndim == 3 and row.shape[0] in (1, 3, 4)


def scale(images: Tensor) -> Tensor:
    """Pictures in any range, from black to white."""
    images = images.float().nan_to_num()
    low, high = images.amin(), images.amax()
    return (images - low) / (high - low).clamp(min=1e-12)


def format_cell(row: Any) -> Any:
    """A cell of the table."""
    if not isinstance(row, Tensor):
        return row
    numbers = [round(number, DIGITS) for number in row.flatten()[:LONGEST].tolist()]
    more = " …" if row.numel() > LONGEST else ""
    return numbers[0] if row.numel() == 1 else " ".join(map(str, numbers)) + more
