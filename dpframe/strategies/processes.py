"""One process a replica, by torchrun or started here: what DDP and FSDP have in common."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpframe.data import split
from dpframe.devices.accelerator import cores
from dpframe.errors import Interrupted, UserError
from dpframe.launch import environment, local
from dpframe.launch.peers import end_with_peers
from dpframe.launch.rank import fail, has_parent
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import Gpus, announce, use_threads
from dpframe.strategies.group import GatherRows, GroupCollectives
from dpframe.values import ABOVE_0, refuse_below

with suppress(ImportError):  # it is deprecated, and there is nothing to guard without it
    # Before any group is open: by their defaults, its functions would keep that one for ever.
    import torch.distributed.nn

_group_numbers = itertools.count()  # numbers the groups of this process


class Processes(Strategy):
    """Ranks, their process group and its collectives; how gradients are shared is a subclass's."""

    collectives_type: type[GroupCollectives] = GroupCollectives
    launches_ranks = True

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        *,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(gpus, accelerator)
        refuse_below("strategy.timeout_seconds", timeout_seconds, ABOVE_0, "more than 0")
        self.timeout_seconds = timeout_seconds
        self.owns_group = False
        self._groups: dict[int, dist.ProcessGroup] = {}  # groups of the first n ranks, by n
        self._made: list[dist.ProcessGroup] = []  # these and others; all ranks have made as many
        self._store: dist.Store | None = None  # None: the group is the program's own

    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        """Starts the ranks, or is one of them where torchrun, srun or mpirun has started them."""
        here = environment.read_rank() if environment.is_rank() else None
        devices = self.choose_devices(default=here.local_world_size if here else None)
        backend_of(devices[0])
        if here is None or here.rank == 0:
            announce(devices, self.accelerator, kind="gloo rank")
        if here is not None:
            return run(*args)
        return local.launch(
            run,
            args,
            count=len(devices),
            uses_gpus=devices[0].type != "cpu",
            timeout_seconds=self.timeout_seconds,
        )

    def setup(self) -> None:
        here = environment.read_rank()
        devices = self.choose_devices(default=here.local_world_size)
        if self.gpus is not None and len(devices) != here.local_world_size:
            raise UserError(
                f"trainer.gpus={self.gpus} but {environment.find_launcher()} has started "
                f"{here.local_world_size} of the ranks on this machine; leave trainer.gpus out, or "
                f"use {environment.count_option(len(devices))}"
            )
        self.rank, self.world_size = here.rank, here.world_size
        self.replicas = self.gradient_divisor = here.world_size
        self.nodes = here.nodes
        self.take(devices[here.local_rank])
        threads = max(1, cores() // here.local_world_size)
        if self.device.type != "cpu":  # torchrun's single one may be enough beside a GPU
            threads = min(threads, torch.get_num_threads())
        use_threads(threads)
        if not dist.is_initialized():  # else the program's own is joined
            self.owns_group = True
            self._open_group()
        self.names = [""] * self.world_size
        dist.all_gather_object(self.names, str(self.device))
        self.collectives = self.collectives_type(self.rank, self.world_size, self.device)

    def _open_group(self) -> None:
        if self.nodes > 1:
            environment.choose_interface()
        timeout = timedelta(seconds=self.timeout_seconds)
        store = self._host_store() or next(dist.rendezvous("env://", timeout=timeout))[0]
        store.set_timeout(timeout)
        # torchrun's store outlives a group; the next one must not find the keys of this one.
        self._store = dist.PrefixStore(f"dpframe{next(_group_numbers)}", store)
        # Not with `device_id`: NCCL then splits groups, which takes ranks that `_first` leaves out.
        dist.init_process_group(
            backend_of(self.device),
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )

    def _host_store(self) -> dist.Store | None:
        """The store, in rank 0 of a launcher that keeps none; torch's own would listen on every
        network that this machine is in."""
        if self.rank > 0 or environment.has_store():
            return None
        return _store_at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @property
    def devices(self) -> list[str]:
        return self.names

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        return [split(rows, self.world_size)[self.rank]]

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        if self.world_size == 1:
            return x
        if not total:
            raise UserError(
                "self.all_gather was called outside of a step, where ranks have no batch, or on a "
                "stream that they divide, whose last batches they share unevenly; call it in a "
                "step, without data.divide_streams (a strategy's to_device keeps its total by "
                "share._replace)"
            )
        size = -(-total // self.world_size)  # of a share; the last of those with rows may be less
        count = -(-total // size)
        if count == 1:
            return x
        own = len(split(range(total), self.world_size)[self.rank])
        if len(self.split_rows(range(total))[0]) != own:
            raise UserError(
                f"{self.name} cuts batches in its own way, and gathers rows as ddp does; override "
                "gather_rows, too"
            )
        each = len(x) // own
        return GatherRows.apply(x, each * size, each * total, self._first(count))

    def _first(self, count: int) -> dist.ProcessGroup | None:
        """The group of the first ranks, those with rows; None: all of them."""
        if count == self.world_size:
            return None
        if count not in self._groups:
            made = self._made_by_main(count)
            while len(self._made) < made:
                self.group_of([self.rank], "gloo")
            self._groups[count] = self.group_of(range(count))
        return self._groups[count]

    def _made_by_main(self, count: int) -> int:
        """How many groups the main rank has made, which is in all of them. Torch names a group
        after its ranks and after how many groups its process has made before."""
        made = torch.tensor(len(self._made))
        if self.is_main:
            for rank in range(1, count):
                dist.send(made, rank)
        else:
            dist.recv(made, 0)
        return int(made)

    def group_of(self, members: Iterable[int], backend: str | None = None) -> dist.ProcessGroup:
        """Makes a group that ends with this strategy."""
        group = dist.new_group(
            list(members),
            timeout=timedelta(seconds=self.timeout_seconds),
            backend=backend,
            use_local_synchronization=True,  # the other ranks take no part
        )
        self._made.append(group)
        return group

    def groups(self) -> list[dist.ProcessGroup]:
        """Those that an error ends: not the program's own."""
        world = dist.group.WORLD
        return [*self._made, world] if self.owns_group and world is not None else self._made

    def close(self) -> None:
        if dist.is_initialized():
            for group in self._made:
                dist.destroy_process_group(group)
        self._groups.clear()
        self._made.clear()
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self.owns_group, self._store = False, None
        super().close()

    def abort(self, error: BaseException) -> None:
        """NCCL ends a group together with all its ranks, and those may be in a collective: after a
        lone failure. All ranks agree on an interruption, and may still be saving together."""
        fail(error)
        if self._store is not None and not has_parent():
            end_with_peers(error, self._store, self.rank, machines=self.nodes)
        if self.device.type != "cpu" and dist.is_initialized() and (groups := self.groups()):
            if isinstance(error, Interrupted):
                torch.accelerator.synchronize(self.device)  # until the others have joined in
            abort_groups(groups)
        super().abort(error)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """At once: to abort one may wait for a collective that the device has begun in another."""
    with ThreadPoolExecutor(len(groups)) as threads:
        for aborted in [threads.submit(group.abort) for group in groups]:
            aborted.result()


@cache  # the other ranks may be there already for the next group
def _store_at(host: str, port: int) -> dist.Store:
    listening = environment.listen(host, port)
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def backends() -> list[str]:
    """The communication backends that torch has here."""
    available = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "xccl": dist.is_xccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [name for name, is_here in available.items() if is_here()]


def backend_of(device: torch.device) -> str:
    """What init_process_group takes for ranks on such devices; gloo alone can do with the host's
    tensors."""
    if device.type == "cpu":
        return "gloo"
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        backend = "gloo"
    if backend == "gloo":  # torch names it for MPS too, whose tensors it refuses
        raise UserError(
            f"ranks can't run on {device.type.upper()} devices: torch.distributed has no "
            "backend for them; use strategy=single_gpu, or trainer.accelerator=cpu to rehearse"
        )
    return f"cpu:gloo,{device.type}:{backend}"
