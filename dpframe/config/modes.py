"""The modes: the core's, each a file in dpframe/modes, and those that entry points bring.

A mode is a module with `run(job)`, which returns a summary. The first line of its docstring is what
--help says of it. If it has `Settings`, a dataclass, its fields are the keys NAME.… of a config,
each with a default; a field's metadata may have a "help". `EVALUATES = True`: it reads a
checkpoint's weights, with the config of its run; `NEEDS_RECIPE = False`: it may do without one. At
its top it imports nothing that takes long: each start imports it for its settings.

    [project.entry-points."dpframe.modes"]
    plan = "dpframe_plan.mode"
"""

from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

from dpframe.config import plugins
from dpframe.errors import LACKING, UserError, first_line, not_one_of

OWN = ("fit", "validate", "test", "predict")
MEANT = {"train": "fit", "evaluate": "validate", "eval": "validate"}  # in other frameworks
UNINSTALLED = {  # what to do where there is no entry point of the mode
    "plan": "pip install examples/dpframe-plan, in dpframe's repository, adds it",
    **dict.fromkeys(("compare", "doctor", "export", "tune", "verify"), LACKING),
}


def names() -> list[str]:
    """dpframe's own in their order, then those of packages."""
    return [*OWN, *of_packages()]


def of_packages() -> list[str]:
    return sorted(plugins.modes().keys() - set(OWN))


def load(name: str) -> ModuleType:
    """The module of one of `names()`."""
    if name in OWN:
        return import_module(f"dpframe.modes.{name}")
    package, *others = found = plugins.modes()[name]
    if others:
        packages = " and ".join(each for each, _ in found)
        raise UserError(f"mode={name} is in {packages}; uninstall one")
    try:
        module: ModuleType = package[1].load()
        if (kind := getattr(module, "Settings", None)) is not None:
            OmegaConf.structured(kind())  # what no config holds, or no default
    except Exception as error:
        raise UserError(
            f"mode={name} of {package[0]}: {type(error).__name__}: {first_line(error)}"
        ) from error
    return module


def about(name: str) -> str:
    """A line for --help, without the mode's name in front."""
    found = [] if name in OWN else plugins.modes()[name]
    packages = [package for package, _ in found if not plugins.is_own(package)]
    said = ""
    with suppress(UserError):  # one that is broken is told when it is asked for
        said = (load(name).__doc__ or "").strip().split("\n")[0].removeprefix(f"`mode={name}`: ")
    named = f" ({', '.join(packages)})" * bool(packages)
    return f"{said[:1].upper()}{said[1:]}{named}".strip()


def settings(name: str) -> type[Any] | None:
    """The dataclass of the keys NAME.… of a config; None if there are none."""
    kind: type[Any] | None = getattr(load(name), "Settings", None)
    return kind


def evaluates(name: str | None) -> bool:
    return name is not None and name in names() and getattr(load(name), "EVALUATES", False)


def needs_recipe(name: str | None) -> bool:
    return name is None or name not in names() or getattr(load(name), "NEEDS_RECIPE", True)


def refuse_unknown(name: str) -> None:
    if name in names():
        return
    if name in UNINSTALLED:
        raise UserError(f"mode={name} is not installed; {UNINSTALLED[name]}")
    if name in plugins.modes_here():
        raise UserError(
            f"mode={name} is a mode of the project in this folder, which has to be installed: pip "
            "install -e ."
        )
    raise not_one_of("mode", name, names(), meant=MEANT.get(name))
