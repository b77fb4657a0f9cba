"""VAE: a variational autoencoder that draws handwritten digits of 8x8 pixels."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe
from dpframe import seeding
from dpframe.recipes.lenet import read_digits

SIDE = 8
INK = " .:-=+*#%@"  # from no ink to all


class VAE(dpframe.Task):
    """Binary cross-entropy of the pixels plus the codes' divergence from a normal distribution."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        latent: int = 8,
        width: int = 256,
        beta: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(None, optimizer, scheduler)
        pixels = SIDE * SIDE
        self.encoder = nn.Sequential(
            nn.Linear(pixels, width), nn.SiLU(), nn.Linear(width, 2 * latent)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.SiLU(), nn.Linear(width, pixels))
        self.latent = latent
        self.beta = beta
        self.seed = seed

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        images, rows = batch
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        epoch = self.epoch if self.training else -1  # a validation's numbers are always the same
        noise = noise_of(rows, self.latent, seed=self.seed, epoch=epoch).to(mean)
        logits = self.decoder(mean + noise * (log_variance / 2).exp())
        error = functional.binary_cross_entropy_with_logits(logits, images, reduction="none")
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
        pixels, codes = error.sum(dim=1).mean(), divergence.sum(dim=1).mean()
        return {"loss": pixels + self.beta * codes, "pixels": pixels, "codes": codes}

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        """The codes."""
        return self.encoder(batch[0]).chunk(2, dim=1)[0]

    @torch.no_grad()
    def draw(self, count: int, seed: int) -> Tensor:
        """Images of random codes, [count, 1, 8, 8]."""
        codes = noise_of(torch.arange(count), self.latent, seed=seed, epoch=0)
        weight = next(self.parameters())
        return self.decoder(codes.to(weight)).sigmoid().unflatten(1, (1, SIDE, SIDE))


class VAEData(dpframe.DataModule):
    """The packaged digits; each comes with its row number."""

    def setup(self) -> None:
        train, held_out = (part.tensors[0].flatten(1) for part in read_digits(SIDE))
        numbers = torch.arange(len(train) + len(held_out))
        self.train_rows = TensorDataset(train, numbers[: len(train)])
        self.held_out_rows = TensorDataset(held_out, numbers[len(train) :])

    def train_dataset(self) -> TensorDataset:
        return self.train_rows

    def val_dataset(self) -> TensorDataset:
        return self.held_out_rows

    def test_dataset(self) -> TensorDataset:
        return self.held_out_rows


class Draw(dpframe.Callback):
    """Logs new digits as an image at every validation, and prints some at the end."""

    def __init__(self, count: int = 64, shown: int = 6, seed: int = 0) -> None:
        self.count = count
        self.shown = shown
        self.seed = seed

    def on_validation_end(self, trainer: "dpframe.Trainer") -> None:
        if trainer.strategy.is_main:
            images: Tensor = trainer.task.draw(self.count, self.seed)  # type: ignore[operator]
            trainer.log_image("val/drawn", images)
            self.last = images[: self.shown]
            if trainer.mode == "validate":
                self.on_fit_end(trainer)

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        if trainer.strategy.is_main:
            print(f"\n{rendered(self.last)}\n", flush=True)


def rendered(images: Tensor) -> str:
    """Images as text, side by side; a pixel is two characters, which makes a square."""
    rows = torch.cat(list(images[:, 0]), dim=1)
    lines = ["".join(2 * INK[int(10 * ink.clamp(0, 0.99))] for ink in row) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def noise_of(rows: Tensor, size: int, *, seed: int, epoch: int) -> Tensor:
    """Normal numbers that are a fact of (seed, epoch, row).

    A torch.randn in the step would draw other numbers on 3 replicas than on 2.
    """
    drawn = [
        torch.randn(size, generator=torch.Generator().manual_seed(seeding.mix(seed, epoch, row)))
        for row in rows.tolist()
    ]
    return torch.stack(drawn)
