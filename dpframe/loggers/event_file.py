"""An event file is how TensorBoard keeps a run: framed records, each one a serialised event."""

import os
import socket
import struct
import time
from pathlib import Path

PATTERN = "events.out.tfevents.[0-9]*"


class EventFile:
    """Keeps records in memory until `write`; between two writes it holds no descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending = bytearray()

    def append(self, record: bytes) -> None:
        length = struct.pack("<Q", len(record))
        self.pending += length + checksum(length) + record + checksum(record)

    def write(self) -> None:
        """Unbuffered: what it wrote survives a killed process, and a full disk raises here."""
        if not self.pending:
            return
        with open(self.path, "ab", buffering=0) as file:
            while self.pending:
                del self.pending[: file.write(self.pending)]


def next_path(directory: Path) -> Path:
    """TensorBoard reads a directory's files by name: this one comes after all that are there."""
    seconds = max([int(time.time()), *(_seconds(path) + 1 for path in directory.glob(PATTERN))])
    name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.0"
    return directory / name


def replace(path: Path, old: bytes, new: bytes) -> None:
    """Writes `new`, which is as long, over `old` in each record that has it."""
    assert len(old) == len(new)
    with path.open("r+b") as file:
        start = 0
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            record = file.read(length)
            if old in record and len(record) == length:
                record = record.replace(old, new)
                file.seek(start + 12)
                file.write(record + checksum(record))
            start = file.seek(start + 12 + length + 4)


def checksum(data: bytes) -> bytes:
    """A masked CRC-32C. Importing a module that computes it costs 100 ms or more."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _seconds(path: Path) -> int:
    digits = path.name.split(".")[3]
    return int(digits) if digits.isdecimal() else 0


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_table_entry(byte) for byte in range(256)]
