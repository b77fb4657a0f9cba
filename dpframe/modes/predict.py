"""`mode=predict`: a checkpoint's predictions for new rows, as predictions.csv."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe.config.compose import Composed
from dpframe.errors import UserError
from dpframe.modes.validate import warn_of_limits

if TYPE_CHECKING:
    from dpframe.trainer import Trainer

EVALUATES = True


@dataclass
class Settings:
    """The keys `predict.…`."""

    columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "[id, name, 'x*']: of the input, beside its predictions; id: a row's place"
        },
    )


def run(job: Composed) -> dict[str, Any]:
    from dpframe.modes.run import launch

    return launch(job, predict)


def predict(trainer: "Trainer", job: Composed, directory: str) -> None:
    warn_of_limits(job, "predict")
    began = time.perf_counter()
    with _naming_input(trainer):
        columns = job.settings.modes["predict"].columns
        predictions = trainer.predict(spool=directory, columns=columns or ())
    seconds = time.perf_counter() - began
    several = predictions if isinstance(predictions, dict) else {"": predictions}
    there = [each for each in several.values() if each is not None]  # of the main process
    for each in there:
        print(f"predictions  {each.save(Path(directory))}")
    rows = sum(each.rows for each in there)
    if there:
        counted = f"{rows:,} row{'s' * (rows != 1)}"
        print(f"{counted} in {seconds:.2f} s, {rows / seconds:,.0f} samples/s")


@contextmanager
def _naming_input(trainer: "Trainer") -> Iterator[None]:
    """Adds to an error of the task's whose rows it could not take, e.g. for their size."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (name := trainer.data.input) is not None:
            kind = type(trainer.data).__name__
            error.add_note(
                f"dpframe: these are rows of data.input={name}, as {kind}.input_row makes them; "
                "they have to be like those of training"
            )
        raise
