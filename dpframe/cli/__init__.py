"""The command line: owns Hydra and OmegaConf, and hands plain containers down."""

from dpframe.cli.main import main

__all__ = ["main"]
