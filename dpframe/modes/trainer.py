"""`dpframe.Trainer`: in a program it shows how far it is, as the command does."""

from dpframe import trainer
from dpframe.callbacks.live import Live, is_notebook
from dpframe.callbacks.progress import Progress, can_redraw
from dpframe.trainer.callback import Callback


class Trainer(trainer.Trainer):
    __doc__ = trainer.Trainer.__doc__

    def display(self, callbacks: list[Callback], wanted: bool | None) -> list[Callback]:
        """One line in a notebook, a bar on a terminal; lines of epochs elsewhere if `wanted`."""
        if wanted is False or any(isinstance(each, Progress | Live) for each in callbacks):
            return []
        if is_notebook():
            return [Live()]
        return [Progress()] if wanted or can_redraw() else []
