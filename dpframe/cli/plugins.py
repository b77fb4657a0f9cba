"""Installed packages that bring options: an entry point names the package's config folder.

    [project.entry-points."dpframe.plugins"]
    localsgd = "dpframe_localsgd.conf"

The folder joins Hydra's search path, after dpframe's own and the user's `--config-dir`: what is
nearer wins. Nothing of a package is imported before one of its options is used.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

from dpframe.errors import UserError

GROUP = "dpframe.plugins"


class Plugin(NamedTuple):
    package: str  # its name and version
    top: str  # what is imported
    folder: Path  # of its configs

    def file(self, group: str, option: str) -> Path:
        return self.folder / group / f"{option}.yaml"


@cache
def installed() -> tuple[Plugin, ...]:
    """By the packages' names; of two versions of a package, the one that Python would import."""
    # What lies in the current directory was not installed, though Python may look there.
    here = os.path.realpath(os.curdir)
    folders = [path for path in sys.path if os.path.realpath(path or os.curdir) != here]
    plugins: dict[tuple[str, str], Plugin] = {}
    for package in metadata.distributions(path=folders):
        for module in _modules(package):
            if folder := _folder(module):
                plugin = Plugin(f"{package.name} {package.version}", module.split(".")[0], folder)
                plugins.setdefault((package.name.lower(), module), plugin)
    return tuple(plugins[key] for key in sorted(plugins))


def bringing(group: str, option: str) -> list[Plugin]:
    return [plugin for plugin in installed() if plugin.file(group, option).is_file()]


def selected(choices: Mapping[str, Any], nearer: Sequence[Path]) -> list[str]:
    """The packages whose options a config has; what is in a `nearer` folder is not theirs."""
    packages = set()
    for group, options in choices.items():
        group = group.split("@")[0]
        for option in [options] if isinstance(options, str | None) else options:
            if not any((folder / group / f"{option}.yaml").is_file() for folder in nearer):
                packages |= {plugin.top for plugin in bringing(group, str(option))}
    return sorted(packages)


def refuse_shared(group: str, option: str) -> None:
    """Two packages with one name: neither is meant more than the other."""
    plugins = bringing(group, option)
    if len(plugins) > 1:
        names = " and ".join(plugin.package for plugin in plugins)
        raise UserError(
            f"{group}={option} is in {names}; uninstall one, or copy the file that you mean, e.g. "
            f"{plugins[0].file(group, option)}, into your --config-dir"
        )


def origin_of(module: str) -> str:
    """' of PACKAGE VERSION', where the module is part of a plugin, to go into an error."""
    top = module.split(".")[0]
    return next((f" of {plugin.package}" for plugin in installed() if plugin.top == top), "")


def _modules(package: metadata.Distribution) -> list[str]:
    try:
        text = package.read_text("entry_points.txt") or ""
        if GROUP not in text or not (package.name and package.version):  # cheaper than parsing all
            return []
        return [point.value for point in package.entry_points.select(group=GROUP)]
    except Exception:
        return []  # a broken package is no reason to stop


def _folder(module: str) -> Path | None:
    """Only the package is looked for: to find what is in it, Python would import it."""
    top, *rest = module.split(".")
    try:
        spec = util.find_spec(top)
    except Exception:
        return None
    places = (spec.submodule_search_locations or []) if spec else []
    folders = (Path(place, *rest) for place in places)
    return next((folder for folder in folders if folder.is_dir()), None)
