"""Chats as rows of tokens: several in a row, each with its positions, and answers to learn."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import torch
from jinja2 import TemplateError  # which torch needs, too
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

import dpframe
from dpframe.plugins.huggingface.files import FileData, lines, text_of

IGNORED = -100  # as a target: cross_entropy leaves it out
Chat = tuple[Tensor, Tensor]  # its tokens, and which of them an answer has


class ChatData(FileData):
    """Lists of messages under `key`, each message with a role and a content.

    A row has `length` tokens of as many chats as fit, or of one where `packed` is false. `template`
    is a file with a chat template, in place of the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: str,
        train: str,
        val: str | None = None,
        key: str = "messages",
        length: int = 1024,
        packed: bool = True,
        template: str | None = None,
        batch_size: int = 8,
        workers: int | str = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(tokenizer, train, val, batch_size, workers, shuffle)
        self.key, self.length, self.packed, self.template = key, length, packed, template

    def prepared(self, tokenizer: Any) -> Any:
        if self.template is not None:
            tokenizer.chat_template = text_of(self.template)
        if not tokenizer.chat_template:
            raise dpframe.UserError(
                f"data.tokenizer={self.name} has no chat template; name a file with one by "
                "data.template=FILE"
            )
        return tokenizer

    def rows_of(self, file: str) -> "Rows":
        chats = []
        for where, row in lines(file):
            try:
                chats.append(chat_of(row, self.key, self.tokenizer, where))
            except TemplateError as error:  # e.g. of roles that do not take turns
                raise dpframe.UserError(f"{where}: its chat template: {error}") from error
        return Rows(chats, self.length, self.packed, file)

    def collate(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        size = self.length if self.packed else max(len(row["targets"]) for row in rows)
        return {
            name: torch.stack([_padded(row[name], size, name) for row in rows]) for name in rows[0]
        }


class Rows(Dataset):
    """Chats in rows of at most `length` tokens; longer ones are cut there."""

    def __init__(self, chats: list[Chat], length: int, packed: bool, file: str) -> None:
        self.length = length
        self.cut = sum(len(tokens) > length for tokens, _ in chats)
        chats = [(tokens[:length], answers[:length]) for tokens, answers in chats]
        self.chats = [chat for chat in chats if chat[1][1:].any()]
        self.left_out = len(chats) - len(self.chats)
        if not self.chats:
            raise dpframe.UserError(
                f"{file}: none of {len(chats)} chats has an answer in its first {length} tokens; "
                "set data.length"
            )
        lengths = [len(tokens) for tokens, _ in self.chats]
        self.rows = packs(lengths, length) if packed else [[chat] for chat in range(len(lengths))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        chats = [self.chats[chat] for chat in self.rows[row]]
        return {
            "input_ids": torch.cat([tokens for tokens, _ in chats]).long(),
            "position_ids": torch.cat([torch.arange(len(tokens)) for tokens, _ in chats]),
            "targets": torch.cat([_targets(*chat) for chat in chats]),
        }

    def described(self) -> str:
        tokens = sum(len(tokens) for tokens, _ in self.chats)
        answers = sum(int(is_answer[1:].sum()) for _, is_answer in self.chats)
        told = (
            f"{len(self.chats)} chats of {tokens} tokens, {answers} to learn, in {len(self)} rows"
        )
        told += f"; {self.cut} cut after {self.length} tokens" if self.cut else ""
        return told + (f"; {self.left_out} without an answer left out" if self.left_out else "")


def packs(lengths: list[int], most: int) -> list[list[int]]:
    """Best fit: from the longest on, each goes into the fullest row that has room for it."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # with the row, in order
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        at = bisect_left(rooms, (lengths[number], 0))
        room, row = rooms.pop(at) if at < len(rooms) else (most, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        insort(rooms, (room - lengths[number], row))
    return rows


def chat_of(row: dict[str, Any], key: str, tokenizer: Any, where: str) -> Chat:
    messages = row.get(key)
    is_chat = isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("content"), str) and "role" in each
        for each in messages
    )
    if not is_chat or not messages:
        raise dpframe.UserError(
            f"{where} has no list of messages under {key}, each with a role and a text as content; "
            "set data.key"
        )
    shared = {"tools": row.get("tools")}
    if "{% generation" in tokenizer.chat_template.replace("{%-", "{%"):
        tokens = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **shared
        )
        is_answer = tokens["assistant_masks"]
    else:

        def render(some: list[Any], prompt: bool = False) -> str:
            how = {**shared, "add_generation_prompt": prompt, "tokenize": False}
            return tokenizer.apply_chat_template(some, **how)

        text = render(messages)
        spans = answers_in(text, messages, render, where)
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_answer = [
            begin < end and any(first <= begin < last for first, last in spans)
            for begin, end in tokens["offset_mapping"]
        ]
    return torch.tensor(tokens["input_ids"], dtype=torch.int32), torch.tensor(is_answer).bool()


def answers_in(
    text: str, messages: list[Any], render: Callable[..., str], where: str
) -> list[tuple[int, int]]:
    """From where the assistant is asked for an answer up to the sign that ends it."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, upto = render(messages[:number], prompt=True), render(messages[: number + 1])
        end = len(upto.rstrip())
        if not text.startswith(upto.rstrip()):  # the last answer is written differently
            content = message["content"].strip()
            learned = content + upto[upto.rfind(content) + len(content) :].rstrip()
            end = text.find(learned, len(prompt)) + len(learned) if content in upto else 0
        if not text.startswith(prompt) or not upto.startswith(prompt) or end <= len(prompt):
            raise dpframe.UserError(
                f"{where}: the chat template changes what came before an answer, or the answer; "
                "mark answers in the template by {% generation %} and {% endgeneration %}, and "
                "name it by data.template=FILE"
            )
        spans.append((len(prompt), end))
    return spans


def _targets(tokens: Tensor, is_answer: Tensor) -> Tensor:
    """What follows each token, where an answer has it."""
    following = tokens[1:].long().masked_fill(~is_answer[1:], IGNORED)
    return functional.pad(following, (0, 1), value=IGNORED)


def _padded(row: Tensor, size: int, name: str) -> Tensor:
    """Positions of 0 make each token of the padding a document of its own."""
    return functional.pad(row, (0, size - len(row)), value=IGNORED if name == "targets" else 0)
