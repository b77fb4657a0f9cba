"""What a resumed run has in common with the run that it continues: all that decides its numbers."""

import hashlib
import inspect
import io
import linecache
import re
import sys
import tokenize
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

from dpframe.composite import parts_of
from dpframe.data import DataModule
from dpframe.data.mix import Several
from dpframe.data.source import evaluated_rows
from dpframe.launch import interpreter
from dpframe.parameters import groups_of
from dpframe.task import Task
from dpframe.trainer.feed import TrainingData
from dpframe.trainer.optim.schedule import StepSchedule, by_arguments
from dpframe.trainer.optim.step import OptimizerStep
from dpframe.trainer.optim.turns import Turns
from dpframe.trainer.recorder import RunInfo
from dpframe.trainer.settings import TrainerSettings

Fingerprint = dict[str, Any]
"""By the key or the name that a user knows; plain values, which a checkpoint can hold."""
DECIDING = (
    "precision",
    "matmul_precision",
    "accumulate",
    "clip_norm",
    "clip_value",
    "scheduler_every",
    "limit_train_batches",
)
LIBRARIES = ("torch", "builtins", "lightning", "pytorch_lightning")  # whose code may change


def fingerprint(
    task: Task,
    data: DataModule,
    feed: TrainingData,
    updates: Turns,
    settings: TrainerSettings,
    run: RunInfo,
    seed: int,
) -> Fingerprint:
    source = feed.source
    config = leaves_of_config(run.config, run.public)
    facts = dict(config)
    reading = ("workers", "persistent_workers", "pin_memory")
    for name in (*reading, "eval_batch_size", "drop_last", "input"):
        facts.pop(f"data.{name}", None)  # only whether there are any workers decides
    if feed.source.drop_last:
        facts["data.drop_last"] = True
    if "task" not in run.config:
        optimizers = updates.each(partial(_options, task))
        name = "optimizer" if "" in updates else "optimizers"
        facts |= _leaves({name: optimizers, "scale_lr": task.scale_lr or {}})
        if task.lr_schedule is not None:
            facts["lr_schedule"] = str(task.lr_schedule)
    facts |= _leaves({"trainer": {name: getattr(settings, name) for name in DECIDING}})
    if settings.has_global_batch_norm:
        facts["trainer.batch_norm"] = "global"
    if settings.drops_by_row:
        facts["trainer.dropout"] = "row"
    if settings.logical_replicas is not None:
        facts["trainer.logical_replicas"] = settings.logical_replicas
        facts["trainer.threads"] = settings.threads
    # Of ready batches the module may have made the loader by its own.
    batch_size = source.batch_size or evaluated_rows(data)
    facts |= {"seed": seed, "data.batch_size": batch_size, "data.shuffle": source.shuffle}
    for update in updates.values():
        facts |= update.kinds()
        make = task.make_schedulers.get(update.name, task.make_scheduler)
        facts |= _of_schedule(update, make, config if "task" in run.config else {})
    dataset = source.dataset
    if hasattr(dataset, "__len__"):
        facts["rows to train on"] = len(dataset)
    if isinstance(dataset, Several):
        facts["the data"] = dataset.described()
    if feed.train.division is not None:
        facts["the stream"] = feed.train.division.described()
    return facts | of_code(task, data)


def _options(task: Task, update: OptimizerStep) -> dict[str, Any]:
    make = task.make_optimizers.get(update.name, task.make_optimizer)
    several = [part.defaults for part in parts_of(update.optimizer)]
    defaults = {"parts": several} if len(several) > 1 else several[0]
    return {**defaults, "groups": groups_of(make) or {}}


def _of_schedule(update: OptimizerStep, make: Any, config: Fingerprint) -> Fingerprint:
    """The options of a scheduler that the config does not have. `task.schedule` has its own key."""
    if update.scheduler is None or isinstance(update.scheduler, StepSchedule):
        return {}
    kept = update.options["schedule"]["options"]
    found = by_arguments(kept, update.scheduler, make)
    options = {name: value for name, value in found.items() if name != "total_steps"}
    if found is kept and not config:  # what it keeps in the optimizer's groups
        own = {"name", "initial_lr", *update.optimizer.defaults}
        groups = update.options["groups"]
        options["groups"] = [{k: v for k, v in g.items() if k not in own} for g in groups]
    of_config = f"task.schedulers.{update.name}" if update.name else "task.scheduler"
    whose = f"{update.name}'s " if update.name else ""
    named = {path.replace("._", "."): value for path, value in _leaves({"_": options}).items()}
    return {
        f"{whose}scheduler{path[1:]}": value
        for path, value in named.items()
        if f"{of_config}{path[1:]}" not in config
    }


def leaves_of_config(config: Mapping[str, Any], public: Mapping[str, Any] | None) -> Fingerprint:
    """A value that `public` keeps out of files is told from others by its hash."""
    values = _leaves({name: config.get(name) for name in ("task", "data")})
    if public is None or public is config:
        return values
    written = _leaves({name: public.get(name) for name in ("task", "data")})
    for key, value in values.items():
        if written.get(key) != value:
            digest = hashlib.sha256(repr(value).encode(errors="surrogateescape")).hexdigest()
            # Eight digits tell two values apart, and do not help to guess one.
            values[key] = f"{written.get(key, 'hidden')} (sha256 {digest[:8]})"
    return values


def is_hidden(value: Any) -> bool:
    return isinstance(value, str) and re.search(r" \(sha256 [0-9a-f]{8}\)$", value) is not None


def of_code(task: Task, data: DataModule) -> Fingerprint:
    return {
        "task's code": _digest(task.own_class),
        "data's code": _digest(data.own_class),
    }


def differences(then: Fingerprint, now: Fingerprint) -> list[str]:
    """A text for each difference, e.g. `task.optimizer.lr=0.01 there, 0.1 here`."""
    texts: dict[str, str] = {}
    for key in [*then, *(key for key in now if key not in then)]:
        if then.get(key) != now.get(key) and not _is_told(key, texts):
            values = f"={_worded(then.get(key))} there, {_worded(now.get(key))} here"
            texts[key] = key + (" has changed" if key.endswith("code") else values)
    return [*texts.values()]


def _is_told(key: str, texts: Mapping[str, str]) -> bool:
    """Whether it is an option of a scheduler that is told to be of another kind, or length."""
    owner, dot, _ = key.partition(".")
    return (
        bool(dot)
        and owner.endswith("scheduler")
        and (owner in texts or f"{owner}'s steps" in texts)
    )


def _leaves(config: Any) -> Fingerprint:
    """The values of nested dicts and lists, by their paths."""
    leaves: Fingerprint = {}
    waiting = [("", config)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, partial):  # the optimizer of a group
            value = {"_target_": value.func, **value.keywords}
        if isinstance(value, Mapping):
            parts = [(f"{path}.{key}" if path else str(key), part) for key, part in value.items()]
        elif isinstance(value, list):
            parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
        else:
            is_plain = isinstance(value, int | float | str | bool | None)
            leaves[path] = value if is_plain else repr(value)[:200]
            continue
        waiting += reversed(parts)
    return leaves


def _worded(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return str(value)


def _digest(kind: type) -> str:
    """The hash of the files of a class and its parents, without comments."""
    digest = hashlib.sha256(kind.__qualname__.encode())
    for parent in kind.__mro__:
        module = sys.modules.get(parent.__module__)
        package, *inside = parent.__module__.split(".")
        is_ours = package == "dpframe" and inside[:1] != ["recipes"]
        if module is None or is_ours or package in LIBRARIES:
            continue
        # It was typed at a prompt, or its file is being edited.
        with suppress(OSError, TypeError, SyntaxError, tokenize.TokenError):
            digest.update(significant(_source_of(module)).encode())
    return digest.hexdigest()[:16]


def _source_of(module: ModuleType) -> str:
    """Also of the program itself, in its ranks."""
    file = interpreter.file_of_main() if module.__name__ == "__main__" else None
    return inspect.getsource(module) if file is None else "".join(linecache.getlines(file))


@lru_cache(maxsize=64)  # a sweep, or a program, makes many runs of the same files
def significant(source: str) -> str:
    """The text without comments, blank lines and spaces at the ends of lines.

    It is the same on every version of Python: syntax trees and tokens are not, but where a comment
    begins and a line ends is.
    """
    lines: list[str | None] = list(source.split("\n"))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
            row, column = token.start
            lines[row - 1] = (lines[row - 1] or "")[:column].rstrip() or None
    return "\n".join(line for line in lines if line is not None).rstrip()
