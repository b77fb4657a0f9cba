"""Writes the trained model and its tokenizer as `from_pretrained` of `transformers` reads them."""

from pathlib import Path
from typing import Any

import dpframe
from dpframe.plugins.huggingface.model import base_of


class SavePretrained(dpframe.Callback):
    """At the end of training, to `folder` of the run's directory; of LoRA its adapter alone."""

    needs_directory = True

    def __init__(self, folder: str = "pretrained") -> None:
        self.folder = folder

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        net: Any = trainer.task.net
        state = trainer.whole_state_dict(net)
        if not trainer.strategy.is_main:
            return
        folder = Path(trainer.run.directory) / self.folder
        config = base_of(net).config
        was_cached = getattr(config, "use_cache", None)
        if was_cached is False:
            config.use_cache = True  # for who generates by it
        is_adapter = hasattr(net, "peft_config")
        options = {"save_embedding_layers": False} if is_adapter else {}  # else it asks the Hub
        net.save_pretrained(folder, state_dict=state, **options)
        if was_cached is False:
            config.use_cache = False
        tokenizer: Any = getattr(trainer.data, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        print(f"pretrained {folder}", flush=True)
