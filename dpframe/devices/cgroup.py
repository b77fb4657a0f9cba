"""What the cgroups of this process allow, e.g. a container's: memory, and processor time."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # of proc and sys


def memory_limit() -> int | None:
    """In bytes; None: the machine's is the limit."""
    found = [*_numbers("", "memory.max"), *_numbers("memory", "memory.limit_in_bytes")]
    return min((limit for (limit,) in found), default=None)


def memory_left() -> int | None:
    """Of that limit, in bytes; what only caches files can be had. None: the machine's is it."""
    left = []
    for controller, *names in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _folders(controller):
            with suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = (int((folder / name).read_text()) for name in names)
                left.append(max(0, limit - used + _cached(folder)))
    return min(left, default=None)


def _cached(folder: Path) -> int:
    """The files that have not been read for a while, in this cgroup and those within it."""
    pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    names = "inactive_file", "total_inactive_file"
    return max((int(number) for name, number in pairs if name in names), default=0)


def cpu_limit() -> float | None:
    """In cores, e.g. 2.5."""
    found = [*_numbers("", "cpu.max")]
    found += _numbers("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min((quota / period for quota, period in found), default=None)


def _numbers(controller: str, *names: str) -> Iterator[list[int]]:
    """What these files say in the cgroup of this process and in all around it, as limits nest;
    nothing where there is none. The controller of the second version is ""."""
    count = 2 if "cpu" in names[0] else 1  # a quota and a period
    for folder in _folders(controller):
        with suppress(OSError, ValueError):  # no such file, or "max"
            numbers = [int(word) for name in names for word in (folder / name).read_text().split()]
            if len(numbers) == count and min(numbers) > 0:  # -1 is no limit
                yield numbers


def _folders(controller: str) -> Iterator[Path]:
    mount = ROOT / "sys/fs/cgroup" / controller
    try:
        lines = (ROOT / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, has_path, path = rest.partition(":")
        if has_path and controller in controllers.split(","):
            # In a container, it may be the host's path: then the mount itself is the cgroup.
            inner = [part for part in Path(path).parts[1:] if part != ".."]
            for depth in range(len(inner), -1, -1):
                yield mount.joinpath(*inner[:depth])
