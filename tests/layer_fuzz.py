"""Random networks with BatchNorm and dropout: with the keys each is the same on any number of
replicas, or has a line that names why; no other one has a line.

`python tests/layer_fuzz.py 200 0` tries as many, of a seed: each on data_parallel, ddp and fsdp."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from forked import on
from small import SGD, Given, fitted
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dpframe import DataModule, Strategy, Task, UserError
from dpframe.strategies import CPU, DDP, FSDP, DataParallel

EXACT = 1e-10
WIDTH, WORDS = 6, 4  # of what the layers pass on: [rows, words, width]


class Calls(nn.Module):
    """Calls a function with itself: a layer in whatever layout."""

    def __init__(self, call: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def flat(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.flatten(0, 1)).reshape_as(x)


def words_first(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.transpose(0, 1)).transpose(0, 1)


def words_first_flat(m: Any, x: Tensor) -> Tensor:
    turned = x.transpose(0, 1)
    return m.layer(turned.flatten(0, 1)).reshape_as(turned).transpose(0, 1)


def channels(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.transpose(1, 2)).transpose(1, 2)


def image(m: Any, x: Tensor) -> Tensor:
    return m.layer(x.reshape(len(x), WIDTH, 2, 2)).reshape(x.shape)


def word_by_word(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.layer(word) for word in x.unbind(1)], dim=1)


def twice(m: Any, x: Tensor) -> Tensor:
    return m.layer(torch.tanh(m.layer(x)))


def in_pairs(m: Any, x: Tensor) -> Tensor:
    """As two views of each row, one after another."""
    pairs = torch.stack([x, x.flip(1)], dim=1)
    return m.layer(pairs.flatten(0, 1)).reshape_as(pairs).mean(1)


def as_views(m: Any, x: Tensor) -> Tensor:
    """As two views of all rows, one after another."""
    return torch.stack(m.layer(torch.cat([x, x.flip(1)])).chunk(2)).mean(0)


def chosen(m: Any, x: Tensor) -> Tensor:
    """Of words of which each row has another number."""
    wanted = x[..., 0] > 0
    return torch.zeros_like(x).index_put((wanted,), m.layer(x[wanted]))


def last_layer(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)[0]


def drawn(m: Any, x: Tensor) -> Tensor:
    kept = torch.rand(len(x), 1, 1, dtype=x.dtype) > 0.2
    return x * kept if m.training else x


def encoder(random: Random, first: bool, p: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=random.choice([0.1, 0.4]))
    layer.self_attn.dropout = p
    layer.self_attn.batch_first = first
    return layer


def of(call: Any, make: Any) -> Any:
    return lambda random: Calls(call, layer=make(random))


def dropout(random: Random) -> nn.Module:
    kind = random.choice([nn.Dropout, nn.Dropout, nn.AlphaDropout])
    return kind(random.choice([0.1, 0.5, 0.8]))


def norm(kind: Any, width: int = WIDTH) -> Any:
    return lambda random: kind(
        width,
        affine=random.random() < 0.8,
        momentum=random.choice([0.1, 0.1, None]),
        track_running_stats=random.random() < 0.8,
    )


# Of which each is the same with the keys.
LAYERS: dict[str, Callable[[Random], nn.Module]] = {
    "linear": lambda r: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "layer norm": lambda r: nn.LayerNorm(WIDTH),
    "group norm": of(channels, lambda r: nn.GroupNorm(2, WIDTH)),
    "instance norm": of(channels, lambda r: nn.InstanceNorm1d(WIDTH)),
    "norm": of(channels, norm(nn.BatchNorm1d)),
    "norm of words": norm(nn.BatchNorm1d, WORDS),
    "norm, flat": of(flat, norm(nn.BatchNorm1d)),
    "norm, words first": of(words_first_flat, norm(nn.BatchNorm1d)),
    "norm, word by word": of(word_by_word, norm(nn.BatchNorm1d)),
    "norm of images": of(image, norm(nn.BatchNorm2d)),
    "norm of views": of(as_views, norm(nn.BatchNorm1d, WORDS)),
    "synced norm": of(channels, norm(nn.SyncBatchNorm)),
    "frozen norm": lambda r: norm(nn.BatchNorm1d, WORDS)(r).eval(),
    "norm twice": of(twice, norm(nn.BatchNorm1d, WORDS)),
    "dropout": dropout,
    "dropout in place": lambda r: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2, True)),
    "dropout, flat": of(flat, dropout),
    "dropout, words first": of(words_first, dropout),
    "dropout, word by word": of(word_by_word, dropout),
    "dropout twice": of(twice, dropout),
    "dropout in pairs": of(in_pairs, dropout),
    "dropout of words": lambda r: nn.Dropout1d(0.4),
    "dropout of channels": of(channels, lambda r: nn.Dropout1d(0.4)),
    "dropout of images": of(image, lambda r: nn.Dropout2d(0.4)),
    "dropout of features": lambda r: nn.FeatureAlphaDropout(0.3),
    "frozen dropout": lambda r: nn.Dropout(0.5).eval(),
    "encoder": lambda r: encoder(r, True, 0.0),
    "encoder, words first": of(words_first, lambda r: encoder(r, False, 0.0)),
    "lstm": of(last_layer, lambda r: nn.LSTM(WIDTH, WIDTH, batch_first=True)),
}
# Of which each is another one on ranks, and has a line.
TOLD: dict[str, Callable[[Random], nn.Module]] = {
    "dropout, words first and flat": of(words_first_flat, dropout),
    "dropout of views": of(as_views, lambda r: nn.Dropout(0.4)),
    "dropout of what is chosen": of(chosen, lambda r: nn.Dropout(0.4)),
    "functional": lambda r: Calls(lambda m, x: F.dropout(x, 0.4, m.training)),
    "drawn": lambda r: Calls(drawn),
    "attention": lambda r: encoder(r, True, 0.4),
    "deep lstm": of(last_layer, lambda r: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.4)),
}


@dataclass
class Network:
    """Layers that are chosen at random, and how they are trained."""

    names: list[str]
    settings: dict[str, Any]
    sizes: tuple[int, int]  # of the data and of a batch
    seed: str

    @classmethod
    def of(cls, seed: str) -> "Network":
        random = Random(seed)
        names = random.choices(list(LAYERS), k=random.randint(2, 5))
        if random.random() < 0.25:
            names.insert(random.randrange(len(names) + 1), random.choice(list(TOLD)))
        settings: dict[str, Any] = {"accumulate": random.choice([1, 1, 2])}
        if random.random() < 0.2:
            settings["checkpoint_activations"] = ["net.1"]
        sizes = random.choice([(10, 4), (11, 3), (14, 6), (16, 7)])
        return cls(names, settings, sizes, seed)

    @property
    def is_told(self) -> bool:
        return any(name in TOLD for name in self.names)

    def trained(self, strategy: Strategy) -> tuple[dict[str, Tensor], str]:
        """The weights, and the line."""
        torch.manual_seed(0)
        random = Random(self.seed)
        layers = [(LAYERS | TOLD)[name](random) for name in self.names]
        settings = {"max_epochs": 1, "precision": "64", "exact_layers": True, **self.settings}
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))
        task = Fit(net, partial(SGD, momentum=0.9))
        made = fitted(task, data(*self.sizes), strategy=strategy, **settings)
        state = task.state_dict()
        state = strategy.sharding.whole(state)
        has = {key: t.double() for key, t in state.items() if t is not None}  # of the main rank
        return has, made.training.own


class Fit(Task):
    def training_step(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": (self.net(x).mean(1) - y).square().mean()}


def data(rows: int, batch_size: int) -> DataModule:
    x = torch.randn(rows, WORDS, WIDTH, generator=torch.Generator().manual_seed(rows))
    return Given(TensorDataset(x, x.sum((1, 2))[:, None]), batch_size=batch_size)


def results(strategy: Strategy, seeds: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for seed in seeds:
        try:
            found.append(Network.of(seed).trained(strategy))
        except UserError as error:
            found.append(str(error))
    return found


def fuzz(seeds: Sequence[str], strategy: Strategy) -> list[tuple[Network, str]]:
    """The networks that are judged wrongly, and why. Virtual replicas draw one after another as
    one does, so that what has a line may be the same there."""
    wrong = []
    given = on(strategy, results, seeds)
    for seed, wanted, got in zip(seeds, results(CPU(), seeds), given, strict=True):
        network = Network.of(seed)
        if isinstance(got, str) or isinstance(wanted, str):
            why = "" if network.is_told and isinstance(got, str) else f"refused: {wanted} {got}"
        else:
            (weights, line), (state, _) = got, wanted
            apart = max(float((weights[key] - t).abs().max()) for key, t in state.items())
            is_same = apart < EXACT * max(1.0, *(float(t.abs().max()) for t in state.values()))
            if line:
                is_right = network.is_told and not (is_same and strategy.world_size > 1)
            else:
                is_right = is_same and not network.is_told
            why = "" if is_right else f"{apart:.2g}, line {line!r}"
        if why:
            wrong.append((network, why))
    return wrong


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    count, seed = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "0"
    seeds = [f"{seed} {number}" for number in range(count)]
    for kind, replicas in ((DataParallel, 2), (DataParallel, 3), (DDP, 2), (FSDP, 2)):
        strategy = kind(replicas, "cpu")
        wrong = fuzz(seeds, strategy)
        told = sum(Network.of(each).is_told for each in seeds)
        print(f"{strategy.name} {strategy.gpus}: {count}, {told} with a line; wrong: {len(wrong)}")
        for network, why in wrong[:10]:
            print(network, why)
