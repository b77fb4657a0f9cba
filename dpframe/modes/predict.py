"""`mode=predict`: a checkpoint's predictions for new rows, as predictions.csv."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe.config.compose import Composed
from dpframe.modes.validate import warn_of_limits

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

EVALUATES = True


def run(job: Composed) -> dict[str, Any]:
    from dpframe.modes.run import launch

    return launch(job, predict)


def predict(trainer: "Trainer", job: Composed, directory: str) -> None:
    warn_of_limits(job, "predict")
    began = time.perf_counter()
    predictions = trainer.predict(spool=directory)
    seconds = time.perf_counter() - began
    several = predictions if isinstance(predictions, dict) else {"": predictions}
    there = [each for each in several.values() if each is not None]  # of the main process
    for each in there:
        print(f"predictions  {each.save(Path(directory))}")
    rows = sum(each.rows for each in there)
    if there:
        counted = f"{rows:,} row{'s' * (rows != 1)}"
        print(f"{counted} in {seconds:.2f} s, {rows / seconds:,.0f} samples/s")
