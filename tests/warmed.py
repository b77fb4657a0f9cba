"""What tests/forked.py's server does before it forks, so that no fork of it does it: one config is
composed, for which Hydra and OmegaConf import, compile and learn the grammars that they read.

Hydra alone composes it: what dpframe keeps, e.g. the packages that it has found, is of a process.
"""

import importlib
import pkgutil

from hydra import compose, initialize_config_module
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

import dpframe.modes

IMPORTED = ("dpframe.cli.main", "dpframe.callbacks.checkpoint", "dpframe.loggers.csv")
IMPORTED += ("torch.utils.serialization.config",)  # by torch.save, when it is called
MODES = pkgutil.iter_modules(dpframe.modes.__path__)

for name in (*IMPORTED, *(f"dpframe.modes.{mode.name}" for mode in MODES)):
    importlib.import_module(name)
with initialize_config_module("dpframe.conf", version_base="1.3", job_name="dpframe"):
    compose("config", ["recipe=boston", "strategy=ddp", "trainer.gpus=2"])
Singleton._instances.pop(Plugins)  # a fork looks for plugins along its own path
