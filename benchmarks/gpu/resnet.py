"""ResNet-50 for images of 224x224, on made-up ones."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dpframe

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels, blocks, first stride
WIDER = 4  # a block's output has this many times its channels
CLASSES = 1000


class ResNet50(dpframe.Task):
    """25,557,032 parameters with all `stages`, as the one that was published."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        stages: tuple[tuple[int, int, int], ...] = STAGES,
    ) -> None:
        super().__init__(resnet(stages), optimizer)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        return {"loss": functional.cross_entropy(self.net(images), labels)}


def resnet(stages: tuple[tuple[int, int, int], ...]) -> nn.Sequential:
    before = 64
    layers: list[nn.Module] = [*convolution(3, before, 7, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    for channels, blocks, stride in stages:
        for index in range(blocks):
            layers.append(Bottleneck(before, channels, 1 if index else stride))
            before = WIDER * channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class Bottleneck(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        after = WIDER * channels
        self.path = nn.Sequential(
            *convolution(before, channels, 1, 1),
            nn.ReLU(inplace=True),
            *convolution(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(channels, after, 1, 1),
        )
        is_same = before == after and stride == 1
        self.skip = (
            nn.Identity() if is_same else nn.Sequential(*convolution(before, after, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.skip(x), inplace=True)


def convolution(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
    kernels = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return [kernels, nn.BatchNorm2d(after)]


class Images(dpframe.DataModule):
    """Always the same random ones."""

    def __init__(self, batch_size: int, rows: int, side: int) -> None:
        super().__init__(batch_size)
        self.rows, self.side = rows, side

    def train_dataset(self) -> TensorDataset:
        return images(self.rows, self.side)


@cache
def images(rows: int, side: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(rows, 3, side, side, generator=draw)
    return TensorDataset(pixels, torch.randint(CLASSES, (rows,), generator=draw))
