"""A Trainer's state as plain containers, and back: a resumed run goes on as if nothing happened."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpframe import checkpoint, seeding
from dpframe.callbacks.base import Callback
from dpframe.errors import UserError

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

COUNTERS = ("global_step", "epoch", "batches_done", "rows_seen", "seconds")


def of(trainer: "Trainer") -> dict[str, Any]:
    strategy = trainer.strategy
    return {
        "recipe": trainer.run.recipe,
        "order": _order(trainer),
        "task": trainer.task.state_dict(),
        **trainer.update.state_dict(),
        "strategy": {strategy.name: strategy.state_dict(trainer.update.optimizer)},
        "progress": {
            **{name: getattr(trainer, name) for name in COUNTERS},
            "means": trainer.means.state_dict(),
        },
        "metrics": dict(trainer.metrics),
        "callbacks": {name: one.state_dict() for name, one in _named(trainer.callbacks)},
        "random": strategy.gather(seeding.random_state()),
    }


def restore(trainer: "Trainer", state: dict[str, Any]) -> None:
    _check_order(trainer, state)
    checkpoint.load_task(trainer.task, state)
    trainer.update.load_state_dict(state)
    strategy = trainer.strategy
    kept_of_it = state.get("strategy", {}).get(strategy.name, {})
    strategy.load_state_dict(kept_of_it, trainer.update.optimizer)
    for name in COUNTERS:
        setattr(trainer, name, state["progress"][name])
    trainer.means.load_state_dict(state["progress"]["means"])
    trainer.metrics = dict(state["metrics"])
    for name, callback in _named(trainer.callbacks):
        if kept := state["callbacks"].get(name):
            callback.load_state_dict(kept)
    if len(state["random"]) == strategy.world_size:
        seeding.restore_random_state(state["random"][strategy.rank])
    else:  # other ranks than there were draw other dropout; all else goes on
        seeding.seed_everything(seeding.mix(trainer.seed, strategy.rank, trainer.global_step))


def _order(trainer: "Trainer") -> dict[str, int]:
    """What decides which rows come next."""
    return {"seed": trainer.seed, "data.batch_size": trainer.data.batch_size}


def _check_order(trainer: "Trainer", state: dict[str, Any]) -> None:
    is_within_epoch = state["progress"]["batches_done"] > 0
    for key, here in _order(trainer).items():
        there = state["order"][key]
        if there != here and (key == "seed" or is_within_epoch):
            raise UserError(
                f"resume: that run had {key}={there}, this one has {key}={here}, and would read "
                f"other rows; give {key}={there}"
            )


def _named(callbacks: list[Callback]) -> Iterator[tuple[str, Callback]]:
    """By class, with a number for the second of one class."""
    count: dict[str, int] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        count[kind] = count.get(kind, 0) + 1
        yield (kind if count[kind] == 1 else f"{kind}-{count[kind]}"), callback
