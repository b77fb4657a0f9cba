"""`mode=export`: a trained task as files that torch alone can use, each tried without dpframe."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpframe import UserError
from dpframe.plugin import Composed, not_one_of

if TYPE_CHECKING:
    from dpframe import Trainer

EVALUATES = True
FORMATS = ("program", "weights", "safetensors", "onnx", "checkpoint")


@dataclass
class Settings:
    """The keys `export.…`."""

    formats: list[str] | None = field(
        default=None,
        metadata={
            "help": "[program, weights, safetensors, onnx, checkpoint]; null: those of the first "
            "three that can be had"
        },
    )

    def __post_init__(self) -> None:
        if self.formats == []:
            raise UserError("export.formats=[] writes nothing; name formats, or leave it out")
        for name in self.formats or ():
            if name not in FORMATS:
                raise not_one_of("export.formats", name, FORMATS)


def run(job: Composed) -> dict[str, Any]:
    from dpframe.plugin import launch

    return launch(job, export)


def export(trainer: "Trainer", job: Composed, directory: str) -> None:
    from dpframe.plugins.lab.export_files import write_files

    if trainer.strategy.is_main:
        formats = job.settings.modes["export"].formats
        print(*write_files(trainer, Path(directory), formats, job.start), sep="\n")
