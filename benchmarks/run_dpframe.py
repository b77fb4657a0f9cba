"""Runs the command `dpframe` in a folder that is then removed, and returns its summaries."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def summaries(*words: str) -> list[dict[str, Any]]:
    """As summary.json has them; of a sweep, in no order."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dpframe", *words, "logger=none"]
        command += [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
        return [json.loads(path.read_text()) for path in Path(folder).rglob("summary.json")]
