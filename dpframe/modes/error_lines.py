"""A device that is out of memory, or fails: one line with what was in use and what to change."""

import re
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpframe.callbacks.banner import batch
from dpframe.checkpoint import seal
from dpframe.data.source import evaluated_rows
from dpframe.devices import memory
from dpframe.errors import DeviceLost, Failure, OutOfMemory, first_line
from dpframe.strategies import Strategy
from dpframe.trainer import Trainer
from dpframe.trainer.prepare import can_be_cut
from dpframe.trainer.settings import TrainerSettings

SMALLER = {"32": "bf16", "64": "bf16", "bf16": "bf16-true", "fp16": "bf16-true"}  # precisions
SET_UP = "set-up"
KIND = re.compile(r"\b[A-Z]+ error: .*")  # e.g. `CUDA error: unspecified launch failure`
ECC = "ECC error"
CAUSES = {
    "device-side assert": "a kernel met a value out of range, e.g. an index or a label",
    "illegal memory access": "a kernel read or wrote outside of its tensors",
    ECC: "the memory of this GPU is damaged, see nvidia-smi -q -d ECC",
}


@contextmanager
def explain(
    strategy: Strategy,
    settings: TrainerSettings,
    trainer: Trainer | None = None,
    *,
    resumes: bool = False,
) -> Iterator[None]:
    """Turns such an error inside into a Failure of one line, whose details are the traceback."""
    try:
        yield
    except Exception as error:
        doing = SET_UP if trainer is None else trainer.phase
        kind: type[Failure] = Failure
        if memory.ran_out(error):
            kind = OutOfMemory
            line = f"{memory.full(strategy.local_devices, f'{doing}{_on_rank(strategy)}')}; "
            if trainer is None or doing == SET_UP:
                line += _about_set_up(settings)
            else:
                line += _about_batch(trainer, doing)
        elif isinstance(error, torch.AcceleratorError):
            kind = DeviceLost
            line = _lost(strategy, doing, error)
        else:
            raise
        if trainer is not None and trainer.has_begun and (resumes or _has_saved(trainer)):
            line += _resume(trainer, doing, kind)
        failure = kind(line)
        failure.details = "".join(traceback.format_exception(error))
        raise failure from error


def _about_set_up(settings: TrainerSettings) -> str:
    half = SMALLER.get(settings.precision, "").removesuffix("-true")
    now = f"trainer.precision={settings.precision}"
    advice = f"lower {now} to {half}-true, or" if half else f"{now} is small already;"
    return f"the model does not fit; {advice} take a smaller one"


def _about_batch(trainer: Trainer, doing: str) -> str:
    """What to set so that a step is smaller."""
    settings, data, replicas = trainer.settings, trainer.data, trainer.strategy.replicas
    is_trained = doing == "training"
    rows = trainer.feed.source.batch_size if is_trained else evaluated_rows(data)
    if not rows:
        return "make the batches of its loader smaller"
    share = -(-rows // replicas)
    piece = min(settings.micro_batch or share, share)
    half = f"data.eval_batch_size={rows // 2}"
    if is_trained and can_be_cut(trainer.task, trainer.strategy):
        half = f"trainer.micro_batch={piece // 2}, which is the same update"
    elif is_trained:
        half = f"data.batch_size={rows // 2} trainer.accumulate={2 * settings.accumulate}"
        half += "" if rows % 2 else ", which are the same updates"
    # A replica with one row would go on to have it.
    todo = [half] if piece > 1 else []
    if is_trained and not settings.checkpoint_activations:
        todo.append("trainer.checkpoint_activations=true")
    if smaller := SMALLER.get(settings.precision):
        todo.append(f"trainer.precision={smaller}")
    wanted = f"set {', or '.join(todo)}" if todo else "take a smaller model"
    return f"{batch(rows, replicas)}; {wanted}"


def _lost(strategy: Strategy, doing: str, error: Exception) -> str:
    found = KIND.search(str(error))
    kind = found[0] if found else first_line(error)
    devices = ", ".join(map(str, strategy.local_devices))
    line = f"{devices} failed in {doing}{_on_rank(strategy)}: {kind}"
    line += "".join(f"; {cause}" for words, cause in CAUSES.items() if words in kind)
    if ECC not in kind:
        line += "; CUDA_LAUNCH_BLOCKING=1 in the environment makes the traceback in run.log exact"
    return f"{line}; this process can't use the device any more, and saves nothing"


def _has_saved(trainer: Trainer) -> bool:
    """The main process knows; the others look."""
    return bool(trainer.checkpoint or seal.newest_of_run(trainer.run.directory))


def _resume(trainer: Trainer, doing: str, kind: type[Failure]) -> str:
    words = f"resume={shlex.quote(trainer.run.directory)}"
    if kind is DeviceLost:
        how = f"{words}, or trainer.max_restarts=1 under strategy=ddp does so by itself"
    elif doing == "training":
        how = f"{words}, with resume_anyway=true for another batch or precision"
    else:
        how = words
    return f"; the last checkpoint is whole: go on with {how}"


def _on_rank(strategy: Strategy) -> str:
    return f" on rank {strategy.rank}" if strategy.world_size > 1 else ""
