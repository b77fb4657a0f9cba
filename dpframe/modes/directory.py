"""A run's directory with its `.hydra/`: made after all checks, removed if nothing was trained."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from dpframe.errors import UserError
from dpframe.util import files

UTF8 = {"encoding": "utf-8", "errors": "surrogateescape"}  # keeps bytes that are not text
OVERWRITTEN = (".hydra", "checkpoints")  # folders whose files a run may write over
KEPT = ("config.yaml", "origin.json")  # in .hydra/, of the starts before
ELSEWHERE = "name another by hydra.run.dir=DIR"


class Directory:
    """The directory of one run, which this process locks."""

    def __init__(self, path: Path, *, is_given: bool) -> None:
        self.path = path
        self.is_given = is_given
        self.made: list[Path] = []  # by this run, the innermost first
        self.has_broken_run = False  # before this one
        self._lock: IO[str] | None = None

    def make(self, notes: Mapping[str, str]) -> str:
        """Makes the directory, and `.hydra/` with `notes`: texts by the names of their files."""
        try:
            self.path, self.made = create(self.path, is_given=self.is_given)
            if not self.made:
                refuse_ways_out(self.path)
            self._lock = files.claim(self.path, "the run directory", instead=ELSEWHERE)
            folder = self.path / ".hydra"
            folder.mkdir(exist_ok=True)
            for swept in (self.path, folder):
                files.remove_leftovers(swept)
            self.has_broken_run = has_broken_run(self.path)
            for name, text in notes.items():
                if name in KEPT:
                    _keep_older(folder / name, text)
                files.write_text(folder / name, text)
        except OSError as error:
            self.unmake()
            raise UserError(
                f"the run directory {self.path} can't be made: {error.strerror}; {ELSEWHERE}"
            ) from None
        return str(self.path)

    def unmake(self) -> None:
        """Removes what `make` made, and nothing else."""
        self.release()
        remove(self.made)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def create(path: Path, *, is_given: bool) -> tuple[Path, list[Path]]:
    """The directory, and what was made for it: itself, then those above it.

    One that the user named is used as it is. Two of one second get a number each.
    """
    above = [parent for parent in path.parents if not parent.exists()]
    name, number = path.name, 1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                return path, [path, *above]
            except FileExistsError:
                if is_given and path.is_dir():
                    return path, []
                if is_given:
                    raise
                number += 1
                path = path.with_name(f"{name}-{number}")
    except OSError:
        _remove_empty(above)
        raise


def remove(made: Sequence[Path]) -> None:
    """Removes what `create` has made."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
        _remove_empty(made[1:])


def refuse_ways_out(directory: Path) -> None:
    """Refuses links that would lead what a run writes out of an existing directory: to folders, and
    of files those that it may write over.

    The directory itself may be behind a link, which is its owner's.
    """
    inside = directory.resolve()
    at_risk = {inside, *(Path(os.path.realpath(inside / name)) for name in OVERWRITTEN)}
    for folder, folders, names in os.walk(directory):
        for name in sorted(folders + names * (Path(folder).resolve() in at_risk)):
            entry = Path(folder, name)
            if not Path(os.path.realpath(entry)).is_relative_to(inside):
                raise UserError(
                    f"{entry} is a link out of the run directory, and a run writes only inside it; "
                    "move what it leads to here, or remove the link"
                )
            if not (entry.is_file() or entry.is_dir()):
                raise UserError(f"{entry} is neither a file nor a folder; remove it")


def has_broken_run(directory: Path) -> bool:
    """Whether a run there was killed or has failed."""
    if not (directory / ".hydra" / "config.yaml").is_file():
        return False
    try:
        return bool(json.loads((directory / "summary.json").read_text())["status"] != "finished")
    except (OSError, LookupError, TypeError, ValueError):
        return True


def _remove_empty(directories: Iterable[Path]) -> None:
    for directory in directories:
        try:
            directory.rmdir()
        except OSError:
            return  # another run is in it


def _keep_older(path: Path, text: str) -> None:
    """A resumed run may have another config: the older one stays beside it."""
    if not path.is_file() or (before := path.read_text(**UTF8)) == text:
        return
    number, newest = 0, ""
    while (older := path.with_name(f"{path.stem}-{number + 1}{path.suffix}")).exists():
        number, newest = number + 1, older.read_text(**UTF8)
    if before != newest:  # equal if a resume was killed before it wrote its own
        files.write_text(older, before)
