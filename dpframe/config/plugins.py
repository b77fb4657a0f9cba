"""Installed packages that bring options, by an entry point with their config folder, or modes.

    [project.entry-points."dpframe.plugins"]
    localsgd = "dpframe_localsgd.conf"
    [project.entry-points."dpframe.modes"]
    plan = "dpframe_plan.mode"

The folder joins Hydra's search path, after dpframe's own and the user's `--config-dir`: what is
nearer wins. The project in the current directory, whose pyproject.toml says so, is the last one, so
that it needs no installation while one works in it. A package's modes are imported for their
settings, at each start; nothing else of it is before one of its options is used.
"""

import os
from functools import cache
from importlib import metadata, util
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from dpframe.errors import UserError
from dpframe.util import entry_points

OPTIONS = (  # of dpframe/plugins, which has modes, too
    *("callbacks=save_pretrained", "recipe=classify", "recipe=lightning", "recipe=sft"),
    "strategy=ray",
)


class Plugin(NamedTuple):
    """A package, and the folder of configs that it brings."""

    package: str  # its name and version
    top: str  # what is imported
    folder: Path  # of its configs


def installed() -> tuple[Plugin, ...]:
    """The plugins by package name, and the project in the current directory."""
    packages, (own, _) = _packages(), _project(os.path.realpath(os.curdir))
    known = {_name(plugin.package) for plugin in packages}
    return (*packages, *(plugin for plugin in own if _name(plugin.package) not in known))


def modes_here() -> list[str]:
    """Those of the project in the current directory, installed or not."""
    return _project(os.path.realpath(os.curdir))[1]


@cache
def _packages() -> tuple[Plugin, ...]:
    """Of two versions, the one that Python would import."""
    plugins: dict[tuple[str, str], Plugin] = {}
    for package, point in entry_points.found():
        if point.group == entry_points.OPTIONS and (folder := _folder(point.value)):
            plugin = Plugin(package, point.value.split(".")[0], folder)
            plugins.setdefault((_name(package), point.value), plugin)
    return tuple(plugins[key] for key in sorted(plugins))


@cache
def _project(here: str) -> tuple[tuple[Plugin, ...], list[str]]:
    """The plugins, and the names of the modes, of the project in this folder."""
    try:
        text = Path(here, "pyproject.toml").read_text(encoding="utf-8")
        if entry_points.OPTIONS not in text and entry_points.MODES not in text:
            return (), []
        import tomllib  # which few starts need

        project = tomllib.loads(text)["project"]
        package = f"{project['name']} {project.get('version', 'in this folder')}"
        points = project["entry-points"]
        modules = points.get(entry_points.OPTIONS, {}).values()
        folders = [(module.split(".")[0], Path(here, *module.split("."))) for module in modules]
        modes = list(points.get(entry_points.MODES, {}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return (), []  # another program's, or half written
    return tuple(Plugin(package, top, folder) for top, folder in folders if folder.is_dir()), modes


@cache
def modes() -> dict[str, list[tuple[str, metadata.EntryPoint]]]:
    """The modes that packages bring, by name: each with its package."""
    found: dict[str, dict[str, tuple[str, metadata.EntryPoint]]] = {}
    for package, point in entry_points.found():
        if point.group == entry_points.MODES:
            found.setdefault(point.name, {}).setdefault(_name(package), (package, point))
    return {name: list(packages.values()) for name, packages in found.items()}


def files_of(group: str, option: str, own: Path | None) -> list[tuple[str, Path]]:
    """An option's files and who brings each, the nearest first: that one is taken."""
    folders = [("dpframe", Path(str(files("dpframe.conf"))))] + ([("you", own)] if own else [])
    folders += [(plugin.package, plugin.folder) for plugin in installed()]
    paths = ((who, folder / group / f"{option}.yaml") for who, folder in folders)
    return [(who, path) for who, path in paths if path.is_file()]


def refuse_shadowed(group: str, option: str, own: Path | None) -> None:
    """A user's file that is not dpframe's must not be ignored; and of two packages' with one name
    neither is meant more than the other."""
    paths = files_of(group, option, own)
    names = [who for who, _ in paths]
    if names[:2] == ["dpframe", "you"]:
        if paths[0][1].read_bytes() != paths[1][1].read_bytes():
            raise UserError(
                f"{group}={option} is both dpframe's and {paths[1][1]}; use another name for yours"
            )
    elif len(paths) > 1 and names[0] not in ("dpframe", "you"):
        raise UserError(
            f"{group}={option} is in {' and '.join(names)}; uninstall one, or copy the file that "
            f"you mean, e.g. {paths[0][1]}, into your --config-dir"
        )


def origin_of(module: str) -> str:
    """' of PACKAGE VERSION', where the module is part of another package's plugin, to go into an
    error."""
    top = module.split(".")[0]
    others = (plugin for plugin in installed() if not is_own(plugin.package))
    return next((f" of {plugin.package}" for plugin in others if plugin.top == top), "")


def is_own(package: str) -> bool:
    """Whether the plugin comes with dpframe."""
    return _name(package) == "dpframe"


def _name(package: str) -> str:
    """The name of a package, without its version, as pip compares them."""
    return package.partition(" ")[0].lower()


def _folder(module: str) -> Path | None:
    """Finds the folder without importing the package."""
    top, *rest = module.split(".")
    try:
        spec = util.find_spec(top)
    except Exception:
        return None
    places = (spec.submodule_search_locations or []) if spec else []
    folders = (Path(place, *rest) for place in places)
    return next((folder for folder in folders if folder.is_dir()), None)
