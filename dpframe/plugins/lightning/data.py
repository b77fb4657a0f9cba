"""The data of a LightningDataModule, or of the LightningModule itself, as a DataModule."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from dpframe import DataModule, UserError
from dpframe.data.preparation import run_once
from dpframe.plugin import Collectives
from dpframe.plugins.lightning.module import is_a, own_class, owns

LOADER = "dataloader"
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STAGES = {"train": "fit", "val": "fit", "test": "test", "predict": "predict"}


class LightningData(DataModule):
    """`module` is a LightningDataModule; without one the data are the LightningModule's own.

    A DataLoader's batch is the global one, on every strategy.
    """

    def __init__(self, module: Any = None) -> None:
        super().__init__()
        if module is not None and not is_a("LightningDataModule", module):
            raise UserError(
                f"data.module is a {type(module).__name__}; name a LightningDataModule, "
                "data.module._target_=my.LitData, or leave it out where task.module has the loaders"
            )
        self.module = module
        self.names: list[str] = []  # of the data sets that were asked for last
        self._task_module: Any = None
        self._trainer: Any = None
        self.has_preparation = module is not None and owns(module, "prepare_data")
        self._is_validated = False  # by itself, not within a training
        self._stages: set[tuple[int, str]] = set()
        self._returned: dict[str, Any] = {}

    def connect(self, task_module: Any, trainer: Any, stage: str) -> None:
        """Sets both up for what is going to be done."""
        self._task_module, self._trainer = task_module, trainer
        self.own_class = own_class(self._owner)
        self._is_validated = stage == "validate"
        modules = [part for part in (self.module, task_module) if part is not None]
        if self.module is not None:
            self.module.trainer = trainer
        self.has_preparation = False  # it is done here
        for part in modules:
            prepare(part, trainer.ours.strategy.collectives)
        for part in modules:
            self._enter(part, stage)

    def prepare_data(self) -> None:
        self.module.prepare_data()

    def train_dataset(self) -> Any:
        return self._loaders("train")

    def val_dataset(self) -> Any:
        module = self._task_module
        if module is not None and not owns(module, "validation_step"):
            return None
        return self._loaders("val")

    def test_dataset(self) -> Any:
        return self._loaders("test")

    def predict_dataset(self) -> Any:
        return self._loaders("predict")

    def tear_down(self, stage: str) -> None:
        if self.module is not None:
            self.module.teardown(stage)

    def _loaders(self, kind: str) -> Any:
        """What the module returned; it is called once, as Lightning does."""
        if kind not in self._returned:
            stage = "validate" if kind == "val" and self._is_validated else STAGES[kind]
            with nullcontext() if self._trainer is None else self._trainer.setting_up():
                if self.module is not None:
                    self._enter(self.module, stage)
                returned = getattr(self._owner, f"{kind}_{LOADER}")()
            self._returned[kind] = self._check(returned, kind)
        returned = self._returned[kind]
        self.names = list(returned) if isinstance(returned, dict) else [""]
        return returned

    def _check(self, returned: Any, kind: str) -> Any:
        label = f"{type(self._owner).__name__}.{kind}_{LOADER}"
        given = returned
        if isinstance(returned, list | tuple):  # [] is Lightning's for none
            numbered = dict(enumerate(returned))
            returned = numbered if len(numbered) > 1 else numbered.get(0)
        if returned is None:
            return None
        is_one = not isinstance(returned, Mapping)
        several = {"": returned} if is_one else {str(name): returned[name] for name in returned}
        if kind == "train" and isinstance(given, list | tuple) and len(several) > 1:
            raise UserError(
                f"{label} returned {len(several)} loaders without names; return a dict of them, "
                "so that a step gets a dict of batches, or one loader of a data set that pairs "
                "their rows"
            )
        for loader in several.values():
            if not isinstance(loader, DataLoader):
                raise UserError(
                    f"{label} returned a {type(loader).__name__}, whose rows can't be divided; "
                    "return a torch.utils.data.DataLoader"
                )
        return next(iter(several.values())) if is_one else several

    def _enter(self, module: Any, stage: str) -> None:
        """Calls its `setup` once for each stage."""
        if (id(module), stage) not in self._stages:
            self._stages.add((id(module), stage))
            module.setup(stage)

    @property
    def _owner(self) -> Any:
        return self._task_module if self.module is None else self.module


def prepare(module: Any, collectives: Collectives) -> None:
    """Has its `prepare_data` called once on each machine, or once in all where it wants that."""
    if owns(module, "prepare_data"):
        on_each = module.prepare_data_per_node
        run_once(module.prepare_data, partial(collectives.once, on_each_machine=on_each))


def transfer(batch: Any, module: Any, data: Any, number: int = 0) -> Any:
    """Through the hooks that Lightning has around the move to the device, which is done: of the
    Trainer's data, or of the LightningModule. `number` is the data set's."""
    theirs = getattr(data, "module", None)
    for hook in TRANSFERS:
        is_of_data = theirs is not None and hook in vars(type(theirs))
        if is_of_data or owns(module, hook):
            args = (module.device,) if hook == "transfer_batch_to_device" else ()
            batch = getattr(theirs if is_of_data else module, hook)(batch, *args, number)
    return batch


def number_of(name: str, data: Any) -> int:
    """The place of a data set among those that were asked for last."""
    names = getattr(data, "names", [])
    return names.index(name) if name in names else 0
