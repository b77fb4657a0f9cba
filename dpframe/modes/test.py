"""`mode=test`: what a checkpoint comes to on the rows that training never saw."""

from typing import TYPE_CHECKING, Any

from dpframe.config.compose import Composed
from dpframe.modes.validate import warn_of_limits

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

EVALUATES = True


def run(job: Composed) -> dict[str, Any]:
    from dpframe.modes.run import launch

    return launch(job, test)


def test(trainer: "Trainer", job: Composed, directory: str) -> None:
    warn_of_limits(job, "test")
    trainer.test()
