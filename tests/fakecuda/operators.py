"""What torch's own list of operators says: which have CUDA kernels, which may mix devices."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

HAS_CUDA_KERNEL, MIXES_DEVICES = 1, 2  # as in run.h
# An entry whose dispatch names none of these is composed of other operators.
KERNELS = {"CPU", "CUDA", "MPS", "XPU", "MkldnnCPU", "QuantizedCPU", "SparseCPU"}


def facts() -> dict[str, int]:
    folder = Path(find_spec("torchgen").origin).parent
    text = (folder / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = yaml.load(text, Loader=yaml.CSafeLoader)
    by_name = {entry["func"].split("(")[0]: entry for entry in entries}
    return {name: _facts(entry, by_name) for name, entry in by_name.items()}


def _facts(entry: dict[str, Any], by_name: dict[str, Any]) -> int:
    delegate = by_name.get(entry.get("structured_delegate"), {})
    keys = {
        key.strip()
        for one in (entry, delegate)
        for names in one.get("dispatch") or ()
        for key in names.split(",")
    }
    is_ufunc = any("ufunc_inner_loop" in one for one in (entry, delegate))
    has_kernel = is_ufunc or "CUDA" in keys or not keys & KERNELS
    mixes = any(one.get("device_check") == "NoCheck" for one in (entry, delegate))
    return HAS_CUDA_KERNEL * has_kernel | MIXES_DEVICES * mixes
