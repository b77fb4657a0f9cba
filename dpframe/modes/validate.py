"""`mode=validate`: what a checkpoint comes to on the rows for validation."""

import logging
from typing import TYPE_CHECKING, Any

from dpframe.config.compose import Composed

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

EVALUATES = True

log = logging.getLogger("dpframe")


def run(job: Composed) -> dict[str, Any]:
    from dpframe.modes.run import launch

    return launch(job, validate)


def validate(trainer: "Trainer", job: Composed, directory: str) -> None:
    warn_of_limits(job, "val")
    trainer.validate()


def warn_of_limits(job: Composed, kind: str) -> None:
    for key in (f"limit_{kind}_batches", "limit_eval_batches"):
        limit = getattr(job.settings.trainer, key)
        if limit is not None:
            log.warning("trainer.%s=%s: no more batches are read", key, limit)
            break
