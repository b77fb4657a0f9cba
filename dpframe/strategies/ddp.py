"""One process a replica: torch's DistributedDataParallel, NCCL on CUDA and gloo on the CPU."""

import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpframe.data import split
from dpframe.errors import UserError
from dpframe.strategies import direct, ranks, supervisor
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import Gpus, announce, rehearsal
from dpframe.task import has_sparse

# The same switch, under its newer name where torch has that.
_names = inspect.signature(DistributedDataParallel).parameters
BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _names else "broadcast_buffers"

_left: set[str] = set()  # the stores in which a process group of this process was


class DDP(Strategy):
    launches_ranks = True

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        max_replicas_per_core: int = 8,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        sync_batchnorm: bool = False,
        direct_sums: bool = True,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(gpus, accelerator, max_replicas_per_core)
        if timeout_seconds <= 0:
            raise UserError(f"strategy.timeout_seconds={timeout_seconds}; give more than 0 seconds")
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            BUFFERS: broadcast_buffers,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self.sync_batchnorm = sync_batchnorm
        self.direct_sums = direct_sums
        self.timeout_seconds = timeout_seconds
        self.module: Any = None
        self.owns_group = False
        self._shared: dict[str, Tensor] = {}  # parameters by name, as they were wrapped
        self._frozen: dict[str, Tensor] = {}
        self.direct: direct.Direct | None = None

    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        """Starts the ranks, or is one of them where torchrun started them already."""
        if ranks.is_rank():
            here = ranks.this_rank()
            if here.rank == 0:
                places = self.choose_devices(default=here.local_world_size)
                announce(rehearsal(places, self.gpus, self.accelerator, kind="gloo ranks"))
            return run(*args)
        devices = self.choose_devices(default=None)
        announce(rehearsal(devices, self.gpus, self.accelerator, kind="gloo ranks"))
        return supervisor.launch(
            run,
            args,
            count=len(devices),
            uses_cuda=devices[0].type == "cuda",
            timeout_seconds=self.timeout_seconds,
        )

    def setup(self) -> None:
        here = ranks.this_rank()
        devices = self.choose_devices(default=here.local_world_size)
        if self.gpus is not None and len(devices) != here.local_world_size:
            raise UserError(
                f"trainer.gpus={self.gpus} but this machine was given {here.local_world_size} "
                "ranks; leave trainer.gpus out under torchrun"
            )
        self.rank, self.world_size = here.rank, here.world_size
        self.replicas = self.averaged_over = here.world_size
        self.device = devices[here.local_rank]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // here.local_world_size))
        self.owns_group = not dist.is_initialized()  # else the program's own, which is joined
        if self.owns_group:
            _refuse_second_group()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                timeout=timedelta(seconds=self.timeout_seconds),
            )
        is_direct = self.direct_sums and self.device.type == "cpu"
        is_direct &= direct.is_possible(self.world_size, here.local_world_size)
        door = direct.Door() if is_direct else None
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, (str(self.device), door and door.address))
        self.names = [name for name, _ in found]
        if door is not None:
            addresses = [address for _, address in found]
            self.direct = door.meet(self.rank, addresses, self.timeout_seconds)
        self.is_set_up = True

    @property
    def devices(self) -> list[str]:
        return self.names

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if not training:
            return module
        if self.sync_batchnorm:
            module = self._with_synced_batchnorm(module)
        self.module = DistributedDataParallel(module, **self.options)
        named = list(module.named_parameters())
        self._shared = {name: weight for name, weight in named if weight.requires_grad}
        self._frozen = {name: weight for name, weight in named if not weight.requires_grad}
        size = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        if self.direct is not None and size <= direct.LARGEST and not has_sparse(module):
            self._first_forward = self.module.register_forward_pre_hook(self._share_directly)
        return self.module

    def _share_directly(self, *_: Any) -> None:
        """Before the first forward: by then a callback may have registered a hook of its own."""
        self._first_forward.remove()
        if self.direct is not None and not self.module._comm_hooks:
            self.module.register_comm_hook(None, self.direct.hook)

    def shares(self, rows: Sequence) -> list[Sequence]:
        return [split(rows, self.world_size)[self.rank]]

    def grad_sync(self, is_last: bool) -> None:
        # What `no_sync` sets, without its frames. A static graph can't be without: torch counts
        # its backwards; gradients that are shared each time add up to the same.
        self.module.require_backward_grad_sync = is_last or self.options["static_graph"]

    def check_skips(self, accumulate: int) -> None:
        """Torch's reducer keeps which parameters those backwards used, and nothing resets that."""
        if accumulate > 1 and self.options["find_unused_parameters"]:
            raise UserError(
                f"trainer.on_nonfinite=skip with trainer.accumulate={accumulate}: under "
                "strategy.find_unused_parameters=true torch still expects the gradients of the "
                "batches that were left out; use trainer.accumulate=1 or strategy=data_parallel"
            )

    def check_gradients(self) -> None:
        """Torch tells at the next forward, when each rank has made an update of its own."""
        if self.module is None:
            return
        for weight in self._frozen.values():
            if weight.requires_grad and self.world_size > 1:
                raise UserError(self._thawed())
        # A private name: `grad is None` would miss what an update's last batch alone leaves out.
        check = getattr(self.module, "_check_reducer_finalized", None)
        try:
            if check is not None:
                check()
        except RuntimeError:
            raise UserError(self._unshared()) from None

    def weight_sync(self, is_read: bool) -> None:
        """The weights are the same on all ranks. The buffers (running statistics) are each rank's
        own since its last forward: the main one's count."""
        if is_read and self.module is not None:
            _broadcast(list(self.module.buffers()))

    def reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        self._sum(tensor)
        return tensor

    def tally(self, numbers: list[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._sum(sums)  # on the host, with CUDA too: it runs ahead of the device
        return sums.tolist()

    def _sum(self, tensor: Tensor) -> None:
        if self.direct is not None and tensor.nbytes <= direct.LARGEST:
            self.direct.sum(tensor)
        else:
            dist.all_reduce(tensor)

    def backward_communication(self) -> float:
        """As torch samples it, less what the backward itself has hidden."""
        if self.module is None:
            return 0.0
        sampled = self.module._get_ddp_logging_data()
        whole = sampled.get("avg_backward_comm_time", 0)
        hidden = sampled.get("avg_backward_compute_comm_overlap_time", 0)
        return max(0, whole - hidden) / 1e9

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values)
        return values or []

    def share(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def close(self) -> None:
        if self.module is not None:
            # The reducer goes first: were it the last to hold the process group, its destructor
            # would join gloo's thread under the GIL, for which that thread may be waiting.
            self.module.logger = self.module.reducer = None
        if self.direct is not None:
            self.direct.close()
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
            _left.add(ranks.store_of_agent())
        super().close()

    def _thawed(self) -> str:
        thawed = [name for name, weight in self._frozen.items() if weight.requires_grad]
        return (
            f"{_listed(thawed)} {'was' if len(thawed) == 1 else 'were'} frozen when {self.name} "
            f"began and {'is' if len(thawed) == 1 else 'are'} trained now, but the ranks don't "
            "share their gradients; leave requires_grad=True from the start, with lr=0 until then, "
            "or use strategy=data_parallel"
        )

    def _unshared(self) -> str:
        lacking = [name for name, weight in self._shared.items() if weight.grad is None]
        static = "strategy.static_graph=false " if self.options["static_graph"] else ""
        return (
            f"{_listed(lacking) or 'parameters'} {'has' if len(lacking) == 1 else 'have'} no "
            f"gradient in this step on rank {self.rank}, so the ranks can't share theirs; set "
            f"{static}strategy.find_unused_parameters=true where a step may leave out or freeze "
            "parameters"
        )

    def _with_synced_batchnorm(self, module: nn.Module) -> nn.Module:
        if self.device.type != "cuda":
            raise UserError(
                "strategy.sync_batchnorm=true needs CUDA devices: torch's SyncBatchNorm has no CPU "
                "version; set it to false"
            )
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)


def _refuse_second_group() -> None:
    """A second one would find the keys of the first in torchrun's store, and hang."""
    if ranks.store_of_agent() in _left - {""}:
        raise UserError(
            "torchrun's ranks meet once in a process, and this one has closed its strategy; give "
            "one strategy to all Trainers, and close it after the last"
        )


def _listed(names: list[str]) -> str:
    """As the task calls them; the first few."""
    names = [name.removeprefix("task.") for name in names]
    shown, more = names[:3], len(names) - 3
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


@torch.no_grad()
def _broadcast(tensors: list[Tensor]) -> None:
    """The main process's, at one collective a type of device: as bytes, whatever they are of."""
    for kind in dict.fromkeys(tensor.device.type for tensor in tensors):
        here = [tensor for tensor in tensors if tensor.device.type == kind]
        together = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in here])
        dist.broadcast(together, src=0)
        for tensor, part in zip(here, together.split([t.nbytes for t in here]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))
