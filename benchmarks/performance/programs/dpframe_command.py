"""The command `python -m dpframe …`, with a callback that notes the times of its epochs.

With `--first` a sweep ends with its first run.
"""

import os
import sys

from marks import Marks

import dpframe


class Notes(dpframe.Callback):
    runs_last = True

    def __init__(self, is_alone: bool = False) -> None:
        self.marks = Marks()
        self.is_alone = is_alone

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
        if self.is_alone:
            os._exit(0)


if __name__ == "__main__":
    from dpframe.cli import main

    if "--first" in sys.argv:
        sys.argv.remove("--first")
        sys.argv.append("+callbacks.notes.is_alone=true")
    sys.argv.append("+callbacks.notes._target_=dpframe_command.Notes")
    main()
