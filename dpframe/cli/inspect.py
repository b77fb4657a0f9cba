"""What Hydra shows by itself: a config, its own help, and the shell's completions."""

import argparse

from omegaconf import OmegaConf

from dpframe.cli.compose import CONFIG_NAME, composed, hydra_over, job_only, raw, search_path
from dpframe.errors import UserError


def show(arguments: argparse.Namespace) -> None:
    overrides = [*search_path(arguments.config_dir), *arguments.overrides]
    if arguments.cfg == "job":
        _show_job(arguments)
        return
    with hydra_over(arguments.config_dir) as hydra:
        if arguments.cfg:
            hydra.show_cfg(
                CONFIG_NAME, overrides, arguments.cfg, arguments.package, arguments.resolve
            )
        elif arguments.shell_completion:
            hydra.shell_completion(CONFIG_NAME, overrides)
        elif arguments.info:
            hydra.show_info(arguments.info, CONFIG_NAME, overrides)
        else:
            from hydra._internal.utils import get_args_parser

            parser = get_args_parser()
            hydra.hydra_help(CONFIG_NAME, parser, parser.parse_args(["--hydra-help"]))


def _show_job(arguments: argparse.Namespace) -> None:
    composed(arguments.overrides, config_dir=arguments.config_dir)  # refuses what a run would
    with hydra_over(arguments.config_dir):
        config = job_only(raw(arguments.overrides, config_dir=arguments.config_dir))
    if arguments.package:
        config = OmegaConf.select(config, arguments.package)
        if config is None:
            raise UserError(f"--package={arguments.package}: the config has no such part")
    print(OmegaConf.to_yaml(config, resolve=arguments.resolve), end="")
