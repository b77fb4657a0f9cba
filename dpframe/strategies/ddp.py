"""One process a replica: torch's DistributedDataParallel, by NCCL, XCCL, or gloo on the CPU."""

import inspect
import json
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.nn.parallel import DistributedDataParallel

from dpframe.data import Share
from dpframe.errors import UserError, listed
from dpframe.strategies.base import FREEZE_ALIKE
from dpframe.strategies.devices import Gpus
from dpframe.strategies.processes import Processes
from dpframe.values import ABOVE_0, refuse_below

# The same switch, under its newer name where torch has that.
_names = inspect.signature(DistributedDataParallel).parameters
BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _names else "broadcast_buffers"

Changes = dict[str, list[str]]
"""The names of the weights that were frozen, and of those that were thawed."""


class DDP(Processes, takes_logical_shares=True):
    """Ranks that share gradients by DistributedDataParallel."""

    has_alike_weights = True

    def __init__(
        self,
        gpus: Gpus = None,
        accelerator: str = "auto",
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        timeout_seconds: float = 1800,
    ) -> None:
        super().__init__(gpus, accelerator, timeout_seconds=timeout_seconds)
        refuse_below("strategy.bucket_cap_mb", bucket_cap_mb, ABOVE_0, "more than 0")
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            BUFFERS: broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        # By what `wrap` was given; None: it had nothing to train.
        self.wrapped: dict[nn.Module, Wrapped | None] = {}
        self.current: Wrapped | None = None  # the one whose gradients are computed
        self._agreed = 0  # how often
        self._unsynced = ExitStack()  # holds `no_sync` while gradients are only accumulated

    @property
    def module(self) -> Any:
        """The DistributedDataParallel that computes the gradients now, e.g. for a hook on it."""
        return self.current and self.current.module

    @property
    def wants_all_gradients(self) -> bool:  # type: ignore[override]
        return not self.options["find_unused_parameters"]

    def wrap(self, module: nn.Module, *, training: bool) -> nn.Module:
        if not training:
            self.current = None  # a task that steps its optimizers itself has no other
            return module
        if before := self.wrapped.pop(module, None):
            before.let_go()
        self._unsynced.close()
        if not any(weight.requires_grad for weight in module.parameters()):
            self.wrapped[module] = None  # torch refuses it
            return module
        self.current = Wrapped(DistributedDataParallel(module, **self.options))
        self.wrapped[module] = self.current
        return self.current.module

    def begin_step(self, module: Any) -> nn.Module:
        """A reducer knows the weights that were trained when it was made: others need another."""
        inner = getattr(module, "module", module)
        if inner not in self.wrapped:  # a subclass has wrapped it in its own way
            return module
        now = self.wrapped[inner]
        if now is None or now.is_outdated():
            self._agree(
                changes(now.shared, now.frozen)
                if now
                else changes({}, dict(inner.named_parameters()))
            )
            module = self.wrap(inner, training=True)
            now = self.wrapped[inner]
        self.current = now
        if now is not None and not now.is_settled:
            self._settle(now)
        return module

    def _agree(self, mine: Changes) -> None:
        """Before all ranks wrap a module again, as they have frozen or thawed the same weights.

        A rank that has not does not come here: it waits for the others' gradients."""
        if self._store is None or not any(mine.values()):
            return
        keys = [f"trained/{self._agreed}/{rank}" for rank in range(self.world_size)]
        self._agreed += 1
        self._store.set(keys[self.rank], json.dumps(mine))
        said = f"rank {self.rank} has {_in_words(mine)}, and rank %s has %s; {FREEZE_ALIKE}"
        with suppress(DistError):  # one does not come, and is named below
            self._store.wait(keys, timedelta(seconds=self.timeout_seconds / 2))
        for rank, key in enumerate(keys):
            if not self._store.check([key]):
                raise UserError(said % (rank, "not"))
            if (theirs := json.loads(self._store.get(key))) != mine:
                raise UserError(said % (rank, _in_words(theirs)))

    def _settle(self, now: "Wrapped") -> None:
        """Torch puts the gradients into other buckets after the first backward, by the order in
        which they came, and sums over four ranks then round in another way. A first backward of
        zeros gives a resumed run the buckets of the run that it continues."""
        now.is_settled = True
        if self.world_size > 1 and not self.options["find_unused_parameters"]:
            loss, _ = now.module(Share(None, 0, self.world_size), 1.0)
            loss.backward()
            for weight in now.shared.values():
                weight.grad = None

    def grad_sync(self, is_last: bool) -> None:
        assert self.current is not None
        self._unsynced.close()
        if not is_last:
            self._unsynced.enter_context(self.current.module.no_sync())
        self.current.note_arrivals()

    def check_skips(self, accumulate: int) -> None:
        """Torch's reducer keeps which parameters those backwards used, and nothing resets that."""
        if accumulate > 1 and self.options["find_unused_parameters"]:
            raise UserError(
                f"trainer.on_nonfinite=skip with a step of {accumulate} backwards or more: under "
                "strategy.find_unused_parameters=true torch still expects the gradients of those "
                "that were left out; use trainer.accumulate=1 trainer.micro_batch=null, or "
                "strategy=data_parallel"
            )

    def check_gradients(self) -> None:
        """Torch tells at the next forward, when each rank has made an update of its own."""
        now = self.current
        if now is None:
            return
        thawed = [name for name, weight in now.frozen.items() if weight.requires_grad]
        if thawed and self.world_size > 1:
            raise UserError(
                f"thawed within this step: {_list(thawed)}; the ranks don't share these "
                "gradients; set requires_grad in a hook, e.g. on_epoch_start, not in training_step"
            )
        if self.options["find_unused_parameters"]:
            return
        if lacking := now.lacking():
            raise UserError(
                f"no gradient in this step on rank {self.rank}: {_list(lacking)}; the ranks "
                "can't share theirs; set strategy.find_unused_parameters=true where a step may "
                "leave out parameters"
            )

    @torch.no_grad()
    def sync_weights(self, for_reading: bool) -> None:
        """The weights are the same on all ranks. The buffers (running statistics) are each rank's
        own since its last forward: the main one's count."""
        if for_reading and self.current is not None:
            self.collectives.broadcast_tensors(self.current.module.buffers())

    def close(self) -> None:
        self._unsynced.close()
        for wrapped in filter(None, self.wrapped.values()):
            wrapped.let_go()
        self.wrapped.clear()
        self.current = None
        super().close()


class Wrapped:
    """A module in DistributedDataParallel, and the weights whose gradients the ranks share."""

    def __init__(self, module: Any) -> None:
        self.module = module
        named = list(module.module.named_parameters())
        self.shared = {name: weight for name, weight in named if weight.requires_grad}
        self.frozen = {name: weight for name, weight in named if not weight.requires_grad}
        self.is_settled = False  # whether its buckets are the last ones
        self._trained = list(self.shared.values())
        self._hooks: list[Any] = []  # on weights, once there is accumulation
        self._arrived: set[str] = set()  # whose gradients came in the last backward

    def is_outdated(self) -> bool:
        """Whether weights were thawed or frozen since."""
        for weight in self._trained:
            if not weight.requires_grad:
                return True
        return any(weight.requires_grad for weight in self.frozen.values())

    def note_arrivals(self) -> None:
        if not self._hooks:
            for name, weight in self.shared.items():
                note = partial(_note, self._arrived, name)
                self._hooks.append(weight.register_post_accumulate_grad_hook(note))
        self._arrived.clear()

    def lacking(self) -> list[str]:
        """The weights that got no gradient in the last backward."""
        if self._hooks:  # under accumulation the gradients of an earlier batch may be there
            if not self._arrived:  # a share without rows, or of weight 0
                return []
            return [name for name in self.shared if name not in self._arrived]
        return [name for name, weight in self.shared.items() if weight.grad is None]

    def let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # The reducer goes first: were it the last to hold the process group, its destructor
        # would join gloo's thread under the GIL, for which that thread may be waiting.
        self.module.logger = self.module.reducer = None


def changes(trained: dict[str, Tensor], frozen: dict[str, Tensor]) -> Changes:
    """Which weights were frozen or thawed, of those that were trained or frozen before."""
    return {
        "frozen": [name for name, weight in trained.items() if not weight.requires_grad],
        "thawed": [name for name, weight in frozen.items() if weight.requires_grad],
    }


def _in_words(made: Changes) -> str:
    return " and ".join(f"{what} {_list(names)}" for what, names in made.items() if names)


def _note(arrived: set[str], name: str, weight: Tensor) -> None:
    arrived.add(name)


def _list(names: list[str]) -> str:
    """The first few, by the task's names."""
    return listed((name.removeprefix("task.") for name in names), 3)
