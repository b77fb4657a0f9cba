"""What can be seen without a run: the config that would run, and Hydra's own help."""

import argparse
import io
from contextlib import redirect_stdout

from omegaconf import DictConfig, ListConfig, OmegaConf

from dpframe.cli.compose import CONFIG_NAME, explained, from_hydra, hydra_over, raw_of_run
from dpframe.cli.main import parser
from dpframe.cli.refusal import has, nearest
from dpframe.cli.resumed import value_of
from dpframe.cli.settings import shown
from dpframe.errors import UserError, printable


def show(arguments: argparse.Namespace) -> None:
    overrides = arguments.overrides
    with hydra_over(arguments.config_dir) as hydra, explained(overrides):
        if arguments.cfg:
            config = raw_of_run(overrides, arguments.config_dir)
            from_hydra(config, overrides)  # refuses what a run would
            OmegaConf.set_readonly(config.hydra, None)
            config = hydra.get_sanitized_cfg(config, arguments.cfg)
            print(printable(_yaml(config, arguments.package, arguments.resolve)), end="")
            return
        with redirect_stdout(io.StringIO()) as told:
            if arguments.info:
                has_recipe = value_of("recipe", overrides) is not None
                overrides = overrides if has_recipe else [*overrides, "~recipe"]
                hydra.show_info(arguments.info, CONFIG_NAME, overrides)
            else:
                hydra.hydra_help(CONFIG_NAME, parser(), arguments)
        print(printable(told.getvalue()), end="")


def _yaml(config: DictConfig, package: str | None, resolve: bool) -> str:
    if resolve:
        OmegaConf.resolve(config)
    if package and not has(config, package):
        raise UserError(f"--package={package}: there is no such part; {nearest(config, package)}")
    part = OmegaConf.select(config, package) if package else config
    if not isinstance(part, DictConfig | ListConfig):
        return f"{shown(part)}\n"
    return (f"# @package {package}\n" if package else "") + OmegaConf.to_yaml(part)
