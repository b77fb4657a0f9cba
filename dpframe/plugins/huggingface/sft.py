"""Supervised fine-tuning: a causal model of `transformers` learns the answers in chats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler

import dpframe
from dpframe.plugins.huggingface.chats import IGNORED, ChatData
from dpframe.plugins.huggingface.model import base_of, model_of

LEAK = 1e-4  # of the largest number: what rounding never makes


class SFT(dpframe.Task):
    """`model` is a name of the Hub, a folder, or a config, for random weights; `lora` is what
    peft's LoraConfig takes; `attention` is transformers' `attn_implementation`."""

    def __init__(
        self,
        model: str | Mapping[str, Any],
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        lora: Mapping[str, Any] | None = None,
        attention: str = "sdpa",
    ) -> None:
        net = model_of("AutoModelForCausalLM", model, lora, {}, attn_implementation=attention)
        super().__init__(net, optimizer, scheduler)
        self.is_flat = attention.startswith("flash")  # which sees documents in a single row alone

    def setup(self, trainer: "dpframe.Trainer") -> None:
        data = trainer.data
        if not isinstance(data, ChatData):
            return
        most = getattr(base_of(self.net).config, "max_position_embeddings", data.length)
        if data.length > most:
            raise dpframe.UserError(
                f"data.length={data.length}, but the model has {most} positions; set "
                f"data.length={most}"
            )

    def on_fit_start(self, trainer: "dpframe.Trainer") -> None:
        data = trainer.data
        if not isinstance(data, ChatData):
            return
        if data.packed and not self.is_flat:
            with trainer.strategy.sharding.whole_weights(self):
                is_seen = sees_other_documents(self.net, self.device)
            if is_seen:
                raise dpframe.UserError(
                    f"{type(base_of(self.net)).__name__} doesn't keep the documents of a packed "
                    "row apart; set data.packed=false"
                )
        for name, rows in data.rows.items() if trainer.strategy.is_main else ():
            print(f"{name:<10} {rows.described()}", flush=True)

    def training_step(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        if self.is_flat:
            batch = {name: value.reshape(1, -1) for name, value in batch.items()}
        ids, positions, targets = batch["input_ids"], batch["position_ids"], batch["targets"]
        logits = self.net(input_ids=ids, position_ids=positions, use_cache=False).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "weight": (targets != IGNORED).sum()}  # a mean over answers' tokens

    @torch.no_grad()
    def answer(self, question: str, tokenizer: Any, tokens: int) -> str:
        net: Any = self.net
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        ).to(self.device)
        how = {"max_new_tokens": tokens, "do_sample": False, "use_cache": True}
        was_training = self.training
        self.eval()
        made = net.generate(**asked, **how, synced_gpus=False)  # the main rank asks alone
        self.train(was_training)
        return tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


class Answers(dpframe.Callback):
    """Prints what the model answers to `questions` at the end, in at most so many `tokens`."""

    def __init__(self, questions: Sequence[str] = (), tokens: int = 200) -> None:
        self.questions, self.tokens = questions, tokens

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        task, data = cast(SFT, trainer.task), cast(ChatData, trainer.data)
        if not self.questions:
            return
        with trainer.strategy.sharding.whole_weights(task):
            for question in self.questions if trainer.strategy.is_main else ():
                answer = task.answer(question, data.tokenizer, self.tokens)
                print(f"question   {question}\nanswer     {answer}", flush=True)


@torch.no_grad()
def sees_other_documents(net: Any, device: torch.device) -> bool:
    """Whether a document's logits change with the one before it in its row."""
    was_training = net.training
    net.eval()
    ids = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]], device=device)
    positions = torch.tensor([[0, 1, 0, 1]], device=device).expand(2, 4)
    one, other = net(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 2:]
    net.train(was_training)
    return bool((one - other).abs().max() > LEAK * one.abs().max())
