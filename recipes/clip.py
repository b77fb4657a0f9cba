"""CLIP: finds the caption of an image among many, and the image of a caption."""

import random
from collections.abc import Callable
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe
from dpframe.plugin import fraction
from dpframe.recipes.lenet import read_digits
from dpframe.recipes.vae import SIDE, rendered

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
INKS = {"faint": 0.4, "bold": 1.0}
FORMS = (  # the first is what is printed; all say which digit is where
    "a {left} left of a {right}",
    "a {right} right of a {left}",
    "a {left} then a {right}",
    "a {left} and on its right a {right}",
    "a {right} and on its left a {left}",
)
VOCABULARY = ["", *DIGITS, *INKS, *sorted(set(" ".join(FORMS).split()) - {"{left}", "{right}"})]
LONGEST = 10  # words
MEANINGS = list(product(DIGITS, INKS, DIGITS, INKS))


class CLIP(dpframe.Task):
    """Two towers, whose vectors are near for an image and its caption, and far for others.

    Each row is compared with all rows of the global batch, whichever replica has them.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        width: int = 32,
        size: int = 64,
    ) -> None:
        super().__init__(None, optimizer, scheduler)
        self.images = image_tower(width, size)
        self.captions = CaptionTower(2 * width, size)
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        image, words, meaning = batch
        images, captions = normalize(self.images(image)), normalize(self.captions(words))
        # Two captions of a batch may say the same: both are right, then.
        is_same = meaning[:, None] == self.all_gather(meaning)
        to_captions = images @ self.all_gather(captions).T
        to_images = captions @ self.all_gather(images).T
        target = is_same / is_same.sum(dim=1, keepdim=True, dtype=images.dtype)
        scale = self.log_scale.exp()
        loss = cross_entropy(scale * to_captions, target) + cross_entropy(scale * to_images, target)
        return {
            "loss": loss / 2,
            "caption_found": share_found(to_captions, is_same),
            "image_found": share_found(to_images, is_same),
        }

    def predict_step(self, batch: list[Tensor]) -> list[str]:
        """For each image the nearest of all captions."""
        captions = normalize(self.captions(all_captions().to(self.device)))
        nearest = (self.images(batch[0]) @ captions.T).argmax(dim=1)
        return [caption(MEANINGS[number]) for number in nearest.tolist()]


def image_tower(width: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * SIDE * SIDE, size),  # a quarter of an image's 2 * SIDE * SIDE pixels
    )


class CaptionTower(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, size)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(words))
        last = (words != 0).sum(dim=1) - 1
        return self.head(states[torch.arange(len(words), device=last.device), last])


class CLIPData(dpframe.DataSets):
    """Two digits side by side, with words that say which, where and how dark."""

    def __init__(
        self,
        batch_size: int = 128,
        workers: int | str = 0,
        shuffle: bool = True,
        pairs: int = 6000,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, shuffle=shuffle)
        self.pairs = pairs

    def setup(self) -> None:
        train, held_out = read_digits(SIDE)
        self.train = paired(train, self.pairs, seed=0)
        self.val = self.test = paired(held_out, self.pairs // 10, seed=1)


class ShowCaptions(dpframe.Callback):
    """Prints some held-out images at the end, each with the nearest of all captions."""

    def __init__(self, count: int = 4) -> None:
        self.count = count

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        if trainer.strategy.is_main:
            task, data = cast(CLIP, trainer.task), cast(CLIPData, trainer.data)
            images = data.val.tensors[0][: self.count]
            with torch.no_grad():
                found = task.predict_step([images.to(task.log_scale)])
            for image, text in zip(images, found, strict=True):
                print(f"\n{rendered(image[None])}\n{text}")
            print(flush=True)


def share_found(cosines: Tensor, is_same: Tensor) -> Tensor:
    nearest = cosines.argmax(dim=1, keepdim=True)
    return fraction(is_same.gather(1, nearest))


def paired(digits: TensorDataset, count: int, *, seed: int) -> TensorDataset:
    """Images [count, 1, 8, 16], the words of their captions, and the numbers of their meanings."""
    draw = random.Random(seed)
    images, labels = digits.tensors
    rows = []
    for _ in range(count):
        sides = [(draw.randrange(len(labels)), draw.choice(list(INKS))) for _ in range(2)]
        image = torch.cat([INKS[ink] * images[row] for row, ink in sides], dim=2)
        (left, left_ink), (right, right_ink) = ((DIGITS[labels[row]], ink) for row, ink in sides)
        meaning = (left, left_ink, right, right_ink)
        text = caption(meaning, draw.choice(FORMS))
        rows.append((image, words_of(text), torch.tensor(MEANINGS.index(meaning))))
    return TensorDataset(*map(torch.stack, zip(*rows, strict=True)))


def caption(meaning: tuple[str, str, str, str], form: str = FORMS[0]) -> str:
    left, left_ink, right, right_ink = meaning
    return form.format(left=f"{left_ink} {left}", right=f"{right_ink} {right}")


def words_of(text: str) -> Tensor:
    words = [VOCABULARY.index(word) for word in text.split()]
    return torch.tensor(words + [0] * (LONGEST - len(words)))


def all_captions() -> Tensor:
    return torch.stack([words_of(caption(meaning)) for meaning in MEANINGS])
