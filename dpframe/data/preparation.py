"""`prepare_data`: what is downloaded or converted once on each machine, before it is read."""

import operator
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dpframe import seeding
from dpframe.data.module import DataModule
from dpframe.errors import UserError
from dpframe.launch import signals
from dpframe.util.files import locked

Once = Callable[[Callable[[], object]], None]
"""Calls a function once on each machine, as a strategy's `Collectives.once` does."""


def call_prepare_data(data: DataModule, once: Once | None = None) -> None:
    """Calls `prepare_data` of data that have one. Without `once` this process is alone."""
    check = partial(_refuse_changed, data, dict(vars(data)))
    run_once(data.prepare_data, once, check=check)


def run_once(
    prepare_data: Callable[[], object],
    once: Once | None = None,
    *,
    check: Callable[[], object] = bool,
) -> None:
    """Calls a method `prepare_data`, and `check` after it. No time limit ends the processes that
    wait for it."""
    with signals.unwatched():
        (once or operator.call)(partial(_run, prepare_data, check))


def _run(prepare_data: Any, check: Callable[[], object]) -> None:
    """In one process of this user and machine at a time: several runs may begin together."""
    kind = type(prepare_data.__self__)
    user = os.getuid() if hasattr(os, "getuid") else ""
    name = f"dpframe-{user}-{kind.__module__}.{kind.__qualname__}.lock"
    # Other processes, which don't call it, draw nothing there.
    with locked(Path(tempfile.gettempdir(), name)), seeding.kept():
        prepare_data()
    check()


def _refuse_changed(data: DataModule, before: dict[str, Any]) -> None:
    """Other processes do not have what it sets."""
    nothing = object()
    changed = [name for name, value in vars(data).items() if before.get(name, nothing) is not value]
    if changed:
        raise UserError(
            f"{type(data).__name__}.prepare_data sets self.{changed[0]}, which no other process "
            "would have: it runs in one process of each machine; write files there, and read "
            "them in setup"
        )
