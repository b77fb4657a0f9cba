"""Text: tags each word of sentences of any length; sentences of like length share a batch."""

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

import dpframe
from dpframe.plugin import fraction

# A word's tag depends on the words around it: they fish, a fish; the old man, the old man the ship.
WORDS = {
    "DET": "the a my her every",
    "ADJ": "old light little fast wild cold",
    "NOUN": "man dog can fish duck saw light watch cold cook ship",
    "PRON": "she they he we",
    "VERB": "saw fish duck light watch cook man ship like",
    "AUX": "can will must",
    "ADV": "fast often again",
    "PREP": "like by with near",
    "CONJ": "and but",
    "REL": "that who",
}
GRAMMAR = {  # the first of each ends a sentence that has grown deep
    "S": ["NP VP", "NP VP", "NP VP", "S CONJ S"],
    "NP": ["DET NOUN", "PRON", "DET ADJ NOUN", "DET ADJ ADJ NOUN", "NP PREP NP", "DET NOUN REL VP"],
    "VP": ["VERB NP", "VERB ADV", "AUX VERB NP", "VERB", "VP CONJ VP", "AUX VERB ADV PREP NP"],
}
DEEPEST = 7
TAGS = list(WORDS)
VOCABULARY = ["", *sorted({word for words in WORDS.values() for word in words.split()})]
PADDING = VOCABULARY.index("")
NO_TAG = -100  # what cross_entropy leaves out
EXAMPLES = (
    "the old man can fish",
    "she saw her duck",
    "they man the light ship",
    "my fish can watch the cold can",
    "he saw a saw that can light the cold",
)


class Text(dpframe.Task):
    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        width: int = 32,
    ) -> None:
        super().__init__(None, optimizer, scheduler)
        self.embedding = nn.Embedding(len(VOCABULARY), width, padding_idx=PADDING)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, len(TAGS))

    def forward(self, words: Tensor) -> Tensor:
        # Packed: no number depends on the padding, which is another one in every share.
        lengths = (words != PADDING).sum(dim=1).cpu()
        packed = pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, total_length=words.shape[1]
        )
        return self.head(states)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        words, tags = batch
        logits = self(words).flatten(0, 1)
        tags = tags.flatten()
        is_word = tags != NO_TAG
        return {
            "loss": functional.cross_entropy(logits, tags, ignore_index=NO_TAG),
            "accuracy": fraction((logits.argmax(dim=1) == tags)[is_word]),
            "weight": is_word.sum(),  # the means are over words, not over sentences
        }

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> list[str]:
        words = batch[0]
        pairs = zip(words.tolist(), self(words).argmax(dim=2).tolist(), strict=True)
        return [" ".join(_tagged(*pair)) for pair in pairs]


class TextData(dpframe.DataSets):
    """Made-up sentences of 1 to 100 words; a tenth is held out."""

    def __init__(
        self,
        batch_size: int = 64,
        workers: int | str = 0,
        shuffle: bool = True,
        sentences: int = 4000,
        buckets: bool = True,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, shuffle=shuffle)
        self.sentences = sentences
        self.buckets = buckets

    def setup(self) -> None:
        draw = random.Random(0)
        rows = [_row(_grown("S", draw)) for _ in range(self.sentences)]
        cut = len(rows) * 9 // 10
        self.train = Rows(rows[:cut])
        self.val = self.test = Rows(rows[cut:])

    def train_sampler(self, dataset: "Rows") -> "ByLength | None":  # type: ignore[override]
        lengths = [len(words) for words, _ in dataset.rows]
        return ByLength(lengths, self.batch_size) if self.buckets else None

    def collate(self, rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        words, tags = ([row[column] for row in rows] for column in (0, 1))
        return (
            pad_sequence(words, batch_first=True, padding_value=PADDING),
            pad_sequence(tags, batch_first=True, padding_value=NO_TAG),
        )


class Rows(Dataset):
    """Words and their tags, both as numbers, of as many words as each sentence has."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.rows[row]


class ByLength:
    """A batch sampler: rows are sorted by length within pools of 20 batches, drawn at random."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        self.lengths = lengths
        self.batch_size = batch_size

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        # torch's own generator: dpframe seeds it by the run's seed and the epoch.
        pools = torch.randperm(len(self.lengths)).split(20 * self.batch_size)
        batches = []
        for pool in pools:
            ordered = sorted(pool.tolist(), key=self.lengths.__getitem__)
            batches += [
                ordered[start : start + self.batch_size]
                for start in range(0, len(ordered), self.batch_size)
            ]
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number]


class ShowTags(dpframe.Callback):
    """Prints some sentences with their tags at the end."""

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        if trainer.strategy.is_main:
            task: Text = trainer.task  # type: ignore[assignment]
            words = [torch.tensor(list(map(VOCABULARY.index, text.split()))) for text in EXAMPLES]
            batch = pad_sequence(words, batch_first=True, padding_value=PADDING).to(task.device)
            with torch.no_grad():
                print("", *task.predict_step((batch, batch)), "", sep="\n", flush=True)


# ---- the sentences


def _grown(symbol: str, draw: random.Random, depth: int = 0) -> list[tuple[str, str]]:
    """Words and their tags."""
    if symbol in WORDS:
        return [(draw.choice(WORDS[symbol].split()), symbol)]
    form = GRAMMAR[symbol][0] if depth > DEEPEST else draw.choice(GRAMMAR[symbol])
    return [pair for part in form.split() for pair in _grown(part, draw, depth + 1)]


def _row(sentence: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    words = [VOCABULARY.index(word) for word, _ in sentence]
    return torch.tensor(words), torch.tensor([TAGS.index(tag) for _, tag in sentence])


def _tagged(words: list[int], tags: list[int]) -> Iterator[str]:
    for word, tag in zip(words, tags, strict=True):
        if word != PADDING:
            yield f"{VOCABULARY[word]}/{TAGS[tag]}"
