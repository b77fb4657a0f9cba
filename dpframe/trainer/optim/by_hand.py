"""A task that steps its optimizers in its training_step."""

from dpframe.errors import UserError
from dpframe.strategies.base import Strategy
from dpframe.task import Task
from dpframe.trainer.compute.placement import DTYPES
from dpframe.trainer.optim.step import OptimizerStep
from dpframe.trainer.outputs import IgnoredWeights
from dpframe.trainer.profile import timed
from dpframe.trainer.settings import TrainerSettings


class ByHand(OptimizerStep):
    """Replaces the loop's update where a task steps its optimizers in training_step. Each
    optimizer has an OptimizerStep, which keeps its state."""

    name = ""
    needs_closure = False
    scaler = None

    def __init__(self, task: Task, strategy: Strategy, settings: TrainerSettings) -> None:
        self.settings = settings
        self.step = timed("optimizer", lambda *_, **__: True, is_profiled=settings.profile)
        self.weighting = IgnoredWeights(strategy.collectives, strategy.device, is_used=False)
        self.dtype = DTYPES.get(settings.precision)
        self.backward = lambda loss: None
        kind = task.own_class.__name__
        if strategy.replicas > strategy.world_size:
            raise UserError(
                f"{kind} steps its optimizers itself, and the {strategy.replicas} replicas of "
                f"{strategy.name} in one process would each do so; use strategy=ddp"
            )
        if strategy.sharding.cuts:
            raise UserError(
                f"{kind} steps its optimizers itself, with whole gradients, and {strategy.name} "
                "cuts them; use strategy=ddp"
            )
        for key, value, plain in (
            ("accumulate", settings.accumulate, 1),
            ("micro_batch", settings.micro_batch, None),
            ("clip_norm", settings.clip_norm, None),
            ("clip_value", settings.clip_value, None),
            ("compile.mode", settings.compile_mode, None),
            ("on_nonfinite", settings.on_nonfinite, "stop"),
        ):
            if value != plain:
                raise UserError(
                    f"trainer.{key}={value}: {kind} steps its optimizers itself; do this in its "
                    f"training_step, and use trainer.{key}={'null' if plain is None else plain}"
                )
        if settings.precision == "fp16":
            raise UserError(
                f"trainer.precision=fp16 scales the loss, and {kind} steps its optimizers itself; "
                "use trainer.precision=bf16 or 32"
            )

    def fill_gradients(self) -> None: ...
