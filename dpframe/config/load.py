"""`dpframe.load`: the trained task of a checkpoint, built from the config of its run."""

import os
from pathlib import Path
from typing import Any

import torch

from dpframe import checkpoint
from dpframe.checkpoint.address import local_file
from dpframe.config.build import build
from dpframe.config.compose import Composed, composed, hydra_kept
from dpframe.config.earlier_run import run_directory, saved_overrides
from dpframe.config.evaluated_run import find_differences
from dpframe.config.loader import quoted
from dpframe.config.target import see_own_folders
from dpframe.errors import UserError
from dpframe.strategies import Strategy
from dpframe.task import Task
from dpframe.trainer.compute.placement import Precision
from dpframe.trainer.resume.state import load_attributes

BEST = ("best.ckpt", "last.ckpt")


def load(
    path: str | os.PathLike[str],
    *overrides: str,
    config_dir: str | None = None,
    device: str | torch.device = "cpu",
) -> Task:
    """The task with its trained weights, in evaluation mode.

    `path` is a checkpoint, or a run's directory: of that the best checkpoint. The config is
    composed as by `mode=predict checkpoint=FILE`: of the run's overrides those are taken that name
    nothing to call, and `overrides` and `config_dir` add the others.
    """
    file = _file(local_file("path", path))
    if file.is_file() and not (overrides or saved_overrides(run_directory(file))):
        raise UserError(
            f"{file}: nothing beside it says how its task is built; add its recipe, e.g. "
            f"dpframe.load({str(path)!r}, 'recipe=NAME'), or build the task in Python and call "
            "dpframe.checkpoint.load_task(task, checkpoint.load(file))"
        )
    start = ["mode=predict", "callbacks=none", "logger=none", f"checkpoint={quoted(str(file))}"]
    with hydra_kept():
        job = composed([*start, *overrides], config_dir=config_dir)
    state = checkpoint.load(file)
    find_differences(job, state, ("task",))
    see_own_folders(job.config["task"], job.config_dir, job.start)
    return trained(job, state, device=device)


def trained(job: Composed, state: dict[str, Any], *, device: str | torch.device = "cpu") -> Task:
    """The task of a config with a checkpoint's weights and attributes."""
    task: Task = build(job.config["task"], "task", Task)
    precision = Precision(job.settings.trainer.precision, torch.device("cpu"))
    task.to(device, precision.dtype)
    checkpoint.load_task(task, state)
    load_attributes(task, state, Strategy())
    return task.eval()


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    paths = [path / "checkpoints" / name for name in BEST]
    found = [file for file in paths if file.is_file()]
    if not found:
        raise UserError(f"{path / 'checkpoints'} has no {' and no '.join(BEST)}; name a checkpoint")
    return found[0]
