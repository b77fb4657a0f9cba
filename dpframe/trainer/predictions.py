"""What `predict` gives: every row's output in dataset order, as a table where it is one."""

import csv
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpframe.errors import UserError

CELLS = (int, float, str, bool)


class Predictions:
    """`batches` holds, for each global batch, what each replica returned, in replica order."""

    def __init__(self, batches: list[list[Any]]) -> None:
        self.batches = batches

    def joined(self) -> Any:
        """One value over all rows: a tensor, or a dict of them; a list where they are neither."""
        return join(list(chain.from_iterable(self.batches)))

    def save(self, directory: Path) -> Path:
        """`predictions.csv` for numbers in rows and columns, else `predictions.pt`."""
        joined = self.joined()
        table = as_table(joined)
        if table is None:
            path = directory / "predictions.pt"
            _refuse_objects(joined)
            torch.save(joined, path)
            return path
        path = directory / "predictions.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))
        return path


def collected(replicas: list[list[list[tuple[int, Any]]]]) -> Predictions:
    """From each process's batches of (rows, output) to dataset order; lent rows fall out."""
    batches = [
        [output for part in parts for rows, output in part if rows]
        for parts in zip(*replicas, strict=True)
    ]
    if not batches:
        raise UserError("predict: the data set gave no rows")
    return Predictions(batches)


def join(parts: list[Any]) -> Any:
    if all(isinstance(part, Tensor) and part.ndim for part in parts) and _alike(parts):
        return torch.cat(parts)
    if all(isinstance(part, dict) for part in parts):
        return {name: join([part[name] for part in parts]) for name in parts[0]}
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    return parts


def _alike(parts: list[Tensor]) -> bool:
    return len({part.shape[1:] for part in parts}) == 1


def as_table(joined: Any) -> dict[str, list] | None:
    """Columns by name, one entry a row; None where the outputs are not a table."""
    if not isinstance(joined, dict):
        joined = {"output": joined}
    table: dict[str, list] = {}
    for name, value in joined.items():
        if isinstance(value, Tensor) and value.ndim in (1, 2):
            columns = value.T.tolist() if value.ndim == 2 else [value.tolist()]
        elif isinstance(value, list) and all(isinstance(cell, CELLS) for cell in value):
            columns = [value]
        else:
            return None
        names = [name] if len(columns) == 1 else [f"{name}_{i}" for i in range(len(columns))]
        table |= dict(zip(names, columns, strict=True))
    return table if len({len(column) for column in table.values()}) == 1 else None


def _refuse_objects(joined: Any) -> None:
    """What `weights_only` could not load again is not written."""
    parts = joined.values() if isinstance(joined, dict) else joined
    if isinstance(joined, (dict, list)):
        for part in parts:
            _refuse_objects(part)
    elif joined is not None and not isinstance(joined, (Tensor, *CELLS)):
        raise UserError(
            f"predict_step returned a {type(joined).__name__}; return tensors, numbers, text, "
            "or lists and dicts of them"
        )
