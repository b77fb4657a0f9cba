"""Multilabel: four questions about each digit, judged by F1 and AUROC on clean and noisy images."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe
from dpframe.recipes.lenet import CLASSES, read_digits

SIDE = 8
DIGITS = {
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "above_five": (6, 7, 8, 9),
    "has_loop": (0, 6, 8, 9),
}
LABELS = list(DIGITS)


class Multilabel(dpframe.Task):
    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        width: int = 64,
    ) -> None:
        net = nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, len(LABELS))
        )
        super().__init__(net, optimizer, scheduler)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        return {"loss": functional.binary_cross_entropy_with_logits(self.net(images), labels)}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.net(images)
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
        return {"loss": loss, **self.metrics(logits.sigmoid(), labels.long())}

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        """The probability of each label."""
        return self.net(batch[0]).sigmoid()


class MultilabelData(dpframe.DataSets):
    """The packaged digits; validation is on the held-out ones, clean and with noise."""

    def __init__(
        self,
        batch_size: int = 64,
        workers: int | str = 0,
        shuffle: bool = True,
        noise: float = 0.3,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, shuffle=shuffle)
        self.noise = noise

    def setup(self) -> None:
        table = torch.zeros(CLASSES, len(LABELS))
        for column, digits in enumerate(DIGITS.values()):
            table[list(digits), column] = 1
        (train, train_digits), (clean, self.digits) = (rows.tensors for rows in read_digits(SIDE))
        drawn = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
        noisy = (clean + self.noise * drawn).clamp(0, 1)
        self.train = TensorDataset(train, table[train_digits])
        self.val = self.test = {
            name: TensorDataset(images, table[self.digits])
            for name, images in (("clean", clean), ("noisy", noisy))
        }


class ShowAnswers(dpframe.Callback):
    """Prints at the end what is said of a digit of each kind: +label is wrong, -label is missed."""

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        if not trainer.strategy.is_main:
            return
        data: MultilabelData = trainer.data  # type: ignore[assignment]
        rows = [int((data.digits == digit).nonzero()[0]) for digit in range(CLASSES)]
        said = []
        for part in data.val.values():
            images, labels = part[rows]
            with torch.no_grad():
                chances = trainer.task.predict_step([images.to(next(trainer.task.parameters()))])
            said.append(answers(chances.cpu() > 0.5, labels.bool()))
        print(f"\n   {'clean':36}noisy")
        for digit, (one, other) in enumerate(zip(*said, strict=True)):
            print(f"{digit}  {one:36}{other}".rstrip())
        print(flush=True)


def answers(said: Tensor, right: Tensor) -> list[str]:
    signs = [["", "-"], ["+", ""]]  # by what is said, and what is right
    return [
        " ".join(signs[s][r] + name for name, s, r in zip(LABELS, *row, strict=True) if s or r)
        for row in zip(said.tolist(), right.tolist(), strict=True)
    ]
