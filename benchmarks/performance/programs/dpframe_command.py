"""The command `python -m dpframe …`, with a callback that notes the times of its epochs."""

import sys

from marks import Marks

import dpframe


class Notes(dpframe.Callback):
    runs_last = True

    def __init__(self) -> None:
        self.marks = Marks()

    def on_epoch_start(self, trainer: "dpframe.Trainer") -> None:
        self.marks.begin()

    def on_step_end(self, trainer: "dpframe.Trainer") -> None:
        self.marks.train()

    def on_epoch_end(self, trainer: "dpframe.Trainer") -> None:
        self.marks.end()

    def on_fit_end(self, trainer: "dpframe.Trainer") -> None:
        if trainer.strategy.is_main:
            loss = trainer.metrics["train/loss"]
            self.marks.tell(loss=loss, steps_per_epoch=trainer.steps_per_epoch)


if __name__ == "__main__":
    from dpframe.cli import main

    sys.argv += ["+callbacks.notes._target_=dpframe_command.Notes"]
    main()
