"""`python tests/faults` plants faults one by one and says which the tests notice.

Each is planted into a copy of the working tree, where the tests that should notice it run up to
the first that fails; those of the room `gpu` have two fake ones. `--list` names the faults, `--only
TEXT` takes those of a name or a room, and `--without` runs the same tests with nothing planted, to
see that it is the faults that they notice. All of them take half an hour on a quiet core.
"""

import argparse
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from conftest import PR_SET_CHILD_SUBREAPER, descendants  # noqa: E402

from faults import CanNotPlant, Fault, copied, known, plant  # noqa: E402

SECONDS = 150  # of all tests of a fault; one that hangs is ended by then, and so noticed
TEST_SECONDS = 100


def main() -> int:
    arguments = _arguments()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a killed pytest leaves is ours
    faults = [f for f in known() if arguments.only in f.name or arguments.only == f.room]
    if arguments.list:
        for fault in faults:
            print(f"{fault.room:<12}{fault.name}")
        return 0
    noticed = 0
    for number, fault in enumerate(faults, 1):
        said = _tried(fault, is_planted=not arguments.without)
        noticed += said.startswith("noticed")
        print(f"{number:>3}  {fault.room:<12}{fault.name}: {said}", flush=True)
    print(f"{noticed} of {len(faults)} noticed")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/faults", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the faults, and plant none")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the name, or a room")
    parser.add_argument("--without", action="store_true", help="plant nothing")
    return parser.parse_args()


def _tried(fault: Fault, *, is_planted: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        root = copied(Path(folder) / "copy")
        try:
            if is_planted:
                plant(fault, root)
            return _tested(fault, root)
        except CanNotPlant as error:
            return f"can not be planted: {error}"
        finally:
            _end_all()


def _tested(fault: Fault, root: Path) -> str:
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    on_gpus = [str(root / "tests/fakecuda"), "2"] if fault.room == "gpu" else []
    command = [sys.executable, *on_gpus, "-m", "pytest", *options, *shlex.split(fault.tests)]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    with (root / "said").open("w") as said:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"noticed, as nothing ends in {SECONDS} s"
    text = (root / "said").read_text(errors="replace")
    if code == 0:
        return "NOT NOTICED"
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.M)
    if code == 1 and failed:
        return f"noticed by {failed[1]}"
    if code > 5 or code < 0:  # none of pytest's
        return f"noticed, as it ended the tests (exit code {code})"
    if "Timeout" in text:  # pytest-timeout ends the process where a test does not let it go on
        return f"noticed, as a test did not end in {TEST_SECONDS} s"
    return f"can not be run (exit code {code}): {(text.splitlines() or ['nothing was said'])[-1]}"


def _end_all() -> None:
    """Ranks and servers of a pytest that was killed."""
    while left := [*descendants()]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
