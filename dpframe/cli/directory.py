"""A run's directory with its `.hydra/`: made once all is checked, unmade if nothing was trained."""

import errno
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import yaml

from dpframe import files
from dpframe.cli.compose import Composed
from dpframe.errors import UserError

UTF8 = {"encoding": "utf-8", "errors": "surrogateescape"}  # bytes that are no text stay as given


class Directory:
    """One that was given is used as it is; else two runs of one second get one each."""

    def __init__(self, path: Path, *, is_given: bool) -> None:
        self.path = path
        self.is_given = is_given
        self.is_made = False
        self.made_parents: list[Path] = []  # the innermost first
        self._lock: IO[str] | None = None

    def make(self, job: Composed) -> str:
        try:
            self._make()
            if not self.is_made:
                refuse_ways_out(self.path)
            notes = self.path / ".hydra"
            notes.mkdir(exist_ok=True)
            self._take(notes / "lock")
            for folder in (self.path, notes):
                files.sweep(folder)
            _keep_older(notes / "config.yaml", job.text)
            _write(notes / "config.yaml", job.text)
            _write(notes / "hydra.yaml", job.hydra_text)
            _write(notes / "overrides.yaml", as_notes(job.overrides))
        except OSError as error:
            self.unmake()
            raise UserError(
                f"the run directory {self.path} can't be made: {error.strerror}; "
                "name another by hydra.run.dir=DIR"
            ) from None
        return str(self.path)

    @classmethod
    def made(cls, paths: list[str]) -> "Directory":
        """One that another process made, with its parents: `all_made` of there."""
        directory = cls(Path(paths[0]), is_given=True)
        directory.is_made, directory.made_parents = True, [Path(path) for path in paths[1:]]
        return directory

    @property
    def all_made(self) -> list[str]:
        return [str(path) for path in (self.path, *self.made_parents)] if self.is_made else []

    def unmake(self) -> None:
        """Removes what `make` made, and nothing that was there before."""
        self.release()
        if self.is_made:
            shutil.rmtree(self.path, ignore_errors=True)
        for directory in self.made_parents:
            try:
                directory.rmdir()
            except OSError:
                return  # another run is in it

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make(self) -> None:
        self.made_parents = [parent for parent in self.path.parents if not parent.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        number, first = 1, self.path
        while not self.is_made:
            try:
                self.path.mkdir()
                self.is_made = True
            except FileExistsError:
                if self.is_given and self.path.is_dir():
                    return
                if self.is_given:
                    raise
                number += 1
                self.path = first.with_name(f"{first.name}-{number}")

    def _take(self, path: Path) -> None:
        """The kernel lets go of the lock when its owner ends, however that ends."""
        if sys.platform == "win32":
            return
        import fcntl

        self._lock = path.open("a+")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                self.release()
                print(
                    f"dpframe: the file system of {self.path} has no locks ({error.strerror}); "
                    "see to it that no other run writes there",
                    file=sys.stderr,
                )
                return
            self._lock.seek(0)
            owner = self._lock.read().strip()
            self.release()
            raise UserError(
                f"the run directory {self.path} is in use by {owner or 'another process'}; "
                "end that run first, or name another directory by hydra.run.dir=DIR"
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()


def refuse_ways_out(directory: Path) -> None:
    """What a run writes into a directory that was there before must not end up elsewhere.

    The directory itself may be behind a link: that one is its owner's.
    """
    inside = directory.resolve()
    for folder in (directory, directory / ".hydra", directory / "checkpoints"):
        for entry in sorted(folder.iterdir()) if folder.exists() else []:
            if not Path(os.path.realpath(entry)).is_relative_to(inside):
                raise UserError(
                    f"{entry} is a link out of the run directory, and a run writes into its own "
                    "alone; put what it leads to in its place, or remove it"
                )
            if not (entry.is_file() or entry.is_dir()):
                raise UserError(f"{entry} is neither a file nor a folder; remove it")


def as_notes(overrides: Sequence[str]) -> str:
    """As Hydra's own notes, but quoted where YAML would read a mapping, a comment or a number."""
    return yaml.safe_dump(list(overrides), allow_unicode=True, width=float("inf"))


def _write(path: Path, text: str) -> None:
    with files.whole(path) as part:
        part.write_text(text, **UTF8)


def _keep_older(path: Path, text: str) -> None:
    """A resumed run may have another config: the one that it was begun with stays beside it."""
    if not path.is_file() or (before := path.read_text(**UTF8)) == text:
        return
    number, newest = 0, ""
    while (older := path.with_name(f"{path.stem}-{number + 1}{path.suffix}")).exists():
        number, newest = number + 1, older.read_text(**UTF8)
    if before != newest:  # as it is where a resume was killed before it wrote its own
        _write(older, before)
