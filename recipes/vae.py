"""VAE: a variational autoencoder that draws handwritten digits of 8x8 pixels."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe
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
    ) -> None:
        super().__init__(None, optimizer, scheduler)
        pixels = SIDE * SIDE
        self.encoder = nn.Sequential(
            nn.Linear(pixels, width), nn.SiLU(), nn.Linear(width, 2 * latent)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.SiLU(), nn.Linear(width, pixels))
        self.latent = latent
        self.beta = beta

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        (images,) = batch
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        # A torch.randn would draw other numbers on 3 replicas than on 2.
        noise = self.randn_rows(*mean.shape)
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
        codes = torch.randn(count, self.latent, generator=torch.Generator().manual_seed(seed))
        weight = next(self.parameters())
        return self.decoder(codes.to(weight)).sigmoid().unflatten(1, (1, SIDE, SIDE))


class VAEData(dpframe.DataSets):
    """The packaged digits, without their labels."""

    def setup(self) -> None:
        parts = (TensorDataset(part.tensors[0].flatten(1)) for part in read_digits(SIDE))
        self.train, self.val = parts
        self.test = self.val


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
