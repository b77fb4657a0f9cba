"""A training script in Lightning: with its defaults and TensorBoard, or --bare; and --tuned."""

import logging
from typing import Any

import lightning
import problems
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from marks import Marks
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

BARE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(lightning.LightningModule):
    def __init__(self, problem: problems.Problem, *, is_fused: bool) -> None:
        super().__init__()
        self.problem = problem
        self.net = problem.network()
        self.options = {"fused": True} if is_fused else {}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.problem.loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.problem.loss(self.net(batch[0]), batch[1])
        self.log("val/loss", loss, prog_bar=True, batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.problem.optimizer(self.parameters(), **self.options)


class Batches(Dataset):
    """Rows of a batch at once, by index_select."""

    def __init__(self, rows: TensorDataset) -> None:
        self.columns = rows.tensors

    def __getitem__(self, rows: list[int]) -> list[Tensor]:
        index = torch.tensor(rows)
        return [column.index_select(0, index) for column in self.columns]


def loader(rows: TensorDataset, size: int, *, shuffle: bool, is_tuned: bool) -> DataLoader:
    if not is_tuned:
        return DataLoader(rows, size, shuffle=shuffle)
    order = RandomSampler(rows) if shuffle else SequentialSampler(rows)
    batches = BatchSampler(order, size, drop_last=False)
    return DataLoader(Batches(rows), batch_size=None, sampler=batches)


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
    parser = problems.parser(__doc__)
    parser.add_argument("--bare", action="store_true", help="no logger, bar, checkpoint")
    parser.add_argument("--validates", action="store_true", help="each epoch, even if --bare")
    parser.add_argument("--tuned", action="store_true", help="tensor batches, fused, one thread")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    if options.tuned:
        torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    problem = problems.problem(options.images)
    size = problem.batch_size // options.ranks
    train = loader(problem.train, size, shuffle=True, is_tuned=options.tuned)
    held_out = loader(problem.held_out, size, shuffle=False, is_tuned=options.tuned)
    validates = options.validates or not options.bare
    notes = Notes()
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp" if options.ranks > 1 else "auto",
        callbacks=[notes],
        **(BARE if options.bare else {"logger": TensorBoardLogger("."), "log_every_n_steps": 50}),
    )
    module = Module(problem, is_fused=options.tuned)
    trainer.fit(module, train, held_out if validates else None)
    loss = trainer.callback_metrics["train/loss"].item()
    notes.marks.tell(loss=loss, steps_per_epoch=trainer.num_training_batches)


if __name__ == "__main__":
    main()
