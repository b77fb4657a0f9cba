"""`dpframe --help`: the modes, the groups with their options, and what people type."""

from importlib.resources import files
from pathlib import Path

from dpframe.cli.compose import GROUPS, hydra_over, options_of
from dpframe.cli.settings import MODES

USAGE = """\
dpframe trains PyTorch models from Hydra configs: change the strategy, not the maths.

usage: dpframe recipe=NAME [key=value …] [options]       (python -m dpframe does the same)
"""

KEYS = """\
keys people set most
  trainer.max_epochs=100 trainer.max_steps=1000 trainer.gpus=4|[0,1,3]
  trainer.precision=32|64|bf16|fp16 trainer.accumulate=2 trainer.clip_norm=1.0
  data.batch_size=512 data.workers=4 task.optimizer.lr=0.01 seed=1 checkpoint=FILE resume=last|DIR|FILE
"""

EXAMPLES = """\
examples
  dpframe recipe=boston
  dpframe recipe=boston strategy=ddp trainer.gpus=4
  dpframe recipe=shapes strategy=data_parallel trainer.gpus=3
  dpframe -m recipe=boston strategy=cpu,ddp task.optimizer.lr=0.01,0.001
  dpframe recipe=boston mode=test checkpoint=outputs/boston/…/checkpoints/best.ckpt

options
  -h, --help              this page
  -m, --multirun          one run for each combination of the values given, as lr=1,2
  -c, --cfg job           print the config that would run (--resolve: with ${…} filled in)
  --config-dir DIR        a folder of your own recipe/, strategy/ … files
  --shell-completion install=bash|zsh|fish
  --version
  -i, --info, --hydra-help, --package, -c hydra|all: as Hydra has them
"""


def text(config_dir: str | None) -> str:
    with hydra_over(config_dir):
        groups = [_group(group, config_dir) for group in GROUPS]
    modes = f"modes\n  mode={'|'.join(MODES)}    (fit is the default)\n"
    return "\n".join([USAGE, modes, *groups, KEYS, EXAMPLES]).rstrip()


def _group(group: str, config_dir: str | None) -> str:
    options = options_of(group, config_dir)
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
    if not file.is_file():
        return ""
    comments = [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")]
    return next((line for line in comments if not line.startswith("@package")), "")
