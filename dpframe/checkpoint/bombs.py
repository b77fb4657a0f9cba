"""Bombs: small checkpoints that would fill the memory or take forever, found before they are used.

`torch.load(weights_only=True)` runs no code of a stranger's, but it unpacks what it is told to.
"""

import math
import os
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

CPU = torch.device("cpu")
PLAIN = {int, float, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device}
END = struct.Struct("<4sQ2H2L4Q 4sLQL 4s4H2LH")  # the three records that torch ends a zip file with
LIMIT = 4  # parts for each byte of the file
AS_LATIN = "a text, and latin1"  # what torch writes bytes as
NUMBERS = "a tensor or its storage, or a tuple with one"


def in_file(path: Path) -> str:
    """Why torch may not unpack this file, or ''."""
    with path.open("rb") as file:
        return in_stream(file)


def in_stream(file: BinaryIO) -> str:
    """The same of an open one."""
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            if not _ends_as_torchs(file, size, len(archive.comment)):
                return "it is no zip file as torch writes them"
            entries = archive.infolist()
            if any(e.compress_type or e.file_size != e.compress_size for e in entries):
                return "it has compressed entries, which torch never writes"
            pickles = [e for e in entries if e.filename.lower().endswith("data.pkl")]
            if len(pickles) != 1 or sum(e.file_size for e in entries) > size:
                return "its entries are not those that torch writes"
            return _in_pickle(archive.read(pickles[0]), size)
    except (zipfile.BadZipFile, NotImplementedError, LookupError, ValueError, EOFError):
        return "it is no zip file as torch writes them"


def in_state(state: dict[str, Any], size: int) -> str:
    """What a file of `size` bytes has that no save writes, and that could fill the memory later."""
    storages: dict[int, int] = {}
    try:
        count = _parts(state, {}, storages)
    except RecursionError:
        count = math.inf
    except TypeError as error:
        return f"holds {error}, which no checkpoint of dpframe's does"
    if sum(storages.values()) > size:  # e.g. made by `torch.Tensor(10**9)`
        return f"has more numbers than its {size} bytes can hold"
    return "" if count <= LIMIT * size else f"has more parts than its {size} bytes can hold"


def _ends_as_torchs(file: BinaryIO, size: int, comment: int) -> bool:
    """Otherwise torch might see other entries than those that are checked here."""
    file.seek(0)
    if file.read(4) != b"PK\3\4":  # torch would read it in its older format
        return False
    at = size - comment - END.size
    file.seek(max(0, at))
    end = END.unpack(file.read(END.size))
    (length, start), locator = end[8:10], end[10:14]
    return (
        (end[0], end[14], end[-1]) == (b"PK\6\6", b"PK\5\6", comment)
        and locator == (b"PK\6\7", 0, at, 1)
        and length + start == at
    )


@dataclass
class _Part:
    """A value that unpickling makes: how many parts it has, and its text or its global's name."""

    parts: int
    text: str | None = None


def _in_pickle(pickle: bytes, size: int) -> str:
    """Follows a pickle without making anything. A part that stands in many places may be hashed or
    copied in each, so what is repeated, or passed to a call, must not outgrow the file."""
    too_much = f"it has more parts than its {size} bytes can hold"
    stack: list[_Part] = []
    marks: list[int] = []  # how high the stack was
    memo: dict[Any, _Part] = {}
    repeated = 0
    for code, value, _ in pickletools.genops(pickle):
        if code.name == "MARK":
            marks.append(len(stack))
        elif "PUT" in code.name:
            memo[value] = stack[-1]
        elif "GET" in code.name:
            stack.append(memo[value])
            repeated += memo[value].parts
        else:
            taken = _taken(stack, marks, code)
            parts = sum(part.parts for part in taken)
            made = _Part(parts + 1, value if isinstance(value, str) else None)
            if code.name == "GLOBAL" and str(value).endswith(" bytearray"):
                return "it holds a bytearray, which no checkpoint of dpframe's does"
            if code.name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
                made = taken[0]
                made.parts = parts
            elif code.name == "TUPLE2" and taken[1].text == "latin1" and taken[0].text is not None:
                made = _Part(len(taken[0].text) + 2, AS_LATIN)
            elif code.name in ("REDUCE", "NEWOBJ"):
                function, arguments = (part.text or "" for part in taken)
                if " _rebuild_" in function:  # the calls that torch writes for tensors
                    made.text = NUMBERS
                elif arguments == NUMBERS:  # e.g. as many tensors as there are numbers
                    return too_much
                elif function == "_codecs encode" and arguments != AS_LATIN:
                    return too_much  # any other encoding may double what it is given
                repeated += parts
            elif code.name == "BINPERSID" or any(part.text == NUMBERS for part in taken):
                made.text = NUMBERS
            stack += [made for _ in code.stack_after]
            if made.parts > LIMIT * size:
                return too_much
        if repeated > LIMIT * size:
            return too_much
    return ""


def _taken(stack: list[_Part], marks: list[int], code: pickletools.OpcodeInfo) -> list[_Part]:
    """What an operation takes from the stack."""
    begin = len(stack) - len(code.stack_before)
    if pickletools.stackslice in code.stack_before:  # down to the mark, and what is before it
        begin = marks.pop() - code.stack_before.index(pickletools.markobject)
    taken, stack[begin:] = stack[begin:], []
    return taken


def _parts(value: Any, known: dict[int, float], storages: dict[int, int]) -> float:
    """How many values there are when each is counted wherever it stands; no end in a circle.

    `storages` gets the address and the bytes of each tensor's storage.
    """
    if type(value) in PLAIN:
        return 1
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested
        storage = value.untyped_storage() if value.device == CPU and is_dense else None
        if value.device != CPU or (storage is not None and value.nbytes > storage.nbytes()):
            raise TypeError(f"a tensor of size {tuple(value.shape)} without its numbers")
        if storage is not None:
            storages[storage.data_ptr()] = storage.nbytes()
        return 1
    if not isinstance(value, dict | list | tuple | set):
        raise TypeError(f"a {type(value).__module__}.{type(value).__name__}")
    if id(value) not in known:
        known[id(value)] = math.inf
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_parts(part, known, storages) for part in inner)
    return known[id(value)]
