"""Rows to predict on, from what the user names: a CSV table, an image, or a folder of images."""

import csv
import gzip
import importlib
import math
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from dpframe.errors import UserError, first_line
from dpframe.util import files

TABLES = (".csv", ".csv.gz")
NUMBER = re.compile(r" *[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)? *")
LONGEST_LINE = 1 << 24  # characters; a small packed file can stand for gigabytes without a line end
IMAGES = {  # and the only format that each is read as: for some others, Pillow starts programs
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
GREY = ("1", "L")  # Pillow's modes of 8 bits
WHITE = {"I": 65535, "F": 1}  # by the first letter of Pillow's modes; of all others 255

MakeRow = Callable[[Any], Any]


def dataset_of(name: str, make_row: MakeRow) -> Dataset:
    """`make_row` makes what the data set gives, of a table's row by its columns, or of an image."""
    path = files.local_path("data.input", name)
    if not path.exists():
        raise UserError(f"data.input={name}: there is no such file; name a CSV file or images")
    if path.is_dir():
        paths = sorted(each for each in path.iterdir() if each.suffix.lower() in IMAGES)
        if not paths:
            raise UserError(
                f"data.input={name} has no images ({', '.join(IMAGES)}) in it; name another"
            )
        return Images(paths, make_row)
    if path.name.lower().endswith(TABLES):
        return Table(path, make_row)
    if path.suffix.lower() in IMAGES:
        return Images([path], make_row)
    known = ", ".join((*TABLES, *IMAGES))
    raise UserError(f"data.input={name} is neither a table nor an image; use one of {known}")


@dataclass(eq=False)
class Table(IterableDataset):
    """The rows of a CSV file below its header, read one by one; numbers are numbers."""

    path: Path
    make_row: MakeRow

    def __iter__(self) -> Iterator[Any]:
        return self._read(lambda texts: self.make_row({k: _number(v) for k, v in texts.items()}))

    def texts(self) -> Iterator[dict[str, str]]:
        """The rows by column, as they stand there."""
        return self._read(dict)

    def _read(self, make: MakeRow) -> Iterator[Any]:
        opened: Any = gzip.open if self.path.suffix.lower() == ".gz" else open
        line = 1
        try:
            with opened(self.path, "rt", encoding="utf-8-sig", newline="") as text:
                lines = csv.reader(_limited(text))
                header = [name.strip() for name in next(lines, [])]
                # Spreadsheets leave columns without a name.
                if twice := [name for name, times in Counter(header).items() if times > 1 and name]:
                    names = ", ".join(map(repr, twice))
                    raise UserError(f"several columns are called {names}; give each its own name")
                is_empty = True
                for fields in lines:
                    line = lines.line_num
                    if fields:  # a blank line is no row
                        is_empty = False
                        yield make(_by_column(header, fields))
        except UserError as error:
            raise UserError(f"{self.path} line {line}: {error}") from None
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{self.path} line {line} can't be read: {error}") from None
        if is_empty:
            raise UserError(f"data.input={self.path} has no rows below its header; name another")


def _limited(text: IO[str]) -> Iterator[str]:
    """Its lines; what is quoted over several of them the csv module limits by itself."""
    while line := text.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise UserError(f"a line has more than {LONGEST_LINE} characters; fix the file")
        yield line


@dataclass(eq=False)
class Images(Dataset):
    """Each as a tensor [channels, height, width] of floats from 0 to 1; grey: one channel.

    An image of floats keeps its values.
    """

    paths: list[Path]
    make_row: MakeRow

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        try:
            return self.make_row(_read_image(path))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def numbers_of(row: Any) -> tuple[Tensor]:
    """All numbers of a table's row in one tensor, or an image as it is."""
    if isinstance(row, Tensor):
        return (row,)
    for column, value in row.items():
        if isinstance(value, str):
            raise UserError(
                f"column {column}: {value!r} is not a number; write input_row in your DataModule, "
                "or leave the column out"
            )
    return (torch.tensor(list(row.values()), dtype=torch.float32),)


def _by_column(header: list[str], fields: list[str]) -> dict[str, str]:
    if len(fields) != len(header):
        raise UserError(f"{len(fields)} values for {len(header)} columns; fix that line")
    return dict(zip(header, fields, strict=True))


def _number(text: str) -> float | str:
    """Python takes more for a number, e.g. the names 2021_05, 007 and nan."""
    number = float(text) if NUMBER.fullmatch(text) else math.nan
    return number if math.isfinite(number) else text


def _read_image(path: Path) -> Tensor:
    if not path.is_file():  # e.g. a pipe that nobody writes into
        raise UserError("is no file; remove it")
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError:
        raise UserError("images need the package pillow: pip install 'dpframe[images]'") from None
    name = IMAGES[path.suffix.lower()]
    bomb = pillow.DecompressionBombWarning
    raises_bombs = warnings.catch_warnings(action="error", category=bomb)
    try:
        with raises_bombs, pillow.open(path, formats=[name]) as image:
            kind, is_grey = image.mode[0], image.mode in GREY
            # Pillow's conversion to L cuts larger values off at 255.
            pixels = image.convert("F" if kind in WHITE else "L" if is_grey else "RGB")
    except pillow.UnidentifiedImageError:  # whose message is the path
        raise UserError(
            f"is no {name} that Pillow can read: it is damaged, or has the ending of another format"
        ) from None
    except (pillow.DecompressionBombError, bomb):
        raise UserError(
            f"has more than {pillow.MAX_IMAGE_PIXELS:,} pixels; if you trust it, raise "
            "PIL.Image.MAX_IMAGE_PIXELS in your DataModule, or leave it out"
        ) from None
    except Exception as error:  # of a damaged file, by whatever finds it
        raise UserError(f"is no image that can be read: {first_line(error)}") from None
    dtype = torch.float32 if kind in WHITE else torch.uint8
    values = torch.frombuffer(bytearray(pixels.tobytes()), dtype=dtype).float()
    values = values.reshape(pixels.height, pixels.width, -1).permute(2, 0, 1)
    return values / WHITE.get(kind, 255)
