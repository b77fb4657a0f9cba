"""Runs a composed config: in every process of the job, from building to summary.json."""

import json
import shutil
from pathlib import Path
from typing import Any

from dpframe import checkpoint, seeding
from dpframe.callbacks import Callback
from dpframe.cli.build import build
from dpframe.cli.compose import Composed
from dpframe.cli.logs import logging_to
from dpframe.data import DataModule
from dpframe.errors import UserError
from dpframe.loggers import Logger
from dpframe.strategies import Strategy, ranks  # noqa: F401  ranks counts threads when imported
from dpframe.task import Task
from dpframe.trainer import Run, Trainer


def run(job: Composed) -> dict[str, Any]:
    """The summary, from the main process; the strategy decides how many there are."""
    strategy = build(job.config["strategy"], "strategy", Strategy)
    return strategy.launch(_work, job)


def _work(job: Composed) -> dict[str, Any]:
    """What every process of a job does."""
    settings = job.settings
    strategy = build(job.config["strategy"], "strategy", Strategy)
    strategy.setup()
    try:
        state, resumed = _state(job)
        seeding.seed_everything(settings.seed)
        task = build(job.config["task"], "task", Task)
        data = build(job.config["data"], "data", DataModule)
        callbacks = _several(job.config["callbacks"], "callbacks", Callback)
        loggers = _several(job.config["logger"], "logger", Logger) if settings.mode == "fit" else []
        if state is not None:
            checkpoint.load_task(task, state, settings.checkpoint or settings.resume or "")
        trainer = Trainer(
            task,
            data,
            strategy=strategy,
            settings=settings.trainer,
            callbacks=callbacks,
            loggers=loggers,
            seed=settings.seed,
            run=Run(recipe=settings.recipe, config=job.config, config_text=job.text),
        )
        made = _make_directory(job, resumed) if strategy.is_main else None
        trainer.run.directory = strategy.share(made)
        return _in_directory(trainer, job, state if settings.resume else None)
    finally:
        strategy.close()


def _in_directory(trainer: Trainer, job: Composed, resume: dict[str, Any] | None) -> dict[str, Any]:
    directory = Path(trainer.run.directory)
    try:
        with logging_to(directory, rank=trainer.strategy.rank):
            if job.settings.mode == "fit":
                trainer.fit(resume)
            else:
                _evaluate(trainer, job.settings.mode, directory)
    except UserError:
        if trainer.strategy.is_main and trainer.global_step == 0 and not job.is_run_dir_given:
            shutil.rmtree(directory)  # nothing was trained: leave nothing behind
        raise
    summary = _summary(trainer, job)
    if trainer.strategy.is_main:
        (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _evaluate(trainer: Trainer, mode: str, directory: Path) -> None:
    if mode != "predict":
        getattr(trainer, mode)()
        return
    predictions = trainer.predict()
    if predictions is not None:
        print(f"predictions  {predictions.save(directory)}")


def _several(nodes: dict[str, Any], where: str, kind: type) -> list[Any]:
    """The callbacks or loggers of a group: a node is one of them, null switches it off."""
    return [
        build(node, f"{where}.{name}", kind) for name, node in nodes.items() if node is not None
    ]


def _state(job: Composed) -> tuple[dict[str, Any] | None, Path | None]:
    """The checkpoint to start from, and the run directory that a resumed run goes on in."""
    settings = job.settings
    if settings.resume is not None:
        path = _resumed_file(settings.resume, Path(job.run_dir).parent)
        directory = path.parent.parent if path.parent.name == "checkpoints" else None
        return checkpoint.load(path), directory
    if settings.checkpoint is not None:
        return checkpoint.load(settings.checkpoint), None
    return None, None


def _resumed_file(resume: str, runs: Path) -> Path:
    if resume == "last":
        found = sorted(runs.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UserError(f"resume=last: there is no run with a checkpoint in {runs}")
        return found[-1]
    path = Path(resume)
    return path / "checkpoints" / "last.ckpt" if path.is_dir() else path


def _make_directory(job: Composed, resumed: Path | None) -> str:
    """The run directory with its `.hydra/`; two runs of one second get one each."""
    directory = resumed or Path(job.run_dir)
    if resumed is None:
        number = 1
        while True:
            try:
                directory.mkdir(parents=True, exist_ok=job.is_run_dir_given)
                break
            except FileExistsError:
                if job.is_run_dir_given:
                    raise UserError(f"hydra.run.dir={directory} is a file") from None
                number += 1
                directory = Path(f"{job.run_dir}-{number}")
    notes = directory / ".hydra"
    notes.mkdir(exist_ok=True)
    (notes / "config.yaml").write_text(job.text)
    (notes / "hydra.yaml").write_text(job.hydra_text)
    (notes / "overrides.yaml").write_text("".join(f"- {o}\n" for o in job.overrides) or "[]\n")
    return str(directory)


def _summary(trainer: Trainer, job: Composed) -> dict[str, Any]:
    strategy = trainer.strategy
    seconds = trainer.seconds
    return {
        "recipe": job.settings.recipe,
        "strategy": strategy.name,
        "replicas": strategy.replicas,
        "devices": strategy.devices,
        "epochs": trainer.epoch,
        "steps": trainer.global_step,
        "samples_per_second": trainer.rows_seen / seconds if seconds else 0.0,
        "seconds": seconds,
        "metrics": trainer.metrics,
        "checkpoint": trainer.checkpoint,
        "directory": trainer.run.directory,
    }
