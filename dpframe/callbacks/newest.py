"""The loss of the newest step, as it is shown: read without waiting for a device."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dpframe.checkpoint.snapshot import Snapshot
from dpframe.devices.accelerator import has_streams

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

Measured = Sequence[tuple[int, Mapping[str, Any]]]
"""The rows of each share, and what the step returned for it."""


class NewestLoss:
    """That of this process's rows. A GPU copies it beside its work, and it is shown once it is
    there; a device that would have to be waited for shows none."""

    def __init__(self) -> None:
        self._shown: dict[str, float] = {}
        self._snapshot: Snapshot | None = None  # of a step whose loss is on its way
        self._copies: dict[str, list[tuple[Any, Any]]] = {}  # its losses, each with its weight

    def beside(self, trainer: "Trainer", numbers: Mapping[str, float]) -> dict[str, float]:
        """First the newest losses, then the numbers that are no means of these."""
        newest = self.read(trainer.training.newest)
        means = {f"{group}/{name}" for name in newest for group in ("step", "train")}
        return newest | {name: value for name, value in numbers.items() if name not in means}

    def read(self, newest: Mapping[str, Measured]) -> dict[str, float]:
        """`newest` is by the names of the optimizers; one alone has the name ""."""
        self._take()
        if self._snapshot is None:
            self._snapshot = Snapshot()
            self._copies = {
                f"{name}/loss".strip("/"): [
                    (self._copy(output["loss"]), self._copy(output.get("weight", rows)))
                    for rows, output in measured
                    if _is_readable(output.get("loss"))
                ]
                for name, measured in newest.items()
            }
            self._take()
        return self._shown

    def _copy(self, value: Any) -> Any:
        assert self._snapshot is not None
        return self._snapshot.copy_in_turn(value) if isinstance(value, Tensor) else value

    def _take(self) -> None:
        if self._snapshot is None or not self._snapshot.is_done:
            return
        self._snapshot = None
        for name, pairs in self._copies.items():
            numbers = [(float(loss), float(weight)) for loss, weight in pairs if float(weight)]
            if numbers:
                total = sum(weight for _, weight in numbers)
                self._shown[name] = sum(loss * weight for loss, weight in numbers) / total


def _is_readable(loss: Any) -> bool:
    return isinstance(loss, Tensor) and (loss.device.type == "cpu" or has_streams(loss.device))
