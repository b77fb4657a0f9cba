"""Random numbers that are alike for each row, so that rows can be compared in other company."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpframe.rows import DrawnForAll

BY_SIZE = {"rand", "randn", "randint", "randn_like", "rand_like", "randint_like"}
IN_PLACE = {
    *("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"),
    *("geometric_", "random_"),
}
BY_VALUE = {
    *("normal", "bernoulli", "poisson", "multinomial", "dropout", "alpha_dropout"),
    *("feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu", "gumbel_softmax"),
}


class NotCompared(Exception):
    """Why something can't be compared."""


class AlikeDraws(TorchFunctionMode):
    """Within, what torch draws for each of `rows` rows is the same for all of them: it is drawn
    for each from the same state. Other draws, whose first dimension is not the rows, stay as they
    are."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        self.rows = rows
        self.device = device
        self.draws = False  # whether anything has been drawn
        self.shapes: list[Any] = []  # of what each draw gave a row; None for one that has no rows
        self.known = self._state()  # after the last draw that was seen

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name == "randperm":
            raise NotCompared("it draws an order of rows")
        if name not in BY_SIZE | IN_PLACE | BY_VALUE or isinstance(
            kwargs.get("generator"), DrawnForAll
        ):
            return function(*args, **kwargs)
        self.refuse_unseen()
        drawn = self._drawn(name, function, args, kwargs)
        if self._has_drawn() and kwargs.get("generator") is None:
            self.shapes.append(drawn.shape[1:] if self._by_row else None)
        self.draws |= self._has_drawn() or kwargs.get("generator") is not None
        self.known = self._state()
        return drawn

    def refuse_unseen(self) -> None:
        """By a fused kernel, say, whose draws are not by row."""
        if self._has_drawn():
            raise NotCompared("it draws random numbers that have no rows")

    def _has_drawn(self) -> bool:
        now = self._state()
        return any(not torch.equal(a, b) for a, b in zip(self.known, now, strict=True))

    def _drawn(self, name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        first: Any = args[0] if args else kwargs.get("input", kwargs.get("size"))
        self._by_row = True
        if self._has_rows(first):

            def draw(row: int) -> Any:
                cut = [x[row : row + 1] if self._has_rows(x) else x for x in args]
                return function(*cut, **kwargs)

            drawn = self._for_each_row(kwargs, draw)
            return first if name in IN_PLACE else torch.cat(drawn)
        of_one = self._of_one_row(name, args)
        if of_one is None:
            self._by_row = False
            return function(*args, **kwargs)
        drawn = function(*of_one, **kwargs)
        return drawn.expand(self.rows, *drawn.shape[1:]).clone()

    def _of_one_row(self, name: str, args: Sequence[Any]) -> list[Any] | None:
        """The arguments of a function that takes a size, for one row of it."""
        if name not in BY_SIZE or any(isinstance(each, Tensor) for each in args):
            return None
        for at, each in enumerate(args):
            if isinstance(each, list | tuple) and len(each) and each[0] == self.rows:
                return [*args[:at], (1, *each[1:]), *args[at + 1 :]]
        is_by_numbers = name in ("rand", "randn") and args and args[0] == self.rows
        return [1, *args[1:]] if is_by_numbers else None

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == self.rows

    def _for_each_row(self, kwargs: Mapping[str, Any], draw: Callable[[int], Any]) -> list[Any]:
        """What each row draws from the state as it is."""
        generator = kwargs.get("generator")
        before = self._state() if generator is None else [generator.get_state()]
        drawn = []
        for row in range(self.rows):
            if generator is None:
                self._restore(before)
            else:
                generator.set_state(before[0])
            drawn.append(draw(row))
        return drawn

    def _state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return states

    def _restore(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(states[1], self.device)
