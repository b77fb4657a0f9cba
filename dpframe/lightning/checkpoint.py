"""What Lightning's hooks put into a checkpoint and read from it: plain data, in dpframe's file."""

import logging
from typing import Any

import torch
from torch import Tensor

from dpframe.checkpoint.plain import PLAIN

ARRAY = "__numpy__"  # of a tensor that was an array
HYPER = "hyper_parameters"
LEFT_OUT = object()
log = logging.getLogger("dpframe")


def of_lightning(task: Any, weights: dict[str, Tensor], counts: dict[str, int]) -> dict[str, Any]:
    """A checkpoint with Lightning's keys."""
    stripped = {key.removeprefix("module."): value for key, value in weights.items()}
    theirs: dict[str, Any] = {**counts, "state_dict": stripped}
    if task.module.hparams:
        theirs[HYPER] = dict(task.module.hparams)
    return theirs


def own_part(module: Any, theirs: dict[str, Any]) -> dict[str, Any]:
    """What the module's on_save_checkpoint adds to Lightning's keys."""
    given = {**theirs, HYPER: dict(theirs.get(HYPER, {}))}
    module.on_save_checkpoint(theirs)
    own = {key: value for key, value in theirs.items() if key not in given}
    if theirs.get(HYPER, {}) != given[HYPER]:
        own[HYPER] = theirs[HYPER]
    return own


def plain(value: Any, where: str, left_out: list[str]) -> Any:
    """The part of it that a checkpoint can hold; what it can't is named in `left_out`."""
    kind = type(value)
    if isinstance(value, dict):
        parts = {key: plain(each, f"{where}.{key}", left_out) for key, each in value.items()}
        return {key: each for key, each in parts.items() if each is not LEFT_OUT}
    if kind in (list, tuple, set):
        lost: list[str] = []
        made = [plain(each, where, lost) for each in value]
        left_out += lost[:1]
        return LEFT_OUT if lost else kind(made)
    if kind in PLAIN or isinstance(value, Tensor):
        return value
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        try:
            tensor = torch.as_tensor(value)
            return {ARRAY: tensor} if tensor.ndim else tensor.item()
        except (TypeError, ValueError):
            pass
    left_out.append(f"{where} ({kind.__name__})")
    return LEFT_OUT


def kept(module: Any, own: dict[str, Any], told: set[str]) -> dict[str, Any]:
    """`own` as a checkpoint holds it. What is left out is said once."""
    left_out: list[str] = []
    parts = {key: plain(value, key, left_out) for key, value in own.items()}
    news = [name for name in left_out if name not in told]
    told.update(news)
    if news:
        log.warning(
            "%s.on_save_checkpoint adds what a checkpoint can't hold, so that a resume takes it "
            "from the module as it is built: %s",
            *(type(module).__name__, ", ".join(news[:5]) + (", …" if len(news) > 5 else "")),
        )
    return {key: value for key, value in parts.items() if value is not LEFT_OUT}


def merged(now: Any, then: Any) -> Any:
    """What a checkpoint has, over what the module itself would save now."""
    if isinstance(then, dict) and set(then) == {ARRAY}:
        return then[ARRAY].numpy()
    if not isinstance(then, dict):
        return then
    now = now if isinstance(now, dict) else {}
    return {**now, **{key: merged(now.get(key), value) for key, value in then.items()}}
