"""Histograms of the weights and their gradients."""

from typing import TYPE_CHECKING

from dpframe.trainer.callback import Callback
from dpframe.values import refuse_below

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


class Histograms(Callback):
    """Before every n-th update, of what it is about to change: `weights/net.0.weight` and
    `gradients/net.0.weight`."""

    def __init__(self, every_n_steps: int = 100) -> None:
        refuse_below("callbacks.histograms.every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps

    def on_before_step(self, trainer: "Trainer") -> None:
        sharding = trainer.strategy.sharding
        is_watched = trainer.loggers or sharding.cuts  # then all have to take part
        if trainer.global_step % self.every_n_steps or not is_watched:
            return
        groups = trainer.update.optimizer.param_groups
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in trainer.task.named_parameters():
            if id(parameter) in trained and parameter.requires_grad:
                trainer.log_histogram(f"weights/{name}", sharding.whole(parameter))
                if parameter.grad is not None:
                    gradient = sharding.whole(parameter.grad)
                    if gradient is not None:  # sparse, perhaps
                        gradient = gradient.to_dense()
                    trainer.log_histogram(f"gradients/{name}", gradient)
