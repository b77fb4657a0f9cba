"""What is shown without a run: the help, the settings of a topic, and the config that would run."""

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from importlib.resources import files
from itertools import chain
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf, open_dict, read_write

from dpframe.config import modes, plugins
from dpframe.config.compose import compose, from_hydra, without_hydra
from dpframe.config.loader import ConfigLoader
from dpframe.config.overrides import key_of
from dpframe.config.schema import WHOLE, defaults, groups
from dpframe.errors import UserError, first_line, printable, suggestion
from dpframe.values import shown

USAGE = """\
dpframe trains PyTorch models from Hydra configs: change the strategy, not the maths.

usage: dpframe recipe=NAME [key=value …] [options]       (python -m dpframe does the same)
"""

KEYS = """\
keys people set most
  trainer.max_epochs=100 trainer.max_steps=1000 trainer.gpus=4|[0,1,3]
  trainer.precision=32|64|bf16|fp16|bf16-true|16-true trainer.accumulate=2 trainer.clip_norm=1.0
  data.batch_size=512 data.workers=4 task.optimizer.lr=0.01 seed=1
  callbacks=early_stopping callbacks.progress=false callbacks=[] logger=csv
  checkpoint=best|last|FILE resume=last|DIR|FILE hydra.run.dir=DIR
"""

EXAMPLES = """\
examples
  dpframe new mine                                                 (a small project to begin with)
  dpframe runs --where tags=ablation --sort val/loss               (a table of what was trained)
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
  -c, --cfg job|hydra|all print the config that would run (job --resolve: with ${…} filled in)
  --config-dir DIR        a folder of your own recipe/, strategy/ … files
  --shell-completion install=bash|zsh|fish      e.g. eval "$(dpframe -sc install=bash)"
  --version
"""


TASK = """\
task: a recipe's nn.Module, with its loss and optimizer (docs/tasks.md has more)
  Task(net, optimizer, scheduler)     a class with other arguments hands these on
  dpframe.Supervised     a task without a class: net, loss, optimizer, metrics
  training_step(batch)     returns {"loss": mean over rows, **metrics}
  validation_step(batch), test_step(batch)     by default what training_step returns
  predict_step(batch)      a tensor with a row for each, of mode=predict and mode=export
  configure_optimizer()    by default from what the constructor got
keys, beside those that its class takes
  task.optimizer._target_=torch.optim.AdamW, task.optimizer.lr=0.001     and what else it takes
  'task.metrics={r2:{_target_:torchmetrics.R2Score}}'     for tasks that measure them: val/r2
  task/schedule=warmup_cosine     a learning rate that rises and falls; --help task/schedule
"""

DATA = """\
data: a recipe's DataModule (docs/data.md has more)
  prepare_data()      downloads and converts files; once on each machine, before any process reads
  setup()             reads them; once in each process, before the first data set is asked for
  train_dataset()     all rows, as a Dataset, stream or DataLoader: dpframe divides them
  val_dataset(), test_dataset(), predict_dataset()     the same, or several by name in a dict
  train_sampler(dataset), collate(rows), input_row(row)     an order, a batch, a row of data.input
  worker_init(worker)     in each process of data.workers, before it reads
keys, beside those that its class takes
  data.batch_size=32  rows over all replicas together
  data.workers=0      processes that read for each rank; auto measures how many pay off
  data.shuffle=true   false: in order
"""

ABOUT = {"task": TASK, "data": DATA}


WIDEST = 44  # columns of a setting, for the comments to begin in one
UNTOLD = ("defaults", "_partial_")
FOR_OTHERS = ("@package", "yaml-language-server")  # comments that say nothing to a reader
OF_KEYS = (
    "trainer",
    "callbacks",
    "logger",
    "strategy",
    "task/schedule",
)  # groups in which a key is looked up


def shown_for(arguments: argparse.Namespace) -> str:
    """What `--help` or `--cfg` prints."""
    configs, overrides = ConfigLoader(arguments.config_dir), arguments.overrides
    if arguments.cfg and not arguments.help:
        text = _config(configs, overrides, arguments.cfg, resolve=arguments.resolve)
    elif overrides:
        text = "\n\n".join(_topic(each, configs) for each in overrides)
    else:
        menus = [_menu(group, configs) for group in configs.groups()]
        text = "\n".join([USAGE, _modes(), *menus, KEYS, _examples()])
    return printable(text.rstrip("\n"))


def _config(configs: ConfigLoader, overrides: Sequence[str], part: str, *, resolve: bool) -> str:
    """The config that would run: `job`, `hydra` or `all`."""
    with configs.explained(overrides):
        config = compose(configs, overrides)
        from_hydra(config, overrides)  # refuses what a run would
        if part == "job":
            config = without_hydra(config)
        else:
            with read_write(config.hydra), open_dict(config.hydra):
                del config.hydra["help"], config.hydra["hydra_help"]
        if part == "hydra":
            config = OmegaConf.masked_copy(config, ["hydra"])
        return OmegaConf.to_yaml(config, resolve=resolve)


def _examples() -> str:
    """Those of modes that are here."""
    lines = EXAMPLES.splitlines(keepends=True)
    named = ((line, re.search(r" mode=(\w+)", line)) for line in lines)
    return "".join(line for line, mode in named if not mode or mode[1] in modes.names())


def _modes() -> str:
    names = modes.names()
    width = max(map(len, names))
    lines = [f"  mode={name:<{width}}  {modes.about(name)}" for name in names]
    return "\n".join(["modes", *lines, ""])


def _mode(name: str) -> str:
    """A mode's line, and its keys."""
    lines = f"mode={name}  {modes.about(name)}", _lines(_settings_of_mode(name))
    return "\n".join(filter(None, lines))


def _menu(group: str, configs: ConfigLoader) -> str:
    """A group's options, a line each."""
    options = configs.options(group)
    width = max(map(len, options), default=0)
    lines = [f"  {_title(group, option, configs, width)}" for option in options]
    return "\n".join([group, *lines, ""])


def _title(group: str, option: str, configs: ConfigLoader, width: int = 0) -> str:
    """An option with the first comment of its file, and the packages that bring it."""
    paths = plugins.files_of(group, option, configs.folder)
    packages = [who for who, _ in paths]
    if packages and (packages[0] == "you" or plugins.is_own(packages[0])):
        packages = []  # theirs are hidden by a file that is nearer
    comment = comment_of(group, option, configs) + f" ({', '.join(packages)})" * bool(packages)
    return f"{group}={option:<{width}}  {comment}".rstrip()


# --help TOPIC


class Setting(NamedTuple):
    """A key as the help shows it."""

    key: str
    value: str  # as the file has it; "" for a part of the config
    comment: str

    @property
    def text(self) -> str:
        """The setting as typed; a group of keys has only its name."""
        return f"{self.key}={self.value}" if self.value else self.key


def comment_of(group: str, option: str, configs: ConfigLoader) -> str:
    """The first one of an option's file that is not for Hydra or an editor."""
    lines = _text(group, option, configs).splitlines()
    comments = (line[1:].strip() for line in lines if line.startswith("#"))
    return next((line for line in comments if not line.startswith(FOR_OTHERS)), "")


def settings_of(group: str, option: str, configs: ConfigLoader) -> list[Setting]:
    text = _text(group, option, configs)
    is_global = re.search(r"^# *@package +_global_ *$", text, re.MULTILINE)
    return list(_settings(text, "" if is_global else f"{group.replace('/', '.')}."))


def top_level() -> list[Setting]:
    """The settings of conf/config.yaml, which belong to no group."""
    text = files("dpframe.conf").joinpath("config.yaml").read_text(encoding="utf-8")
    return list(_settings(text, ""))


def topics(configs: ConfigLoader) -> list[str]:
    """What may follow --help; there is more, e.g. a key of a callback."""
    groups = configs.groups()
    options = [option for group in groups for option in configs.options(group)]
    settings = [*top_level(), *settings_of("trainer", "default", configs)]
    return sorted({*groups, *options, *(setting.key for setting in settings)})


def _topic(topic: str, configs: ConfigLoader) -> str:
    """The help of e.g. `trainer`, `strategy`, `strategy=ddp`, `ddp`, `trainer.gpus` or `seed`."""
    groups = configs.groups()
    group, _, option = topic.partition("=")
    if topic == "mode":
        return _modes().rstrip()
    if (name := topic.removeprefix("mode=")) in modes.names():
        return _mode(name)
    if group in groups and option:
        if option not in configs.options(group):
            near = suggestion(option, configs.options(group))
            raise UserError(f"--help {topic}: there is no such {group}; {near}")
        return _option(group, option, configs)
    if group == "recipe":
        recipes = [_title(group, each, configs) for each in configs.options(group)]
        return "\n".join([*recipes, "", "dpframe --help recipe=NAME shows the settings of one"])
    if group in groups:
        return "\n\n".join(_option(group, each, configs) for each in configs.options(group))
    of = {option: group for group in reversed(groups) for option in configs.options(group)}
    if topic in of:
        return _option(of[topic], topic, configs)
    return _key(topic, configs, {*groups, *of, *modes.of_packages()})


def _key(topic: str, configs: ConfigLoader, names: set[str]) -> str:
    """The help of a key, by its whole name or as for a hint; that of each recipe if only recipes
    have it. `names` are the groups, options and modes of packages."""
    settings = [*top_level(), *chain(*map(_settings_of_mode, modes.of_packages()))]
    for group in OF_KEYS if topic not in ABOUT else ():  # whose text names task/schedule
        for option in configs.options(group):
            settings += settings_of(group, option, configs)
    found = {each.key: each for each in reversed(settings)}  # the first of a key
    recipes = {o: list(settings_of("recipe", o, configs)) for o in configs.options("recipe")}
    key = key_of(topic)
    for meant in dict.fromkeys((key, WHOLE.get(key, key))):
        if below := [each for each in reversed(found.values()) if _is_below(each, meant)]:
            return ABOUT.get(topic, "") + _lines(below)
        parts = {
            name: [s for s in recipe if _is_below(s, meant)] for name, recipe in recipes.items()
        }
        if pages := [f"recipe={name}\n{_lines(part)}" for name, part in parts.items() if part]:
            return "\n".join(pages)
    names |= {*found, *(each.key for recipe in recipes.values() for each in recipe)}
    near = suggestion(key, names)
    there = near if near.startswith("did") else f"there is: {', '.join(configs.groups())}"
    raise UserError(f"--help {topic}: there is no such group, option or key; {there}")


def _is_below(setting: Setting, key: str) -> bool:
    """Whether it is the key, a part of it, or a value {…} that has it."""
    above, _, name = key.rpartition(".")
    has_it = above == setting.key and re.search(rf"\b{name}:", setting.value) is not None
    return has_it or f"{setting.key}.".startswith(f"{key}.")


def _settings_of_mode(mode: str) -> Iterator[Setting]:
    for each in fields(groups()[mode]) if mode in groups() else ():
        default = defaults()[mode][each.name]
        value = f"{default:g}" if isinstance(default, float) else shown(default)
        yield Setting(f"{mode}.{each.name}", value, each.metadata.get("help", ""))


def _option(group: str, option: str, configs: ConfigLoader) -> str:
    lines = _title(group, option, configs), _lines(settings_of(group, option, configs))
    return "\n".join(filter(None, lines))


def _text(group: str, option: str, configs: ConfigLoader) -> str:
    """An option's file."""
    paths = plugins.files_of(group, option, configs.folder)
    return paths[0][1].read_text(encoding="utf-8", errors="replace") if paths else ""


def _settings(text: str, prefix: str) -> Iterator[Setting]:
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"broken YAML: {first_line(error)}") from None
    if isinstance(root, yaml.MappingNode):
        yield from _below(root, prefix, text)


def _below(node: yaml.MappingNode, prefix: str, text: str) -> Iterator[Setting]:
    for name, value in node.value:
        if name.value in UNTOLD:
            continue
        key = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            if comment := _comment(text, name.end_mark):
                yield Setting(key, "", comment)
            yield from _below(value, f"{key}.", text)
            continue
        source = text[value.start_mark.index : value.end_mark.index].strip()
        is_long = "\n" in source
        comment = _comment(text, name.end_mark if is_long else value.end_mark)
        yield Setting(key, "[…]" if is_long else source or "null", comment)


def _comment(text: str, mark: Any) -> str:
    """The comment at the end of the line of `mark`."""
    found = re.search(r"(?:^|\s)#\s*(.*)", text[mark.index :].partition("\n")[0])
    return found[1].strip() if found else ""


def _lines(settings: Iterable[Setting]) -> str:
    settings = list(settings)
    width = max((len(each.text) for each in settings if len(each.text) <= WIDEST), default=0)
    return "\n".join(f"  {each.text:<{width}}  {each.comment}".rstrip() for each in settings)
