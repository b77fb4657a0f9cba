"""The Python that the peers run in: a venv of their own, as benchmarks/peers.lock pins it."""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

LOCK = Path(__file__).parent.parent / "peers.lock"
NAMES = ("torch", "lightning", "accelerate", "pytorch-ignite", "tensorboard", "numpy")


def python() -> str:
    """In the user's cache, by the lock's content; made where it is missing, which takes minutes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    content = LOCK.read_bytes() + sys.version.encode()
    folder = cache / "dpframe-benchmarks" / hashlib.sha256(content).hexdigest()[:12]
    found = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        print(f"making {folder} from {LOCK.name}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([found, "-m", "pip", "install", "-q", "-r", str(LOCK)], check=True)
        (folder / "complete").touch()
    return str(found)


def versions() -> dict[str, str]:
    lines = (line.partition("==") for line in LOCK.read_text().splitlines())
    pinned = {name: version for name, _, version in lines}
    return {name: pinned[name] for name in NAMES if name in pinned}
