"""A value on its way to other processes of this machine, through a file that is in memory.

Its tensors and arrays are written there as they are, and each process reads them into memory of its
own: a process never has more than one copy of them.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from tempfile import NamedTemporaryFile
from typing import Any

import numpy
import torch
from torch import Tensor

from dpframe.launch import interpreter

SIZE = 8  # bytes of a number


@contextmanager
def in_memory() -> Iterator[str]:
    """The path of an empty file, for this process and those that it starts within."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("dpframe")
        try:
            yield f"/proc/{os.getpid()}/fd/{number}"
        finally:
            os.close(number)
    else:  # on the disk
        with NamedTemporaryFile(prefix="dpframe") as file:
            yield file.name


@dataclass
class Parcel:
    """Where the value is."""

    path: str | None = None
    blocks_at: int = 0  # in the file: the bytes of tensors and arrays, each after its size
    content: bytes = b""  # in place of a file

    def unpack(self, *, owns_main: bool = False) -> Any:
        if self.path is None:
            return interpreter.unpack(self.content, owns_main=owns_main)
        with open(self.path, "rb") as file, open(self.path, "rb") as blocks:
            blocks.seek(self.blocks_at)
            return interpreter.load(file, buffers=_read(blocks), owns_main=owns_main)

    def drop(self) -> None:
        """Frees the file's memory, once no process is going to unpack it."""
        if self.path is not None:
            os.truncate(self.path, 0)


def pack(value: Any, path: str | None) -> Parcel:
    """`path`: of a file that is `in_memory`; None for processes of other machines, too."""
    if path is None:
        return Parcel(content=interpreter.pack(value))
    buffers: list[pickle.PickleBuffer] = []
    with open(path, "wb") as file:
        interpreter.dump(value, file, reducers=REDUCERS, buffer_callback=buffers.append)
        blocks_at = file.tell()
        for buffer in buffers:
            block = buffer.raw()
            file.write(block.nbytes.to_bytes(SIZE))
            file.write(block)
    return Parcel(path, blocks_at)


def is_packable(value: Any) -> bool:
    """Nothing is written or copied to find out."""
    with open(os.devnull, "wb") as nowhere:
        try:
            interpreter.dump(value, nowhere, reducers=REDUCERS, buffer_callback=lambda buffer: None)
        except Exception:  # what another library's objects raise here is theirs
            return False
    return True


def unpackable(value: Any, name: str) -> str:
    """What in it can't be packed, by its name within `name`, and of which class it is."""
    seen = {id(value)}
    while True:
        for key, part in _parts(value).items():
            if id(part) not in seen and not is_packable(part):
                seen.add(id(part))
                name, value = f"{name}.{key}", part
                break
        else:
            return f"{name}, a {type(value).__name__},"


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, torch.jit.ScriptModule):
        return {}
    if isinstance(value, torch.nn.Module):
        return {**dict(value.named_children()), **vars(value)}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else getattr(value, "__dict__", {})


def _read(file: BufferedReader) -> Iterator[numpy.ndarray]:
    while size := file.read(SIZE):
        # Torch's memory, which is aligned as that of all its tensors.
        block = torch.empty(int.from_bytes(size), dtype=torch.uint8, device="cpu")
        array: Any = block.numpy()
        file.readinto(array)
        yield array


# ---- tensors: torch alone would copy them into the pickle, through two buffers


def _reduce(tensor: Tensor) -> Any:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_plain &= not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    if not is_plain:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    view = tensor.storage_offset(), tensor.size(), tensor.stride()
    return _tensor, (tensor.untyped_storage(), tensor.dtype, *view, tensor.requires_grad)


def _tensor(storage: torch.UntypedStorage, dtype: torch.dtype, *view: Any) -> Tensor:
    *place, requires_grad = view
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)
    return tensor.requires_grad_(requires_grad)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """A pickle has an object once: tensors that share a storage go on to share it."""
    if storage.device.type != "cpu":
        return storage.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not storage.nbytes():
        return torch.UntypedStorage, (0,)
    array: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return _storage, (pickle.PickleBuffer(array),)


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


REDUCERS: dict[Any, Any] = {Tensor: _reduce, torch.UntypedStorage: _reduce_storage}
