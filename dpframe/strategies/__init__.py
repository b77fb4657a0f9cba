"""Strategies say where a recipe runs; each is one file, and conf/strategy/ is the list of them."""

import sys
from typing import TYPE_CHECKING

from dpframe.errors import not_one_of
from dpframe.strategies.base import Strategy
from dpframe.util.lazy import lazy

if TYPE_CHECKING:
    from dpframe.strategies.data_parallel import DataParallel
    from dpframe.strategies.ddp import DDP
    from dpframe.strategies.devices import Gpus
    from dpframe.strategies.fsdp import FSDP
    from dpframe.strategies.single import CPU, SingleGPU, auto

    Ray: type[DDP]  # of a plugin, which imports this package

__all__ = ["CPU", "DDP", "FSDP", "DataParallel", "Ray", "SingleGPU", "Strategy", "auto"]

_HOMES = {
    "CPU": "single",
    "DDP": "ddp",
    "FSDP": "fsdp",
    "DataParallel": "data_parallel",
    "Ray": "dpframe.plugins.ray.strategy",
    "SingleGPU": "single",
    "auto": "single",
}
NAMES = {  # by the names of conf/strategy
    "auto": "auto",
    "cpu": "CPU",
    "single_gpu": "SingleGPU",
    "data_parallel": "DataParallel",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "ray": "Ray",
}


def by_name(name: str, gpus: "Gpus", accelerator: str) -> Strategy:
    """The strategy that a config has under this name."""
    if name not in NAMES:
        raise not_one_of("strategy", name, [*NAMES])
    made: Strategy = getattr(sys.modules[__name__], NAMES[name])(gpus, accelerator)
    return made


__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
