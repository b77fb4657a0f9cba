"""GAN: a generator draws digits of 8x8 pixels, and a critic tells them from handwritten ones."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import LRScheduler

import dpframe
from dpframe.recipes.vae import SIDE

DRAWN = 512  # images for a validation


class GAN(dpframe.Task):
    """The logistic loss of Goodfellow et al., and a penalty on the critic's slope at real images.

    Without batch norm: its statistics would be those of a share, and differ between strategies.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Callable[..., torch.optim.Optimizer]],
        schedulers: Mapping[str, Callable[..., LRScheduler]] | None = None,
        latent: int = 16,
        width: int = 16,
        n_critic: int = 1,
        penalty: float = 3.0,
    ) -> None:
        super().__init__(optimizers=optimizers, schedulers=schedulers)
        self.generator = nn.Sequential(
            nn.Linear(latent, 4 * width * 4),
            nn.Unflatten(1, (4 * width, 2, 2)),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 1, kernel_size=3, padding=1),
            nn.Sigmoid(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * width * 4, 1),
        )
        self.latent = latent
        self.n_critic = n_critic
        self.penalty = penalty

    def turns(self) -> list[str]:
        is_due = (self.global_step + 1) % self.n_critic == 0
        return ["critic", "generator"] if is_due else ["critic"]

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Tensor]:
        (images,) = batch
        # A torch.randn would draw other numbers on 3 replicas than on 2.
        fake = self.generator(self.randn_rows(len(images), self.latent))
        if turn == "generator":
            return {"loss": softplus(-self.critic(fake)).mean()}
        real = images.unflatten(1, (1, SIDE, SIDE)).requires_grad_()
        score = self.critic(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        steepness = slope.square().flatten(1).sum(dim=1).mean()
        loss = softplus(-score).mean() + softplus(self.critic(fake)).mean()
        return {"loss": loss + self.penalty / 2 * steepness, "score": score.mean()}

    def validation_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """How far a held-out image is from the nearest of many drawn ones, which is far where these
        are no digits, or always the same few."""
        drawn = self.draw(DRAWN, seed=0).flatten(1)
        return {"loss": torch.cdist(batch[0], drawn).amin(dim=1).mean()}

    @torch.no_grad()
    def draw(self, count: int, seed: int) -> Tensor:
        """Images of random codes, [count, 1, 8, 8]."""
        codes = torch.randn(count, self.latent, generator=torch.Generator().manual_seed(seed))
        return self.generator(codes.to(next(self.parameters())))
