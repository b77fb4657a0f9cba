"""Weights & Biases: in the run directory, or sent to its server with `mode: online`."""

import inspect
import secrets
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpframe.errors import UserError, not_one_of, suggestion
from dpframe.loggers.base import Logger, Scalar, read_id, require, tags_of, write_id

MODES = ("offline", "online")
BINS = 64  # of a histogram
OURS = ("dir", "id", "resume", "config", "reinit", "settings")  # arguments of wandb.init


class WandB(Logger):
    """`run` is the wandb.Run, for what the methods here don't do.

    Weights & Biases takes no step twice: what a resumed run logs again is left out there.
    """

    needs_directory = True

    def __init__(
        self,
        *,
        mode: str = "offline",
        project: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        **options: Any,
    ) -> None:
        """`options` are other arguments of `wandb.init`, e.g. job_type."""
        if mode not in MODES:
            raise not_one_of("logger.wandb.mode", mode, MODES)
        require("wandb")
        _check(options)
        self.mode = mode
        self.project = project
        self.name = name
        self.options = {"entity": entity, "group": group, "tags": tags, "notes": notes, **options}
        self.run: Any = None

    def open(
        self, run_dir: str, *, config: str, hparams: dict[str, Scalar], purge_step: int | None
    ) -> None:
        import wandb

        path = Path(run_dir) / "wandb-id.txt"
        told = {"tags": tags_of(hparams), "notes": hparams.get("notes")}
        given = {name: value for name, value in self.options.items() if value is not None}
        self.run = wandb.init(
            dir=run_dir,
            mode=self.mode,  # type: ignore[arg-type]
            project=self.project or str(hparams.get("recipe", "dpframe")),
            name=self.name or str(hparams.get("name", Path(run_dir).resolve().name)),
            id=read_id(path) or write_id(path, secrets.token_hex(4)),
            resume="allow" if self.mode == "online" else None,
            config=hparams,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
            **(told | given),
        )

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self.run.log(scalars, step=step)

    def histogram(self, name: str, values: Any, *, step: int) -> None:
        import numpy as np
        import wandb

        if values.size:
            counts = np.histogram(values, BINS)
            self.run.log({name: wandb.Histogram(np_histogram=counts)}, step=step)

    def text(self, name: str, text: str, *, step: int) -> None:
        self.table(name, ["text"], [[text]], step=step)

    def table(self, name: str, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        import wandb

        table = wandb.Table(columns=[*columns], data=rows, allow_mixed_types=True)
        self.run.log({name: table}, step=step)

    def media_file(
        self, kind: str, name: str, suffix: str, encode: Callable[[], bytes], *, step: int
    ) -> None:
        import wandb

        make = wandb.Audio if kind == "sounds" else wandb.Image
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"file.{suffix}"
            path.write_bytes(encode())
            self.run.log({name: make(str(path))}, step=step)

    def dashboard(self, run_dir: str) -> str:
        offline = f"wandb sync {shlex.quote(run_dir)}/wandb/offline-run-*"
        return self.run.url or "" if self.mode == "online" else offline

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        self.run.summary.update(metrics)
        self.run.finish(exit_code=0 if succeeded else 1)


def _check(options: Mapping[str, Any]) -> None:
    """Refuses what `wandb.init` does not take, before a run begins."""
    if not options:
        return
    import wandb

    known = inspect.signature(wandb.init).parameters
    for name in options:
        if name in OURS:
            raise UserError(f"logger.wandb.{name} is set by dpframe; leave it out")
        if name not in known:
            near = suggestion(name, set(known) - {*OURS})
            raise UserError(f"logger.wandb.{name}: wandb.init takes no such argument; {near}")
