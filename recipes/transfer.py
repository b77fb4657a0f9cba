"""Transfer: what was learned of the digits 0 to 4 helps to tell 5 to 9 apart by twenty images each.

The packaged backbone is from the checkpoints/best.ckpt of
`dpframe recipe=transfer task.pretrained=null data.digits=[0,1,2,3,4] data.rows=null
task.optimizer._target_=torch.optim.SGD task.optimizer.lr=0.1 task.optimizer.groups.backbone=null
callbacks.freeze=null callbacks.ema=null trainer.max_epochs=20`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe
from dpframe.plugin import checkpoint, fraction
from dpframe.recipes.lenet import read_digits

if TYPE_CHECKING:
    from dpframe import Trainer

SIDE = 8
PACKAGED = Path(__file__).with_name("data") / "transfer.ckpt"


class Transfer(dpframe.Task):
    """A backbone that may be trained already, and a head."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        pretrained: str | None = "packaged",
        classes: int = 5,
    ) -> None:
        super().__init__(None, optimizer, scheduler)
        self.pretrained = pretrained
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(16 * (SIDE // 2) ** 2, classes)

    def on_fit_start(self, trainer: "Trainer") -> None:
        if self.pretrained is not None and not self.global_step:  # a resumed run has its own
            is_packaged = self.pretrained == "packaged"
            key = "task.pretrained"
            state = checkpoint.load(PACKAGED if is_packaged else self.pretrained, key=key)
            weights = state.get("averaged", state["task"])
            part = {n.removeprefix("backbone."): w for n, w in weights.items() if "backbone." in n}
            state = {"file": state["file"], "task": part}
            checkpoint.load_task(self.backbone, state, key=key, sharding=trainer.strategy.sharding)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.head(self.backbone(images))
        return {
            "loss": functional.cross_entropy(logits, labels),
            "accuracy": fraction(logits.argmax(dim=1) == labels),
        }

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self.head(self.backbone(batch[0]))


class TransferData(dpframe.DataSets):
    """The packaged digits of some classes; `rows` to train on of each, or all of them."""

    def __init__(
        self,
        batch_size: int = 16,
        workers: int | str = 0,
        shuffle: bool = True,
        digits: Sequence[int] = (5, 6, 7, 8, 9),
        rows: int | None = 20,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, shuffle=shuffle)
        self.digits = digits
        self.rows = rows

    def setup(self) -> None:
        train, held_out = read_digits(SIDE)
        self.train = self._of_digits(train, self.rows)
        self.val = self.test = self._of_digits(held_out, None)

    def _of_digits(self, part: TensorDataset, rows: int | None) -> TensorDataset:
        """Classes are numbered as `digits` lists them."""
        images, labels = part.tensors
        taken = [(labels == digit).nonzero()[:rows, 0] for digit in self.digits]
        classes = [torch.full_like(rows, number) for number, rows in enumerate(taken)]
        return TensorDataset(images[torch.cat(taken)], torch.cat(classes))


class ReportStages(dpframe.Callback):
    """Prints at the end how good the head was alone, and with the backbone trained, too."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = {}

    def on_validation_end(self, trainer: "Trainer") -> None:
        if trainer.mode == "fit":
            is_frozen = not all(weight.requires_grad for weight in trainer.task.parameters())
            stage = "the head alone" if is_frozen else "all weights"
            self.stages[stage] = [trainer.global_step, trainer.metrics["val/accuracy"]]

    def on_fit_end(self, trainer: "Trainer") -> None:
        if trainer.strategy.is_main:
            print()
            for stage, (step, accuracy) in self.stages.items():
                print(f"{stage:16}to step {step:<6.0f}accuracy {accuracy:.3f}")
            print(flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"stages": self.stages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stages = state["stages"]
