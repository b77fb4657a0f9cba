"""All that decides the rest of training: a checkpoint holds it, and a run goes on from it."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dpframe import checkpoint, seeding
from dpframe.checkpoint import seal
from dpframe.errors import UserError
from dpframe.metrics import Means
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.callback import Callback
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.optim.state import Mismatch
from dpframe.trainer.optim.turns import Turns
from dpframe.trainer.progress import Progress
from dpframe.trainer.resume.attributes import Attributes, load, of_process
from dpframe.trainer.resume.fingerprint import Fingerprint, differences
from dpframe.trainer.task_metrics import TaskMetrics
from dpframe.values import check_type

Start = dict[str, Any] | str | os.PathLike[str] | None
"""What a run resumes from: a checkpoint's state, its file, or `last`."""
NEEDED = ("fingerprint", "optimizer", "progress", "metrics", "callbacks", "random")


@dataclass(frozen=True)
class Resumable:
    """The parts that have such a state. Every process captures and restores together."""

    task: Task
    strategy: Strategy
    feed: TrainingData
    updates: Turns
    means: Means
    task_metrics: TaskMetrics
    callbacks: Sequence[Callback]
    progress: Progress
    attributes: Attributes
    devices: list[torch.device]  # of this process
    seed: int
    recipe: str
    fingerprint: Fingerprint
    own: str  # what each replica has of its own, which changes the curve

    def capture(self, metrics: Mapping[str, float], logged: Mapping[str, float]) -> dict[str, Any]:
        """`logged` are the numbers of this step that the loggers have. Of tensors that are sharded
        each process has its own shards."""
        strategy, progress = self.strategy, self.progress
        # Random numbers and sums start again with each epoch: only within one is there a state.
        own: dict[str, Any] = {"attributes": self.attributes.state_dict()}
        self.attributes.warn_once(strategy.is_main)
        if done := progress.batches_done:
            own |= {
                "random": seeding.random_state(self.devices),
                "means": self.means.state_dict(),
                "task_metrics": self.task_metrics.state_dict(),
            }
        if (place := self.feed.train.place(done)) is not None:
            own["stream"] = place
        of_ranks = self._gathered(own)
        with self.updates.modes.training():
            trained = {
                **self.updates.modes.both(self.task),
                **self.updates.state_dict(),
                "strategy": {
                    strategy.name: self.updates.each(lambda u: strategy.state_dict(u.optimizer))
                },
            }
        return {
            "recipe": self.recipe,
            "fingerprint": json.dumps(self.fingerprint),
            **trained,
            "progress": {
                **progress.state_dict(),
                "means": of_ranks.get("means", []),
                "task_metrics": of_ranks.get("task_metrics", []),
                "logged": dict(logged),
            },
            "metrics": dict(metrics),
            "callbacks": {n: callback.state_dict() for n, callback in named(self.callbacks)},
            "attributes": of_ranks.get("attributes", []),
            "random": of_ranks.get("random", []),
            "stream": of_ranks.get("stream", []),
            "replicas": {"count": strategy.replicas, "own": self.own},
        }

    def _gathered(self, own: dict[str, Any]) -> dict[str, list[Any]]:
        """Lists over the processes by name, on the main one."""
        everywhere = self.strategy.collectives.gather(own)
        names = dict.fromkeys(chain.from_iterable(everywhere))
        return {name: [each[name] for each in everywhere if name in each] for name in names}

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Loads a checked state; returns what could not be as it was."""
        strategy, progress = self.strategy, self.progress
        rank, world_size = strategy.rank, strategy.world_size
        checkpoint.load_task(self.task, state, is_resumed=True, sharding=strategy.sharding)
        with refusing(state):
            of_strategy = state["strategy"].get(strategy.name, {})
            for name, update in self.updates.items():
                update.load_state_dict(state)
                kept = of_strategy.get(name, {}) if name else of_strategy
                strategy.load_state_dict(kept, update.optimizer)
            progress.load_state_dict(state["progress"])
            for name, part in (("means", self.means), ("task_metrics", self.task_metrics)):
                part.load_state_dict(state["progress"][name], rank=rank, world_size=world_size)
            for name, value in state["progress"]["logged"].items():
                if type(value) not in (int, float):
                    raise TypeError(f"{name}={str(value)[:200]} was logged")
        begun = self._restore_callbacks(state["callbacks"])
        with refusing(state):
            own, changes = of_process(state["attributes"], rank, world_size)
            self.attributes.load_state_dict(own)
            batch_size = int(json.loads(state["fingerprint"])["data.batch_size"])
            place = self._restore_place(state, batch_size)
            return [*begun, *changes, *place]

    def _restore_callbacks(self, states: dict[str, dict[str, Any]]) -> list[str]:
        """One that watches something else than those of its class did begins afresh."""
        begun = []
        for name, callback in named(self.callbacks):
            kind = type(callback).__name__
            if of_callback := states.get(name):
                callback.load_state_dict(of_callback)
            elif any(other.startswith(f"{kind} ") for other in states):
                callback.reset()
                begun.append(f"{name} begins afresh")
        return begun

    def _restore_place(self, state: dict[str, Any], batch_size: int) -> list[str]:
        """The random numbers and the place in the data; what could not be as it was."""
        strategy, progress, devices = self.strategy, self.progress, self.devices
        processes, changes = len(state["random"]), []
        if processes and strategy.has_fixed_shares:  # all drew the same
            seeding.restore_random_state(state["random"][0], devices)
        elif processes == strategy.world_size:
            seeding.restore_random_state(state["random"][strategy.rank], devices)
        elif progress.batches_done:
            changes = [f"random numbers of {processes} processes there, {strategy.world_size} here"]
            seed = seeding.mix(self.seed, strategy.rank, progress.global_step)
            seeding.seed_everything(seed, devices)
        there = state["replicas"]
        own = str(self.own or there["own"])
        if progress.batches_done and own and there["count"] != strategy.replicas:
            changes.append(
                f"replicas={there['count']} there, {strategy.replicas} here, within an epoch, so "
                f"the curve changes from here on: {own}"
            )
        self.feed.train.seek(state["stream"], strategy.world_size)
        # As many rows of the epoch are skipped as were read, or a part of a batch less.
        if now := self.feed.source.batch_size:
            progress.batches_done = progress.batches_done * batch_size // now
        return changes


def start_state(resume: Start, directory: str, *, whole: bool) -> dict[str, Any] | None:
    """The state that a run resumes from."""
    if resume is None or isinstance(resume, dict):
        return resume
    check_type("resume", resume, str | os.PathLike)
    if resume != "last":
        return checkpoint.load(Path(resume), key="resume", whole=whole)
    folder = Path(directory) / "checkpoints"
    newest = seal.newest_good(folder) if directory else None
    if newest is None:
        where = (
            f"there is no whole checkpoint in {folder}" if directory else "this run has no files"
        )
        raise UserError(
            f"resume=last: {where}; pass a file, or run=RunInfo(directory=…) of that run"
        )
    return checkpoint.load(newest, key="resume", whole=whole)


def load_attributes(task: Task, state: Mapping[str, Any], strategy: Strategy) -> list[str]:
    """Those that steps had changed, of a task to evaluate; returns what is not as it was there."""
    with refusing(state, key="checkpoint"):
        states = state.get("attributes", [])
        own, changes = of_process(states, strategy.rank, strategy.world_size)
        load(task, own)
    return changes


def changes_since(state: Mapping[str, Any], now: Fingerprint, *, anyway: bool) -> list[str]:
    """What has changed since the checkpoint; refused unless `anyway`."""
    with refusing(state):
        if missing := [name for name in NEEDED if name not in state]:
            raise Mismatch(f"it has no {' and no '.join(missing)}")
        parts = {name: state[name] for name in ("progress", "metrics", "callbacks")}
        for name, value in (*parts.items(), *state["callbacks"].items()):
            if not isinstance(value, dict):
                raise TypeError(f"{name} is {str(value)[:200]}")
        changes = differences(json.loads(state["fingerprint"]), now)
    if changes and not anyway:
        raise UserError(
            f"resume: this run differs from the one that it would continue: {'; '.join(changes)}; "
            "set back what has changed, or set resume_anyway=true"
        )
    return changes


@contextmanager
def refusing(state: Mapping[str, Any], *, key: str = "resume") -> Iterator[None]:
    """A file that is whole may still hold anything: what can't be restored from it is one line."""
    try:
        yield
    except Mismatch as e:
        raise UserError(
            f"resume={state.get('file', '')}: {e}; use checkpoint=FILE to start a new run from its "
            "weights"
        ) from e
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise UserError(
            f"{key}={state.get('file', '')} has what this run would not have written: "
            f"{type(e).__name__}: {e}; use another checkpoint"
        ) from e


def named(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Callbacks by their class and what they watch; a second one of the same gets a number."""
    count: dict[str, int] = {}
    for callback in callbacks:
        name = f"{type(callback).__name__} {callback.watches}".strip()
        count[name] = count.get(name, 0) + 1
        yield (name if count[name] == 1 else f"{name}-{count[name]}"), callback
