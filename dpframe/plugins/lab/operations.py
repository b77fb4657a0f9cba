"""What a recipe has to compute: its parameters, and the operations of a training step."""

from collections.abc import Callable
from dataclasses import replace

from dpframe import DataModule, Strategy, Task, Trainer, TrainerSettings
from dpframe.callbacks import Throughput
from dpframe.plugin import first_line, seeding, short


def describe_operations(
    make_task: Callable[[], Task], data: DataModule, settings: TrainerSettings, seed: int
) -> str:
    """The parameters, and a step's operations on one device as torch counts them."""
    seeding.seed_everything(seed)
    counter, task = Throughput(), make_task()
    told = f"{sum(parameter.numel() for parameter in task.parameters()):,} parameters"
    strategy = Strategy(accelerator=settings.accelerator)
    once = replace(short(settings, steps=1), compile=False, limit_val_batches=1, sanity_batches=0)
    with Trainer(task, data, strategy=strategy, settings=once, callbacks=[counter]) as trainer:
        try:
            trainer.fit()
        except RuntimeError as error:  # e.g. of a step with an autograd.grad of its own
            return f"{told}; torch can't count a step's operations: {first_line(error)}"
        rows = trainer.progress.rows_seen
        return (
            f"{told}; a step of {rows} rows is {flop(rows * counter.flops_per_row)} of "
            "matrix products, convolutions and attention, forward and backward"
        )


def flop(count: float) -> str:
    """`524 kFLOP`."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while count >= 1000 and len(prefixes) > 1:
        count, prefixes = count / 1000, prefixes[1:]
    return f"{count:.3g} {prefixes[0]}FLOP"
