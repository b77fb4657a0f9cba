"""A Trainer's state as plain containers, and back: a resumed run goes on as if nothing happened."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpframe import checkpoint, seeding
from dpframe.callbacks.base import Callback
from dpframe.errors import UserError
from dpframe.trainer import fingerprint

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

COUNTERS = (
    "global_step",
    "epoch",
    "batches_done",
    "rows_seen",
    "seconds",
    "data_seconds",
    "validated_step",
    "ended_step",
    "skipped_steps",
)
log = logging.getLogger("dpframe")
NEEDED = ("fingerprint", "optimizer", "progress", "metrics", "callbacks", "random")


def of(trainer: "Trainer") -> dict[str, Any]:
    strategy = trainer.strategy
    logged_step, logged = trainer.report.last
    # Each epoch draws and sums anew, so it is only within one that there is anything to go on with.
    here = (seeding.random_state(), trainer.means.state_dict()) if trainer.batches_done else None
    everywhere = [] if here is None else strategy.gather(here)
    return {
        "recipe": trainer.run.recipe,
        "fingerprint": trainer.fingerprint,
        "task": trainer.task.state_dict(),
        **trainer.update.state_dict(),
        "strategy": {strategy.name: strategy.state_dict(trainer.update.optimizer)},
        "progress": {
            **{name: getattr(trainer, name) for name in COUNTERS},
            # A stream's end is not known at its last step: there the run that goes on counts it.
            **({"validated_step": -1} if trainer.is_extra_validation else {}),
            "means": [means for _, means in everywhere],
            "logged": dict(logged) if logged_step == trainer.global_step else {},
        },
        "metrics": dict(trainer.metrics),
        "callbacks": {name: one.state_dict() for name, one in _named(trainer.callbacks)},
        "random": [random for random, _ in everywhere],
    }


def restore(trainer: "Trainer", state: dict[str, Any], *, anyway: bool = False) -> list[str]:
    """What is not as it would have been; refused, unless `anyway`."""
    notes = []
    missing = [name for name in NEEDED if name not in state]
    if missing:
        raise UserError(
            f"resume={state.get('file', '')} has no {' and no '.join(missing)}; "
            "use checkpoint=FILE to start anew from its weights"
        )
    with _told(state):
        _check(state)
        there, here = json.loads(state["fingerprint"]), json.loads(trainer.fingerprint)
        changes = fingerprint.differences(there, here)
    if changes and not anyway:
        raise UserError(
            f"resume: this run is not the one that it would go on with: {'; '.join(changes)}; "
            "give back what there was, or resume_anyway=true"
        )
    checkpoint.load_task(trainer.task, state)
    strategy = trainer.strategy
    with _told(state):
        trainer.update.load_state_dict(state, there, here)
        kept_of_it = state.get("strategy", {}).get(strategy.name, {})
        strategy.load_state_dict(kept_of_it, trainer.update.optimizer)
        for name in COUNTERS:
            setattr(trainer, name, state["progress"][name])
        means = state["progress"]["means"]
        means = [means] if isinstance(means, dict) else means  # earlier versions saved one for all
        trainer.means.load_state_dict(means, rank=strategy.rank, world_size=strategy.world_size)
    trainer.metrics = dict(state["metrics"])
    for name, callback in _named(trainer.callbacks):
        if kept := state["callbacks"].get(name):
            callback.load_state_dict(kept)
    if len(state["random"]) == strategy.world_size:
        with _told(state):
            seeding.restore_random_state(state["random"][strategy.rank])
    elif trainer.batches_done:
        notes.append(f"{len(state['random'])} processes there, {strategy.world_size} here")
        seeding.seed_everything(seeding.mix(trainer.seed, strategy.rank, trainer.global_step))
    if changes:
        # As many rows of the epoch are skipped as were read, or a part of a batch less.
        with _told(state):
            sizes = int(there["data.batch_size"]), here["data.batch_size"]
        trainer.batches_done = trainer.batches_done * sizes[0] // sizes[1]
    return [*changes, *notes]


@contextmanager
def _told(state: dict[str, Any]) -> Iterator[None]:
    """A file that is whole may still hold anything: what can't be taken over is one line."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise UserError(
            f"resume={state.get('file', '')} has what this run would not have written: "
            f"{type(e).__name__}: {e}; use another checkpoint"
        ) from e


def _check(state: dict[str, Any]) -> None:
    """The parts are what they are called; the counters are numbers that count."""
    for name in ("progress", "metrics", "callbacks"):
        if not isinstance(state[name], dict):
            raise TypeError(f"{name} is {str(state[name])[:200]}")
    for name, kept in state["callbacks"].items():
        if not isinstance(kept, dict):
            raise TypeError(f"callbacks.{name} is {str(kept)[:200]}")
    for name in COUNTERS:
        value = state["progress"][name]
        kinds = (int, float) if name.endswith("seconds") else (int,)
        if type(value) not in kinds or not value >= (-1 if name == "validated_step" else 0):
            raise ValueError(f"{name} is {str(value)[:200]}")
    for value in state["progress"]["logged"].values():
        if type(value) not in (int, float):
            raise TypeError(f"{str(value)[:200]} was logged")


def reopen(trainer: "Trainer", state: dict[str, Any], changes: list[str]) -> None:
    """Goes on with the run's curves, and says from where."""
    log.info("resumed at epoch %s, step %s", trainer.epoch, trainer.global_step)
    if changes:
        log.warning("not all is as it was: %s", "; ".join(changes))
    logged = state["progress"]["logged"]
    trainer.report.reopen(trainer.strategy, logged, step=trainer.global_step)


def _named(callbacks: list[Callback]) -> Iterator[tuple[str, Callback]]:
    """By class, with a number for the second of one class."""
    count: dict[str, int] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        count[kind] = count.get(kind, 0) + 1
        yield (kind if count[kind] == 1 else f"{kind}-{count[kind]}"), callback
