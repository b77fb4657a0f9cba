"""One process on one GPU; `trainer.gpus=[2]` picks the card."""

from dpframe.errors import UserError
from dpframe.strategies.base import Strategy
from dpframe.strategies.devices import announce, rehearsal


class SingleGPU(Strategy):
    def setup(self) -> None:
        count = len(self.gpus) if isinstance(self.gpus, list) else self.gpus or 1
        if count != 1:
            raise UserError(
                f"trainer.gpus={self.gpus} but strategy=single_gpu is one replica; "
                "name one card, as trainer.gpus=[0], or use strategy=ddp"
            )
        super().setup()
        announce(rehearsal([self.device], count, self.accelerator, kind="process"))
