"""A model of `transformers` by its name, its folder or its config, whole or with LoRA of `peft`."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dpframe
from dpframe.plugin import first_line


def model_of(
    kind: str,
    model: str | Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    changes: Mapping[str, Any],
    **options: Any,
) -> Any:
    """By transformers' class `kind`, e.g. AutoModelForCausalLM, in 32 bits and training mode;
    `changes` go into its config."""
    net = _built(kind, model, changes, {"dtype": torch.float32, **options}).train()
    if getattr(net.config, "use_cache", False):
        net.config.use_cache = False  # a cache hides from attention where a document ends
    if not lora:
        return net
    peft = library("peft")
    task_type = "CAUSAL_LM" if kind == "AutoModelForCausalLM" else "SEQ_CLS"
    return peft.get_peft_model(net, peft.LoraConfig(task_type=task_type, **lora))


def tokenizer_of(name: str) -> Any:
    with _told("data.tokenizer", name):
        return library("transformers").AutoTokenizer.from_pretrained(name)


def base_of(net: Any) -> Any:
    """The model of transformers that LoRA is in, or that it is."""
    return net.get_base_model() if hasattr(net, "peft_config") else net


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise dpframe.UserError(
            f"dpframe's Hugging Face recipes need {error.name}; pip install 'dpframe[huggingface]'"
        ) from None


def _built(
    kind: str,
    model: str | Mapping[str, Any],
    changes: Mapping[str, Any],
    options: dict[str, Any],
) -> Any:
    transformers = library("transformers")
    auto, configs = getattr(transformers, kind), transformers.AutoConfig
    if not isinstance(model, str) or Path(model).is_dir():  # else one sees a download by them
        transformers.logging.disable_progress_bar()
    is_outline = torch.get_default_device().type == "meta"  # strategy.meta_init fills it
    with _told("task.model", model):
        if isinstance(model, Mapping):
            return auto.from_config(configs.for_model(**{**model, **changes}), **options)
        config = configs.from_pretrained(model, **changes)
        if is_outline:
            return auto.from_config(config, **options)
        return auto.from_pretrained(model, config=config, **options)


@contextmanager
def _told(key: str, given: Any) -> Iterator[None]:
    """What transformers says of a name that it does not find, or can't build, as one line."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise dpframe.UserError(f"{key}={given}: {first_line(error)}") from error
