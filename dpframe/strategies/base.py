"""The simplest strategy, complete as it stands: one process, one device. Override what differs."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpframe.data import Share, move
from dpframe.errors import UserError
from dpframe.launch import environment
from dpframe.loggers import Logger
from dpframe.strategies.collectives import Collectives
from dpframe.strategies.devices import Gpus, choose
from dpframe.strategies.weights import WHOLE, Weights
from dpframe.sums import FLOATS, Sums
from dpframe.values import check_gpus

NO_GATHER = "it has no gather_rows"
FREEZE_ALIKE = "set requires_grad on all ranks at the same step, e.g. by trainer.global_step"


class Strategy:
    """Owns device placement, sampler set-up, gradient sync, and who logs. Values in, values out.

    A replica is one copy of the model with a share of every global batch. A process has one or
    more of them; the main process, rank 0, alone prints, logs and writes. What comes between
    `begin_step` and `sync_weights` is called by all processes together.
    """

    # What `setup` finds out.
    rank = 0
    world_size = 1  # processes
    replicas = 1  # over all processes
    gradient_divisor = 1  # backward has divided gradients by this already
    nodes = 1  # machines
    replicates_task = False  # steps run on copies of the task: attributes they set are lost
    # What a class is.
    uses_gpus = True  # where there are any
    launches_ranks = False  # in processes of their own, which `trainer.max_restarts` may restart
    wants_all_gradients = False  # a replica without rows has to give zeros for every weight
    spans_machines = False  # the ranks that it launches may be on other machines than this one
    takes_logical_shares = False  # allows a plugin to split batches and add up gradients for it
    has_fixed_shares = False  # of a batch, whoever computes them: no number depends on replicas
    has_alike_weights = False  # after each update all ranks' have the same bits: they are compared
    sharding: Weights = WHOLE  # how each process keeps the weights
    sums: Sums = FLOATS  # how numbers of shares and processes are added up
    # What the Trainer sets.
    dtype: torch.dtype | None = None  # floats are moved as this type; None: as they are
    is_set_up = False
    _current: ExitStack | None = None  # what `take` has entered

    def __init_subclass__(cls, *, takes_logical_shares: bool = False, **options: Any) -> None:
        """Each class declares it for itself: a subclass may share gradients in another way."""
        super().__init_subclass__(**options)
        cls.takes_logical_shares = takes_logical_shares

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
    ) -> None:
        check_gpus(gpus)
        self.gpus = gpus
        self.accelerator = accelerator
        self.device = torch.device("cpu")
        self.collectives = Collectives()  # of all processes, once `setup` has run

    @property
    def name(self) -> str:
        """For the banner and summary.json."""
        return type(self).__name__

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints, logs and writes."""
        return self.rank == 0

    @property
    def draws_as(self) -> int:
        """The rank whose random numbers this process draws outside of its shares."""
        return 0 if self.has_fixed_shares else self.rank

    @property
    def devices(self) -> list[str]:
        """One name a replica, in replica order."""
        return [str(self.device)]

    @property
    def local_devices(self) -> list[torch.device]:
        """The devices of this process."""
        if self.world_size > 1 or self.replicas == 1:
            return [self.device]
        return [torch.device(name) for name in dict.fromkeys(self.devices)]

    @property
    def needs_launch(self) -> bool:
        """Whether `setup` can't run in this process, but in those that `launch` starts."""
        return self.launches_ranks and not (self.is_set_up or environment.is_rank())

    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        """Calls `run(*args)` in every process of the job and returns the main one's value."""
        environment.complete()
        if environment.is_one_of_several():
            raise UserError(
                f"{self.name} is one process, but this is one of WORLD_SIZE="
                f"{os.environ['WORLD_SIZE']}; use strategy=ddp, or start it without "
                f"{environment.find_launcher()}"
            )
        return run(*args)

    def __enter__(self) -> Self:
        """Calls `setup`: override that instead."""
        self.setup()
        self.is_set_up = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Calls `close`, or `abort` after an error: override these instead."""
        self.is_set_up = False
        if error is None:
            self.close()
        else:
            self.abort(error)

    def setup(self) -> None:
        """Takes this process's device, and joins the others."""
        devices = self.choose_devices(default=1)
        if len(devices) != 1:
            raise UserError(
                f"trainer.gpus={self.gpus} but {self.name} is one replica; use trainer.gpus=1, "
                "strategy=ddp or strategy=data_parallel"
            )
        self.take(devices[0])

    def take(self, device: torch.device) -> None:
        """Makes it this process's current device, until `close`."""
        self.device = device
        if device.type != "cpu":
            # Not by set_device_index: to go back by it makes a context on a GPU that is not used.
            self._current = self._current or ExitStack()
            self._current.enter_context(torch.accelerator.device_index(device.index))

    def choose_devices(self, *, default: int | None) -> list[torch.device]:
        accelerator = self.accelerator if self.uses_gpus else "cpu"
        return choose(self.gpus, accelerator, default=default)

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        """`module(share, ...)` becomes one that computes all of this process's shares; what several
        of them return goes through `module.combine(results)`."""
        return module

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        """The shares of a global batch that this process's replicas compute, in replica order."""
        return [rows]

    def to_device(self, shares: list[Share]) -> Any:
        """What the wrapped module is called with."""
        if self.dtype is None and self.device.type == "cpu":
            return shares[0]
        return shares[0]._replace(batch=move(shares[0].batch, self.device, self.dtype))

    def begin_step(self, module: nn.Module) -> nn.Module:
        """Before the gradients of a step: the wrapped module that computes them.

        There is one for each optimizer of a task. A strategy that keeps account of the weights may
        have to wrap again, where some were frozen or thawed since.
        """
        return module

    def grad_sync(self, is_last: bool) -> None:
        """Before each micro-batch under accumulation: only the last one's gradients are shared."""

    def check_skips(self, accumulate: int) -> None:
        """Before training that may leave out a step after some of its `accumulate` backwards;
        pieces of a batch are a backward each."""

    def check_gradients(self) -> None:
        """Before each optimizer update: refuses gradients that are not the whole job's."""

    def sync_weights(self, for_reading: bool) -> None:
        """Once after each step, whatever its turns, also after one that is left out; and, with
        `for_reading`, before something looks at the weights.

        For strategies whose replicas have weights or buffers of their own in between: when a
        validation, a checkpoint or the end of training looks at them, all replicas must have the
        same ones, and the ones that the main process saves.
        """

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        """The rows of a batch of `total`, in order, from those of one share, for `Task.all_gather`.

        Backward, what the replicas' losses give to a row adds up. Replicas without a row don't call
        it. `total` is 0 outside of a step, where a single process returns `x`."""
        if self.replicas > 1:
            raise UserError(
                f"{self.name} can't gather the rows of its {self.replicas} replicas for "
                f"self.all_gather: {NO_GATHER}; use strategy=ddp or strategy=data_parallel"
            )
        return x

    def gather_shares(self, x: Tensor, shares: int) -> Tensor:
        """`x` of each of the `shares` of a batch that have rows, one row a share, as
        `gather_rows`; for BatchNorm of the global batch."""
        return self.gather_rows(x[None], shares)

    def logger(self, loggers: list[Logger]) -> list[Logger]:
        """The loggers that write in this process: the main one's, and nobody else's."""
        return loggers if self.is_main else []

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """What a checkpoint keeps of this strategy; every process calls it, the main one saves."""
        return {}

    def load_state_dict(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        """After the weights and the optimizer; `state` is {} from other strategies."""

    def close(self) -> None:
        """Lets go of all that `setup` took."""
        current, self._current = self._current, None
        if current is not None:
            current.close()

    def abort(self, error: BaseException) -> None:
        """The same after an error, without waiting for processes that may wait for this one."""
        self._current = None  # a device that fails takes no call
        self.close()
