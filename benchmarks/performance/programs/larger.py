"""Networks of some size, each trained three ways: by a tuned loop, in dpframe and in Lightning.

`larger.py gpt tuned` trains a GPT on made-up text; `resnet` is a ResNet-18 on images of 32x32, and
`gan` a small GAN with two optimizers. The ways: tuned, dpframe, lightning.
"""

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from marks import Marks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 12
RATE = 1e-5  # small: the losses of programs that train alike stay near each other
Batch = list[Tensor]


class GPT(nn.Module):
    """Three million parameters."""

    def __init__(self, layers: int = 4, width: int = 256, block: int = 64, words: int = 96) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        self.register_buffer("places", torch.arange(block), persistent=False)

    def loss(self, batch: Batch, turn: str) -> Tensor:
        (text,) = batch
        x = self.embed(text[:, :-1]) + self.place(self.places)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten()
        )


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.queries(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))


class ResNet(nn.Module):
    """ResNet-18 for small images: 11 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [*convolution(3, 64, 1), nn.ReLU()]
        for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            before = 64 if channels == 64 else channels // 2
            layers += [Residual(before, channels, stride), Residual(channels, channels, 1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    def loss(self, batch: Batch, turn: str) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])


class Residual(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(before, channels, stride), convolution(channels, channels, 1)
        self.path = nn.Sequential(*first, nn.ReLU(), *second)
        is_same = before == channels
        self.skip = nn.Identity() if is_same else nn.Conv2d(before, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.skip(x))


def convolution(before: int, channels: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)]


class GAN(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(), nn.Linear(width, 1))
        self.generator = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64))

    def loss(self, batch: Batch, turn: str) -> Tensor:
        fake = self.generator(batch[1])
        if turn == "generator":
            return functional.softplus(-self.critic(fake)).mean()
        real = functional.softplus(-self.critic(batch[0]))
        return (real + functional.softplus(self.critic(fake.detach()))).mean()


def gpt() -> tuple[nn.Module, tuple[Tensor, ...], int]:
    return GPT(), (torch.randint(96, (8 * 5, 65)),), 8


def resnet() -> tuple[nn.Module, tuple[Tensor, ...], int]:
    return ResNet(), (torch.randn(16 * 2, 3, 32, 32), torch.randint(10, (16 * 2,))), 16


def gan() -> tuple[nn.Module, tuple[Tensor, ...], int]:
    return GAN(), (torch.randn(64 * 100, 64), torch.randn(64 * 100, 16)), 64


WORKLOADS = {"gpt": gpt, "resnet": resnet, "gan": gan}


def parts_of(net: nn.Module) -> dict[str, nn.Module]:
    """What each optimizer updates, by its name."""
    return {"critic": net.critic, "generator": net.generator} if isinstance(net, GAN) else {"": net}


# The ways


def tuned(net: nn.Module, columns: tuple[Tensor, ...], size: int, marks: Marks) -> float:
    """Fused optimizers, rows by index_select, and no gradient for the network that waits."""
    parts = {turn: list(part.parameters()) for turn, part in parts_of(net).items()}
    optimizers = {
        turn: torch.optim.AdamW(weights, lr=RATE, fused=True) for turn, weights in parts.items()
    }
    for _ in range(EPOCHS):
        marks.begin()
        losses: list[Tensor] = []
        for rows in torch.randperm(len(columns[0])).split(size):
            batch = [column.index_select(0, rows) for column in columns]
            for turn, optimizer in optimizers.items():
                for other, weights in parts.items() if len(parts) > 1 else ():
                    for weight in weights:
                        weight.requires_grad_(other == turn)
                loss = net.loss(batch, turn)
                if not math.isfinite(loss.item()):
                    raise RuntimeError(f"the loss is {loss.item()}")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        mean = torch.stack(losses).double().mean().item()
        marks.train()
        marks.end()
    return mean


def in_dpframe(net: nn.Module, columns: tuple[Tensor, ...], size: int, marks: Marks) -> float:
    import dpframe

    class Task(dpframe.Task):
        def training_step(self, batch: Batch, turn: str = "") -> dict[str, Tensor]:
            return {"loss": self.net.loss(batch, turn)}

        def configure_optimizer(self) -> Any:
            parts = parts_of(self.net).items()
            made = {turn: torch.optim.AdamW(part.parameters(), lr=RATE) for turn, part in parts}
            return made.get("", made)

    class Data(dpframe.DataModule):
        def train_dataset(self) -> TensorDataset:
            return TensorDataset(*columns)

    class Notes(dpframe.Callback):
        def on_epoch_start(self, trainer: dpframe.Trainer) -> None:
            marks.begin()

        def on_step_end(self, trainer: dpframe.Trainer) -> None:
            marks.train()

        def on_epoch_end(self, trainer: dpframe.Trainer) -> None:
            marks.end()

    settings = dpframe.TrainerSettings(max_epochs=EPOCHS, threads=torch.get_num_threads())
    trainer = dpframe.Trainer(Task(net), Data(size), settings=settings, callbacks=[Notes()])
    losses = [value for name, value in trainer.fit().items() if name.endswith("loss")]
    return sum(losses) / len(losses)


def in_lightning(net: nn.Module, columns: tuple[Tensor, ...], size: int, marks: Marks) -> float:
    import lightning
    from in_lightning import BARE

    parts = parts_of(net)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.automatic_optimization = len(parts) == 1

        def training_step(self, batch: Batch, index: int) -> Any:
            if self.automatic_optimization:
                loss = self.net.loss(batch, "")
                self.log("loss", loss, on_step=False, on_epoch=True, batch_size=size)
                return loss
            for turn, optimizer in zip(parts, self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                loss = self.net.loss(batch, turn)
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                self.log(f"{turn}/loss", loss, on_step=False, on_epoch=True, batch_size=size)
            return None

        def configure_optimizers(self) -> Any:
            made = [torch.optim.AdamW(part.parameters(), lr=RATE) for part in parts.values()]
            return made if len(made) > 1 else made[0]

    class Notes(lightning.pytorch.callbacks.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            marks.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            marks.train()

        def on_train_epoch_end(self, *_: Any) -> None:
            marks.end()

    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    loader = DataLoader(TensorDataset(*columns), size, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, callbacks=[Notes()], **BARE
    )
    trainer.fit(Module(), loader)
    losses = [value.item() for name, value in trainer.callback_metrics.items() if "loss" in name]
    return sum(losses) / len(losses)


WAYS: dict[str, Callable[..., float]] = {
    "tuned": tuned,
    "dpframe": in_dpframe,
    "lightning": in_lightning,
}


def main() -> None:
    name, way = sys.argv[1:]
    torch.manual_seed(0)
    net, columns, size = WORKLOADS[name]()
    if name == "gan":  # two threads would only wait for each other
        torch.set_num_threads(1)
    marks = Marks()
    loss = WAYS[way](net, columns, size, marks)
    marks.tell(loss=loss, steps_per_epoch=len(columns[0]) // size)


if __name__ == "__main__":
    main()
