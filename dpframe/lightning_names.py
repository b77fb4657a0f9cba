"""What a task has in Lightning, by the same names: each says what to write here."""

from typing import Any

from torch import nn

from dpframe.errors import UserError

STEP = "return it from the step, e.g. {'loss': loss, 'mae': mae}, or call trainer.log in a hook"
TURNS = (
    "return a dict of optimizers from configure_optimizer, which take turns, or change the "
    "gradients in on_before_step(self, trainer)"
)
CONFIG = "leave it out: the config is saved with each run, and dpframe.load builds the task from it"
INSTEAD = {
    "log": STEP,
    "log_dict": STEP,
    "logger": "use trainer.log_image, trainer.log_text and the like in a hook",
    "trainer": "hooks get it, e.g. on_epoch_start(self, trainer); a step has self.global_step",
    "current_epoch": "use self.epoch",
    "global_rank": "use self.rank",
    "local_rank": "use self.device",
    "automatic_optimization": TURNS,
    "manual_backward": TURNS,
    "optimizers": TURNS,
    "lr_schedulers": "return (optimizer, scheduler) from configure_optimizer",
    "toggle_optimizer": TURNS,
    "untoggle_optimizer": TURNS,
    "clip_gradients": "set trainer.clip_norm or trainer.clip_value",
    "save_hyperparameters": CONFIG,
    "hparams": "keep the arguments of __init__ as attributes of your own",
}


class Instead:
    """Is read where a task has nothing of its own under this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, task: Any, kind: type) -> Any:
        if task is None:
            return self
        try:
            return nn.Module.__getattr__(task, self.name)  # a submodule of this name
        except AttributeError:
            raise refusal(kind, self.name) from None


def refusal(kind: type, name: str) -> UserError:
    return UserError(f"{kind.__name__}.{name} is Lightning's and not here; {INSTEAD[name]}")
