"""Strategies with a planted bug each: one that a plugin might have."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dpframe import Logger, Strategy
from dpframe.data import Share
from dpframe.strategies.data_parallel import DataParallel, Replicas
from dpframe.strategies.ddp import DDP
from dpframe.strategies.group import GroupCollectives


class Around(nn.Module):
    """Calls `call` with another module and its inputs, and has its `combine`."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call
        self.combine = getattr(module, "combine", None)

    def forward(self, *inputs: Any) -> Any:
        return self.call(self.module, *inputs)


class Changed:
    """Mixed into a strategy: `training` or `evaluation` calls what it would wrap."""

    training: Callable[..., Any] | None = None
    evaluation: Callable[..., Any] | None = None

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        call = self.training if training else self.evaluation
        changed = Around(module, call) if call else module
        return super().wrap(changed, training=training)  # type: ignore[misc]


# The numbers


class MeanOfMeans(Changed, DDP):
    """Forgets that the shares have different numbers of rows."""

    def training(self, step: Any, share: Share, of: float) -> Any:
        return step(share, float(share.rows or 1))


class Padded(DDP):
    """Fills the shares up to one size, as a DistributedSampler does."""

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        size = -(-len(rows) // self.world_size)
        places = range(self.rank * size, (self.rank + 1) * size)
        share: Any = [rows[place % len(rows)] for place in places]
        return [torch.stack(share) if isinstance(rows, Tensor) else share]  # type: ignore


class Unshared(DDP):
    """Every rank trains by itself."""

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        return module

    def grad_sync(self, is_last: bool) -> None: ...


class SaysAveraged(DataParallel):
    """Replicas of one process are summed, and this says that they are averaged."""

    def setup(self) -> None:
        super().setup()
        self.gradient_divisor = self.replicas


class MeanOfProcesses(GroupCollectives):
    def sum(self, tensor: Tensor) -> Tensor:
        return super().sum(tensor) / self.world_size


class Averages(DDP):
    """The mean over the processes in place of the sum."""

    collectives_type = MeanOfProcesses


class OnlyTheMains(GroupCollectives):
    def sum(self, tensor: Tensor) -> Tensor:
        return self.broadcast(tensor)


class SharesTheMains(DDP):
    """The main process's numbers in place of the sum."""

    collectives_type = OnlyTheMains


class EvenMeans(Changed, DataParallel):
    """A replica's mean counts one, however many rows it had."""

    def evaluation(self, step: Any, share: Share) -> list[tuple[int, Any]]:
        return [(1 if isinstance(o, dict) else rows, o) for rows, o in step(share)]


class Rounds(Changed, Strategy):
    """Keeps the losses in half the digits."""

    def training(self, step: Any, share: Share, of: float) -> Any:
        loss, measured = step(share, of)
        return loss * (1 + 1e-7), measured


class GathersNumbers(DDP):
    """The rows of other replicas come without their gradients."""

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        with torch.no_grad():
            gathered = super().gather_rows(x, total)
        size = -(-total // self.world_size) * self.rank
        return torch.cat([gathered[:size], x, gathered[size + len(x) :]])


class GathersNothing(DataParallel):
    """Leaves out gather_rows, which is refused and no fail."""

    gather_rows = Strategy.gather_rows


# What shows in some runs alone


class PadLarge(DataParallel):
    """Fills shares of more than 16 rows up to a multiple of 8, as some hardware likes them."""

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        return [padded(share) if len(share) > 16 else share for share in super().split_rows(rows)]


def padded(share: Any) -> Any:
    more = share[: -len(share) % 8]
    return torch.cat([share, more]) if isinstance(share, Tensor) else [*share, *more]


class Other4(DDP):
    """Drops the rows that are left over, from four ranks on."""

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        size = len(rows) // self.world_size
        if self.world_size < 4:
            return super().split_rows(rows)
        return [rows[self.rank * size : (self.rank + 1) * size]]


class StreamDropTail(DataParallel):
    """Drops the rows that are left over, of a stream's batches."""

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        if not isinstance(rows, Tensor):
            rows = rows[: len(rows) // self.replicas * self.replicas]
        return super().split_rows(rows)


class DropsOf20(DataParallel):
    """Drops a row of batches of 20."""

    def split_rows(self, rows: Sequence) -> list[Sequence]:
        *others, last = super().split_rows(rows)
        return [*others, last[1:] if len(rows) == 20 else last]


class Hooked(DDP):
    """Gradients go through `hook` on their way."""

    hook: Callable[..., Any]

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        wrapped: Any = super().wrap(module, training=training)
        if training:
            wrapped.register_comm_hook(None, self.hook)
        return wrapped


class HalfIfFloat32(Hooked):
    """Sends float32 in 16 bits."""

    @staticmethod
    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        is_float32 = bucket.buffer().dtype == torch.float32
        chosen = default_hooks.fp16_compress_hook if is_float32 else default_hooks.allreduce_hook
        return chosen(None, bucket)


class TopKLarge(Hooked):
    """Sends a hundredth of many gradients."""

    @staticmethod
    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        if len(gradients) > 4096:
            least = gradients.abs().topk(len(gradients) // 100).values[-1]
            gradients.mul_(gradients.abs() >= least)
        return default_hooks.allreduce_hook(None, bucket)


class FirstThree(Changed, Strategy):
    """Under accumulation, takes the first three micro-batches of an update."""

    batches, is_taken = 0, True

    def grad_sync(self, is_last: bool) -> None:
        self.is_taken = self.batches < 3
        self.batches = 0 if is_last else self.batches + 1

    def training(self, step: Any, share: Share, of: float) -> Any:
        loss, measured = step(share, of)
        return loss * float(self.is_taken), measured


# Evaluation, and random numbers


class EvalHalf(Changed, DataParallel):
    """Validates and predicts in half precision."""

    def evaluation(self, step: Any, share: Share) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(share)


class EvalTrains(Changed, DataParallel):
    """Validates and predicts in training mode."""

    def evaluation(self, step: Any, share: Share) -> Any:
        return step.train()(share)


class BuffersApart(DDP):
    """Every rank keeps the running statistics of its own rows."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings, broadcast_buffers=False)

    def sync_weights(self, for_reading: bool) -> None: ...


class MovesTwice(DataParallel):
    """Each replica moves the running statistics that they share."""

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        replicas = Replicas(module, self.places)
        replicas.buffers_at.clear()
        return replicas


class SameMasks(Changed, DDP):
    """Seeds each step, in all ranks alike."""

    def training(self, step: Any, share: Share, of: float) -> Any:
        step.calls = getattr(step, "calls", 0) + 1
        torch.manual_seed(step.calls)
        return step(share, of)


class RandomStateLost(Changed, Strategy):
    """Seeds when training begins, in a resumed run, too."""

    def training(self, step: Any, share: Share, of: float) -> Any:
        if not hasattr(step, "has_begun"):
            torch.manual_seed(1)
        step.has_begun = True
        return step(share, of)


class KeepsRows(GroupCollectives):
    def broadcast(self, value: Any) -> Any:
        is_rows = isinstance(value, list) and all(isinstance(part, int) for part in value)
        return value if value and is_rows else super().broadcast(value)


class ShareNumbers(DDP):
    """Takes rows to be the same in all ranks, as those of a sampler mostly are."""

    collectives_type = KeepsRows


# Who does what


class LogsEverywhere(DDP):
    def logger(self, loggers: list[Logger]) -> list[Logger]:
        return loggers


class NeverQuiet(DDP):
    """Shares the gradients of every micro-batch: the numbers are right, the network is not."""

    def grad_sync(self, is_last: bool) -> None: ...


class GathersBackwards(GroupCollectives):
    def gather(self, value: Any) -> list[Any]:
        return super().gather(value)[::-1]


class Backwards(DDP):
    collectives_type = GathersBackwards


class AllMain(DDP):
    is_main = True  # type: ignore[assignment]


class ForgetsToReturn(Strategy):
    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        run(*args)


class NeverRuns(Strategy):
    def launch(self, run: Callable[..., Any], *args: Any) -> Any: ...


class WrapsInPlace(Strategy):
    """What is wrapped within the task has other names in its checkpoints."""

    def wrap(self, module: Any, *, training: bool) -> nn.Module:
        if training and hasattr(module.task, "net"):
            module.task.net = Around(module.task.net, lambda net, *inputs: net(*inputs))
        return module


class ForgetsItsState(Strategy):
    """Resumes from other weights than it saved."""

    def load_state_dict(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.5)


# The end


class LeavesThings(Strategy):
    """A process, a port and a variable."""

    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        return run(*args)

    def setup(self) -> None:
        super().setup()
        LEFT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        LEFT.append(socket.create_server(("127.0.0.1", 0)))


class LeavesThreadInRanks(DDP):
    def setup(self) -> None:
        super().setup()
        threading.Thread(target=time.sleep, args=(600,), name="watcher", daemon=True).start()


class GathersTooLate(GroupCollectives):
    def gather(self, value: Any) -> list[Any]:
        if self.rank == 1:
            time.sleep(600)
        return super().gather(value)


class Hangs(DDP):
    collectives_type = GathersTooLate


LEFT: list[Any] = []  # what a test has to put away
