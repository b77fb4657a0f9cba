"""One process on the CPU."""

from dpframe.errors import UserError
from dpframe.strategies.base import Strategy


class CPU(Strategy):
    uses_gpus = False

    def setup(self) -> None:
        count = len(self.gpus) if isinstance(self.gpus, list) else self.gpus
        if (count or 0) > 1:
            raise UserError(
                f"trainer.gpus={self.gpus} but strategy=cpu is one replica; "
                "use strategy=ddp or strategy=data_parallel"
            )
        if self.accelerator == "cuda":
            raise UserError("trainer.accelerator=cuda but strategy=cpu; use strategy=single_gpu")
        self.is_set_up = True
