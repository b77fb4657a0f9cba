"""Python runs this file first, as `python tests/fakecuda` puts its folder into PYTHONPATH."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_the_next_one() -> None:
    """A machine may have a sitecustomize of its own, which this one hides."""
    others = [path for path in sys.path if Path(path or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def give_torch_the_gpus() -> None:
    package = HERE.parent
    spec = importlib.util.spec_from_file_location(
        "fakecuda", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["fakecuda"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from fakecuda import gpus

    gpus.wait_for_torch()


run_the_next_one()
if "FAKECUDA" in os.environ:
    give_torch_the_gpus()
