"""Hugging Face: a language model of `transformers`, trained by LoRA of `peft`, offline."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler

import dpframe
from dpframe.plugin import seeding

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HuggingFace(dpframe.Task):
    """A causal language model: from the folder `pretrained`, or of random weights from `config`."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        config: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        net = language_model(config or {}, pretrained)
        net.config.use_cache = False  # which trainer.checkpoint_activations needs
        super().__init__(with_lora(net, lora) if lora else net, optimizer, scheduler)

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        text = batch[0].long()
        # The model's own loss is in 32 bits whatever trainer.precision says.
        logits = self.net(input_ids=text[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        return {"loss": loss, "weight": text[:, 1:].numel()}  # a mean over tokens

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float, seed: int) -> str:
        """As the recipe gpt's task does, for its callback."""
        text = torch.tensor([list(prompt.encode())], device=self.device)
        net: Any = self.net
        length = min(length, net.config.max_position_embeddings - text.shape[1])
        how = {"max_new_tokens": length, "do_sample": True, "temperature": temperature}
        how |= {"use_cache": True, "synced_gpus": False}  # the main rank writes alone
        was_training = self.training
        self.eval()
        with seeding.seeded(seed):  # it draws from torch's own generator
            text = net.generate(input_ids=text, attention_mask=torch.ones_like(text), **how)
        self.train(was_training)
        return bytes(text[0].tolist()).decode(errors="replace")


class SaveAdapter(dpframe.Callback):
    """Writes what LoRA has learned, a few kB, as `peft` reads it: to the run's folder `adapter`."""

    needs_directory = True

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        net: Any = trainer.task.net
        state = trainer.whole_state_dict(net)
        if trainer.strategy.is_main:
            folder = Path(trainer.run.directory) / "adapter"
            net.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
            print(f"adapter      {folder}", flush=True)


def language_model(config: Mapping[str, Any], pretrained: str | None) -> "PreTrainedModel":
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise _missing(error) from None
    if pretrained is None:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    if not Path(pretrained).expanduser().is_dir():  # else it would be looked for on the network
        raise dpframe.UserError(
            f"task.pretrained={pretrained} is no folder; name one that save_pretrained has "
            "written, or null for random weights"
        )
    net = AutoModelForCausalLM.from_pretrained(Path(pretrained).expanduser())
    return net.train()  # it comes in evaluation mode


def with_lora(net: "PreTrainedModel", lora: Mapping[str, Any]) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise _missing(error) from None
    return get_peft_model(net, LoraConfig(task_type="CAUSAL_LM", **lora))


def _missing(error: ImportError) -> dpframe.UserError:
    return dpframe.UserError(
        f"recipe=huggingface needs {error.name}; pip install 'dpframe[huggingface]'"
    )
