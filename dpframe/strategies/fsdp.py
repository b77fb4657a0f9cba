"""One process a replica that keeps a part of each weight: torch's fully_shard, which is FSDP2."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
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

from dpframe.blocks import blocks, matching
from dpframe.data import Share
from dpframe.data.module import leaves
from dpframe.errors import UserError, suggestion
from dpframe.parameters import has_sparse
from dpframe.strategies.devices import Gpus
from dpframe.strategies.processes import Processes

KEY = "strategy.shard"
DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
END = "."  # of what the main rank tells of a pass


class FSDP(Processes):
    """The ranks gather a block's weights when it is computed, and let go of them after it.

    `shard` names the blocks, by their names or their class: null for the modules of each ModuleList
    or Sequential that are made of others. What is in no block is gathered for the whole step.
    `replicate` groups of ranks each keep all weights: what is gathered stays within a group.
    """

    cuts_weights = True
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
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        cpu_offload: bool = False,
        broadcast_buffers: bool = True,
        whole_in_hooks: bool = True,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(gpus, accelerator, max_replicas_per_core, timeout_seconds=timeout_seconds)
        if replicate < 1:
            raise UserError(f"strategy.replicate={replicate}; set it to 1 or more")
        self.patterns = [shard] if isinstance(shard, str) else shard
        self.replicate = replicate
        self.reshard_after_forward = reshard_after_forward
        self.param_dtype = _dtype("param_dtype", param_dtype)
        self.reduce_dtype = _dtype("reduce_dtype", reduce_dtype)
        self.cpu_offload = cpu_offload
        self.broadcast_buffers = broadcast_buffers
        self.whole_in_hooks = whole_in_hooks
        self.task: Any = None  # whose gradients are computed
        self._is_open = False  # a forward without its backward
        self._passes = 0  # with fewer rows than ranks
        self._told: list[str] = []  # keys of the store

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
        sizes: tuple[int, ...] = (self.world_size,)
        if self.replicate > 1:
            sizes = (self.replicate, self.world_size // self.replicate)
        names = ("replicate", "shard")[-len(sizes) :]
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    # ---- the weights, and their parts

    def shard(self, task: Any, *, has_autocast: bool) -> None:
        if isinstance(task, FSDPModule):
            self._refuse_others_weights(task)
            return
        self._refuse(task, has_autocast)
        scalars = {weight for weight in task.parameters() if not weight.ndim}
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "ignored_params": scalars,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.param_dtype,
                reduce_dtype=self.reduce_dtype,
                cast_forward_inputs=False,  # autocast does that
            ),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }
        for block in self._chosen(task):
            _sharded(block, reshard_after_forward=self.reshard_after_forward, **options)
            handles: list[Any] = []
            handles.append(block.register_forward_pre_hook(partial(_watch_once, handles)))
        _sharded(task, reshard_after_forward=self.reshard_after_forward, **options)
        for scalar in scalars:
            scalar.data = scalar.data.to(self.device)

    def _refuse(self, task: nn.Module, has_autocast: bool) -> None:
        name = type(task).__name__
        if has_sparse(task):
            raise UserError(
                f"{name} has an embedding with sparse=True, whose gradients strategy=fsdp can't "
                "share; set sparse=False, or use strategy=ddp"
            )
        if any(map(nn.parameter.is_lazy, task.parameters())):
            raise UserError(
                f"{name} has lazy modules, and strategy=fsdp shards weights before the first "
                "batch; give them their sizes"
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

    def _chosen(self, task: nn.Module) -> list[nn.Module]:
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
        if not isinstance(like, DTensor) or isinstance(whole, DTensor):
            return whole
        whole = whole.detach().to(like.device)
        # All ranks have read the same file: none of them has to send it.
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    def whole(self, value: Any, *, for_all: bool = False) -> Any:
        if isinstance(value, DTensor):
            full: Any = value.full_tensor()
            return full.detach().cpu() if for_all or self.is_main else None
        if isinstance(value, dict):
            return {name: self.whole(part, for_all=for_all) for name, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.whole(part, for_all=for_all) for part in value)
        return value

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
        for weight in self.task.parameters():
            if not weight.ndim and weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= self.world_size

    @torch.no_grad()
    def weight_sync(self, is_read: bool) -> None:
        if is_read:
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
        for buffer in self.task.buffers():
            dist.broadcast(buffer, src=0)

    def close(self) -> None:
        self.task, self._is_open = None, False
        self._told.clear()
        super().close()

    # ---- batches with fewer rows than ranks

    def have_all_rows(self, total: int) -> bool:
        if not total:
            raise UserError(
                "strategy=fsdp can't train on a stream that ranks divide: at its end some have no "
                "rows, and can't tell what the others gather; use data.divide_streams=false"
            )
        size = -(-total // self.world_size)
        return -(-total // size) == self.world_size

    @contextmanager
    def told(self, task: Any) -> Iterator[None]:
        """Tells the ranks without a row which blocks the main one calls in this pass."""
        self._passes += 1
        if not self.is_main:
            yield
            return
        tell = Telling(self._shared_store(), f"calls/{self._passes}", self._told)
        handles = [
            block.register_forward_pre_hook(tell.of(number), prepend=True, with_kwargs=True)
            for number, block in enumerate(_sharded_in(task)[1:])
        ]
        try:
            yield
        finally:
            tell.say(END)
            for handle in handles:
                handle.remove()

    def follow(self, task: Any) -> Tensor:
        """Calls what the main rank calls, without a batch; the loss is 0, and so is each gradient
        that comes of it."""
        self._passes += 1
        store, name, number = self._shared_store(), f"calls/{self._passes}", 0
        parts, ends = _sharded_in(task)[1:], []
        zero = torch.zeros((), device=self.device)
        while (said := store.get(f"{name}/{number}").decode()) != END:
            if not said.endswith("+"):  # not of what another block has returned
                ends.append(zero)
                zero = torch.zeros((), device=self.device)
            part = parts[int(said.rstrip("+"))]
            zero = part.gathered(_zero_of, part, zero)
            number += 1
        own = {id(weight) for part in parts for weight in part.parameters()}
        rest = [weight for weight in task.parameters() if id(weight) not in own]
        return Zero.apply(zero, *ends, *filter(_is_trained, rest))

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
        if self.syncs_buffers:
            with torch.no_grad():
                strategy.sync_buffers()
        if strategy.world_size == 1 or strategy.have_all_rows(share.total):
            result = task.gathered(self._step, share, *of)
        elif share.rows:
            with strategy.told(task):
                result = task.gathered(self._step, share, *of)
        else:
            zero = task.gathered(strategy.follow, task)
            result = (zero, []) if self.is_training else []
        if not self.is_training:
            task.reset_iter_state()  # there is no backward, which would let go of the weights
        return result

    def _step(self, *args: Any) -> Any:
        if not self.is_watched:
            self.is_watched = True
            _watch(self.step.task)
        result = self.step(*args)
        if self.is_training:  # fully_shard warns of a loss that is a view
            loss, measured = result
            return loss.clone(), measured
        return result


class Telling:
    def __init__(self, store: dist.Store, name: str, keys: list[str]) -> None:
        self.store = store
        self.name = name
        self.keys = keys
        self.count = 0

    def of(self, number: int) -> Callable[..., None]:
        def tell(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [value for value in leaves([args, kwargs]) if isinstance(value, Tensor)]
            has_gradient = any(tensor.requires_grad for tensor in tensors)
            self.say(str(number) + "+" * (has_gradient and torch.is_grad_enabled()))

        return tell

    def say(self, value: str) -> None:
        key = f"{self.name}/{self.count}"
        self.store.set(key, value)
        self.keys.append(key)
        self.count += 1


class Zero(torch.autograd.Function):
    """0, whose gradients are zeros: a rank that has none would leave the others waiting."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.zeros(form, dtype=t, device=place) for form, t, place in ctx.forms)


def _zero_of(part: nn.Module, zero: Tensor) -> Tensor:
    return Zero.apply(zero, *filter(_is_trained, part.parameters()))


def _sharded(module: Any, **options: Any) -> None:
    """Keeps the names of the class, which errors and checkpoints show."""
    kind = type(module)
    fully_shard(module, **options)
    type(module).__name__, type(module).__qualname__ = kind.__name__, kind.__qualname__
    module.gathered = _called
    register_fsdp_forward_method(module, "gathered")


def _watch_once(handles: list[Any], block: nn.Module, inputs: Any) -> None:
    handles.pop().remove()
    _watch(block)


def _watch(module: nn.Module) -> None:
    """While the whole weights are there: those that get no gradient of a share that counts nothing
    have one of zeros, as the other ranks wait for it."""
    for weight in module.parameters():
        if isinstance(weight, DTensor) or not weight.ndim:  # of a block in it
            continue
        is_trained = weight.requires_grad
        weight.requires_grad_(True).register_hook(partial(_fill, weight))
        weight.requires_grad_(is_trained)


def _fill(weight: Tensor, gradient: Tensor | None) -> None:
    if gradient is None and weight.grad is None:
        weight.grad = torch.zeros_like(weight)


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


def _is_trained(weight: Tensor) -> bool:
    return weight.requires_grad


def _dtype(name: str, value: str | None) -> torch.dtype | None:
    if value is not None and str(value) not in DTYPES:
        raise UserError(f"strategy.{name}={value}; {suggestion(str(value), DTYPES)}")
    return None if value is None else DTYPES[str(value)]
