"""What a run tells its loggers: its config and its numbers."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpframe.errors import UserError
from dpframe.loggers import Logger
from dpframe.loggers.base import Scalar
from dpframe.strategies.base import Strategy
from dpframe.trainer.callback import Callback
from dpframe.trainer.profile import timed
from dpframe.util import files
from dpframe.util.files import refuse_url
from dpframe.values import check_type

BETWEEN_FLUSHES = 0.2  # seconds
log = logging.getLogger("dpframe")
TELLING = ("max_epochs", "max_steps", "precision", "accumulate", "clip_norm", "clip_value")


@dataclass
class RunInfo:
    """Where a run's files go, and the config that it was composed from.

    Without a `directory` a callback or a logger that writes files is refused.
    """

    directory: str = ""  # none
    recipe: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    public: dict[str, Any] | None = None  # `config` without its secrets; None: it has none
    config_text: str = ""
    is_repeated: bool = False  # from its first step, in the directory of a failed job
    is_claimed: bool = False  # by whoever made it: nothing there is another run's

    def __post_init__(self) -> None:
        check_type("directory", self.directory, str | os.PathLike)
        refuse_url("directory", self.directory)
        if self.directory:  # a setup may change the working directory
            self.directory = os.path.abspath(self.directory)


class Recorder:
    """The loggers of this process, and what they were given last."""

    log: Callable[..., None]  # numbers by name, and their `step`

    def __init__(self, loggers: Iterable[Logger], run: RunInfo, *, is_profiled: bool) -> None:
        self.loggers = list(loggers)
        self.run = run
        self.is_open = False
        self._flushed_at = 0.0
        self._forms: dict[str, str] = {}  # of what is shown, by its name
        self.log = timed("logging", self._log, is_profiled=is_profiled)
        self.last: tuple[int, dict[str, float]] = (-1, {})  # the newest step that has numbers

    def open(self, strategy: Strategy, *, purge_step: int | None = None) -> None:
        self.is_open = True
        if not self.loggers:
            return
        run = self.run
        purge_step = 0 if run.is_repeated and purge_step is None else purge_step
        facts: dict[str, Scalar] = {"strategy": strategy.name, "replicas": strategy.replicas}
        hparams = facts | hyperparameters(run.config if run.public is None else run.public)
        self._each(
            lambda logger: logger.open(
                run.directory, config=run.config_text, hparams=hparams, purge_step=purge_step
            )
        )

    def _log(self, scalars: dict[str, float], *, step: int) -> None:
        before = self.last[1] if self.last[0] == step else {}
        self.last = step, before | scalars
        self._each(lambda logger: logger.log(scalars, step=step))

    def show(self, form: str, name: str, *values: Any, step: int) -> None:
        """More than a scalar; `form` is the Logger's method for it."""
        from dpframe.loggers import media

        if self.is_open and self.loggers:
            known = self._forms.setdefault(name, form)
            if known != form:  # a tool shows one thing under a name
                raise UserError(
                    f"trainer.log_{form}({name!r}): there is a {known} with this name; use another"
                )
            value = media.FORMS[form](name, *values)
            parts = value if isinstance(value, tuple) else (value,)
            self._each(lambda logger: getattr(logger, form)(name, *parts, step=step))
        if form == "figure":
            media.close(values[0])

    def flush_if_due(self) -> None:
        """Flushes a few times a second: what was logged before survives the process."""
        if time.perf_counter() - self._flushed_at > BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        self._flushed_at = time.perf_counter()
        self._each(lambda logger: logger.flush())

    def close(self, metrics: dict[str, float], *, succeeded: bool) -> None:
        if self.is_open:
            self.is_open = False
            self._each(lambda logger: logger.close(metrics, succeeded=succeeded))

    def _each(self, call: Callable[[Logger], None]) -> None:
        """A logger that fails, e.g. on a full disk, is left out: training goes on."""
        for logger in list(self.loggers):
            try:
                call(logger)
            except Exception as error:
                self.loggers.remove(logger)
                log.warning(
                    "%s stopped: %s: %s; training goes on without it",
                    type(logger).__name__,
                    type(error).__name__,
                    error,
                )


@contextmanager
def begun(
    run: RunInfo, parts: Sequence[Callback | Logger], *, is_fresh: bool, is_main: bool
) -> Iterator[None]:
    """A run, with its parts afresh if it is a new one; it alone writes into its directory."""
    require_directory(parts, run)
    is_written = any(part.needs_directory for part in parts)
    with ExitStack() as claim:
        if is_written and is_main and not run.is_claimed:
            directory, instead = Path(run.directory), "name another by run=RunInfo(directory=…)"
            claim.enter_context(files.claim(directory, "the run directory", instead=instead))
            if is_fresh:
                again = 'continue it with fit(resume="last")'
                refuse_used(directory, is_repeated=run.is_repeated, again=again, instead=instead)
        for part in parts if is_fresh else ():
            part.reset()
        yield


def require_directory(parts: Iterable[Callback | Logger], run: RunInfo) -> None:
    for part in parts:
        if part.needs_directory and not run.directory:
            raise UserError(
                f"{type(part).__name__} writes files, and nothing says where; pass the Trainer "
                "run=RunInfo(directory=…)"
            )


def refuse_used(directory: Path, *, is_repeated: bool, again: str, instead: str) -> None:
    """A run from its first step would mix its files with those of another one."""
    if any(directory.glob("checkpoints/*.ckpt")):
        raise UserError(
            f"the run directory {directory} has the checkpoints of another run; {again}, or "
            f"{instead}"
        )
    if not is_repeated and (directory / "metrics.csv").exists():
        raise UserError(
            f"the run directory {directory} has the metrics.csv of another run; remove that, or "
            f"{instead}"
        )


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """What decides the curve, by its key: the task, the data and some trainer settings."""
    kept = {name: part for name in ("task", "data") if (part := config.get(name))}
    settings = config.get("trainer", {})
    kept["trainer"] = {name: settings[name] for name in TELLING if name in settings}
    if "precision" in settings:  # 32 or bf16: a column of TensorBoard's has one type
        kept["trainer"]["precision"] = str(settings["precision"])
    told = {name: config[name] for name in ("recipe", "seed") if name in config}
    told |= {name: config[name] for name in ("name", "notes") if config.get(name)}
    told |= {"tags": ",".join(config["tags"])} if config.get("tags") else {}
    return flat(kept) | told


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """`{"task": {"optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01}}}` as
    `{"task.optimizer": "Adam", "task.optimizer.lr": 0.01}`; nulls and lists are left out."""
    numbers: dict[str, Scalar] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            if "_target_" in value and prefix:
                numbers[f"{prefix}{name}"] = str(value["_target_"]).rpartition(".")[2]
            numbers |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float, str, bool)) and not name.startswith("_"):
            numbers[f"{prefix}{name}"] = value
    return numbers
