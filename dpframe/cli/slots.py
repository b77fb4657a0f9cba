"""The slots of a config: what kind of part each takes, and whom their parts vouch for."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpframe.callbacks import Callback
from dpframe.cli.build import check
from dpframe.cli.compose import Composed
from dpframe.cli.settings import RunSettings
from dpframe.cli.trust import Trust
from dpframe.data import DataModule
from dpframe.errors import UserError
from dpframe.loggers import Logger
from dpframe.strategies import Strategy
from dpframe.task import Task


def check_targets(job: Composed) -> Trust:
    """Imports every class that the config names and looks at what it will be given."""
    trust = trust_of(job)
    for where, node, kind in _parts(job.settings):
        check(node, where, kind, trust=trust)
    return trust


def trust_of(job: Composed) -> Trust:
    """Whom the config may call: a package that one part comes from may bring another's."""
    typed = frozenset(job.settings.trusted_modules)
    trust = Trust(typed | set(job.plugins), typed=typed, closed=_closed(job))
    vouched = trust
    for where, node, kind in _parts(job.settings):
        path = node.get("_target_") if isinstance(node, Mapping) else None
        if isinstance(path, str) and path:
            with suppress(UserError):  # `check` tells it
                vouched = vouched.within(path, trust.part(path, f"{where}._target_", kind))
    return vouched


def _closed(job: Composed) -> tuple[Path, ...]:
    """The folder that a run starts from may be a stranger's: it has data, and no code of ours."""
    if job.start is None:
        return ()
    folder = job.start.parent
    inside = folder.resolve()  # `checkpoints` may be a link, on either side of it
    closed = [place.parent.resolve() for place in (folder, inside) if place.name == "checkpoints"]
    if not Path.cwd().is_relative_to(inside):
        closed.append(inside)
    return tuple(closed)


def _parts(settings: RunSettings) -> Iterator[tuple[str, Any, type]]:
    """The slots with their kinds; a callback or a logger that is null is switched off."""
    yield "strategy", settings.strategy, Strategy
    yield "task", settings.task, Task
    yield "data", settings.data, DataModule
    for group, kind in (("callbacks", Callback), ("logger", Logger)):
        for name, node in getattr(settings, group).items():
            if node is not None:
                yield f"{group}.{name}", node, kind
