"""Measures dpframe on this machine's GPUs in minutes, and leaves gpu.json and gpu.md."""

import json
import os
import shlex
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu import budget, results
from benchmarks.gpu.page import page
from benchmarks.gpu.records import Records


def main() -> int:
    options = parser().parse_args()
    if options.section:
        measure(options)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "python -m benchmarks.gpu needs a CUDA device, and there is none; "
            "use --dry-run --device cpu to try it out",
            file=sys.stderr,
        )
        return 2
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in budget.PARTS if name in (options.only or budget.PARTS)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        command = partial(command_of, options)
        outcomes = budget.run_all(names, 60 * options.minutes, command, Path(scratch))
    report = report_of([outcome.as_json() for outcome in outcomes], options)
    report["seconds"] = time.monotonic() - began
    (folder / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "gpu.md").write_text(page(report))
    print(f"{folder / 'gpu.md'}, {folder / 'gpu.json'}")
    for line in report["problems"]:
        print(line)
    return 1 if report["problems"] else 0


def parser() -> ArgumentParser:
    found = ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    found.add_argument("--out", default="gpu-benchmark", help="a directory for the two files")
    found.add_argument("--only", nargs="+", choices=budget.PARTS, help="these sections alone")
    found.add_argument("--minutes", type=float, default=9.0, help="at most, for all of it")
    found.add_argument("--dry-run", action="store_true", help="tiny networks: does all of it run?")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    # Of the process of a section:
    found.add_argument("--section", help="measure this one here")
    found.add_argument("--seconds", type=float, help="for it")
    found.add_argument("--records", type=Path, help="the file that takes what it measures")
    return found


def command_of(options: Namespace, name: str, seconds: float, records: Path) -> list[str]:
    words = ["--section", name, "--seconds", f"{seconds:.1f}", "--records", str(records)]
    words += ["--device", options.device, *(["--dry-run"] if options.dry_run else [])]
    return [sys.executable, "-m", "benchmarks.gpu", *words]


def measure(options: Namespace) -> NoReturn:
    import torch

    from benchmarks.gpu.sections import SECTIONS, Job

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    job = Job(options.seconds, device, options.dry_run, Records(options.records))
    SECTIONS[options.section](job)
    sys.stdout.flush()
    os._exit(0)  # torch aborts now and then where autograd's thread of a GPU outlives Python


def report_of(sections: list[dict[str, Any]], options: Namespace) -> dict[str, Any]:
    records = [record for section in sections for record in section["records"]]
    contests = results.contests_of(records)
    is_dry = options.dry_run
    return {
        "title": "dpframe on a GPU" + (", a dry run: its times mean nothing" if is_dry else ""),
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "command": f"python -m benchmarks.gpu {shlex.join(sys.argv[1:])}".strip(),
        "minutes": options.minutes,
        "problems": results.problems(sections, contests),
        "contests": contests,
        "sections": sections,
    }


if __name__ == "__main__":
    raise SystemExit(main())
