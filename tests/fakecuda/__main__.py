"""`python tests/fakecuda N ARGUMENTS…` runs `python ARGUMENTS…`, and its children, on N GPUs."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

from fakecuda import build, report  # noqa: E402

USAGE = "python tests/fakecuda N ARGUMENTS, e.g. python tests/fakecuda 2 -m pytest -m gpu"
MOST_GPUS = 16
HIDES = "CUDA_VISIBLE_DEVICES"  # real GPUs, by numbers that the fake ones may not have


def main(count: str = "", *arguments: str) -> int:
    if not count.isdigit() or not 1 <= int(count) <= MOST_GPUS or not arguments:
        return refused(f"usage: {USAGE}; N is 1 to {MOST_GPUS}")
    try:
        folder = build.built()
    except build.CanNotBuild as error:
        return refused(str(error))
    with tempfile.NamedTemporaryFile("r", prefix="fakecuda-") as told:
        environment = {
            **{name: value for name, value in os.environ.items() if name != HIDES},
            "FAKECUDA": count,
            "FAKECUDA_BUILD": str(folder),
            "FAKECUDA_REPORT": told.name,
            "PYTHONPATH": joined(os.pathsep, HERE / "start", *paths()),
            "PYTEST_PLUGINS": joined(",", "fakecuda.plugin", os.environ.get("PYTEST_PLUGINS")),
        }
        code = run([sys.executable, *arguments], environment)
        violations = report.violations(told.read())
    print(*violations, sep="\n", end="\n" * bool(violations), file=sys.stderr)
    return code or bool(violations)


def refused(line: str) -> int:
    print(line, file=sys.stderr)
    return 2


def paths() -> list[str]:
    """Without the folder of another such command, within which this one runs."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in given if Path(path).parts[-2:] != (HERE.name, "start")]


def joined(separator: str, *parts: object) -> str:
    return separator.join(str(part) for part in parts if part)


def run(command: list[str], environment: dict[str, str]) -> int:
    with subprocess.Popen(command, env=environment) as process:
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue  # the command has got it, too, and ends


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
