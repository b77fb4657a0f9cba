"""LightningModules as users write them, and their data; imported where lightning is installed."""

from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

ROWS = 22


class Regression(pl.LightningModule):
    """Logs in every way that a step has."""

    def __init__(self, width: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        error = self(x) - y
        self.log("val_loss", error.square().mean(), sync_dist=True)
        self.log_dict({"val/mae": error.abs().mean(), "bias": error.mean()}, batch_size=len(x))
        self.log("val_rows", float(len(x)), reduce_fx="sum")
        self.log("worst", error.abs().max(), reduce_fx=max)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Rows(pl.LightningDataModule):
    """In double precision, in their order: as Lightning's own loop would have them."""

    def __init__(self, batch_size: int = 4, rows: int = ROWS) -> None:
        super().__init__()
        self.batch_size, self.count = batch_size, rows
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)
        draw = torch.Generator().manual_seed(7)
        x = torch.randn(2 * self.count, 3, generator=draw, dtype=torch.float64)
        y = x.sum(dim=1) + 0.1 * torch.randn(2 * self.count, generator=draw, dtype=torch.float64)
        self.train = TensorDataset(x[: self.count], y[: self.count])
        self.held_out = TensorDataset(x[self.count :], y[self.count :])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.held_out, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Linear(pl.LightningModule):
    """For what a test writes of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(3, 1)

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Closures(Linear):
    """Steps an optimizer that computes the gradients several times, and counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert (
            self.batches == self.trainer.num_training_batches * self.current_epoch + batch_idx + 1
        )

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ReadsItsLoss(Linear):
    """Takes smaller steps where the loss is small."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        loss = closure()
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, float(loss))
        optimizer.step()


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)


def of_lambda(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))


RETURNS = {
    "an optimizer": lambda o: o,
    "a list": lambda o: [o],
    "two lists": lambda o: ([o], [steps(o)]),
    "a list and a scheduler's dict": lambda o: (
        [o],
        [{"scheduler": of_lambda(o), "interval": "step"}],
    ),
    "two schedulers": lambda o: (
        [o],
        [steps(o), {"scheduler": of_lambda(o), "interval": "step", "frequency": 4}],
    ),
    "a dict": lambda o: {"optimizer": o},
    "a dict with a scheduler": lambda o: {"optimizer": o, "lr_scheduler": steps(o)},
    "a dict with a plateau": lambda o: {
        "optimizer": o,
        "lr_scheduler": plateau(o),
        "monitor": "val_loss",
    },
    "a dict with a config": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": steps(o), "interval": "step", "frequency": 2, "name": "lr"},
    },
    "a config with a plateau": lambda o: {
        "optimizer": o,
        "lr_scheduler": {
            "scheduler": plateau(o),
            "monitor": "val_loss",
            "frequency": 2,
            "strict": True,
        },
    },
    "one dict in a list": lambda o: [{"optimizer": o, "lr_scheduler": of_lambda(o)}],
    "a plateau of an epoch's training": lambda o: {
        "optimizer": o,
        "lr_scheduler": {"scheduler": plateau(o), "monitor": "train_loss_epoch"},
    },
}


class Returns(Linear):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True)
        return {"loss": loss, "extra": batch}

    def configure_optimizers(self) -> Any:
        return RETURNS[self.what](super().configure_optimizers())


class ForAsLong(Returns):
    """Its schedule ends with the training."""

    def __init__(self, schedule: str = "OneCycleLR", stops_after: int | None = None) -> None:
        super().__init__("an optimizer")
        self.schedule, self.stops_after = schedule, stops_after

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.stops_after:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        optimizer, rates = super().configure_optimizers(), torch.optim.lr_scheduler
        if self.schedule == "CosineAnnealingLR":
            return [optimizer], [rates.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]
        steps = self.trainer.estimated_stepping_batches
        if self.schedule == "OneCycleLR":
            scheduler: Any = rates.OneCycleLR(optimizer, 0.1, total_steps=steps)
        else:
            scheduler = rates.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Warm(Linear):
    """optimizer_step as Lightning's documentation has it, and what may be overridden beside it."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (self.trainer.global_step + 1) / 6

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in self.parameters():
            weight.grad.add_(0.01 * weight.detach())

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [of_lambda(optimizer)]


class Draws(Regression):
    """With weights and noise in the precision that is asked for."""

    def configure_model(self) -> None:
        if not hasattr(self, "last"):
            torch.manual_seed(4)
            self.last = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.randn(len(x), generator=torch.Generator().manual_seed(batch_idx))
        weights = torch.full((1,), 0.1)
        loss = functional.mse_loss(self.last(self.net(x))[:, 0] + weights * noise, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


class ByHand(Linear):
    """Two optimizers that take turns in one step, with clipping and a schedule, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)
        self.other = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        if batch_idx % 2 == 0:
            with second.toggle_model():
                error = functional.mse_loss(self.other(batch[0])[:, 0], self.net(batch[0])[:, 0])
                second.zero_grad()
                self.manual_backward(0.5 * error)
                self.manual_backward(0.5 * self.other[0].weight.square().mean())
                second.step()
            self.log("train_error", error, on_epoch=True)
        self.lr_schedulers().step()
        self.log("train_loss", loss, on_epoch=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        second = torch.optim.Adam(self.other.parameters(), lr=0.01)
        return [first, second], [of_lambda(first)]


class Measures(Linear):
    """Metrics as users log them: the object, in the step; its result, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.val_r2 = torchmetrics.R2Score().set_dtype(torch.float64)
        self.val_mape = torchmetrics.MeanAbsolutePercentageError().set_dtype(torch.float64)
        self.train_mae = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.train_mae(self.net(batch[0])[:, 0], batch[1])
        self.log("train_mae", self.train_mae, on_step=False, on_epoch=True)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("train_norm", self.net.weight.norm())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        guesses = self.net(batch[0])[:, 0]
        self.val_r2.update(guesses, batch[1])
        self.val_mape.update(guesses, batch[1])
        self.log("val_r2", self.val_r2)

    def on_validation_epoch_end(self) -> None:
        self.log("val_percent", 100 * self.val_mape.compute())
        self.val_mape.reset()


class LogsValues(Linear):
    """What a metric's forward returns, as many log it: of a share it is another number."""

    def __init__(self) -> None:
        super().__init__()
        root = torchmetrics.MeanSquaredError(squared=False)
        self.train_root = root.clone().set_dtype(torch.float64)
        kinds = {"rmse": root, "mse": torchmetrics.MeanSquaredError()}
        self.errors = torchmetrics.MetricCollection(kinds, prefix="val_").set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train_score", self.train_root(self.net(batch[0])[:, 0], batch[1]))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        guesses = self.net(batch[0])[:, 0]
        self.log_dict(self.errors(guesses, batch[1]))
        self.log("val_loss", functional.mse_loss(guesses, batch[1]))


class Momentum(Linear):
    """A slow copy of the network, a little nearer to it after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(3, 1).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.slow.weight.lerp_(self.net.weight, 0.1)


class OnlyTheFirst(Linear):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.log("val_loss", self.loss(batch))
        self.log("val_bias", self.net.bias.mean())


class Forecasts(Linear):
    """As pytorch-forecasting's models are: a metric is the loss, of two things, and what is saved
    has numbers of NumPy's, arrays, and objects."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.error = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)
        self.scaler = {"rows": np.int64(7), "means": np.arange(3.0), "kind": Fraction(1, 3)}

    @property
    def forecasts(self) -> bool:
        return self.trainer is None or self.trainer.state.fn == "predict"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not self.forecasts and self.trainer.state.stage == "train"
        guesses = self.net(batch[0])[:, 0]
        loss = self.error(guesses, batch[1])
        other = self.error(2 * guesses, batch[1])
        self.log_dict({"train_error": loss, "train_other": other}, on_epoch=True)
        return loss + other

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.trainer.state.stage in ("sanity_check", "validate")
        self.log("val_mae", functional.l1_loss(self.net(batch[0])[:, 0], batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scaler"] = self.scaler
        checkpoint["hyper_parameters"].update({"half": Fraction(1, 2)})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.scaler = checkpoint["scaler"]
        self.loaded = checkpoint["hyper_parameters"]


class Asks(Linear):
    @property
    def machine(self) -> Any:
        return self.trainer.gpus_of_the_node

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.machine


class Best(Linear):
    """Metrics that a hook of an epoch's end updates, or logs under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"best": torchmetrics.MinMetric, "newest": torchmetrics.MaxMetric}
        self.of_hooks = nn.ModuleDict({n: k().set_dtype(torch.float64) for n, k in kinds.items()})
        self.error = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error.update(self.net(batch[0])[:, 0], batch[1])

    def on_validation_epoch_end(self) -> None:
        error = self.error.compute()
        self.log("val_mae", self.error)
        for metric in self.of_hooks.values():
            metric(error * (-1) ** self.current_epoch)
        self.log("val_best", self.of_hooks["best"].compute())
        self.log("val_newest", self.of_hooks["newest"])
        self.logger.experiment.add_scalar("error", error, self.current_epoch)


HOOKS = """
on_fit_start on_fit_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end
on_train_batch_start on_train_batch_end on_before_zero_grad on_before_backward on_after_backward
on_before_optimizer_step on_validation_start on_validation_end on_validation_epoch_start
on_validation_epoch_end on_validation_batch_start on_validation_batch_end on_test_start on_test_end
on_test_epoch_start on_test_epoch_end on_test_batch_start on_test_batch_end on_predict_start
on_predict_end on_predict_epoch_start on_predict_epoch_end on_predict_batch_start
on_predict_batch_end setup teardown prepare_data configure_model
"""


class Noting(Linear):
    """Writes down each hook with where training is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.net(batch[0])


def _noted(name: str) -> Any:
    def note(self: Noting, *args: Any, **named: Any) -> None:
        batches = [arg for arg in (*args, *named.values()) if type(arg) is int]
        self.seen.append((name, self.trainer.current_epoch, self.trainer.global_step, *batches[:1]))

    return note


for _hook in HOOKS.split():
    setattr(Noting, _hook, _noted(_hook))
