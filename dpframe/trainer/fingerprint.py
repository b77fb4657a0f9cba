"""What a run has to share with the one that it goes on with: all that decides its numbers."""

import hashlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dpframe.data import DataModule, tensors_of
from dpframe.task import Task

if TYPE_CHECKING:
    from dpframe.trainer.loop import Trainer

Fingerprint = dict[str, Any]
DECIDING = (
    "precision",
    "accumulate",
    "clip_norm",
    "clip_value",
    "scheduler_every",
    "limit_train_batches",
)
NOT_DECIDING = ("data.workers",)  # but for whether there are any: see below


def of(trainer: "Trainer") -> Fingerprint:
    """By the key or the name that a user knows; plain values, that a checkpoint can hold."""
    data, settings = trainer.data, trainer.settings
    found = of_config(trainer.run.config, trainer.run.public)
    found = {key: value for key, value in found.items() if key not in NOT_DECIDING}
    if "task" not in trainer.run.config:
        defaults = trainer.update.optimizer.defaults
        found |= {f"optimizer.{key}": _plain(value) for key, value in defaults.items()}
    found |= {f"trainer.{name}": getattr(settings, name) for name in DECIDING}
    found |= {"seed": trainer.seed, "data.batch_size": data.batch_size}
    found |= {"data.shuffle": data.shuffle} | trainer.update.kinds()
    dataset = trainer.train_dataset
    if hasattr(dataset, "__len__"):
        found["rows to train on"] = len(dataset)
    if tensors_of(dataset) is None:  # the workers draw other random numbers than the main process
        found["data.workers > 0"] = trainer.train_loader.readers.draws_apart
    return found | of_code(trainer.task, data)


def of_config(config: Mapping[str, Any], public: Mapping[str, Any] | None = None) -> Fingerprint:
    """A value that `public` keeps out of files is told apart by its hash."""
    flat = _flat({name: config.get(name) for name in ("task", "data")})
    if public is None or public is config:
        return flat
    written = _flat({name: public.get(name) for name in ("task", "data")})
    hidden = {key: value for key, value in flat.items() if written.get(key) != value}
    return flat | {
        key: f"{written.get(key, 'hidden')} (sha256 {_hash(repr(value))})"
        for key, value in hidden.items()
    }


def is_hidden(value: Any) -> bool:
    return isinstance(value, str) and re.search(r" \(sha256 [0-9a-f]{8}\)$", value) is not None


def _hash(text: str) -> str:
    """Short: it tells two values apart, and does not help to guess one."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def of_code(task: Task, data: DataModule) -> Fingerprint:
    return {"task's code": _code(type(task)), "data's code": _code(type(data))}


def differences(there: Fingerprint, here: Fingerprint) -> list[str]:
    """One text each, as `task.optimizer.lr=0.01 there, 0.1 here`."""
    found = []
    for key in [*there, *(key for key in here if key not in there)]:
        one, other = there.get(key), here.get(key)
        if one != other:
            values = f"={_said(one)} there, {_said(other)} here"
            found.append(key + (" has changed" if key.endswith("code") else values))
    return found


def _flat(config: Any, prefix: str = "") -> Fingerprint:
    if isinstance(config, Mapping):
        flat: Fingerprint = {}
        for key, value in config.items():
            flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    if isinstance(config, list):
        flat = {}
        for index, value in enumerate(config):
            flat |= _flat(value, f"{prefix}[{index}]")
        return flat
    return {prefix: _plain(config)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else repr(value)[:200]


def _said(value: Any) -> str:
    words = {None: "nothing", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _code(kind: type) -> str:
    """Of the file that the class is in, its parents' too: whatever there is but comments."""
    found = hashlib.sha256(kind.__qualname__.encode())
    for one in kind.__mro__:
        module = sys.modules.get(one.__module__)
        if module is None or one.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        if one.__module__.startswith("dpframe.") and ".recipes." not in one.__module__:
            continue
        # It was typed at a prompt, or its file is being edited.
        with suppress(OSError, TypeError, SyntaxError, tokenize.TokenError):
            found.update(significant(inspect.getsource(module)).encode())
    return found.hexdigest()[:16]


def significant(source: str) -> str:
    """The text less comments, blank lines and spaces at the ends of lines.

    It is the same text on every version of Python: syntax trees and tokens are not, but where a
    comment begins and a line ends is.
    """
    lines: list[str | None] = list(source.split("\n"))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
            row, column = token.start
            lines[row - 1] = (lines[row - 1] or "")[:column].rstrip() or None
    return "\n".join(line for line in lines if line is not None).rstrip()
