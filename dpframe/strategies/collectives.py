"""What the processes of a job do together. The base class is complete for a single process."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class Collectives:
    """Every process calls these in the same order; `rank` is its number, and 0 the main one's."""

    rank = 0
    world_size = 1  # processes

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, on every process. It may write into the tensor."""
        return tensor

    def sum_numbers(self, numbers: list[float]) -> list[float]:
        """Host numbers summed over the processes, without waiting for a device."""
        return numbers

    def sum_in_order(
        self, add: Callable[[list[Tensor]], Tensor], vectors: list[Tensor], counts: list[int]
    ) -> Tensor:
        """`add` of all processes' vectors, in rank order; of each process there are `counts`. It
        adds up element by element, so that it may be called with a part of each vector."""
        return add(vectors)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value in rank order, on the main process; an empty list elsewhere."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The main process's value, on every process."""
        return value

    def once(self, work: Callable[[], object], *, on_each_machine: bool = True) -> None:
        """Calls `work` in the first process of each machine, or in the main one alone. All go on
        when it is done everywhere, however long that takes."""
        work()

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Gives them the main process's values."""
