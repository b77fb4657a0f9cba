"""Boston in Lightning: with its defaults and TensorBoard, or --bare; --ranks 2 for its ddp."""

import logging
from argparse import ArgumentParser, Namespace
from typing import Any

import boston
import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from marks import Marks
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader


class Boston(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = boston.network()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val/loss", loss, prog_bar=True, batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=boston.LEARNING_RATE)


class Notes(Callback):
    """A validation is within its epoch in Lightning: `train` is over with the last step."""

    def __init__(self) -> None:
        self.marks = Marks()

    def on_train_epoch_start(self, *_: Any) -> None:
        self.marks.begin()

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.train()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.marks.end()


def main() -> None:
    given = options()
    lightning.seed_everything(0, verbose=False)
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    train, held_out = boston.datasets()
    size = boston.BATCH_SIZE // given.ranks
    loader = DataLoader(train, batch_size=size, shuffle=True)
    notes = Notes()
    trainer = lightning.Trainer(
        max_epochs=given.epochs,
        accelerator="cpu",
        devices=given.ranks,
        strategy="ddp" if given.ranks > 1 else "auto",
        callbacks=[notes],
        **(BARE if given.bare else {"logger": TensorBoardLogger("."), "log_every_n_steps": 50}),
    )
    trains_only = given.bare and not given.validates
    validation = None if trains_only else DataLoader(held_out, batch_size=size)
    trainer.fit(Boston(), loader, validation)
    loss = trainer.callback_metrics["train/loss"].item()
    notes.marks.tell(loss=loss, steps_per_epoch=trainer.num_training_batches)


BARE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def options() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument(
        "--bare", action="store_true", help="no validation, logger, bar, checkpoint"
    )
    parser.add_argument("--validates", action="store_true", help="each epoch, even if --bare")
    parser.add_argument("--ranks", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
