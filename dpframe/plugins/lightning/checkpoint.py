"""What Lightning's hooks put into a checkpoint and read from it: plain data, in dpframe's file."""

import logging
from typing import Any

from torch import Tensor

from dpframe.trainer.resume.attributes import NotPlain, OfAStep, packed, unpacked

HYPER = "hyper_parameters"
LEFT_OUT = object()
log = logging.getLogger("dpframe")


def of_lightning(task: Any, weights: dict[str, Tensor]) -> dict[str, Any]:
    """A checkpoint with Lightning's keys."""
    theirs: dict[str, Any] = {
        "epoch": task.current_epoch,
        "global_step": task.module.trainer.global_step,
        "state_dict": {key.removeprefix("module."): value for key, value in weights.items()},
    }
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
    if isinstance(value, dict):
        parts = {key: plain(each, f"{where}.{key}", left_out) for key, each in value.items()}
        return {key: each for key, each in parts.items() if each is not LEFT_OUT}
    if isinstance(value, Tensor):
        return value
    try:
        return packed(value)
    except NotPlain as what:
        left_out.append(f"{where} ({str(what).removeprefix('a ')})")
    except OfAStep:
        left_out.append(f"{where} (of a step's graph)")
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


def restored(task: Any, there: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint as on_load_checkpoint gets it; `own` is what `kept` has made."""
    return there | merged(own_part(task.module, dict(there)), unpacked(own, task.device))


def merged(now: Any, then: Any) -> Any:
    """What a checkpoint has, over what the module itself would save now."""
    if not isinstance(then, dict):
        return then
    now = now if isinstance(now, dict) else {}
    return {**now, **{key: merged(now.get(key), value) for key, value in then.items()}}
