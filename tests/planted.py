"""Strategies that err on purpose, each in one way that a plugin might."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpframe import Logger, Strategy
from dpframe.data import Share
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import DDP

# The numbers


class MeanOfMeans(DDP):
    """Forgets that the shares have different numbers of rows."""

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        return super().wrap(Unweighted(module) if training else module, training=training)


class Unweighted(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, share: Share, of: float) -> Any:
        return self.module(share, float(share.rows or 1))


class Padded(DDP):
    """Fills the shares up to one size, as a DistributedSampler does."""

    def shares(self, rows: Sequence) -> list[Sequence]:
        size = -(-len(rows) // self.world_size)
        whole = [rows[place % len(rows)] for place in range(size * self.world_size)]
        return [torch.stack(whole[self.rank * size : (self.rank + 1) * size])]  # type: ignore


class Unshared(DDP):
    """Every rank trains by itself."""

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        return module

    def grad_sync(self, is_last: bool) -> None: ...


class SaysAveraged(DataParallel):
    """Replicas of one process are summed, and this says that they are averaged."""

    def setup(self) -> None:
        super().setup()
        self.averaged_over = self.replicas


class Averages(DDP):
    """The mean over the processes in place of the sum."""

    def reduce(self, tensor: Tensor) -> Tensor:
        return super().reduce(tensor) / self.world_size


class SharesTheMains(DDP):
    """The main process's numbers in place of the sum."""

    def reduce(self, tensor: Tensor) -> Tensor:
        return self.share(tensor)


class EvenMeans(DataParallel):
    """A replica's mean counts one, however many rows it had."""

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        return super().wrap(module if training else Even(module), training=training)


class Even(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.combine = module.combine

    def forward(self, share: Share) -> list[tuple[int, Any]]:
        return [(1, output) for _, output in self.module(share)]


class Rounds(Strategy):
    """Keeps the losses in half the digits."""

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        return Rounded(module) if training else module


class Rounded(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, share: Share, of: float) -> Any:
        loss, measured = self.module(share, of)
        return loss * (1 + 1e-7), measured


# Who does what


class LogsEverywhere(DDP):
    def logger(self, loggers: list[Logger]) -> list[Logger]:
        return loggers


class NeverQuiet(DDP):
    """Shares the gradients of every micro-batch: the numbers are right, the network is not."""

    def grad_sync(self, is_last: bool) -> None: ...


class Backwards(DDP):
    def gather(self, value: Any) -> list[Any]:
        return super().gather(value)[::-1]


class AllMain(DDP):
    is_main = True  # type: ignore[assignment]


class ForgetsToReturn(Strategy):
    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        run(*args)


class WrapsInPlace(Strategy):
    """What is wrapped within the task has other names in its checkpoints."""

    def wrap(self, module: Any, *, training: bool) -> nn.Module:
        if training and hasattr(module.task, "net"):
            module.task.net = Wrapped(module.task.net)
        return module


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class ForgetsItsState(Strategy):
    """Resumes from other weights than it saved."""

    def load_state_dict(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.5)


# The end


class LeavesProcess(Strategy):
    def setup(self) -> None:
        super().setup()
        LEFT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))


class LeavesThreadInRanks(DDP):
    def setup(self) -> None:
        super().setup()
        threading.Thread(target=time.sleep, args=(600,), name="watcher", daemon=True).start()


class LeavesPort(Strategy):
    def setup(self) -> None:
        super().setup()
        LEFT.append(socket.create_server(("127.0.0.1", 0)))


class LeavesVariable(Strategy):
    def launch(self, run: Callable[..., Any], *args: Any) -> Any:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        return run(*args)


class Hangs(DDP):
    def gather(self, value: Any) -> list[Any]:
        if self.rank == 1:
            time.sleep(600)
        return super().gather(value)


LEFT: list[Any] = []  # what a test has to put away
