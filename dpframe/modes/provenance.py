"""What a run was: the commit of its code and what was changed since, versions, GPU and command.

It is in `.hydra/origin.json` and, without the text of the changes, in summary.json. A new key is
compared with the earlier run's unless it is of one start. Git may be missing, or slow in a large
repository: nothing waits for it but a run with an earlier one, for PATIENCE.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dpframe.util import files

NAME = "origin.json"
LARGEST = 1_000_000  # bytes of a diff; the rest is left out
PATIENCE = 0.2  # seconds, where a run is compared with an earlier one
# A repository's own settings may name programs: none is called.
ASK = (
    "git -c core.fsmonitor=false rev-parse HEAD && git -c core.fsmonitor=false diff --no-color "
    f"--no-ext-diff --no-textconv --ignore-submodules=dirty HEAD | head -c {LARGEST + 1}"
)
QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
DRIVER = Path("/proc/driver/nvidia/version")
NEW_EACH_TIME = ("began", "command")


class Git:
    """Git's answer about the current directory, while the main process builds its run."""

    def __init__(self, *, is_asked: bool) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if not is_asked:
            return
        with suppress(OSError):
            self._output = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                ["sh", "-c", ASK],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                env=os.environ | QUIET,
                start_new_session=True,
            )

    def __enter__(self) -> "Git":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()

    def answer(self, seconds: float = 0.0) -> dict[str, str]:
        """`commit` and `diff`, once git has ended; {} before, and where there is no repository."""
        if self._process is None:
            return {}
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {}
        self._output.seek(0)
        commit, _, diff = self._output.read().partition(b"\n")
        if not commit:
            return {}
        cut = f"\n… cut after {LARGEST:,} bytes\n" if len(diff) > LARGEST else ""
        text = diff[:LARGEST].decode(errors="surrogateescape") + cut
        return {"commit": commit.decode(), "diff": text}


def facts(command: str, targets: Iterable[str], devices: Sequence[Any]) -> dict[str, Any]:
    """All but git's part. `targets` are what the config calls; torch is there already."""
    import torch

    from dpframe.strategies.devices import model

    has_driver = any(each.type == "cuda" for each in devices) and DRIVER.is_file()
    driver = re.search(r"\d+(\.\d+)+", DRIVER.read_text()) if has_driver else None
    return {
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "python": platform.python_version(),
        "device": ", ".join(dict.fromkeys(map(model, devices))),
        "cuda": torch.version.cuda,
        "driver": driver and driver[0],
        "packages": _versions(targets),
    }


def as_text(origin: Mapping[str, Any]) -> str:
    return json.dumps(origin, indent=1) + "\n"


def complete(directory: str, git: Git) -> None:
    """Writes down what git has answered since the run began."""
    path = Path(directory) / ".hydra" / NAME
    origin = read(path.parent.parent)
    if origin and "commit" not in origin and (answer := git.answer()):
        with suppress(OSError):
            files.write_text(path, as_text(origin | answer))


def read(directory: Path | None) -> dict[str, Any]:
    """Of a run's directory, which a stranger may have written; {} if there is none."""
    return files.json_object(directory / ".hydra" / NAME) if directory else {}


def summarized(directory: str | Path) -> dict[str, Any]:
    """With `is_dirty` in place of the diff."""
    origin = read(Path(directory))
    diff = origin.pop("diff", None)
    return origin if diff is None else origin | {"is_dirty": diff != ""}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In one line what both know and where they differ, e.g. `torch 2.12.0, now 2.13.0`."""
    before, after = flat(then), flat(now)
    differing = [key for key in after if key in before and before[key] != after[key]]
    told = [f"{key} {before[key]}, now {after[key]}" for key in differing if key != "diff"]
    told += ["other uncommitted changes"] * ("diff" in differing)
    return "; ".join(told)


def flat(origin: Mapping[str, Any]) -> dict[str, Any]:
    """What of it may differ, by short names."""
    packages = origin.get("packages")
    own = {key: value for key, value in origin.items() if key not in (*NEW_EACH_TIME, "packages")}
    if isinstance(commit := own.get("commit"), str):
        own["commit"] = commit[:12]
    return own | (packages if isinstance(packages, dict) else {})


def _versions(targets: Iterable[str]) -> dict[str, str]:
    """Of all that is imported and tells its version, and of what the config calls."""
    found = {}
    names = [name for name in sys.modules if "." not in name]
    for name in {*names} - sys.stdlib_module_names:
        version = getattr(sys.modules[name], "__dict__", {}).get("__version__")
        if isinstance(version, str):
            found[name] = version
    for name in {str(target).partition(".")[0] for target in targets} - found.keys():
        with suppress(metadata.PackageNotFoundError, ValueError):
            found[name] = metadata.version(name)
    return dict(sorted(found.items()))
