"""`dpframe --help`: the modes, the groups with their options, and what people type."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from dpframe.cli import plugins
from dpframe.cli.compose import groups, hydra_over, options_of
from dpframe.cli.settings import MODES
from dpframe.errors import printable

USAGE = """\
dpframe trains PyTorch models from Hydra configs: change the strategy, not the maths.

usage: dpframe recipe=NAME [key=value …] [options]       (python -m dpframe does the same)
"""

KEYS = """\
keys people set most
  trainer.max_epochs=100 trainer.max_steps=1000 trainer.gpus=4|[0,1,3]
  trainer.precision=32|64|bf16|fp16 trainer.accumulate=2 trainer.clip_norm=1.0
  data.batch_size=512 data.workers=4 task.optimizer.lr=0.01 seed=1
  checkpoint=FILE resume=last|DIR|FILE hydra.run.dir=DIR
"""

EXAMPLES = """\
examples
  dpframe recipe=boston
  dpframe recipe=boston strategy=ddp trainer.gpus=4
  dpframe recipe=shapes strategy=data_parallel trainer.gpus=3
  dpframe -m recipe=boston strategy=cpu,ddp task.optimizer.lr=0.01,0.001
  dpframe mode=test checkpoint=outputs/boston/…/checkpoints/best.ckpt
  dpframe recipe=boston strategy=ddp trainer.gpus=2 mode=verify    (does it keep the numbers?)
  dpframe recipe=boston mode=plan plan.bandwidth=1.25e9            (what would 4096 replicas bring?)

options
  -h, --help              this page
  -m, --multirun          one run for each combination of the values given, as lr=1,2
  -c, --cfg job           print the config that would run (--resolve: with ${…} filled in)
  --config-dir DIR        a folder of your own recipe/, strategy/ … files
  --shell-completion install=bash|zsh|fish      as eval "$(dpframe -sc install=bash)"
  --version
  -i, --info, --hydra-help, --package, -c hydra|all: as Hydra has them
"""


def text(config_dir: str | None) -> str:
    with hydra_over(config_dir):
        menus = [_group(group, config_dir) for group in groups()]
    modes = f"modes\n  mode={'|'.join(MODES)}    (fit is the default)\n"
    return printable("\n".join([USAGE, modes, *menus, KEYS, EXAMPLES]).rstrip())


def _group(group: str, config_dir: str | None) -> str:
    options = options_of(group)
    width = max((len(option) for option in options), default=0)
    lines = [
        f"  {group}={option:<{width}}  {_description(group, option, config_dir)}".rstrip()
        for option in options
    ]
    return "\n".join([group, *lines, ""])


def _description(group: str, option: str, config_dir: str | None) -> str:
    """The first comment of the option's file that is not for Hydra."""
    own = Path(config_dir, group, f"{option}.yaml") if config_dir else None
    file = own if own and own.exists() else files("dpframe.conf") / group / f"{option}.yaml"
    if file.is_file():
        return _first_comment(file)
    bringing = plugins.bringing(group, option)
    packages = ", ".join(plugin.package for plugin in bringing)
    return f"{_first_comment(bringing[0].file(group, option))} ({packages})" if bringing else ""


def _first_comment(file: Any) -> str:
    lines = file.read_bytes().decode(errors="replace").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    return next((line for line in comments if not line.startswith("@package")), "")
