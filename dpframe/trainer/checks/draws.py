"""Which random numbers a step draws by torch, and their sizes."""

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


class DrawRecorder(TorchFunctionMode):
    """Notes what is drawn within, from torch's generators or from one that is passed; but for what
    is drawn for all rows of a batch, e.g. by `self.randn_rows`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.seen: list[Drawn] = []
        self._device = device
        self._known = self._states()
        self._before = [self._known]  # all there were
        self._seed = torch.initial_seed()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__":  # an attribute
            return function(*args, **kwargs)
        if not all(map(torch.equal, self._known, now := self._states())):
            self._note_unseen(now)
        result = function(*args, **kwargs)
        generator, now = kwargs.get("generator"), self._states()
        has_drawn = any(not torch.equal(a, b) for a, b in zip(self._known, now, strict=True))
        if has_drawn or not isinstance(generator, DrawnForAll | None):
            size = tuple(result.shape) if isinstance(result, Tensor) else None
            self.seen.append(Drawn(name, size, _calling_module()))
            self._before.append(now)
        self._known = now
        return result

    def _note_unseen(self, now: list[Tensor]) -> None:
        """What was drawn by no function that a mode sees, e.g. in a scripted module; to set a seed,
        or a state of before, draws nothing."""
        seed = torch.initial_seed()
        is_set = seed != self._seed or any(all(map(torch.equal, was, now)) for was in self._before)
        if not is_set:
            self.seen.append(Drawn("a call outside of torch's functions", None, _calling_module()))
        self._known, self._seed = now, seed
        self._before.append(now)

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
