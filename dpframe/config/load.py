"""`dpframe.load`: the trained task of a checkpoint, built from the config of its run."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from dpframe import checkpoint, files
from dpframe.config.build import build
from dpframe.config.start import run_directory
from dpframe.config.trust import Trust, with_theirs
from dpframe.errors import UserError
from dpframe.task import Task
from dpframe.trainer.placement import Precision

BEST = ("best.ckpt", "last.ckpt")
LEVELS = 100  # of a config
FROM_ENVIRONMENT = r"\$\{oc\.env:([^,{}]+)(?:,([^{}]*))?\}"


def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    trusted_modules: Sequence[str] = (),
) -> Task:
    """The task with its trained weights, in evaluation mode.

    `path` is a checkpoint, or a run's directory: of that the best checkpoint. Its config may be a
    stranger's: it calls what any config may call, and what `trusted_modules` names.
    """
    file = _file(files.local_path("path", path))
    config = _config(file)
    node: Any = config.get("task")
    settings = config.get("trainer")
    inside = file.resolve()
    closed = tuple(run_directory(each) or each.parent for each in (file.absolute(), inside))
    trust = Trust(frozenset(trusted_modules), typed=frozenset(trusted_modules), closed=closed)
    if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
        trust = trust.within(trust.part(node["_target_"], "task", Task))
        trust = with_theirs(trust, {"task": node})
    name = settings.get("precision", "32") if isinstance(settings, Mapping) else "32"
    return trained(node, file, precision=str(name), device=device, trust=trust)


def trained(
    node: Any, file: Path, *, precision: str, device: str | torch.device = "cpu", trust: Trust
) -> Task:
    """The task of a config's node with a checkpoint's weights."""
    state = checkpoint.load(file)
    task: Task = build(node, "task", Task, trust=trust)
    task.to(device, Precision(precision, torch.device("cpu")).dtype)
    checkpoint.load_task(task, state)
    return task.eval()


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    paths = [path / "checkpoints" / name for name in BEST]
    found = [file for file in paths if file.is_file()]
    if not found:
        raise UserError(f"{path / 'checkpoints'} has no {' and no '.join(BEST)}; name a checkpoint")
    return found[0]


def _config(file: Path) -> dict[str, Any]:
    path = (run_directory(file) or file.parent) / ".hydra" / "config.yaml"
    if path.exists() and not path.is_file():  # e.g. a pipe that nobody writes into
        raise UserError(f"{path} is no file; restore it from the run")
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        if flaw := _flaw(text):
            raise UserError(f"{path} has {flaw}; restore it from the run")
        config = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        if not file.exists():
            raise UserError(f"{file}: there is no such file") from None
        why = error.strerror if isinstance(error, OSError) else str(error).replace("\n", " ")
        raise UserError(
            f"{path}: {why}; it says how the task of {file.name} is built: without it, build the "
            "task in Python and call dpframe.checkpoint.load_task(task, checkpoint.load(file))"
        ) from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no config; restore it from the run")
    return _filled(config)


def _flaw(text: str) -> str:
    """What of it can't be read to its end: aliases that lead in a circle or stand for gigabytes,
    and more levels than Python has room for."""
    level = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            return f"an alias, *{event.anchor}, which no run writes"
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if level > LEVELS:
            return f"more than {LEVELS} levels"
    return ""


def _filled(value: Any) -> Any:
    """Fills in values from the environment, which no file of a run has."""
    if isinstance(value, dict):
        return {key: _filled(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part) for part in value]
    if not isinstance(value, str):
        return value
    whole = re.fullmatch(FROM_ENVIRONMENT, value)
    if whole and whole[2] == "null" and whole[1] not in os.environ:
        return None
    return re.sub(FROM_ENVIRONMENT, _variable, value)


def _variable(match: re.Match[str]) -> str:
    value = os.environ.get(match[1], match[2])
    if value is None:
        raise UserError(f"the config reads {match[0]}, and {match[1]} is not set; set it")
    return value
