"""LeNet in Lightning, with its defaults and TensorBoard."""

import sys
from pathlib import Path

import images
import lightning
import torch
from boston_lightning import Notes
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader


class LeNet(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = images.network()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        hits = (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("val/accuracy", hits, prog_bar=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=images.LEARNING_RATE)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    train, test = images.datasets(Path(sys.argv[1]))
    loader = DataLoader(train, batch_size=images.BATCH_SIZE, shuffle=True)
    notes = Notes()
    logger = TensorBoardLogger(".")
    trainer = lightning.Trainer(
        max_epochs=int(sys.argv[2]), accelerator="cpu", callbacks=[notes], logger=logger
    )
    trainer.fit(LeNet(), loader, DataLoader(test, batch_size=images.BATCH_SIZE))
    loss = trainer.callback_metrics["train/loss"].item()
    notes.marks.tell(loss=loss, steps_per_epoch=trainer.num_training_batches)


if __name__ == "__main__":
    main()
