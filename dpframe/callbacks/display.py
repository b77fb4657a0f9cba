"""What a program's Trainer shows: one line in a notebook, a bar on a terminal."""

from dpframe.callbacks.live import Live, is_notebook
from dpframe.callbacks.progress import Progress
from dpframe.trainer.callback import Callback
from dpframe.util.terminal import can_redraw


def display(callbacks: list[Callback], *, is_wanted: bool) -> list[Callback]:
    """What is added to the callbacks; elsewhere lines of epochs if it `is_wanted`."""
    if any(isinstance(each, Progress | Live) for each in callbacks):
        return []
    if is_notebook():
        return [Live()]
    return [Progress()] if is_wanted or can_redraw() else []
