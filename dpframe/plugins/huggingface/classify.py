"""Classification of texts by a model of `transformers`, and the texts with their labels."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

import dpframe
from dpframe.plugin import fraction
from dpframe.plugins.huggingface.files import FileData, lines
from dpframe.plugins.huggingface.model import base_of, model_of


class Classify(dpframe.Task):
    """`labels` are the names of the classes; `model` and `lora` are as those of SFT."""

    def __init__(
        self,
        model: str | Mapping[str, Any],
        labels: Sequence[str],
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        names = dict(enumerate(map(str, labels)))
        numbers = {name: number for number, name in names.items()}
        changes = {"id2label": names, "label2id": numbers}
        net = model_of("AutoModelForSequenceClassification", model, lora, changes)
        super().__init__(net, optimizer, scheduler)
        self.takes = {*inspect.signature(base_of(net).forward).parameters}

    def setup(self, trainer: "dpframe.Trainer") -> None:
        config, words = base_of(self.net).config, getattr(trainer.data, "tokenizer", None)
        if getattr(config, "pad_token_id", None) is None and words is not None:
            config.pad_token_id = words.pad_token_id  # by which a causal model finds a text's end

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name in self.takes - {"labels"}}
        return self.net(**inputs).logits

    def training_step(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        logits, labels = self(batch), batch["labels"]
        is_right = logits.argmax(dim=1) == labels
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": fraction(is_right)}

    def predict_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self(batch).softmax(dim=1)


class TextData(FileData):
    """Objects with a text and a label, which is one of `labels` or its number."""

    def __init__(
        self,
        tokenizer: str,
        labels: Sequence[str],
        train: str,
        val: str | None = None,
        text: str = "text",
        label: str = "label",
        length: int = 512,
        batch_size: int = 32,
        workers: int | str = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(tokenizer, train, val, batch_size, workers, shuffle)
        self.labels = [*map(str, labels)]
        self.text, self.label, self.length = text, label, length

    def prepared(self, tokenizer: Any) -> Any:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def rows_of(self, file: str) -> "Texts":
        return Texts([self._row(where, row) for where, row in lines(file)])

    def collate(self, rows: list[tuple[str, int]]) -> dict[str, Tensor]:
        """Pads to the longest text."""
        texts, labels = zip(*rows, strict=True)
        how = {"padding": True, "truncation": True, "max_length": self.length}
        batch = self.tokenizer([*texts], return_tensors="pt", **how)
        return {**batch, "labels": torch.tensor(labels)}

    def _row(self, where: str, row: dict[str, Any]) -> tuple[str, int]:
        text, label = row.get(self.text), row.get(self.label)
        if not isinstance(text, str):
            raise dpframe.UserError(f"{where} has no text under {self.text}; set data.text")
        if label in self.labels:
            return text, self.labels.index(label)
        if type(label) is not int or not 0 <= label < len(self.labels):
            raise dpframe.UserError(
                f"{where} has {label!r} under {self.label}, which is none of "
                f"{', '.join(self.labels)}, nor the number of one; set data.label or task.labels"
            )
        return text, label


class Texts(Dataset):
    """Texts, each with the number of its label."""

    def __init__(self, rows: list[tuple[str, int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[str, int]:
        return self.rows[row]
