"""`dpframe.run`: what the command does, from Python; in a notebook with one live line."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe.callbacks.live import is_notebook
from dpframe.config import modes
from dpframe.config.compose import Composed, composed, hydra_kept
from dpframe.config.loader import quoted
from dpframe.config.schema import is_off
from dpframe.errors import UserError
from dpframe.values import shown

if TYPE_CHECKING:
    from dpframe.task import Task

ALONE = threading.RLock()  # Hydra's config and torch's random numbers are all threads' own
BAR, LINE = "dpframe.callbacks.progress.Progress", "dpframe.callbacks.live.Live"


@dataclass
class Result:
    """What a run came to. `history` has a row for each logged step: pandas.DataFrame takes it."""

    metrics: dict[str, float]
    history: list[dict[str, float]]
    directory: str
    checkpoint: str | None  # the best one, or the last
    summary: dict[str, Any]  # as in summary.json
    job: Composed = field(repr=False)

    @cached_property
    def task(self) -> "Task":
        """The task with the weights of `checkpoint`, on the CPU, in evaluation mode."""
        from dpframe import checkpoint
        from dpframe.config.load import trained

        if self.checkpoint is None:
            raise UserError(
                "this run has kept no weights; leave callbacks.checkpoint as it is, or pass "
                "checkpoint=FILE"
            )
        return trained(self.job, checkpoint.load(Path(self.checkpoint)))


def run(*overrides: str, config_dir: str | None = None, **settings: Any) -> Result:
    """One run, as the command makes it: `dpframe.run("recipe=boston", "trainer.gpus=2")`, or
    `dpframe.run(recipe="boston", trainer={"gpus": 2})`. What the command prints as an error is
    raised as a UserError. Ranks have processes of their own. Runs of several threads come one after
    another."""
    for word in overrides:
        if not isinstance(word, str) or word.startswith("-"):
            raise UserError(
                f"dpframe.run: {word!r} is not an override; pass key=value texts and "
                "config_dir=DIR; for several values call it once for each"
            )
    with ALONE, hydra_kept():
        job = composed([*overrides, *typed(settings)], config_dir=config_dir)
        summary = _run(job)
    return Result(
        metrics=summary.get("metrics", {}),
        history=summary.pop("history", []),
        directory=summary.get("directory", ""),
        checkpoint=summary.get("checkpoint"),
        summary=summary,
        job=job,
    )


def _run(job: Composed) -> dict[str, Any]:
    # These import torch: only now that the config is known to be good.
    from dpframe.config.build import build, check_targets
    from dpframe.launch import interpreter
    from dpframe.loggers.history import History
    from dpframe.modes.run import run as run_job
    from dpframe.seeding import seeded
    from dpframe.strategies import Strategy

    job.history = History()
    if is_notebook():
        _draw_line(job.settings.callbacks)
    check_targets(job)
    strategy = build(job.config["strategy"], "strategy", Strategy)
    mode = job.settings.mode
    if strategy.needs_launch or not (mode == "fit" or modes.evaluates(mode)):
        return interpreter.call(run_job, job)
    with seeded(job.settings.seed):
        return run_job(job, owns_process=False)


def typed(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`{"trainer": {"gpus": [0, 1]}}` as one types it: `trainer.gpus=[0,1]`."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value and "_target_" not in value:
            yield from typed(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_text(part)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    is_plain = value is None or isinstance(value, bool | Number)  # NumPy's, too
    return shown(value) if is_plain else quoted(str(value))


def _draw_line(callbacks: dict[str, Any]) -> None:
    for name, node in callbacks.items():
        if not is_off(node) and node["_target_"] == BAR and node.get("bar", "auto") == "auto":
            callbacks[name] = {"_target_": LINE}
