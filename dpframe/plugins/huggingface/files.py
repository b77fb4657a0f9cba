"""Data in files of JSON lines, for a model with a tokenizer of `transformers`."""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

import dpframe
from dpframe.plugins.huggingface.model import tokenizer_of


class FileData(dpframe.DataModule):
    """`rows_of` and `prepared` are what a kind of it writes."""

    def __init__(
        self,
        tokenizer: str,
        train: str,
        val: str | None,
        batch_size: int,
        workers: int | str,
        shuffle: bool,
    ) -> None:
        super().__init__(batch_size, workers, shuffle)
        self.name = tokenizer
        self.files = {"train": train, "val": val}
        self.rows: dict[str, Any] = {}

    def rows_of(self, file: str) -> Dataset:
        raise NotImplementedError

    def prepared(self, tokenizer: Any) -> Any:
        return tokenizer

    @cached_property
    def tokenizer(self) -> Any:
        return self.prepared(tokenizer_of(self.name))

    def setup(self) -> None:
        self.rows = {n: self.rows_of(file) for n, file in self.files.items() if file is not None}

    def train_dataset(self) -> Dataset:
        return self.rows["train"]

    def val_dataset(self) -> Dataset | None:
        return self.rows.get("val")

    def test_dataset(self) -> Dataset | None:
        return self.rows.get("val")


def lines(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file, each with where it is."""
    for number, line in enumerate(text_of(file).split("\n"), 1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise dpframe.UserError(f"{where} is not a JSON object: {line.strip()[:60]}")
            yield where, row


def text_of(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise dpframe.UserError(f"{file} can't be read: {error}") from error
