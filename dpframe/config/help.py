"""What is shown without a run: the help, and the config that would run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from dpframe.config import modes, plugins
from dpframe.config.compose import compose, from_hydra, without_hydra
from dpframe.config.hints import has, hint
from dpframe.config.schema import shown
from dpframe.config.search import CONFIG_NAME, Configs
from dpframe.config.start import value_of
from dpframe.errors import UserError, printable

USAGE = """\
dpframe trains PyTorch models from Hydra configs: change the strategy, not the maths.

usage: dpframe recipe=NAME [key=value …] [options]       (python -m dpframe does the same)
"""

KEYS = """\
keys people set most
  trainer.max_epochs=100 trainer.max_steps=1000 trainer.gpus=4|[0,1,3]
  trainer.precision=32|64|bf16|fp16|bf16-true|16-true trainer.accumulate=2 trainer.clip_norm=1.0
  data.batch_size=512 data.workers=4 task.optimizer.lr=0.01 seed=1
  checkpoint=best|last|FILE resume=last|DIR|FILE hydra.run.dir=DIR
"""

EXAMPLES = """\
examples
  dpframe new mine                                                 (a small project to begin with)
  dpframe recipe=boston
  dpframe recipe=boston strategy=ddp trainer.gpus=4
  dpframe recipe=shapes strategy=data_parallel trainer.gpus=3
  dpframe -m recipe=boston strategy=cpu,ddp task.optimizer.lr=0.01,0.001
  dpframe -m recipe=boston seed=0,1,2 sweep.jobs=2                 (two at a time)
  dpframe recipe=boston mode=test checkpoint=best                  (of the newest run, or a FILE)
  dpframe recipe=boston mode=predict checkpoint=best data.input=FILE    (a CSV table, or images)
  dpframe recipe=boston mode=export checkpoint=best                (for torch alone)
  dpframe recipe=boston strategy=ddp trainer.gpus=2 mode=verify    (does it keep the numbers?)
  dpframe recipe=lenet mode=tune                     (the largest batch that fits, a learning rate)
  dpframe mode=doctor                                (what is here, and what is wrong with it?)
  dpframe recipe=lenet mode=compare                  (which strategy is fastest?)

options
  -h, --help [TOPIC]      this page; the settings of trainer, strategy=ddp, boston, tune …
  -m, --multirun          one run for each combination of the values given, e.g. lr=1,2
  -c, --cfg job           print the config that would run (--resolve: with ${…} filled in)
  --config-dir DIR        a folder of your own recipe/, strategy/ … files
  --shell-completion install=bash|zsh|fish      e.g. eval "$(dpframe -sc install=bash)"
  --version
  -i, --info, --hydra-help, --package, -c hydra|all: see --hydra-help
"""


def shown_for(arguments: argparse.Namespace, options: str) -> str:
    """What `--help`, `--cfg`, `--info` or `--hydra-help` prints; `options` are the command's."""
    configs, overrides = Configs(arguments.config_dir), arguments.overrides
    if arguments.help and overrides:
        from dpframe.config.topics import settings_of

        text = "\n\n".join(settings_of(topic, configs) for topic in overrides)
    elif arguments.help:
        text = _help(configs)
    elif arguments.cfg:
        text = _config(configs, overrides, arguments)
    elif arguments.info:
        text = _info(configs, overrides, arguments.info)
    else:
        groups = [f"hydra/{group}" for group in sorted(configs.list_groups("hydra"))]
        lines = [f"  {group}: {', '.join(configs.options(group))}" for group in groups]
        text = "\n".join([options, "Hydra's groups", *lines])
    return printable(text.rstrip("\n"))


def _help(configs: Configs) -> str:
    """The modes, the groups with their options, and what people type."""
    menus = [_menu(group, configs) for group in configs.groups()]
    return "\n".join([USAGE, _modes(), *menus, KEYS, EXAMPLES])


def _modes() -> str:
    names = modes.names()
    width = max(map(len, names))
    lines = [f"  mode={name:<{width}}  {modes.about(name)}" for name in names]
    return "\n".join(["modes", *lines, ""])


def _config(configs: Configs, overrides: Sequence[str], arguments: argparse.Namespace) -> str:
    """The config that would run."""
    with configs.explained(overrides):
        config = compose(configs, overrides)
        from_hydra(config, overrides)  # refuses what a run would
        if arguments.cfg == "job":
            config = without_hydra(config)
        else:
            with read_write(config.hydra), open_dict(config.hydra):
                del config.hydra["help"], config.hydra["hydra_help"]
        if arguments.cfg == "hydra":
            config = OmegaConf.masked_copy(config, ["hydra"])
        return _yaml(config, arguments.package, arguments.resolve)


def _yaml(config: DictConfig, package: str | None, resolve: bool) -> str:
    if resolve:
        OmegaConf.resolve(config)
    if package and not has(config, package):
        raise UserError(f"--package={package}: there is no such part; {hint(config, package)}")
    part = OmegaConf.select(config, package) if package else config
    if not isinstance(part, DictConfig | ListConfig):
        return shown(part)
    return (f"# @package {package}\n" if package else "") + OmegaConf.to_yaml(part)


def _info(configs: Configs, overrides: Sequence[str], kind: str) -> str:
    """Which files and packages the config is composed of."""
    if value_of("recipe", overrides) is None:
        overrides = [*overrides, "~recipe"]
    with configs.explained(overrides):
        config = configs.compose(overrides)
        defaults = configs.compute_defaults_list(CONFIG_NAME, list(overrides), RunMode.RUN)
    sources = config.hydra.runtime.config_sources
    parts = {
        "plugins": [plugin.__name__ for plugin in Plugins.instance().discover()],
        "searchpath": [f"{s.provider}: {s.schema}://{s.path}" for s in sources],
        "defaults": [
            f"{d.config_path} (package {d.package or '_global_'})" for d in defaults.defaults
        ],
        "config": OmegaConf.to_yaml(without_hydra(config)).splitlines(),
    }
    lines = []
    for name in parts if kind == "all" else [kind]:
        lines += [name, *(f"  {line}" for line in parts[name])]
    return "\n".join(lines)


def _menu(group: str, configs: Configs) -> str:
    options = configs.options(group)
    width = max((len(option) for option in options), default=0)
    lines = [
        f"  {group}={option:<{width}}  {_description(group, option, configs.folder)}".rstrip()
        for option in options
    ]
    return "\n".join([group, *lines, ""])


def _description(group: str, option: str, folder: Path | None) -> str:
    """The first comment of the option's file."""
    paths = plugins.files_of(group, option, folder)
    texts = (path.read_bytes().decode(errors="replace") for _, path in paths)
    comments = [first_comment(text) for text in texts]
    packages = [who for who, _ in paths if paths[0][0] not in ("dpframe", "you")]
    return "".join(comments[:1]) + f" ({', '.join(packages)})" * bool(packages)


def first_comment(text: str) -> str:
    """The first one of a config's that is not for Hydra."""
    comments = (line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    return next((line for line in comments if not line.startswith("@package")), "")
