"""Entry points, by which packages bring options, modes, and what carries out a trainer.* key."""

import os
import sys
from functools import cache
from importlib import metadata

OPTIONS, MODES, SETTINGS = "dpframe.plugins", "dpframe.modes", "dpframe.settings"


@cache
def found() -> tuple[tuple[str, metadata.EntryPoint], ...]:
    """Each with the name and version of its package."""
    # What lies in the current directory was not installed, though Python may look there.
    here = os.path.realpath(os.curdir)
    folders = [path for path in sys.path if os.path.realpath(path or os.curdir) != here]
    return tuple(
        (f"{package.name} {package.version}", point)
        for package in metadata.distributions(path=folders)
        for point in _points_of(package)
    )


def _points_of(package: metadata.Distribution) -> list[metadata.EntryPoint]:
    try:
        text = package.read_text("entry_points.txt") or ""
        if "dpframe." not in text or not (package.name and package.version):
            return []  # without parsing it
        return [p for p in package.entry_points if p.group in (OPTIONS, MODES, SETTINGS)]
    except Exception:
        return []  # a broken package is no reason to stop
