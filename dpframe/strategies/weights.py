"""How each process of a strategy keeps the weights of a task: whole."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from dpframe.checkpoint.plain import Stored


class Weights:
    """What the Trainer asks of a strategy's weights. `Sharding` cuts them: its methods are called
    by every process, and these answer alone."""

    cuts = False  # each process keeps a shard of every weight
    rounds = False  # what it gathers has fewer digits
    keeps_casts = False  # autocast saves copies of whole weights for the backward
    whole_in_hooks = False  # those that may run the task have to be given whole weights
    saves_shards = False  # each process writes its own to a checkpoint
    fused_optimizers: tuple[str, ...] | None = None  # whose fused kernels it takes; None: all

    def building(self) -> AbstractContextManager[None]:
        """Within, each process builds the same task."""
        return nullcontext()

    def cut(self, task: nn.Module, *, has_autocast: bool) -> None:
        """Before its optimizers are made; also moves it to the device."""

    def local(self, tensor: Any) -> Any:
        """This process's part of a weight, a gradient or an optimizer's state."""
        return tensor

    def shard_like(self, whole: Tensor, like: Any) -> Tensor:
        """A tensor, which may be Stored, cut as the weight `like` is."""
        return whole.read() if isinstance(whole, Stored) else whole

    def whole(self, value: Any, *, for_all: bool = False) -> Any:
        """A state with whole tensors in it, on the main process; elsewhere only if it is `for_all`
        where weights are cut."""
        return value

    def total_norm(self, gradients: list[Any]) -> Tensor:
        return get_total_norm(gradients)

    def whole_weights(self, task: nn.Module) -> AbstractContextManager[None]:
        """Within, each process has the whole weights and may call the task by itself."""
        return nullcontext()

    def taking_shards(self) -> AbstractContextManager[None]:
        """Within, a `state_dict()` may have shards in it."""
        return nullcontext()

    def whole_state(self, module: nn.Module) -> dict[str, Any]:
        return module.state_dict()

    def run_alone(self, task: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
        """Calls with the task's whole weights, without a backward."""
        return call(*args)


WHOLE = Weights()
