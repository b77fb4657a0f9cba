"""Which random numbers a step draws by torch, and of which sizes."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpframe.rows import DrawnForAll


class NotCompared(Exception):
    """Why something can't be compared."""


class Drawn(NamedTuple):
    """What a step has drawn."""

    by: str  # the function, e.g. randn
    size: tuple[int, ...] | None  # None of what is no tensor
    module: nn.Module | None  # the innermost one whose method has called it


class Draws(TorchFunctionMode):
    """Notes what is drawn within, from torch's generators or from one that is passed; but for what
    is drawn for all rows of a batch, e.g. by `self.randn_rows`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.seen: list[Drawn] = []
        self._device = device
        self._known = self._states()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name == "__get__":  # an attribute
            return result
        generator, now = kwargs.get("generator"), self._states()
        has_drawn = any(not torch.equal(a, b) for a, b in zip(self._known, now, strict=True))
        if has_drawn or not isinstance(generator, DrawnForAll | None):
            size = tuple(result.shape) if isinstance(result, Tensor) else None
            self.seen.append(Drawn(name, size, _calling_module()))
        self._known = now
        return result

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states


def _calling_module() -> nn.Module | None:
    """The innermost one whose method is running. No frame is kept: it would keep the run."""
    frame = inspect.currentframe()
    try:
        while frame is not None:
            frame = frame.f_back
            owner = frame.f_locals.get("self") if frame else None
            if isinstance(owner, nn.Module):
                return owner
        return None
    finally:
        del frame
