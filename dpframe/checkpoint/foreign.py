"""Weights that other programs have saved: which of them they are, and which is which of a task."""

import importlib.util
import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpframe.checkpoint.plain import Unusable

WEIGHTS = ("state_dict", "model_state_dict", "model", "net")  # where other programs keep them
WRAPPERS = ("module", "_orig_mod")  # in names: of DataParallel and DDP, and of torch.compile


def read_safetensors(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("safetensors") is None:
        raise Unusable("needs the package safetensors: pip install 'dpframe[export]'")
    try:
        saved = importlib.import_module("safetensors.torch").load_file(path)
    except Exception as error:  # of its own kind
        raise Unusable(f"can't be read: {str(error)[:160]}") from None
    return pick_weights(saved)


def pick_weights(saved: Any) -> dict[str, Any]:
    """A state dict, or the one among what a program has saved."""
    inside = saved if isinstance(saved, dict) else {}
    found = {str(name): value for name, value in inside.items() if _is_state_dict(value)}
    names = [name for name in WEIGHTS if name in found] or list(found)
    if len(found) > 1 and names[0] not in WEIGHTS:
        raise Unusable(f"holds several state dicts, {', '.join(found)}; save one of them alone")
    weights = saved if _is_state_dict(saved) else found[names[0]] if names else None
    if weights is None:
        raise Unusable(
            "is no dpframe checkpoint, and holds no state dict, i.e. tensors by their names"
        )
    return {"task": weights, "is_foreign": True}


def _is_state_dict(value: Any) -> bool:
    pairs = value.items() if isinstance(value, dict) else ()
    return bool(pairs) and all(isinstance(n, str) and isinstance(v, Tensor) for n, v in pairs)


def rename_to_match(
    weights: dict[str, Any], task: torch.nn.Module, here: dict[str, Any]
) -> dict[str, Any]:
    """Under the task's names, whatever was around the network there, and is around it here."""
    ways = [
        (_strip_wrappers(here, cut), _strip_wrappers(weights, other))
        for cut, other in product((1, 0), repeat=2)
    ]
    ours, theirs = max(ways, key=lambda way: len(way[0].keys() & way[1].keys()))
    if weights.keys() == here.keys() or len(theirs) < len(weights) or len(ours) < len(here):
        return weights  # nothing to do, or which is which is not known
    renamed = {ours.get(bare, name): weights[name] for bare, name in theirs.items()}
    # Of a weight that has several names, safetensors keeps one.
    named = list(task.named_parameters(remove_duplicate=False))
    known = {id(weight): renamed[name] for name, weight in named if name in renamed}
    return {name: known[id(weight)] for name, weight in named if id(weight) in known} | renamed


def _strip_wrappers(names: Iterable[str], is_cut: int) -> dict[str, str]:
    """The names by what is left without wrappers and, if `is_cut`, the common beginning."""
    parts = [[part for part in name.split(".") if part not in WRAPPERS] for name in names]
    shared = len(os.path.commonprefix([each[:-1] for each in parts])) if is_cut else 0
    return {".".join(each[shared:]): name for each, name in zip(parts, names, strict=True)}
