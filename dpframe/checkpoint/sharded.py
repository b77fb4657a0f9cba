"""Parts of tensors are written by torch.distributed.checkpoint: each rank writes its own."""

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint import save as save_together
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dpframe import files
from dpframe.checkpoint import seal
from dpframe.checkpoint.parts import NotANumber, Own, Part, Parts


def save(parts: Parts, folder: Path, step: int, group: Any) -> seal.Parts | None:
    """Into a new folder in this one. The first rank raises what went wrong in any of them."""
    tensors = {name: part for name, part in parts.items() if isinstance(part, Part)}
    _gather({name: own for name, own in parts.items() if isinstance(own, Own)}, group)
    if dist.get_rank(group) > 0:
        [name] = shared = [""]
        dist.broadcast_object_list(shared, group=group)
        if name := shared[0]:
            with suppress(CheckpointException):
                _written(tensors, folder / name, group)
        return None
    path = folder / f"step{step}-{secrets.token_hex(4)}.parts"
    with files.atomic_write(path) as part:
        try:
            part.mkdir(parents=True)
        except OSError:
            dist.broadcast_object_list([""], group=group)
            raise
        dist.broadcast_object_list([part.name], group=group)
        try:
            digest = _written(tensors, part, group)
        except CheckpointException as error:
            raise _cause(error) from None
        files.sync(part)
    files.sync(folder)
    return seal.Parts(path.name, digest)


def _gather(owns: dict[str, Own], group: Any) -> None:
    """Not every process has a value of each."""
    values = {name: own.value for name, own in owns.items()}
    of_ranks: list[Any] | None = None
    if dist.get_rank(group) == 0:
        of_ranks = [None] * dist.get_world_size(group)
    dist.gather_object(values, of_ranks, group=group)
    for name, own in owns.items():
        own.of_all = [each[name] for each in of_ranks or [] if name in each]


def _written(parts: dict[str, Part], folder: Path, group: Any) -> str:
    """The hash of the list of them, in the first rank."""
    # What it copies ahead it waits for, a tensor at a time, behind what training has to do there.
    writer = Writer(folder, sync_files=False, per_thread_copy_ahead=0)
    save_together(parts, storage_writer=writer, planner=Planner(), process_group=group)
    return writer.hash


def _cause(error: CheckpointException) -> BaseException:
    rank, (cause, trace) = min(error.failures.items())
    if isinstance(cause, OSError | NotANumber):
        return cause
    return RuntimeError(f"rank {rank}: {cause}\n{''.join(trace.format())}")


class Planner(DefaultSavePlanner):
    """What this rank writes is known: its parts."""

    def create_local_plan(self) -> SavePlan:
        for name, part in self.state_dict.items():
            is_weight = name.startswith("task.") and part.rows.is_floating_point()
            if is_weight and bool(part.rows.isnan().any()):
                raise NotANumber(name.removeprefix("task."))
        own = {n: p for n, p in self.state_dict.items() if len(p.rows) and not p.is_copy}
        items = [_item(name, part) for name, part in own.items()]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].rows


def _item(name: str, part: Part) -> WriteItem:
    offsets = torch.Size([part.first, *[0] * (len(part.size) - 1)])
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, part.rows.size()),
            TensorProperties.create_from_tensor(part.rows),
            torch.Size(part.size),
        ),
    )


@dataclass(frozen=True)
class Written(WriteResult):
    rows: int = 0
    digest: str = ""


class Writer(FileSystemWriter):
    """Adds a list of the parts, with their hashes, to DCP's files."""

    hash = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rows = {i.index: i.tensor_data.chunk.sizes[0] for i in plan.items if i.tensor_data}
        written: list[WriteResult] = []
        for result in super().write_data(plan, planner).wait():
            at = result.storage_data
            block = seal.read_block(Path(self.path, at.relative_path), at.offset, at.length)
            size, count = result.size_in_bytes, rows[result.index]
            written.append(Written(result.index, size, at, count, seal.digest(block)))
        for name in {result.storage_data.relative_path for result in written}:
            files.sync(Path(self.path, name))
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        tensors: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(tensor.size), "parts": []}
        for part in sorted(chain(*results), key=lambda part: part.index.offset):
            at = part.storage_data
            place = [part.rows, at.relative_path, at.offset, at.length, part.digest]
            tensors[part.index.fqn]["parts"].append(place)
        text = json.dumps({"tensors": tensors}).encode()
        path = Path(self.path, seal.MANIFEST)
        path.write_bytes(text)
        files.sync(path)
        self.hash = seal.digest(text)
