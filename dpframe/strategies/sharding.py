"""The weights of a task in shards, one in each process: cutting, gathering and saving them."""

import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from dpframe import seeding
from dpframe.checkpoint import seal, sharded
from dpframe.checkpoint.plain import Stored
from dpframe.checkpoint.snapshot import Snapshot
from dpframe.data.module import mapped
from dpframe.errors import UserError, first_line
from dpframe.parameters import first_hooked, has_sparse
from dpframe.strategies import outline
from dpframe.strategies.collectives import Collectives
from dpframe.strategies.group import GroupCollectives
from dpframe.strategies.weights import Weights
from dpframe.util.patterns import blocks, match_modules

KEY = "strategy.shard"


@dataclass(eq=False, kw_only=True)
class Sharding(Weights):
    """`patterns` name the blocks whose weights are gathered together, as `strategy.shard` does.
    `open` comes first: the processes are known once the strategy is set up."""

    patterns: Sequence[str] | None
    reshard_after_forward: bool | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    cpu_offload: bool
    meta_init: bool
    whole_in_hooks: bool  # those that may run the task get whole weights
    saves_shards: bool  # each process writes its own to a checkpoint
    timeout_seconds: float
    cuts = True
    fused_optimizers = ("Adam", "AdamW")  # those whose fused kernels take shards
    _saving: GroupCollectives | None = field(default=None, init=False)  # of the threads that save
    _mesh: Any = field(default=None, init=False)
    _gathered: Sequence[Any] = field(default=(), init=False)  # whose weights a hook has whole
    _has_given: bool = field(default=False, init=False)  # their state to that hook

    def __post_init__(self) -> None:
        self.scalars: dict[Any, list[Tensor]] = {}  # which are not cut, by their task
        self.rounds = self.param_dtype not in (None, torch.float32)

    def open(
        self, mesh: DeviceMesh, device: torch.device, collectives: Collectives, *, nodes: int
    ) -> None:
        self._mesh, self._device = mesh, device
        self._collectives, self._nodes = collectives, nodes

    def close(self) -> None:
        self.scalars.clear()
        if self._saving is not None and dist.is_initialized():
            dist.destroy_process_group(self._saving.group)
        self._saving = None
        self._mesh = None

    @property
    def is_main(self) -> bool:
        return self._collectives.is_main

    # ---- a task

    @contextmanager
    def building(self) -> Iterator[None]:
        """Within, each process builds the same task; with `meta_init` all but the main one build
        an outline, which `cut` fills. The main one's may be one, too, of what is read then."""
        if not self.meta_init:
            yield
        elif self._collectives.is_main:
            with outline.asked():
                yield
            self._collectives.broadcast(seeding.random_state())
        else:
            try:
                with outline.asked(), torch.device("meta"):
                    yield
            except (NotImplementedError, RuntimeError) as error:  # of torch, for lack of numbers
                raise UserError(
                    f"strategy.meta_init=true: the task can't be built on the meta device: "
                    f"{first_line(error)[:200]}; use strategy.meta_init=false"
                ) from error
            seeding.restore_random_state(self._collectives.broadcast(None))

    def cut(self, task: Any, *, has_autocast: bool) -> None:
        """Leaves each process a shard of every weight of a task, before its optimizers are made,
        and moves it to the device."""
        self.keeps_casts = has_autocast and self.param_dtype in (None, torch.float32)
        self.scalars[task] = scalars = [weight for weight in task.parameters() if not weight.ndim]
        if isinstance(task, FSDPModule):
            return
        self._refuse_unshardable(task, has_autocast)
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "ignored_params": set(scalars),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.param_dtype,
                reduce_dtype=self.reduce_dtype,
                cast_forward_inputs=False,  # autocast does that
            ),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }
        done: set[int] = set()
        reads = outline.reads_of(task) if self.is_main else {}
        self._refuse_unfilled(task, reads)
        for block in self.choose_blocks(task):
            self._fill_in(block, done, reads)
            _shard_module(block, reshard_after_forward=self.reshard_after_forward, **options)
        self._fill_in(task, done, reads)
        _shard_module(task, reshard_after_forward=self.reshard_after_forward, **options)
        for scalar in scalars:
            scalar.data = scalar.data.to(self._device)

    def choose_blocks(self, task: nn.Module) -> list[nn.Module]:
        """The blocks, inner ones first. One that shares a weight with the rest is left to the
        root."""
        if self.patterns is None:
            named = list(blocks(task))
        else:
            named = [pair for each in self.patterns for pair in match_modules(task, each, key=KEY)]
        chosen = {id(block) for _, block in named if next(block.parameters(), None) is not None}
        found = [module for module in task.modules() if id(module) in chosen]
        holders: dict[int, int] = {}
        for module in task.modules():
            for weight in module.parameters(recurse=False):
                holders[id(weight)] = holders.get(id(weight), 0) + 1
        return [block for block in reversed(found) if not _shares_weight(block, holders)]

    # ---- its tensors

    def local(self, tensor: Any) -> Any:
        """This process's part of a weight, a gradient or an optimizer's state."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def shard_like(self, whole: Tensor, like: Any) -> Tensor:
        """A tensor, which may be Stored, cut as the weight `like` is if it has its size."""
        is_cut = isinstance(like, DTensor) and whole.shape == like.shape
        if isinstance(whole, Stored):
            return whole.read(torch.zeros_like(like, dtype=whole.dtype) if is_cut else None)
        if not is_cut or isinstance(whole, DTensor):
            return whole
        whole = whole.detach().to(like.device)
        # All ranks have read the same file: none of them has to send it.
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    def whole(self, value: Any, *, for_all: bool = False) -> Any:
        """A state with whole tensors in it, on the main process; elsewhere only if it is `for_all`.
        Every process has to call it."""

        copies = Snapshot()

        def collect(tensor: Any) -> Any:
            if not isinstance(tensor, DTensor):
                return tensor
            full = tensor.full_tensor().detach()
            return copies.copy_in_turn(full) if for_all or self._collectives.is_main else None

        collected = mapped(collect, value)
        copies.wait()
        return collected

    def total_norm(self, gradients: list[Any]) -> Tensor:
        """The norm of all gradients together, those of all processes."""
        parts = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        others = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norms = [get_total_norm(others)] if others or not parts else []
        if parts:
            norm: Any = get_total_norm(parts)
            norms.append(norm.full_tensor())
        return norms[0] if len(norms) == 1 else get_total_norm(norms)

    @contextmanager
    def whole_weights(self, task: Any) -> Iterator[None]:
        """Within, each process has the whole weights and may call the task by itself."""
        self.run_alone(task, lambda: None)  # torch knows the root by its first forward
        before, modules = self._gathered, sharded_in(task)
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        self._gathered = modules
        holders = [
            module for module in task.modules() if next(module.parameters(), None) is not None
        ]
        refusals = [each.register_state_dict_pre_hook(self._refuse_shards) for each in holders]
        try:
            yield
        finally:
            self._gathered = before
            for refusal in refusals:
                refusal.remove()
            for module in modules:
                is_root, choice = module is task, self.reshard_after_forward
                reshards = not is_root if choice is None else choice
                module.set_reshard_after_forward(reshards, recurse=False)
            task.reset_iter_state()  # lets go of the weights, and forgets what a rank alone called

    def _refuse_shards(self, *_: Any) -> None:
        """Not once a hook has the whole state: to save it, peft reads the names of another one."""
        if self._gathered and not self._has_given:
            raise UserError(
                "state_dict() has this rank's part of each weight, even in a hook that sees "
                "whole ones; call trainer.whole_state_dict(MODULE) on every rank, and save what "
                "the main one gets"
            )

    @contextmanager
    def taking_shards(self) -> Iterator[None]:
        """Within, a `state_dict()` may have them, in a hook that sees whole weights, too. Every
        process does it."""
        modules, self._gathered = self._gathered, ()
        try:
            yield
        finally:
            self._gathered = modules
            for module in modules:  # the main process alone may have cut some
                module.reshard()
                module.unshard()

    def whole_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's state with whole tensors on the main process, nothing elsewhere. Every
        process has to call it."""
        with self.taking_shards():
            state = self.whole(module.state_dict())
        self._has_given = True
        return state if self.is_main else {}

    def run_alone(self, task: Any, call: Callable[..., Any], *args: Any) -> Any:
        """Within the task's gathering of its weights; every process does it, without a backward."""
        try:
            return task.gathered(call, *args)
        finally:
            task.reset_iter_state()

    # ---- checkpoints in shards

    def split(
        self, state: dict[str, Any], copy: Callable[[Tensor], Tensor]
    ) -> tuple[dict[str, Any], sharded.Shards]:
        """The state without its sharded tensors, and copies of this process's shards of them. Every
        process calls it."""
        if self._saving is None:
            timeout = timedelta(seconds=self.timeout_seconds)
            group = dist.new_group(backend="gloo", timeout=timeout)
            rank, count = self._collectives.rank, self._collectives.world_size
            self._saving = GroupCollectives(rank, count, torch.device("cpu"), group)
        return sharded.split(state, copy, copies_rest=self.is_main)

    def save(self, shards: sharded.Shards, folder: Path, step: int) -> seal.Parts | None:
        """As `ShardWriter.save`; every process calls it."""
        return sharded.save(shards, folder, step, self._saving)

    def check_folder(self, folder: Path) -> None:
        """Before training whose checkpoints go there; the main process has made it."""
        if self._nodes == 1:
            return
        name = self._collectives.broadcast(secrets.token_hex(8))
        here = folder / f".{name}.{os.getpid()}.part"
        if self._collectives.is_main:
            here.touch()
        self._collectives.sum_numbers([0.0])  # it is there
        seen = self._collectives.sum_numbers([float(bool(list(folder.glob(f".{name}.*"))))])[0]
        if self._collectives.is_main:
            here.unlink()
        if seen < self._collectives.world_size:
            raise UserError(
                f"strategy.checkpoints=sharded but not all machines see {folder} of the main one; "
                "name a run directory on a file system that they share by hydra.run.dir=DIR, or "
                "use strategy.checkpoints=whole"
            )

    # ---- within a task

    def _fill_in(self, module: nn.Module, done: set[int], reads: dict[int, outline.Reads]) -> None:
        """Gives what is not cut yet the main rank's values, as under ddp; block by block, so that
        a rank with an outline of the task has the numbers of one block at a time."""
        own = []
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) in done or isinstance(tensor, DTensor):
                continue
            read = reads.get(id(tensor))
            own.append(_give_room(tensor, module) if tensor.is_meta else tensor)
            if read is not None:
                own[-1].detach().copy_(read())
        self._collectives.broadcast_tensors(own)
        done |= {id(tensor) for tensor in own}

    def _refuse_unfilled(self, task: nn.Module, reads: dict[int, outline.Reads]) -> None:
        for name, tensor in (*task.named_parameters(), *task.named_buffers()):
            if self.is_main and tensor.is_meta and id(tensor) not in reads:
                raise UserError(
                    f"{type(task).__name__}.{name} is on the meta device, and nothing fills it; "
                    "build it with numbers, and set strategy.meta_init=true to build it once"
                )

    def _refuse_unshardable(self, task: nn.Module, has_autocast: bool) -> None:
        name = type(task).__name__
        for where, module in task.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    raise UserError(
                        f"strategy.meta_init=true: {f'{where}.{attribute}'.lstrip('.')} is neither "
                        "a parameter nor a buffer, so nothing fills it; use register_buffer, or "
                        "strategy.meta_init=false"
                    )
        if has_sparse(task):
            raise UserError(
                f"{name} has an embedding with sparse=True, whose gradients strategy=fsdp can't "
                "share; set sparse=False, or use strategy=ddp"
            )
        if hooked := first_hooked(task):
            raise UserError(
                f"{hooked} has a hook, which the parts that strategy=fsdp makes of it would not "
                "have; change gradients in on_before_step, or use strategy=ddp"
            )
        if self.rounds and not has_autocast:
            raise UserError(
                "strategy.param_dtype rounds what is gathered, and trainer.precision has no "
                "autocast to compute in it; set trainer.precision=bf16, or strategy.param_dtype="
                "null"
            )


def _shard_module(module: Any, **options: Any) -> None:
    """Keeps the names of the class, which errors and checkpoints show."""
    kind = type(module)
    fully_shard(module, **options)
    type(module).__name__, type(module).__qualname__ = kind.__name__, kind.__qualname__
    module.gathered = _call
    register_fsdp_forward_method(module, "gathered")


def _give_room(tensor: Tensor, module: nn.Module) -> Tensor:
    """On the CPU instead of the meta device; what is tied stays tied."""
    empty = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    if not weakref.getweakrefcount(tensor):
        torch.utils.swap_tensors(tensor, empty)
        return tensor
    for holder in module.modules():  # RNNs keep weak references, which can't be swapped
        for name, weight in holder.named_parameters(recurse=False, remove_duplicate=False):
            if weight is tensor:
                setattr(holder, name, empty)
    return empty


def _call(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def sharded_in(task: nn.Module) -> list[Any]:
    """The task, then its blocks."""
    return [module for module in task.modules() if isinstance(module, FSDPModule)]


def _shares_weight(block: nn.Module, holders: dict[int, int]) -> bool:
    within: dict[int, int] = {}
    for module in block.modules():
        for weight in module.parameters(recurse=False):
            within[id(weight)] = within.get(id(weight), 0) + 1
    return any(count != holders[key] for key, count in within.items())
