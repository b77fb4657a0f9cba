"""Averages of the weights over training: an exponential one, or that of the last epochs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from dpframe import checkpoint
from dpframe.callbacks.monitor import count_in
from dpframe.errors import UserError
from dpframe.trainer.callback import Callback
from dpframe.values import check_type, refuse_below

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

MultiAverage = Callable[[list[Tensor], list[Tensor], int], None]
"""Of torch: takes the averages, the new values, and how many were averaged before."""
HALVES = (torch.float16, torch.bfloat16)


class Average(Callback):
    """Training goes on with the weights; validations, and the task after training, have their
    average. A checkpoint holds it as `averaged`, which all but a resume load."""

    key: str  # in the config, for the errors
    has_buffers = False  # whether running statistics are averaged, too

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A task that was trained before keeps the average that it has."""
        self.count = 0  # how many were averaged
        self.known: list[Tensor] = []  # of the task
        self.tensors: list[Tensor] = []  # the same, or the parts that this process keeps
        self.averages: list[Tensor] = []  # or, while these are in the task, what was there before
        self.is_in = False
        self.is_cut = False  # the strategy keeps parts

    def make_update(self) -> MultiAverage:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Another process has other weights."""
        return {**vars(self), "known": [], "tensors": [], "averages": [], "is_in": False}

    def on_fit_start(self, trainer: "Trainer") -> None:
        kinds = [type(c).__name__ for c in trainer.callbacks if isinstance(c, Average)]
        if len(kinds) > 1:
            raise UserError(f"callbacks: {' and '.join(kinds)} can't be combined; keep one")
        for optimizer in trainer.updates.modes.optimizers:
            raise UserError(
                f"{self.key}: {type(optimizer).__name__} averages the weights itself; leave one of "
                "them out"
            )
        self._find(trainer)

    def on_validation_start(self, trainer: "Trainer") -> None:
        if trainer.mode == "fit" and self.count:
            self._swap()
            # Running statistics are each rank's own.
            trainer.strategy.sync_weights(for_reading=True)

    def on_validation_end(self, trainer: "Trainer") -> None:
        if trainer.mode == "fit" and self.is_in:
            self._swap()

    def on_fit_end(self, trainer: "Trainer") -> None:
        if self.count and not self.is_in:
            self._swap()
            trainer.strategy.sync_weights(for_reading=True)

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        if self.is_in:
            self._swap()

    def on_save(self, trainer: "Trainer", state: dict[str, Any]) -> None:
        if self.count:
            with self._swapped():
                other = trainer.task.state_dict()
                if self.is_cut:  # the numbers are about to be exchanged again
                    other = {n: v.clone() if isinstance(v, Tensor) else v for n, v in other.items()}
            weights = state["task"]
            state["task"], state["averaged"] = (other, weights) if self.is_in else (weights, other)

    def on_load(self, trainer: "Trainer", state: dict[str, Any]) -> None:
        self._find(trainer)
        self.is_in = False  # a fit before has left the average there, and its weights are replaced
        if "averaged" not in state:
            self.count = 0
        if not self.count:  # the run, or its callback of this kind, had averaged nothing
            return
        with self._swapped():  # what is not averaged is the same in both
            checkpoint.load_task(trainer.task, state, sharding=trainer.strategy.sharding)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = count_in(state, "count", self.key)

    @torch.no_grad()
    def add(self) -> None:
        """Takes the weights as they are now into the average."""
        if not self.count:
            for average, tensor in zip(self.averages, self.tensors, strict=True):
                average.copy_(tensor)
        for kind in {tensor.dtype for tensor in self.tensors} if self.count else ():
            pairs = zip(self.averages, self.tensors, strict=True)
            of_kind = [(average, tensor) for average, tensor in pairs if tensor.dtype == kind]
            averages, tensors = map(list, zip(*of_kind, strict=True))
            self.make_update()(averages, tensors, self.count)
        self.count += 1

    def _find(self, trainer: "Trainer") -> None:
        task = trainer.task
        tensors = [*task.parameters(), *(task.buffers() if self.has_buffers else ())]
        tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        for tensor in tensors:
            if tensor.dtype in HALVES:
                raise UserError(
                    f"{self.key}: an average of weights that are {tensor.dtype} would lose its "
                    "small steps; use trainer.precision=bf16, whose weights are float32"
                )
        if [*map(id, tensors)] == [*map(id, self.known)]:
            return  # a resume has found them
        sharding = trainer.strategy.sharding
        self.is_cut, self.known, self.tensors = sharding.cuts, tensors, tensors
        if sharding.cuts:
            self.tensors = [sharding.local(tensor.detach()) for tensor in tensors]
        self.averages = [tensor.detach().clone() for tensor in self.tensors]

    def _swap(self) -> None:
        """Exchanges memory, not numbers, where the strategy does not hold on to the memory."""
        for tensor, average in zip(self.tensors, self.averages, strict=True):
            if self.is_cut:
                before = tensor.clone()
                tensor.copy_(average)
                average.copy_(before)
            else:
                tensor.data, average.data = average.data, tensor.data
        self.is_in = not self.is_in

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()


class EMA(Average):
    """An exponential average, which begins with the first weights: of each step's weights,
    1 - `decay` comes in."""

    key = "callbacks.ema"

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__()
        check_type(f"{self.key}.decay", decay, float)
        if not 0 <= decay < 1:
            raise UserError(
                f"{self.key}.decay={decay} is out of range; use 0 or more, and less than 1"
            )
        self.decay = decay

    def make_update(self) -> MultiAverage:
        return get_ema_multi_avg_fn(self.decay)

    def on_fit_start(self, trainer: "Trainer") -> None:
        super().on_fit_start(trainer)
        if not self.count:
            self.add()

    def on_step_end(self, trainer: "Trainer") -> None:
        if not trainer.progress.is_left_out:
            self.add()


class SWA(Average):
    """Stochastic weight averaging: the mean of the weights at the ends of epochs, once
    `start_epoch` epochs are done; or of every `every_n_steps` steps from then on.

    Running statistics are averaged, too.
    """

    key = "callbacks.swa"
    has_buffers = True

    def __init__(self, start_epoch: int = 10, every_n_steps: int | None = None) -> None:
        super().__init__()
        refuse_below(f"{self.key}.start_epoch", start_epoch, 0)
        refuse_below(f"{self.key}.every_n_steps", every_n_steps)
        self.start_epoch = start_epoch
        self.every_n_steps = every_n_steps

    def make_update(self) -> MultiAverage:
        return get_swa_multi_avg_fn()

    def on_fit_start(self, trainer: "Trainer") -> None:
        super().on_fit_start(trainer)
        if self.every_n_steps is None and trainer.feed.batches_per_epoch is None:
            raise UserError(
                f"{self.key}: nothing tells when an epoch of a stream is about to end; set "
                f"{self.key}.every_n_steps"
            )

    def on_step_end(self, trainer: "Trainer") -> None:
        if trainer.epoch < self.start_epoch:
            return
        if self.every_n_steps is not None:
            is_due = trainer.global_step % self.every_n_steps == 0
            is_due &= not trainer.progress.is_left_out
        else:  # before the epoch's validation, which comes before on_epoch_end
            is_due = trainer.progress.batches_done == trainer.feed.batches_in(trainer.epoch)
        if is_due:
            self.add()
