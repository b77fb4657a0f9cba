"""GPT: a transformer that writes stories byte by byte; overrides make it as large as GPT-2."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

import dpframe


class GPT(dpframe.Task):
    """Predicts each byte from those before it, or tokens, of which GPT-2 has 50,257."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        vocabulary: int = 256,
        block: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        attention_dropout: float | None = None,  # None: as dropout
    ) -> None:
        if width % heads:
            raise dpframe.UserError(
                f"task.width={width} can't be divided by task.heads={heads}; "
                f"set task.width={heads * -(-width // heads)}"
            )
        dropouts = dropout, dropout if attention_dropout is None else attention_dropout
        net = Transformer(vocabulary, block, layers, heads, width, *dropouts)
        super().__init__(net, optimizer, scheduler)
        self.block = block

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        text = batch[0].long()
        logits = self.net(text[:, :-1])
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        loss = means["loss"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {**means, "bits": loss / math.log(2), "perplexity": perplexity}

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float, seed: int) -> str:
        """The prompt and `length` bytes more, each drawn from what the network expects there.

        Tokens above 255 are no bytes: none of them is drawn."""
        # Its own generator: training draws the same numbers whether or not a sample is written.
        generator = torch.Generator(self.device).manual_seed(seed)
        text = torch.tensor([list(prompt.encode())], device=self.device)
        was_training = self.training
        self.eval()
        for _ in range(length):
            logits = self.net(text[:, -self.block :])[:, -1, :256].float()
            drawn = torch.multinomial((logits / temperature).softmax(dim=1), 1, generator=generator)
            text = torch.cat([text, drawn], dim=1)
        self.train(was_training)
        return bytes(text[0].tolist()).decode(errors="replace")


class Transformer(nn.Module):
    """The logits of the next token at every place; one table of tokens for both ends."""

    def __init__(
        self,
        vocabulary: int,
        block: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        blocks = (Block(width, heads, dropout, attention_dropout) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # The sum over the residual branches, two a block, keeps the size of one.
                is_residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if is_residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        x = self.norm(self.blocks(self.dropout(x)))
        return functional.linear(x, self.tokens.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = attention_dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        heads = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class GPTData(dpframe.DataSets):
    """Blocks of a text file, or without one of made-up stories; the last tenth is held out."""

    def __init__(
        self,
        batch_size: int = 32,
        workers: int | str = 0,
        shuffle: bool = True,
        block: int = 128,
        file: str | None = None,
        stories: int = 6000,
    ) -> None:
        super().__init__(batch_size=batch_size, workers=workers, shuffle=shuffle)
        self.block = block
        self.file = file
        self.stories = stories

    def setup(self) -> None:
        text = (
            stories(self.stories) if self.file is None else _content(Path(self.file).expanduser())
        )
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if len(rows) <= 2 * self.block:
            raise dpframe.UserError(
                f"the text has {len(rows)} bytes, too few for two blocks; set data.block below "
                f"{len(rows) // 2}"
            )
        # A block's last byte is the next one's first: each byte but one is predicted once.
        rows = rows.unfold(0, self.block + 1, self.block)
        train, held_out = rows.tensor_split([len(rows) - max(1, len(rows) // 10)])
        self.train = TensorDataset(train)
        self.val = self.test = TensorDataset(held_out)


class Sample(dpframe.Callback):
    """Prints, and logs as text, how the network goes on after `prompt`, at every validation."""

    def __init__(
        self, prompt: str = "\n", length: int = 300, temperature: float = 0.7, seed: int = 0
    ) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self.seed = seed

    def on_validation_end(self, trainer: "dpframe.Trainer") -> None:
        if trainer.strategy.is_main:
            task: Any = trainer.task
            text = task.write(self.prompt, self.length, self.temperature, self.seed).strip()
            print(f"\n{text}\n", flush=True)
            trainer.log_text("val/sample", text)


# ---- the stories

NAMES = {"she": ("her", "Mia Ana Lily Emma Nora Zoe"), "he": ("him", "Tom Ben Max Leo Sam Jack")}
WORDS = {
    "time": "One morning,One day,In the evening,After the rain,Before breakfast,On Sunday",
    "place": "to the forest,to the river,to the market,up the hill,down to the sea,for a walk",
    "things": "apples,nuts,plums,shells,eggs,stones,feathers,coins",
    "bag": "a red bag,a small box,an old hat,a blue basket,a glass jar",
    "thief": "a fox,a crow,a goat,the wind,a little dog",
}
COUNTS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SENTENCES = (  # one of each makes a story
    ("{time} {name} went {place}.", "{time} {name} and {friend} went {place}."),
    ("{She} found {some} {things} and put them into {bag}.", "{She} had {some} {things} in {bag}."),
    ("{friend} gave {her} {more} more.", '"Take my {more}," said {friend}.'),
    ("Now {she} had {both} {things}.", "That made {both} {things}."),
    ("But {thief} took {lost}, so {rest} were left.", "They ate {lost} and kept {rest}."),
    ("{name} laughed.", "{friend} was happy.", "Then it was time to go home.", "What a day!"),
)


def stories(count: int) -> bytes:
    """Always the same ones. Who is who is right in them, and so are the sums."""
    draw = random.Random(0)
    return "\n".join(_story(draw) for _ in range(count)).encode()


def _story(draw: random.Random) -> str:
    she = draw.choice(list(NAMES))
    her, names = NAMES[she]
    name = draw.choice(names.split())
    friend = draw.choice([n for _, all_ in NAMES.values() for n in all_.split() if n != name])
    some, more = draw.randint(2, 5), draw.randint(2, 5)
    lost = draw.randint(1, some + more - 2)
    counts = {"some": some, "more": more, "both": some + more, "lost": lost}
    counts["rest"] = some + more - lost
    words = {key: draw.choice(choices.split(",")) for key, choices in WORDS.items()}
    words |= {"name": name, "friend": friend, "she": she, "She": she.capitalize(), "her": her}
    words |= {key: COUNTS[number] for key, number in counts.items()}
    return " ".join(draw.choice(forms).format(**words) for forms in SENTENCES)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise dpframe.UserError(
            f"cannot read {path}: {error.strerror}; leave data.file=null for the stories"
        ) from error
