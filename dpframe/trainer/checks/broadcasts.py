"""Where a step makes a matrix of two columns of rows, which is seldom meant: [n, 1] and [n]."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Broadcasts(TorchFunctionMode):
    """Describes the first one within; `first` is empty where there is none."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first = ""
        self._shapes = {(rows, 1), (rows,)}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [each for each in args[:2] if isinstance(each, Tensor)]
        name = getattr(function, "__name__", "")
        if not self.first and {tuple(each.shape) for each in tensors} == self._shapes:
            shapes = " and ".join(str(list(each.shape)) for each in tensors)
            self.first = f"torch's {name} broadcasts {shapes}: give both one shape"
        return function(*args, **kwargs or {})
