"""Where a Trainer runs: the strategy that it is given, or one for the devices that are there."""

from dpframe import seeding
from dpframe.errors import UserError
from dpframe.strategies import by_name
from dpframe.strategies.base import Strategy
from dpframe.strategies.logical import Logical
from dpframe.strategies.single import auto
from dpframe.trainer.settings import TrainerSettings


def choose_strategy(strategy: Strategy | str | None, settings: TrainerSettings) -> Strategy:
    if strategy is None:
        return auto(settings.gpus, settings.accelerator)
    if isinstance(strategy, str):
        return by_name(strategy, settings.gpus, settings.accelerator)
    if not strategy.is_set_up:
        _refuse_other_devices(strategy, settings)
    return strategy


def add_logical_shares(strategy: Strategy, settings: TrainerSettings, seed: int) -> Strategy:
    """The strategy itself, unless `trainer.logical_replicas` says how batches are computed."""
    if settings.logical_replicas is not None:
        strategy = Logical(strategy, settings.logical_replicas, seed)
    is_logical = strategy.logical_shares and strategy.device.type != "cpu"
    if settings.deterministic or is_logical:
        seeding.refuse_nondeterminism(strategy.device)
    return strategy


def _refuse_other_devices(strategy: Strategy, settings: TrainerSettings) -> None:
    """In a config both have one value; from Python each is made with its own."""
    for key, unset in (("gpus", None), ("accelerator", "auto")):
        there, here = getattr(strategy, key, unset), getattr(settings, key)
        if here not in (unset, there):
            raise UserError(
                f"TrainerSettings({key}={here!r}) but the strategy is {strategy.name}({key}="
                f"{there!r}); pass {key} to the strategy alone"
            )
