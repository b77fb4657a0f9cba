"""`mode=fit`: trains, or resumes a training; the default."""

from typing import TYPE_CHECKING, Any

from dpframe.config.compose import Composed

if TYPE_CHECKING:
    from dpframe.trainer import Trainer


def run(job: Composed) -> dict[str, Any]:
    from dpframe.modes.run import launch

    return launch(job, train)


def train(trainer: "Trainer", job: Composed, directory: str) -> None:
    """In each process; `test_after_fit` also tests the best checkpoint."""
    is_tested = job.settings.test_after_fit
    trainer.fit(keep_loggers_open=is_tested)
    if is_tested:
        _test_best(trainer)


def _test_best(trainer: "Trainer") -> None:
    """Tests the weights of the run's best checkpoint, or of its last one."""
    from dpframe import checkpoint
    from dpframe.trainer.resume.state import load_attributes

    strategy = trainer.strategy
    path = strategy.collectives.broadcast(trainer.checkpoint)
    if path is not None:
        if strategy.sharding.saves_shards:
            state = checkpoint.load(path, whole=False)
        else:
            state = strategy.collectives.broadcast(
                checkpoint.load(path) if strategy.is_main else None
            )
        checkpoint.load_task(trainer.task, state, sharding=strategy.sharding)
        load_attributes(trainer.task, state, strategy)
    try:
        trainer.test()
    except BaseException:
        trainer.recorder.close(trainer.metrics, succeeded=False)
        raise
