"""`dpframe new NAME` writes a small project to begin with: a package that brings options."""

import keyword
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from dpframe.config.overrides import VALUES
from dpframe.errors import UserError

HELP = """dpframe new NAME     or FOLDER/NAME

Writes a small project: a package NAME with a recipe, a callback and their options, its test and its
pyproject.toml. Its options are there in its folder, and once it is installed in every directory."""
NAME = "NAME"  # stands for the project's, in the names of files and in them


def new(words: Sequence[str]) -> str:
    """Writes the project, and returns what one types next."""
    if len(words) != 1:
        raise UserError(f"dpframe new {shlex.join(words)}: name one project, e.g. dpframe new mine")
    folder = Path(words[0])
    name = folder.name
    try:
        _check(name, folder)
        for path, text in _files(files("dpframe.cli").joinpath("project")):
            file = folder / path.replace(NAME, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace(NAME, name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error.strerror}; name another") from None
    return (
        f"{folder} is a project with a recipe and a callback; next:\n"
        f"  cd {shlex.quote(str(folder))}\n"
        f"  dpframe recipe={name}\n"
        "  dpframe schema > dpframe.schema.json   # by which an editor checks the configs\n"
        "  pip install -e '.[dev]' && python -m pytest"
    )


def _check(name: str, folder: Path) -> None:
    if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(
            f"dpframe new {name}: a project is a Python package; name it by letters, digits and _"
        )
    if name.lower() in VALUES:
        raise UserError(f"dpframe new {name}: recipe={name} is no text to Hydra; use another name")
    if files("dpframe.conf").joinpath(f"recipe/{name}.yaml").is_file():
        raise UserError(f"dpframe new {name}: recipe={name} is dpframe's own; use another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"dpframe new {folder}: {folder} is there already; name another")
    if name == "tests" or _is_module(name):
        raise UserError(f"dpframe new {name}: there is another module {name}; use another name")


def _is_module(name: str) -> bool:
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # without one it is an empty folder


def _files(folder: Traversable, above: str = "") -> Iterator[tuple[str, str]]:
    """Each file's path without `.txt`, which keeps it from being a module of dpframe's."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(".txt"):
            yield above + entry.name.removesuffix(".txt"), entry.read_text(encoding="utf-8")
