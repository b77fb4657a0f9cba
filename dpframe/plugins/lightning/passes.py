"""A LightningModule's hooks around passes, and the names of its metrics, as the Trainer asks."""

from typing import Any

from dpframe.plugin import Adapter

THEIRS = {"val": "validation", "test": "test", "predict": "predict"}  # in the names of hooks


class Passes(Adapter):
    """A part of the task `Lightning`, which has all that is named here."""

    module: Any
    numbers: Any
    hook_metrics: Any
    held: Any
    known: dict[str, float]
    optimizes_by_hand: bool
    named_modules: Any
    ends_passes = True
    prefers_metrics = True
    needs_trainer = True

    @property
    def adapter(self) -> Adapter:
        return self

    def metric_name(self, kind: str, name: str) -> str:
        return self.numbers.name_of(kind, name.removeprefix("module."))

    def logs_metric(self, kind: str, name: str) -> bool:
        return self.numbers.has_metric(kind, name.removeprefix("module."))

    def begin_pass(self, kind: str) -> None:
        self.numbers.begin_pass(kind)
        if self.optimizes_by_hand and kind == "val":
            self.held.trainer.strategy.collectives.broadcast_tensors(self.module.buffers())
        stage = THEIRS[kind]
        for moment in ("start", "epoch_start"):
            hook_of(self.module, stage, moment)()

    def end_pass(self, kind: str, numbers: dict[str, float]) -> dict[str, float]:
        self.known.update(numbers)
        self.numbers.kind = kind
        with self.hook_metrics.noted(self.module, self.named_modules(), self.numbers):
            if kind == "train":
                self.module.on_train_epoch_end()
            else:
                for moment in ("epoch_end", "end"):
                    hook_of(self.module, THEIRS[kind], moment)()
        more = self.numbers.of_pass(self.held.trainer.strategy)
        self.known.update(more)
        self.numbers.kind = "train" if self.held.trainer.mode == "fit" else ""
        return more


def hook_of(module: Any, stage: str, moment: str) -> Any:
    return getattr(module, f"on_{stage}_{moment}")
