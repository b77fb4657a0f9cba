"""Small networks of the kinds that people train, with BatchNorm, dropout, or both."""

from functools import partial
from typing import Any

import torch
from small import Given, Listed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dpframe import Task
from dpframe.callbacks import EMA

ROWS, SIZE = 15, 4  # three replicas have 2, 2 and 0 rows, and in the last batch 1 each
WORDS = 9


class ConvNorm(nn.Sequential):
    def __init__(
        self, into: int, out: int, act: Any = nn.ReLU, size: int = 3, **given: Any
    ) -> None:
        conv = nn.Conv2d(into, out, size, padding=size // 2, bias=False, **given)
        super().__init__(conv, nn.BatchNorm2d(out), act())


class BasicBlock(nn.Module):
    """As torchvision's ResNet has it."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(into, out, stride=stride)
        self.second = ConvNorm(out, out, nn.Identity)
        self.shortcut = ConvNorm(into, out, nn.Identity, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class SqueezeExcitation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


class InvertedResidual(nn.Module):
    """As torchvision's MobileNetV3 has it."""

    def __init__(self, into: int, width: int) -> None:
        super().__init__()
        self.expand = ConvNorm(into, width, nn.Hardswish, 1)
        self.spread = ConvNorm(width, width, nn.Hardswish, groups=width)
        self.excite = SqueezeExcitation(width)
        self.project = ConvNorm(width, into, nn.Identity, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.excite(self.spread(self.expand(x))))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = ConvNorm(3, 4), nn.Sequential(ConvNorm(4, 6), nn.Dropout2d(0.3))
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.Sequential(ConvNorm(8, 4), nn.Dropout2d(0.2), nn.Conv2d(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        return self.out(torch.cat([high, self.up(self.low(F.max_pool2d(high, 2)))], dim=1))


class Block(nn.Module):
    """Of a transformer, without dropout in its attention."""

    def __init__(self, width: int, *, is_causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.is_causal = nn.Dropout(0.2), is_causal
        self.mlp = nn.Sequential(
            nn.Linear(width, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, width), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=self.is_causal)
        x = x + self.drop(self.joined(seen.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places, self.drop = nn.Parameter(torch.randn(1, 5, width)), nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width, is_causal=False) for _ in range(2)))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), patches], dim=1)
        return self.head(self.blocks(self.drop(x + self.places))[:, 0])


class GPT(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width, is_causal=True) for _ in range(2)))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.blocks(self.drop(self.words(tokens) + places)))


class Encoder(nn.Module):
    """Whose rows are dimension 1."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.2)
        self.layer.self_attn.dropout = 0.0
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.words(tokens.T))).transpose(0, 1)


class Tagger(nn.Module):
    """Reads texts of several lengths."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, width, padding_idx=0), nn.Dropout(0.3)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens > 0).sum(1).cpu()
        x = pack_padded_sequence(
            self.drop(self.words(tokens)), lengths, batch_first=True, enforce_sorted=False
        )
        x, _ = pad_packed_sequence(self.lstm(x)[0], batch_first=True)
        return self.head(self.drop(x))


class OfImages(Task):
    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        found = self.net(x).flatten(1)
        wanted = y if found.shape[1] > 1 else y.mean(1, keepdim=True)
        return {"loss": (found - wanted).square().mean()}


class OfTokens(Task):
    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        tokens, wanted = batch
        of_token = F.cross_entropy(self.net(tokens).transpose(1, 2), wanted, reduction="none")
        known = (tokens > 0).to(of_token)
        return {"loss": (of_token * known).sum() / known.sum(), "weight": known.sum()}


class Gan(Task):
    """BatchNorm in both networks."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizers={"critic": optimizer, "generator": optimizer})
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.Unflatten(1, (4, 2, 2)), nn.BatchNorm2d(4), nn.ReLU(),
            nn.ConvTranspose2d(4, 3, 4, stride=4), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            ConvNorm(3, 4, nn.Tanh, stride=2), nn.Dropout2d(0.2), ConvNorm(4, 4, nn.Tanh),
            nn.Flatten(), nn.Linear(64, 1),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], turn: str) -> dict[str, Tensor]:
        real = batch[0]
        fake = self.generator(self.randn_rows(len(real), 4).to(real))
        if turn == "generator":
            return {"loss": F.softplus(-self.critic(fake)).mean()}
        return {
            "loss": (F.softplus(-self.critic(real)) + F.softplus(self.critic(fake.detach()))).mean()
        }

    def validation_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"score": self.critic(batch[0]).mean()}


def images() -> Any:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 3, 8, 8, generator=draw)
    return TensorDataset(x, x.mean(1).flatten(1))


def texts() -> Any:
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, WORDS, (ROWS, 7), generator=draw)
    return TensorDataset(tokens, tokens.roll(-1, 1))


def ragged() -> Any:
    """Of several lengths."""
    return Listed(
        [(row[: 2 + n % 6], wanted[: 2 + n % 6]) for n, (row, wanted) in enumerate(texts())]
    )


def padded(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [pad_sequence(list(each), batch_first=True) for each in zip(*rows, strict=True)]


def resnet() -> nn.Module:
    return nn.Sequential(
        ConvNorm(3, 4), BasicBlock(4, 4, 1), BasicBlock(4, 6, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 1),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    return nn.Sequential(
        ConvNorm(3, 4, nn.Hardswish, stride=2), InvertedResidual(4, 8), InvertedResidual(4, 8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8), nn.Hardswish(), nn.Dropout(0.2),
        nn.Linear(8, 1),
    )  # fmt: skip


class Loop(nn.Module):
    """Reads word by word, so that a share calls its dropout as often as its longest text says."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(WORDS, width), nn.GRUCell(width, width)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x, found = self.words(tokens), []
        state = x.new_zeros(len(x), x.shape[-1])
        for word in x.unbind(1):
            state = self.drop(self.cell(word, state))
            found.append(self.head(state))
        return torch.stack(found, dim=1)


class Maps(nn.Module):
    """Drops of its attention's maps, with each head as a row, and each word as one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.pairs = nn.Embedding(WORDS, width), nn.Linear(width, 2 * width)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(width)
        self.drop_words, self.head = nn.Dropout(0.2), nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        one, other = self.pairs(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        scores = (one @ other.mT).unflatten(0, (-1, 2))
        scores = scores.masked_fill((tokens == 0)[:, None, None], -1e9)
        maps = self.drop(scores.softmax(-1).flatten(0, 1)).unflatten(0, (-1, 2))
        seen = (maps @ x.unflatten(-1, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
        known = tokens > 0
        words = self.norm(seen[known]) if self.training else self.norm(seen.flatten(0, 1))
        if self.training:
            seen = torch.zeros_like(seen).masked_scatter(known[..., None], words)
        return self.head(self.drop_words(seen.flatten(0, 1)).view_as(seen))


class OfRows(Task):
    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": (self.net(x.flatten(1)) - y[:, :1]).square().mean()}


class Recomputing(OfRows):
    """Calls torch.utils.checkpoint itself."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        contexts = self.checkpoint_contexts
        x = checkpoint(self.net[:3], batch[0].flatten(1), use_reentrant=False, context_fn=contexts)
        return {"loss": (self.net[3](x) - batch[1][:, :1]).square().mean()}


class Compiles(OfRows):
    """Calls torch.compile itself."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        compiled = torch.compile(self.net, backend="eager")
        return {"loss": (compiled(batch[0].flatten(1)) - batch[1][:, :1]).square().mean()}


class Sampled(OfRows):
    """A validation that draws masks."""

    def validation_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        self.net[2].train()
        losses = [self.training_step(batch)["loss"] for _ in range(3)]
        return {"loss": torch.stack(losses).mean(), "spread": losses[0] - losses[1]}


class Changing(OfRows):
    """What drops nothing in the first steps does later."""

    def __init__(self, net: nn.Module, optimizer: Any, *, thaws: bool) -> None:
        super().__init__(net, optimizer)
        self.thaws = thaws
        net[2].train(not thaws).p = 0.3 if thaws else 0.0

    def on_step_end(self, *_: Any) -> None:
        self.net[2].train().p = 0.3


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


NETS: dict[str, tuple[Any, Any, Any]] = {
    "resnet": (OfImages, resnet, images),
    "mobilenet": (OfImages, mobilenet, images),
    "unet": (OfImages, UNet, images),
    "vit": (OfImages, ViT, images),
    "gpt": (OfTokens, GPT, texts),
    "encoder": (OfTokens, Encoder, texts),
    "tagger": (OfTokens, Tagger, ragged),
    "gan": (lambda _, optimizer: Gan(optimizer), nn.Identity, images),
}
USES: dict[str, tuple[Any, Any, Any]] = {
    "a loop over words": (OfTokens, Loop, ragged),
    "maps of attention": (OfTokens, Maps, ragged),
    "p from 0 on": (partial(Changing, thaws=False), layers, images),
    "thawed": (partial(Changing, thaws=True), layers, images),
    "checkpoint": (Recomputing, layers, images),
    "recomputed": (OfRows, layers, images),
    "lbfgs": (OfRows, layers, images),
    "averaged": (OfRows, layers, images),
    "masks in validation": (Sampled, layers, images),
}
ALONE: dict[str, tuple[Any, Any, Any]] = {"compiles": (Compiles, layers, images)}
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "recomputed": {"checkpoint_activations": ["net.1", "net.2"]},
    "averaged": {"callbacks": [EMA(0.5)]},
}
OPTIMIZERS = {"lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3)}
OPTIMIZER = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def case_of(name: str) -> tuple[Task, Given]:
    task, net, data = (NETS | USES | ALONE)[name]
    given = Given(data, data, SIZE)
    if data is ragged:
        given.collate = padded
    return task(net(), OPTIMIZERS.get(name, OPTIMIZER)), given
