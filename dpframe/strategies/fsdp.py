"""One process a replica that keeps a part of each weight: torch's fully_shard, which is FSDP2."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpframe.data import Share, split
from dpframe.errors import UserError, not_one_of
from dpframe.parameters import Watched
from dpframe.strategies import absent
from dpframe.strategies.devices import Gpus
from dpframe.strategies.processes import Processes
from dpframe.strategies.sharding import Sharding, sharded_in
from dpframe.values import refuse_below

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

    sharding: Sharding

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
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
        super().__init__(gpus, accelerator, timeout_seconds=timeout_seconds)
        refuse_below("strategy.replicate", replicate)
        if checkpoints not in CHECKPOINTS:
            raise not_one_of("strategy.checkpoints", checkpoints, CHECKPOINTS)
        self.sharding = Sharding(
            patterns=[shard] if isinstance(shard, str) else shard,
            reshard_after_forward=reshard_after_forward,
            param_dtype=_dtype("param_dtype", param_dtype),
            reduce_dtype=_dtype("reduce_dtype", reduce_dtype),
            cpu_offload=cpu_offload,
            meta_init=meta_init,
            whole_in_hooks=whole_in_hooks,
            saves_shards=checkpoints == "sharded",
            timeout_seconds=timeout_seconds,
        )
        self.replicate = replicate
        self.broadcast_buffers = broadcast_buffers
        self.mesh: Any = None  # of the ranks
        self.task: Any = None  # whose gradients are computed
        self._is_open = False  # a forward without its backward
        self._passes = 0  # with fewer rows than ranks
        self.is_absent = False  # without a row of the batch at hand
        self._keys: list[str] = []  # of the store
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
        if self.sharding.cpu_offload and self.device.type == "cpu":
            raise UserError(
                "strategy.cpu_offload=true needs GPUs, and the weights are on the CPU already; set "
                "it to false"
            )
        if self.replicate > 1:
            self.mesh = self._mesh_of_groups()
        else:
            sizes = (self.world_size,)
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("shard",))
        self.sharding.open(self.mesh, self.device, self.collectives, nodes=self.nodes)

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

    # ---- the steps

    def wrap(self, module: Any, *, training: bool) -> nn.Module:
        if module.task not in self.known:
            self._watch_blocks(module.task)
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
                f"trainer.on_nonfinite=skip with a step of {accumulate} backwards or more: "
                "strategy=fsdp can't take back the gradients of the first ones; use "
                "trainer.accumulate=1 trainer.micro_batch=null, or strategy=ddp"
            )

    def check_gradients(self) -> None:
        """And averages those of scalars, which have no parts."""
        self._is_open = False
        for weight in self.sharding.scalars[self.task]:
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
        for key in self._keys:  # all ranks have made the step, and read them
            self._shared_store().delete_key(key)
        self._keys.clear()

    def sync_buffers(self) -> None:
        """The main rank's count, as under ddp."""
        self.collectives.broadcast_tensors(self.task.buffers())

    def close(self) -> None:
        self.task, self._is_open = None, False
        self._keys.clear()
        self.known.clear()
        self.sharding.close()
        # torch keeps the mesh in caches, and with it the group, whose threads would outlive Python.
        getattr(self.mesh, "_pg_registry", {}).clear()
        self.mesh = None
        super().close()

    # ---- batches with fewer rows than ranks

    def ranks_with_rows(self, share: Share) -> list[int]:
        """Of the batch; where ranks have rows of their own, they tell each other."""
        if share.total:
            rows = [float(len(part)) for part in split(range(share.total), self.world_size)]
        else:
            own = [float(share.rows * (rank == self.rank)) for rank in range(self.world_size)]
            rows = self.collectives.sum_numbers(own)
        return [rank for rank, count in enumerate(rows) if count]

    def tell_calls(self, teller: int, step: Callable[..., Any], task: Any, *args: Any) -> Any:
        """One rank tells those without a row which blocks it calls in this pass."""
        self._passes += 1
        if self.rank != teller:
            return task.gathered(step, *args)
        calls = absent.Calls(self._shared_store(), f"calls/{self._passes}", self._keys)
        handles = []
        for number, block in enumerate(sharded_in(task)[1:]):
            tell = calls.hook(number)
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
        used = absent.find_reached(result[0]) if torch.is_grad_enabled() else set()
        known = self.known[task].items()  # none before training
        calls.end([named for named, weight in known if id(weight) not in used])
        return result

    def _watch_blocks(self, task: Any) -> None:
        self.known[task] = {}
        for number, block in enumerate(sharded_in(task)[1:]):
            handles: list[Any] = []
            once = partial(self._watch_once, handles, number, task)
            handles.append(block.register_forward_pre_hook(once))

    def _watch_once(self, handles: list[Any], number: int, task: Any, *called: Any) -> None:
        handles.pop().remove()
        self.watch(number, task, called[0])

    def watch(self, number: int, task: Any, module: nn.Module) -> None:
        """Once, while the whole weights are there. Those that get no gradient of a share that
        counts nothing have one of zeros, as the other ranks wait for it."""
        for name, weight in module.named_parameters():
            if isinstance(weight, DTensor):  # of a block in it
                continue
            self.known[task][number, name] = weight
            is_trained = weight.requires_grad
            weight.requires_grad_(True).register_hook(partial(self._fill, weight))
            weight.requires_grad_(is_trained)

    def _fill(self, weight: Tensor, gradient: Tensor | None) -> None:
        if gradient is None and weight.grad is None and not self.is_absent:
            weight.grad = torch.zeros_like(weight)

    def follow_calls(self, task: Any) -> Tensor:
        self._passes += 1
        blocks = sharded_in(task)[1:]
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
        self.needs_watch = training
        self.gathered = Watched(())  # weights that are whole within a training step
        has_buffers = next(step.task.buffers(), None) is not None
        self.syncs_buffers = training and strategy.broadcast_buffers and has_buffers

    def forward(self, share: Share, *of: float) -> Any:
        task, strategy = self.step.task, self.strategy
        strategy.is_absent = not share.rows
        if self.syncs_buffers:
            strategy.sync_buffers()
        ranks = strategy.ranks_with_rows(share) if strategy.world_size > 1 else [0]
        if len(ranks) == strategy.world_size:
            result = task.gathered(self._step, share, *of)
        elif share.rows:
            result = strategy.tell_calls(ranks[0], self._step, task, share, *of)
        else:
            zero = task.gathered(strategy.follow_calls, task)
            result = (zero, []) if self.is_training else []
        if not self.is_training:
            task.reset_iter_state()  # there is no backward, which would let go of the weights
        return result

    def _step(self, *args: Any) -> Any:
        if self.needs_watch:
            self.needs_watch = False
            self.strategy.watch(absent.ROOT, self.step.task, self.step.task)
            self.gathered = Watched(gathered_in(self.step.task))
        self.gathered.begin()
        try:
            result = self.step(*args)
        except RuntimeError as error:
            if "DTensor" in str(error):
                error.add_note(f"dpframe: {OUTSIDE}")
            raise
        _refuse_parts(result[1] if self.is_training else result)
        if changed := self.gathered.changed():
            refuse_lost(self.step.task, changed)
        if self.is_training:  # fully_shard warns of a loss that is a view
            loss, measured = result
            return loss.clone(), measured
        return result


def gathered_in(task: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights that are whole within a step; torch gathers them into the same tensors again."""
    return (pair for pair in task.named_parameters() if not isinstance(pair[1], DTensor))


def refuse_lost(task: Any, changed: str) -> NoReturn:
    kind = task.own_class.__name__
    raise UserError(
        f"{kind}.training_step changes {changed}, which fsdp has gathered only for this step, so "
        "the change would be lost; change it in on_step_end, or use strategy=ddp"
    )


def _refuse_parts(measured: Sequence[tuple[int, Any]]) -> None:
    for _, output in measured:
        for name, value in output.items() if isinstance(output, dict) else ():
            if isinstance(value, DTensor):
                raise UserError(f"a step returned {name!r} of parts of weights; {OUTSIDE}")


def _dtype(name: str, value: str | int | None) -> torch.dtype | None:
    if value is not None and str(value) not in DTYPES:
        raise not_one_of(f"strategy.{name}", value, list(DTYPES))
    return None if value is None else DTYPES[str(value)]
