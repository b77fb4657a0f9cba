"""One process a replica that keeps a part of each weight: torch's fully_shard, which is FSDP2."""

import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from dpframe.blocks import blocks, matching
from dpframe.checkpoint import seal, sharded
from dpframe.checkpoint.plain import Stored
from dpframe.data import Share, split
from dpframe.errors import UserError, first_line, not_one_of, refuse_below
from dpframe.parameters import has_sparse
from dpframe.strategies import absent
from dpframe.strategies.devices import Gpus
from dpframe.strategies.processes import Processes

KEY = "strategy.shard"
OUTSIDE = (
    "strategy=fsdp has only this rank's part of a weight where its block is not called, e.g. in a "
    "sum over parameters(); use the optimizer's weight_decay for such a sum, or strategy.shard=[], "
    "which gathers all weights for the whole step"
)
CHECKPOINTS = ("sharded", "whole")
DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDP(Processes):
    """The ranks gather a block's weights when it is computed, and let go of them after it.

    `shard` names the blocks, by their names or their class: null for the modules of each ModuleList
    or Sequential that are made of others. What is in no block is gathered for the whole step.
    `replicate` groups of ranks each keep all weights: what is gathered stays within a group.
    """

    cuts_weights = True
    reads_parts = True
    fuses = ("Adam", "AdamW")

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        max_replicas_per_core: int = 8,
        *,
        shard: str | Sequence[str] | None = None,
        replicate: int = 1,
        reshard_after_forward: bool | None = None,
        param_dtype: str | int | None = None,
        reduce_dtype: str | int | None = None,
        cpu_offload: bool = False,
        broadcast_buffers: bool = True,
        whole_in_hooks: bool = True,
        checkpoints: str = "sharded",
        meta_init: bool = False,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(gpus, accelerator, max_replicas_per_core, timeout_seconds=timeout_seconds)
        refuse_below("strategy.replicate", replicate)
        self.patterns = [shard] if isinstance(shard, str) else shard
        self.replicate = replicate
        self.reshard_after_forward = reshard_after_forward
        self.param_dtype = _dtype("param_dtype", param_dtype)
        self.reduce_dtype = _dtype("reduce_dtype", reduce_dtype)
        self.cpu_offload = cpu_offload
        self.broadcast_buffers = broadcast_buffers
        self.whole_in_hooks = whole_in_hooks
        if checkpoints not in CHECKPOINTS:
            raise not_one_of("strategy.checkpoints", checkpoints, CHECKPOINTS)
        self.meta_init = meta_init
        self.mesh: Any = None  # of the ranks
        self.saves_parts = checkpoints == "sharded"
        self._saving: dist.ProcessGroup | None = None  # of the threads that save
        self.task: Any = None  # whose gradients are computed
        self._is_open = False  # a forward without its backward
        self._passes = 0  # with fewer rows than ranks
        self.is_absent = False  # without a row of the batch at hand
        self._told: list[str] = []  # keys of the store
        self.scalars: dict[Any, list[Tensor]] = {}  # by their task
        self.known: dict[Any, dict[absent.Named, Tensor]] = {}  # whole weights, by their task

    def setup(self) -> None:
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise UserError(
                f"strategy=fsdp needs FSDPModule.reset_iter_state, and torch {torch.__version__} "
                "does not have it; upgrade torch to 2.13, or use strategy=ddp"
            )
        super().setup()
        if self.world_size % self.replicate:
            raise UserError(
                f"strategy.replicate={self.replicate} does not divide the {self.world_size} ranks; "
                "set it to a divisor of them, or to 1"
            )
        if self.cpu_offload and self.device.type == "cpu":
            raise UserError(
                "strategy.cpu_offload=true needs GPUs, and the weights are on the CPU already; set "
                "it to false"
            )
        if self.replicate > 1:
            self.mesh = self._mesh_of_groups()
        else:
            sizes = (self.world_size,)
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("shard",))

    def _mesh_of_groups(self) -> DeviceMesh:
        """Torch's own groups would have its timeout, and not end with an error."""
        ranks = torch.arange(self.world_size).view(self.replicate, -1)
        row, column = divmod(self.rank, ranks.shape[1])
        members = ranks[:, column], ranks[row]
        return DeviceMesh.from_group(
            [self.group_of(each.tolist()) for each in members],
            self.device.type,
            ranks,
            mesh_dim_names=("replicate", "shard"),
        )

    # ---- the weights, and their parts

    @contextmanager
    def building(self) -> Iterator[None]:
        """With `meta_init`, only the main rank has weights until `shard`."""
        if not self.meta_init:
            yield
        elif self.is_main:
            yield
            self.collectives.broadcast(seeding.random_state())
        else:
            try:
                with torch.device("meta"):
                    yield
            except (NotImplementedError, RuntimeError) as error:  # of torch, for lack of numbers
                raise UserError(
                    f"strategy.meta_init=true: the task can't be built on the meta device: "
                    f"{first_line(error)[:200]}; use strategy.meta_init=false"
                ) from error
            seeding.restore_random_state(self.collectives.broadcast(None))

    def shard(self, task: Any, *, has_autocast: bool) -> None:
        self.keeps_casts = has_autocast and self.param_dtype in (None, torch.float32)
        self.scalars[task] = scalars = [weight for weight in task.parameters() if not weight.ndim]
        if isinstance(task, FSDPModule):
            self._refuse_others_weights(task)
            return
        self._refuse(task, has_autocast)
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "ignored_params": set(scalars),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.param_dtype,
                reduce_dtype=self.reduce_dtype,
                cast_forward_inputs=False,  # autocast does that
            ),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }
        done: set[int] = set()
        for block in self.chosen(task):
            self._fill_in(block, done)
            _sharded(block, reshard_after_forward=self.reshard_after_forward, **options)
        for number, block in enumerate(_sharded_in(task)):
            handles: list[Any] = []
            once = partial(self._watch_once, handles, number, task)
            handles.append(block.register_forward_pre_hook(once))
        self._fill_in(task, done)
        _sharded(task, reshard_after_forward=self.reshard_after_forward, **options)
        for scalar in scalars:
            scalar.data = scalar.data.to(self.device)

    def _fill_in(self, module: nn.Module, done: set[int]) -> None:
        """Gives what is not cut yet the main rank's values, as under ddp; block by block, so that
        a rank with an outline of the task has the numbers of one block at a time."""
        own = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in done]
        own = [
            _with_room(tensor, module) if tensor.is_meta else tensor
            for tensor in own
            if not isinstance(tensor, DTensor)
        ]
        self.collectives.broadcast_tensors(own)
        done |= {id(tensor) for tensor in own}

    def _refuse(self, task: nn.Module, has_autocast: bool) -> None:
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
        if self.param_dtype not in (None, torch.float32) and not has_autocast:
            raise UserError(
                "strategy.param_dtype rounds what is gathered, and trainer.precision has no "
                "autocast to compute in it; set trainer.precision=bf16, or strategy.param_dtype="
                "null"
            )

    def _refuse_others_weights(self, task: Any) -> None:
        weight = next((weight for weight in task.parameters() if isinstance(weight, DTensor)), None)
        if weight is not None and weight.device_mesh is not self.mesh:
            raise UserError(
                f"{type(task).__name__} was sharded by a strategy that is closed; make a new task "
                "and load its weights from a checkpoint"
            )

    def chosen(self, task: nn.Module) -> list[nn.Module]:
        """The blocks, inner ones first. One that shares a weight with the rest is left to the
        root."""
        if self.patterns is None:
            named = list(blocks(task))
        else:
            named = [pair for each in self.patterns for pair in matching(task, each, key=KEY)]
        chosen = {id(block) for _, block in named if next(block.parameters(), None) is not None}
        found = [module for module in task.modules() if id(module) in chosen]
        holders: dict[int, int] = {}
        for module in task.modules():
            for weight in module.parameters(recurse=False):
                holders[id(weight)] = holders.get(id(weight), 0) + 1
        return [block for block in reversed(found) if not _shares_weight(block, holders)]

    def local(self, tensor: Any) -> Any:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def part(self, whole: Tensor, like: Any) -> Tensor:
        is_cut = isinstance(like, DTensor) and whole.shape == like.shape
        if isinstance(whole, Stored):
            return whole.read(torch.zeros_like(like, dtype=whole.dtype) if is_cut else None)
        if not is_cut or isinstance(whole, DTensor):
            return whole
        whole = whole.detach().to(like.device)
        # All ranks have read the same file: none of them has to send it.
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    def whole(self, value: Any, *, for_all: bool = False) -> Any:
        def collect(tensor: Any) -> Any:
            full = tensor.full_tensor()
            return full.detach().cpu() if for_all or self.is_main else None

        return _mapped(collect, value)

    # ---- checkpoints in parts

    def parts(self, state: Any) -> Any:
        if self._saving is None:
            timeout = timedelta(seconds=self.timeout_seconds)
            self._saving = dist.new_group(backend="gloo", timeout=timeout)
        return state

    def save_parts(self, shards: sharded.Shards, folder: Path, step: int) -> seal.Parts | None:
        return sharded.save(shards, folder, step, self._saving)

    def check_folder(self, folder: Path) -> None:
        if self.nodes == 1:
            return
        name = self.collectives.broadcast(secrets.token_hex(8))
        here = folder / f".{name}.{os.getpid()}.part"
        if self.is_main:
            here.touch()
        self.collectives.sum_numbers([0.0])  # it is there
        seen = self.collectives.sum_numbers([float(bool(list(folder.glob(f".{name}.*"))))])[0]
        if self.is_main:
            here.unlink()
        if seen < self.world_size:
            raise UserError(
                f"strategy.checkpoints=sharded but not all machines see {folder} of the main one; "
                "name a run directory on a file system that they share by hydra.run.dir=DIR, or "
                "use strategy.checkpoints=whole"
            )

    def total_norm(self, gradients: list[Any]) -> Tensor:
        parts = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        others = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norms = [get_total_norm(others)] if others or not parts else []
        if parts:
            norm: Any = get_total_norm(parts)
            norms.append(norm.full_tensor())
        return norms[0] if len(norms) == 1 else get_total_norm(norms)

    @contextmanager
    def whole_weights(self, task: Any) -> Iterator[None]:
        modules = _sharded_in(task)
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                is_root, choice = module is task, self.reshard_after_forward
                reshards = not is_root if choice is None else choice
                module.set_reshard_after_forward(reshards, recurse=False)
            task.reset_iter_state()  # lets go of the weights, and forgets what a rank alone called

    # ---- the steps

    def wrap(self, module: Any, *, training: bool) -> nn.Module:
        return Gathering(module, self, training=training)

    def begin_step(self, module: Any) -> nn.Module:
        if self._is_open:  # its loss was not finite, and the step was left out
            self.task.reset_iter_state()
        self.task, self._is_open = module.step.task, True
        return module

    def grad_sync(self, is_last: bool) -> None:
        self.task.set_requires_gradient_sync(is_last)

    def check_skips(self, accumulate: int) -> None:
        if accumulate > 1:
            raise UserError(
                f"trainer.on_nonfinite=skip with trainer.accumulate={accumulate}: strategy=fsdp "
                "has the gradients of the first batches where nothing can leave them out; use "
                "trainer.accumulate=1 or strategy=ddp"
            )

    def check_gradients(self) -> None:
        """And averages those of scalars, which have no parts."""
        self._is_open = False
        for weight in self.scalars[self.task]:
            if weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= self.world_size

    def sync_weights(self, for_reading: bool) -> None:
        if for_reading:
            if self.task is not None:
                self.sync_buffers()
            return
        if self._is_open:
            self.task.reset_iter_state()
            self._is_open = False
        for key in self._told:  # all ranks have made the step, and read them
            self._shared_store().delete_key(key)
        self._told.clear()

    def sync_buffers(self) -> None:
        """The main rank's count, as under ddp."""
        self.collectives.broadcast_tensors(self.task.buffers())

    def close(self) -> None:
        self.task, self._is_open = None, False
        self._told.clear()
        self.scalars.clear()
        self.known.clear()
        if self._saving is not None and dist.is_initialized():
            dist.destroy_process_group(self._saving)
        self._saving = None
        # torch keeps the mesh in caches, and with it the group, whose threads would outlive Python.
        getattr(self.mesh, "_pg_registry", {}).clear()
        self.mesh = None
        super().close()

    # ---- batches with fewer rows than ranks

    def have_all_rows(self, total: int) -> bool:
        if not total:
            raise UserError(
                "strategy=fsdp can't train on a stream that ranks divide: at its end some have no "
                "rows, and can't tell what the others gather; use data.divide_streams=false"
            )
        return len(split(range(total), self.world_size)[-1]) > 0

    def told(self, step: Callable[..., Any], task: Any, *args: Any) -> Any:
        """The main rank tells those without a row which blocks it calls in this pass."""
        self._passes += 1
        if not self.is_main:
            return task.gathered(step, *args)
        telling = absent.Telling(self._shared_store(), f"calls/{self._passes}", self._told)
        handles = []
        for number, block in enumerate(_sharded_in(task)[1:]):
            tell = telling.of(number)
            if task.run_context.is_compiled:  # else each block's hook is compiled, for its number
                tell = torch.compiler.disable(tell)
            # In front of torch's own, which gathers the weights together with the others.
            handle = block.register_forward_pre_hook(tell, prepend=True, with_kwargs=True)
            handles.append(handle)
        try:
            result = task.gathered(step, *args)
        finally:
            for handle in handles:
                handle.remove()
        used = absent.reached(result[0]) if torch.is_grad_enabled() else set()
        known = self.known.get(task, {}).items()  # none before training
        telling.end([named for named, weight in known if id(weight) not in used])
        return result

    def _watch_once(self, handles: list[Any], number: int, task: Any, *called: Any) -> None:
        handles.pop().remove()
        self.watch(number, task, called[0])

    def watch(self, number: int, task: Any, module: nn.Module) -> None:
        """Once, while the whole weights are there. Those that get no gradient of a share that
        counts nothing have one of zeros, as the other ranks wait for it."""
        for name, weight in module.named_parameters():
            if isinstance(weight, DTensor):  # of a block in it
                continue
            self.known.setdefault(task, {})[number, name] = weight
            is_trained = weight.requires_grad
            weight.requires_grad_(True).register_hook(partial(self._fill, weight))
            weight.requires_grad_(is_trained)

    def _fill(self, weight: Tensor, gradient: Tensor | None) -> None:
        if gradient is None and weight.grad is None and not self.is_absent:
            weight.grad = torch.zeros_like(weight)

    def followed(self, task: Any) -> Tensor:
        self._passes += 1
        blocks = _sharded_in(task)[1:]
        own = {id(weight) for block in blocks for weight in block.parameters()}
        rest = {name: weight for name, weight in task.named_parameters() if id(weight) not in own}
        store, name = self._shared_store(), f"calls/{self._passes}"
        return absent.follow(store, name, blocks, rest, self.device)

    def _shared_store(self) -> dist.Store:
        if self._store is None:
            raise UserError(
                "a batch has fewer rows than ranks, and the process group is the program's own: "
                "strategy=fsdp has no store to tell the others by; use a data.batch_size that "
                "leaves every rank a row of each batch"
            )
        return self._store


class Gathering(nn.Module):
    """Runs a step within the task's own gathering of its weights."""

    def __init__(self, step: Any, strategy: FSDP, *, training: bool) -> None:
        super().__init__()
        self.step = step
        self.strategy = strategy
        self.is_training = training
        self.is_watched = not training
        has_buffers = next(step.task.buffers(), None) is not None
        self.syncs_buffers = training and strategy.broadcast_buffers and has_buffers

    def forward(self, share: Share, *of: float) -> Any:
        task, strategy = self.step.task, self.strategy
        strategy.is_absent = not share.rows
        if self.syncs_buffers:
            strategy.sync_buffers()
        if strategy.world_size == 1 or strategy.have_all_rows(share.total):
            result = task.gathered(self._step, share, *of)
        elif share.rows:
            result = strategy.told(self._step, task, share, *of)
        else:
            zero = task.gathered(strategy.followed, task)
            result = (zero, []) if self.is_training else []
        if not self.is_training:
            task.reset_iter_state()  # there is no backward, which would let go of the weights
        return result

    def _step(self, *args: Any) -> Any:
        if not self.is_watched:
            self.is_watched = True
            self.strategy.watch(absent.ROOT, self.step.task, self.step.task)
        try:
            result = self.step(*args)
        except RuntimeError as error:
            if "DTensor" in str(error):
                error.add_note(f"dpframe: {OUTSIDE}")
            raise
        _refuse_parts(result[1] if self.is_training else result)
        if self.is_training:  # fully_shard warns of a loss that is a view
            loss, measured = result
            return loss.clone(), measured
        return result


def _refuse_parts(measured: Sequence[tuple[int, Any]]) -> None:
    for _, output in measured:
        for name, value in output.items() if isinstance(output, dict) else ():
            if isinstance(value, DTensor):
                raise UserError(f"a step returned {name!r} of parts of weights; {OUTSIDE}")


def _sharded(module: Any, **options: Any) -> None:
    """Keeps the names of the class, which errors and checkpoints show."""
    kind = type(module)
    fully_shard(module, **options)
    type(module).__name__, type(module).__qualname__ = kind.__name__, kind.__qualname__
    module.gathered = _called
    register_fsdp_forward_method(module, "gathered")


def _with_room(tensor: Tensor, module: nn.Module) -> Tensor:
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


def _mapped(call: Callable[[Any], Any], value: Any) -> Any:
    """Applies `call` to each DTensor in nested containers."""
    if isinstance(value, DTensor):
        return call(value)
    if isinstance(value, dict):
        return {name: _mapped(call, part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(call, part) for part in value)
    return value


def _called(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def _sharded_in(task: nn.Module) -> list[Any]:
    """The task, then its blocks."""
    return [module for module in task.modules() if isinstance(module, FSDPModule)]


def _shares_weight(block: nn.Module, holders: dict[int, int]) -> bool:
    within: dict[int, int] = {}
    for module in block.modules():
        for weight in module.parameters(recurse=False):
            within[id(weight)] = within.get(id(weight), 0) + 1
    return any(count != holders[key] for key, count in within.items())


def _dtype(name: str, value: str | int | None) -> torch.dtype | None:
    if value is not None and str(value) not in DTYPES:
        raise not_one_of(f"strategy.{name}", value, list(DTYPES))
    return None if value is None else DTYPES[str(value)]
