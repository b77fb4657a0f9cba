"""A module with parametrizations (spectral_norm, weight_norm …) on its way to another process.

Its class is one that torch makes for it alone, and refuses to pickle: it is made again there.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def reduced(module: Any) -> Any:
    """What a pickler takes for it; NotImplemented for what has no parametrizations."""
    if not (isinstance(module, nn.Module) and parametrize.is_parametrized(module)):
        return NotImplemented
    kind: Any = parametrize.type_before_parametrizations(module)
    parametrizations: Any = module.parametrizations
    return _made, (kind, list(parametrizations)), kind.__getstate__(module)


def _made(kind: type[nn.Module], names: list[str]) -> nn.Module:
    """Of the class that torch makes; its state, which comes next, replaces all that it has."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name in names:
        module.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    return module
