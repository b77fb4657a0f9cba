"""Which checkpoint a run starts from: found before torch is imported, once for all ranks."""

from pathlib import Path

from dpframe.cli.settings import RunSettings
from dpframe.errors import UserError


def start_file(settings: RunSettings, runs: Path) -> Path | None:
    """What `resume` or `checkpoint` names; `runs` is where this recipe's runs are."""
    if settings.resume is not None:
        return _resumed_file(settings.resume, runs)
    if settings.checkpoint is not None:
        return _file("checkpoint", Path(settings.checkpoint))
    return None


def resumed_directory(start: Path) -> Path | None:
    """The run directory that a resumed run goes on in."""
    return start.parent.parent if start.parent.name == "checkpoints" else None


def _resumed_file(resume: str, runs: Path) -> Path:
    if resume == "last":
        found = sorted(runs.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UserError(f"resume=last: there is no run with a checkpoint in {runs}")
        return found[-1]
    path = Path(resume).expanduser()
    if path.is_dir():
        return _file("resume", path / "checkpoints" / "last.ckpt")
    return _file("resume", path)


def _file(key: str, path: Path) -> Path:
    path = path.expanduser()
    if path.is_dir():
        raise UserError(f"{key}={path} is a directory; name a file in it, as checkpoints/best.ckpt")
    if not path.is_file():
        raise UserError(f"{key}={path}: there is no such file")
    return path
