"""What a Trainer is given: objects of the right kinds, with no method that nothing would call."""

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from dpframe.data import DataModule, DataSets
from dpframe.errors import UserError, nearest, no_super, refuse_miscalled
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.callback import HOOKS, Callback
from dpframe.trainer.recorder import RunInfo
from dpframe.trainer.settings import TrainerSettings, check_seed

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
CALLED: dict[type, tuple[str, ...]] = {
    Task: (*STEPS, "configure_optimizer", "turns", "summarize"),
    DataModule: tuple(name for name, value in vars(DataModule).items() if inspect.isroutine(value)),
    Callback: ("state_dict", "load_state_dict", "monitored"),
}
NEAR = 0.88  # training_steps is near training_step, and a helper train_data not near train_dataset
MEANT = {  # what is not spelt alike
    "train_step": "training_step",
    "val_step": "validation_step",
    "validation_dataset": "val_dataset",
    "validate_dataset": "val_dataset",
    "collate_fn": "collate",
    "train_dataloader": "train_dataset",
    "val_dataloader": "val_dataset",
    "test_dataloader": "test_dataset",
    "predict_dataloader": "predict_dataset",
}
MEANS = "the means over all rows are in trainer.metrics"
DATA = "write it in a DataModule, whose methods are setup, train_dataset, val_dataset and the like"
STEP = "do this in the step: its means are taken over all rows"
LAYERS = "build the layers in __init__"
STATE = "keep what a checkpoint has to hold by on_save and on_load of the task or of a callback"
MOVED = "do this in collate, or at the beginning of a step"
THEIRS: dict[type, dict[str, str]] = {  # what other frameworks call, and what to do here
    Task: {
        "training_epoch_end": f"write on_epoch_end(self, trainer): {MEANS}",
        "validation_epoch_end": f"write on_validation_end(self, trainer): {MEANS}",
        "test_epoch_end": f"write on_test_end(self, trainer): {MEANS}",
        "training_step_end": STEP,
        "validation_step_end": STEP,
        "test_step_end": STEP,
        "optimizer_step": "write an optimizer whose step does this",
        "optimizer_zero_grad": "leave it out: gradients are None at the beginning of each step",
        "lr_scheduler_step": "write a scheduler whose step does this",
        "configure_gradient_clipping": "set trainer.clip_norm, or write on_before_step",
        "configure_callbacks": "set callbacks.* in the config, or Trainer(callbacks=[…])",
        "configure_model": LAYERS,
        "configure_sharded_model": LAYERS,
        "teardown": "do this in on_fit_end(self, trainer)",
        "prepare_data": DATA,
        "train_dataloader": DATA,
        "val_dataloader": DATA,
        "test_dataloader": DATA,
        "predict_dataloader": DATA,
        "transfer_batch_to_device": MOVED,
    },
    DataModule: {
        **dict.fromkeys(HOOKS, "write this hook in the task or in a callback"),
        "teardown": "do this in on_fit_end(self, trainer) of the task or of a callback",
        "state_dict": STATE,
        "load_state_dict": STATE,
        "on_before_batch_transfer": MOVED,
        "on_after_batch_transfer": MOVED,
        "transfer_batch_to_device": MOVED,
    },
    Callback: {
        "setup": "do this in __init__, or in on_fit_start(self, trainer)",
        "teardown": "do this in on_fit_end(self, trainer)",
    },
}


class Sets(NamedTuple):
    """The data of a Trainer: a DataModule, or data sets and the rows of a batch of theirs."""

    data: Any
    val: Any
    test: Any
    predict: Any
    batch_size: Any


def check(
    task: Any, sets: Sets, strategy: Any, settings: Any, callbacks: list[Any], run: Any, seed: Any
) -> DataModule:
    """Returns the DataModule, which is made here of data sets."""
    check_seed(seed)
    data = _module_of(sets)
    parts: list[tuple[str, Any, Any, str]] = [
        ("task", task, Task, "an object of your Task"),
        ("strategy", strategy, Strategy | str | None, 'e.g. "ddp", or DataParallel(2)'),
        ("settings", settings, TrainerSettings | None, "TrainerSettings(KEY=VALUE)"),
        ("run", run, RunInfo | None, f"RunInfo(directory={run!r})"),
    ]
    for name, value, kind, example in parts:
        if not isinstance(value, kind):
            raise _misfit(name, value, example)
    for part, name in ((task, "training"), (data, "workers")):
        if not hasattr(part, name):
            raise no_super(type(part))
    if "stage" in inspect.signature(task.setup).parameters:
        raise UserError(
            f"{type(task).__name__}.setup takes a stage, and is called with the Trainer, once for "
            "all modes; write setup(self, trainer), and look at trainer.data or trainer.settings"
        )
    for part in (task, data, *callbacks):
        _refuse_uncalled(part)
    refuse_miscalled(data, "prepare_data")
    refuse_miscalled(data, "setup")
    refuse_miscalled(task, "setup", "trainer")
    return data


def _module_of(sets: Sets) -> DataModule:
    beside = {name: value for name, value in sets._asdict().items() if value is not None}
    if isinstance(data := beside.pop("data", None), DataModule):
        for name in beside:
            raise UserError(
                f"Trainer: {name} beside {type(data).__name__}, a DataModule, which says that "
                "itself; leave it out"
            )
        return data
    size = beside.pop("batch_size", None)
    if size is not None and isinstance(data, DataLoader):
        raise UserError("Trainer: batch_size is that of the DataLoader; leave it out")
    for name, value in (("data", data), *beside.items()):
        given = value.values() if isinstance(value, dict) else [value]
        if not all(map(_is_set, given)) and (value is not None or not beside):
            raise _misfit(
                name,
                value,
                "a data set, e.g. TensorDataset(x, y), a DataLoader, a dict of these by name, or "
                "an object of your DataModule",
            )
    return DataSets(data, **beside, **({} if size is None else {"batch_size": size}))


def _is_set(value: Any) -> bool:
    is_other = isinstance(value, str | tuple | Tensor | type)
    return not is_other and any(hasattr(type(value), way) for way in ("__getitem__", "__iter__"))


def list_of(name: str, parts: Any, kind: type) -> list[Any]:
    """Of what may be any iterable."""
    is_list = isinstance(parts, Iterable) and not isinstance(parts, str)
    listed = list(parts) if is_list else []
    wrong = [part for part in listed if not isinstance(part, kind)] if is_list else [parts]
    if wrong:
        raise _misfit(name, wrong[0], f"a list of {kind.__name__}s")
    return listed


def _misfit(name: str, value: Any, example: str) -> UserError:
    given = str(value)[:80]
    given = type(value).__name__ if "\n" in given else given
    return UserError(f"Trainer: {name}={given}; pass {example}")


def _refuse_uncalled(part: Any) -> None:
    """Of a task, a DataModule or a callback: a method that is named almost as one that is called,
    or as another framework's. A helper has a name that begins with `_`."""
    bases = [base for base in CALLED if isinstance(part, base)]  # one, but for data with hooks
    base = bases[0]
    for kind in _own_classes(part):
        for name, value in vars(kind).items():
            is_method = isinstance(value, FunctionType | staticmethod | classmethod)
            if not is_method or name.startswith("_"):
                continue
            if any(hasattr(each, name) for each in bases):
                continue
            do_instead = THEIRS[base].get(name)
            meant = MEANT.get(name) or nearest(name, CALLED[base], cutoff=NEAR)
            if do_instead is None and meant in CALLED[base] and meant not in vars(kind):
                do_instead = f"rename it to {meant}"
            if do_instead is not None:
                raise UserError(
                    f"{kind.__name__}.{name} is never called; {do_instead}, or call it _{name} if "
                    "it is a helper"
                )


def _own_classes(part: Any) -> list[type]:
    """The classes that the user has written; a recipe's are like the user's."""
    found = []
    for kind in type(part).__mro__:
        package, *inside = kind.__module__.split(".")
        if package not in ("torch", "builtins", "typing") and (
            package != "dpframe" or inside[:1] == ["recipes"]
        ):
            found.append(kind)
    return found
