"""trainer.logical_replicas: the same bits on any number of replicas, in one process or several.

`Logical` is put around the strategy, which keeps its processes and devices. Each global batch is
computed as so many shares, one after the other, whoever does it. What they give is added up along
one tree over all of them (`tree`), numbers without rounding (`exact`), and metrics by the share.
"""

from dpframe import Strategy, TrainerSettings, UserError
from dpframe.plugin import seeding
from dpframe.trainer.settings import BY_SPEED, CUDA_GRAPH_MODES


def settle(settings: TrainerSettings) -> None:
    """Refuses what can't have the same bits. Sums round by the number of threads."""
    own = "each share has a forward and a backward of its own"
    mode = settings.compile_mode
    for key, is_refused, why, use in (
        (
            f"precision={settings.precision}",
            settings.precision == "fp16",
            own,
            "precision=bf16 or 32",
        ),
        (f"compile.mode={mode}", mode in CUDA_GRAPH_MODES, own, "compile.mode=default"),
        ("cudnn_benchmark=true", settings.cudnn_benchmark, BY_SPEED, "cudnn_benchmark=false"),
        ("batch_norm=global", settings.has_global_batch_norm, own, "batch_norm=replica"),
        (f"micro_batch={settings.micro_batch}", settings.micro_batch, own, "micro_batch=null"),
    ):
        if is_refused:
            raise UserError(
                f"trainer.{key} with trainer.logical_replicas={settings.logical_replicas}: {why}; "
                f"use trainer.{use}"
            )
    settings.threads = settings.threads or 1


def put_around(strategy: Strategy, settings: TrainerSettings, seed: int) -> Strategy:
    """`strategy` is set up."""
    from dpframe.plugins.logical.strategy import Logical

    logical = Logical(strategy, settings.logical_replicas or 0, seed)
    if strategy.device.type != "cpu":
        seeding.refuse_nondeterminism(strategy.device)
    return logical
