"""The command line: arguments, exit codes, sweeps."""

from dpframe.cli.main import main

__all__ = ["main"]
