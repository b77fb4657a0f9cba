"""What is shown and written, without a library: PNG pictures, WAV sounds, CSV and text tables."""

import csv
import io
import re
import struct
import wave
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from dpframe.errors import printable

COLOURS = {1: 0, 3: 2, 4: 6}  # PNG's number for grey, RGB and RGBA, by the channels


def png(pixels: Any) -> bytes:
    """[height, width, channels] of uint8 as a PNG file."""
    height, width, channels = pixels.shape
    lines = pixels.reshape(height, -1).copy()
    lines[1:] = lines[1:] - lines[:-1]
    rows = b"".join(b"\2" + line.tobytes() for line in lines)  # 2: less the line above
    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def draw(figure: Any) -> bytes:
    """A figure of matplotlib's as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def wav(samples: Any, sample_rate: int) -> bytes:
    """[samples, channels] of int16 as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(samples.shape[1])
        sound.setsampwidth(2)
        sound.setframerate(sample_rate)
        sound.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def table_text(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def ruled(rows: Sequence[tuple[str, ...]]) -> str:
    """A table whose first row is its head, with a rule below it."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], tuple("-" * width for width in widths), *rows[1:]]
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def file_name(name: str, step: int, suffix: str) -> str:
    """`val/worst` at step 200 as `val_worst-step200.csv`: nothing that leads to another folder."""
    stem = re.sub(r"[^\w+=@,-]", "_", name)
    return f"{stem}-step{step}.{suffix}"
