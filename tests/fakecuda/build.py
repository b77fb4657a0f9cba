"""Compiles the C++ of this folder once for a version of torch, into the user's cache directory."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRIED = ("2.13",)  # the versions of torch whose inner interfaces these sources are written for
OPTIMIZED = "races.cpp"  # it runs for each operator; the others would compile for minutes more
LIBRARY, OPERATORS = "_gpus.so", "operators.json"
# NDEBUG, as torch is built with it: without, some of its classes have more members.
FLAGS = ["-w", "-std=c++20", "-fPIC", "-DNDEBUG", "-DTORCH_EXTENSION_NAME=_gpus"]


class CanNotBuild(Exception):
    """In one line, why there are no fake GPUs here."""


def built() -> Path:
    """The folder of the compiled library and of what torch says of its operators."""
    refusal = why_not()
    if refusal:
        raise CanNotBuild(refusal)
    folder = cache() / key()
    if not (folder / LIBRARY).exists():
        with _lock(folder):
            if not (folder / LIBRARY).exists():
                _build(folder)
    return folder


def why_not() -> str | None:
    torch = version("torch")
    if not torch.startswith(TRIED):
        return f"fake GPUs are made for torch {', '.join(TRIED)}, this is {torch}"
    if sys.platform != "linux":
        return f"fake GPUs need Linux, this is {sys.platform}"
    if shutil.which("g++") is None:
        return "fake GPUs are compiled by g++, and there is none; install g++"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "fake GPUs are compiled with Python.h, and there is none; install python3-dev"
    return None


def cache() -> Path:
    above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(above) / "dpframe-fakecuda"


def key() -> str:
    """Of the version of torch, of Python's and of the sources."""
    digest = hashlib.sha256("\0".join([version("torch"), sys.version, *FLAGS]).encode())
    for path in (*_sources("*.cpp"), *_sources("*.h"), HERE / "build.py", HERE / "operators.py"):
        digest.update(path.read_bytes())
    return f"torch-{version('torch')}-{digest.hexdigest()[:16]}"


def _sources(pattern: str) -> list[Path]:
    return sorted(HERE.glob(pattern))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    print(f"compiling fake GPUs for torch {version('torch')}, half a minute", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        _compile(Path(name), made / LIBRARY)
        from fakecuda import operators

        (made / OPERATORS).write_text(json.dumps(operators.facts()))
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _compile(work: Path, library: Path) -> None:
    """All but one source as one: to read torch's headers takes most of the time."""
    torch = Path(find_spec("torch").origin).parent
    include = torch / "include"
    includes = [HERE, include, include / "torch/csrc/api/include"]
    includes.append(Path(sysconfig.get_paths()["include"]))
    others = [source.name for source in _sources("*.cpp") if source.name != OPTIMIZED]
    together = work / "together.cpp"
    together.write_text("".join(f'#include "{name}"\n' for name in others))

    def compiled(source: Path, level: str) -> Path:
        target = work / f"{source.stem}.o"
        _gxx(level, *FLAGS, *(f"-I{path}" for path in includes), "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, [together, HERE / OPTIMIZED], ["-O0", "-O2"]))
    names = ("c10", "torch_cpu", "torch", "torch_python")
    libraries = [f"-L{torch / 'lib'}", "-Wl,--no-as-needed"]  # gpus.py loads those of this torch
    _gxx("-shared", *objects, *libraries, *(f"-l{name}" for name in names), "-o", library)


def _gxx(*arguments: object) -> None:
    done = subprocess.run(["g++", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CanNotBuild(f"g++ can't compile fake GPUs: {(errors or [done.stderr.strip()])[0]}")
