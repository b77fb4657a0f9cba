"""Sharded checkpoints: each process writes its shards into a folder beside the checkpoint's file.

The file has all the rest, and in the place of each sharded tensor one of the same size and type
without numbers, on torch's meta device. `torch.distributed.checkpoint` (DCP) writes and reads the
folder: a file a process, and `.metadata`, an index for DCP's own tools. That is a pickle, which may
run code, and which other versions of Python write otherwise: dpframe reads its own `parts.json`,
with the place of each tensor and the hashes of these files. The seal of the checkpoint's file has
the hash of `parts.json`.
"""

import json
import os
import secrets
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dpframe.checkpoint import seal
from dpframe.checkpoint.plain import NotANumber, Stored, map_tensors
from dpframe.errors import UserError, first_line
from dpframe.util import files

WEIGHTS = ("task.", "averaged.")  # how their names begin
AS_THEY_ARE = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Shard(NamedTuple):
    """A copy, in the host's memory, of this process's rows of a tensor."""

    rows: Tensor
    of: DTensor


Shards = dict[str, Shard]


# ---- writing


@torch.no_grad()  # a copy needs no history
def split(
    state: dict[str, Any], copy: Callable[[Tensor], Tensor], *, copies_rest: bool
) -> tuple[dict[str, Any], Shards]:
    """The state without the numbers of its sharded tensors, and copies of this process's shards of
    these by name."""
    shards: Shards = {}

    def copied(tensor: Tensor, name: str) -> Tensor:
        if not isinstance(tensor, DTensor):
            return copy(tensor) if copies_rest else tensor
        shards[_free_name(name, shards)] = Shard(copy(tensor.to_local()), tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return map_tensors(state, copied), shards


def save(shards: Shards, folder: Path, step: int, collectives: Any) -> seal.Parts | None:
    """As `ShardWriter.save`; every process of the collectives' group calls it."""
    nan = next((name for name, shard in shards.items() if _has_nan(name, shard.rows)), "")
    all_nans = collectives.gather(nan)
    if not collectives.is_main:
        if name := collectives.broadcast(""):
            with suppress(dcp.CheckpointException):  # the main one raises it
                _write(shards, folder / name, collectives)
        return None
    path = folder / f"step{step}-{secrets.token_hex(4)}.parts"
    with files.atomic_write(path) as part:
        try:
            if name := next(filter(None, all_nans), ""):
                raise NotANumber(name.removeprefix("task."))
            part.mkdir(parents=True)
        except Exception:
            collectives.broadcast("")
            raise
        collectives.broadcast(part.name)
        try:
            hashes, index = _write(shards, part, collectives)
        except dcp.CheckpointException as error:
            raise _cause(error) from None
        manifest = json.dumps({"files": hashes, "tensors": places_of(index)}).encode()
        (part / seal.MANIFEST).write_bytes(manifest)
        files.sync(part / seal.MANIFEST)
        files.sync(part)
    files.sync(folder)
    return seal.Parts(path.name, seal.digest(manifest))


def _write(shards: Shards, folder: Path, collectives: Any) -> tuple[dict[str, str], Metadata]:
    """The hashes of all files, in the main process, and DCP's index."""
    index = dcp.save(
        {name: _as_dtensor(shard) for name, shard in shards.items()},
        # What it copies ahead it waits for, a tensor at a time, behind what training has to do.
        storage_writer=dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0),
        planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True, **AS_THEY_ARE),
        process_group=collectives.group,
    )
    hashes: dict[str, str] = {}
    for each in collectives.gather(_hash_files(folder, collectives.rank)):
        if isinstance(each, OSError):
            raise each
        hashes |= each
    return hashes, index


def places_of(index: Any) -> dict[str, Any]:
    """By name, a tensor's size and type, and of each chunk of it the place in it and in a file."""
    tensors: dict[str, Any] = {}
    for name, tensor in index.state_dict_metadata.items():
        chunks = []
        for chunk in tensor.chunks:
            at = index.storage_data[MetadataIndex(name, chunk.offsets)]
            file = at.relative_path, at.offset, at.length
            chunks.append({"offsets": chunk.offsets, "sizes": chunk.sizes, "file": file})
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"size": tensor.size, "dtype": dtype, "chunks": chunks}
    return tensors


def _hash_files(folder: Path, rank: int) -> dict[str, str] | OSError:
    """Of the files of one process, which are then on disk."""
    own = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    try:
        for path in own:
            files.sync(path)
        return {path.name: seal.digest_of(path) for path in own}
    except OSError as error:
        return error


def _as_dtensor(shard: Shard) -> DTensor:
    mesh = shard.of.device_mesh
    if mesh.device_type != "cpu":  # one of the same ranks, by which nothing is sent
        groups, names = mesh.get_all_groups(), mesh.mesh_dim_names
        mesh = DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=names)
    return DTensor.from_local(
        shard.rows,
        mesh,
        shard.of.placements,
        run_check=False,
        shape=shard.of.shape,
        stride=shard.of.stride(),
    )


def _cause(error: dcp.CheckpointException) -> BaseException:
    rank, (cause, trace) = min(error.failures.items())
    if isinstance(cause, OSError | UserError):
        return cause
    return RuntimeError(f"rank {rank}: {cause}\n{''.join(trace.format())}")


def _has_nan(name: str, rows: Tensor) -> bool:
    return name.startswith("task.") and rows.is_floating_point() and bool(rows.isnan().any())


def _free_name(name: str, names: Any) -> str:
    """Of two tensors of one name, `a.b` in `c` and `a` in `b.c`, the second one gets another."""
    while name in names:
        name += "+"
    return name


# ---- reading


def fill(state: dict[str, Any], path: Path, where: str) -> dict[str, Any]:
    """The state with a Stored in the place of each tensor without numbers. `where` is the key and
    the file, for errors."""
    folder = Folder(path, where)
    names: set[str] = set()

    def stored(tensor: Tensor, name: str) -> Tensor:
        if not tensor.is_meta:
            return tensor
        names.add(name := _free_name(name, names))
        return folder.find(name, tensor)

    return map_tensors(state, stored)


def read_all(value: Any, read: Callable[[Stored], Tensor] = Stored.read) -> Any:
    """A state with the values of its Stored tensors."""
    return map_tensors(value, lambda each, _: read(each) if isinstance(each, Stored) else each)


def read_into_file(stored: Stored, folder: str) -> Tensor:
    """Its numbers in a new file, which the system reads into memory where they are used."""
    number, name = mkstemp(dir=folder)
    os.close(number)
    mapped = torch.from_file(name, shared=True, size=stored.numel(), dtype=stored.dtype)
    return stored.read(mapped.view(stored.shape))


class Folder(dcp.FileSystemReader):
    """What processes have written for one checkpoint, or a stranger has made: no code of it runs,
    no other file is read, and nothing in it is larger than its files."""

    def __init__(self, path: Path, where: str) -> None:
        super().__init__(path)
        self.where = where
        self._folder = path
        self._checked: set[str] = set()
        try:
            self._hashes = seal.hashes_of(path)
            self._check(".metadata")
            self._room = sum((path / name).stat().st_size for name in self._hashes)
            listed = json.loads((path / seal.MANIFEST).read_bytes())
            self._index = index_of(listed["tensors"])
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            self._refuse(f"{path.name}/{seal.MANIFEST} can't be read: {first_line(error)[:160]}")

    def find(self, name: str, tensor: Tensor) -> Stored:
        known: Any = self._index.state_dict_metadata.get(name)
        self._room -= tensor.numel() * tensor.itemsize
        if not (
            known is not None
            and tuple(known.size) == tuple(tensor.shape)
            and known.properties.dtype == tensor.dtype
            and self._room >= 0
        ):
            self._refuse(f"{self._folder.name} has no such {name} as the checkpoint says")
        stored = tensor.as_subclass(Stored)
        stored.load_into = partial(self.load, name)
        return stored

    def load(self, name: str, target: Tensor) -> None:
        """Into a tensor of which this process has some rows, or all."""
        try:
            with warnings.catch_warnings(action="ignore"):  # that no other process takes part
                planner = dcp.DefaultLoadPlanner(**AS_THEY_ARE)
                dcp.load({name: target}, storage_reader=self, planner=planner, no_dist=True)
        except dcp.CheckpointException as error:
            cause = error.failures[0][0]
            if isinstance(cause, UserError):
                raise cause from None
            self._refuse(f"{self._folder.name}: {name} can't be read: {first_line(cause)[:160]}")
        rows = target.to_local() if isinstance(target, DTensor) else target
        if name.startswith(WEIGHTS) and rows.is_floating_point() and bool(rows.isnan().any()):
            raise UserError(f"{self.where} has weights that are not numbers; use an earlier one")

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return self._index

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        for item in plan.items:
            self._check(self.storage_data[item.storage_index].relative_path)
        return super().read_data(plan, planner)

    def _check(self, name: str) -> None:
        """Once, before it is read."""
        if name not in self._hashes:
            self._refuse(
                f"{self._folder.name} names {str(name)[:160]}, which is no file of its list"
            )
        if name not in self._checked:
            if damage := seal.damage_of_part(self._folder / name, self._hashes[name]):
                self._refuse(damage)
            self._checked.add(name)

    def _refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.where} can't be used: {why}") from None


def index_of(tensors: dict[str, Any]) -> Metadata:
    """DCP's index, of what `places_of` has made. Whatever else a stranger's list has raises."""
    index = Metadata({}, storage_data={})
    for name, tensor in tensors.items():
        dtype, chunks = getattr(torch, tensor["dtype"]), []
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} has no type")
        for chunk in tensor["chunks"]:
            offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
            path, offset, length = chunk["file"]
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            index.storage_data[MetadataIndex(name, offsets)] = SimpleNamespace(
                relative_path=path, offset=offset, length=length, transform_descriptors=None
            )
        kind = TensorProperties(dtype=dtype)
        index.state_dict_metadata[name] = TensorStorageMetadata(
            kind, torch.Size(tensor["size"]), chunks
        )
    return index
