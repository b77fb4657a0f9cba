"""A model of `transformers` by its name, its folder or its config, whole or with LoRA of `peft`."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dpframe
from dpframe.plugin import first_line, is_outlined
from dpframe.plugins.huggingface.weights import outline_of


def model_of(
    kind: str,
    model: str | Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    changes: Mapping[str, Any],
    **options: Any,
) -> Any:
    """By transformers' class `kind`, e.g. AutoModelForCausalLM, in 32 bits and training mode;
    `changes` go into its config."""
    options = {"dtype": torch.float32, **options}
    net = _built(kind, model, changes, options, is_whole=not lora).train()
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
    *,
    is_whole: bool,
) -> Any:
    transformers = library("transformers")
    auto, configs = getattr(transformers, kind), transformers.AutoConfig
    if not isinstance(model, str) or Path(model).is_dir():  # else one sees a download by them
        transformers.logging.disable_progress_bar()
    with _told("task.model", model):
        if isinstance(model, Mapping):
            return auto.from_config(configs.for_model(**{**model, **changes}), **options)
        config = configs.from_pretrained(model, **changes)
        if torch.get_default_device().type == "meta":  # strategy.meta_init fills it
            return auto.from_config(config, **options)
        if is_outlined() and is_whole:  # LoRA's own weights have to be made with numbers
            net = outline_of(lambda: auto.from_config(config, **options), model)
            if net is not None:
                return net
        return auto.from_pretrained(model, config=config, **options)


@contextmanager
def _told(key: str, given: Any) -> Iterator[None]:
    """What transformers says of a name that it does not find, or can't build, as one line."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise dpframe.UserError(f"{key}={given}: {first_line(error)}") from error
