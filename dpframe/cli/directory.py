"""A run's directory with its `.hydra/`: made after all checks, removed if nothing was trained."""

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

UTF8 = {"encoding": "utf-8", "errors": "surrogateescape"}  # keeps bytes that are not text


class Directory:
    """A directory that the user named is used as it is; two runs of one second get one each."""

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
        """A directory that another process made, from its `all_made`."""
        directory = cls(Path(paths[0]), is_given=True)
        directory.is_made, directory.made_parents = True, [Path(path) for path in paths[1:]]
        return directory

    @property
    def all_made(self) -> list[str]:
        return [str(path) for path in (self.path, *self.made_parents)] if self.is_made else []

    def unmake(self) -> None:
        """Removes what `make` made, and nothing else."""
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
        """The kernel releases the lock when its process ends, however that happens."""
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
                    "make sure that no other run writes there",
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
    """Refuses links that would lead what a run writes out of an existing directory.

    The directory itself may be behind a link, which is its owner's.
    """
    inside = directory.resolve()
    for folder in (directory, directory / ".hydra", directory / "checkpoints"):
        for entry in sorted(folder.iterdir()) if folder.exists() else []:
            if not Path(os.path.realpath(entry)).is_relative_to(inside):
                raise UserError(
                    f"{entry} is a link out of the run directory, and a run writes only inside it; "
                    "move what it leads to here, or remove the link"
                )
            if not (entry.is_file() or entry.is_dir()):
                raise UserError(f"{entry} is neither a file nor a folder; remove it")


def as_notes(overrides: Sequence[str]) -> str:
    """As Hydra writes overrides, but in quotes where YAML would read anything but text."""
    return yaml.safe_dump(list(overrides), allow_unicode=True, width=float("inf"))


def _write(path: Path, text: str) -> None:
    with files.whole(path) as part:
        part.write_text(text, **UTF8)


def _keep_older(path: Path, text: str) -> None:
    """A resumed run may have another config: the older one stays beside it."""
    if not path.is_file() or (before := path.read_text(**UTF8)) == text:
        return
    number, newest = 0, ""
    while (older := path.with_name(f"{path.stem}-{number + 1}{path.suffix}")).exists():
        number, newest = number + 1, older.read_text(**UTF8)
    if before != newest:  # equal if a resume was killed before it wrote its own
        _write(older, before)
