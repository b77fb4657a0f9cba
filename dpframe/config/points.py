"""The points of a sweep: of those that differ by numbers and names alone, Hydra composes one."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from dpframe.config.compose import Composed, compose, from_hydra
from dpframe.config.loader import ConfigLoader, with_path_quoted
from dpframe.config.overrides import key_of
from dpframe.config.untrusted import calls_in
from dpframe.errors import UserError

KEPT = 32  # configs, e.g. of a sweep over recipes: half a megabyte each
WORDS = 1024  # overrides whose values are kept: to parse one takes a millisecond
SCALARS = (bool, int, float, str)
COMPOSED = ("hydra", "sweep")  # groups whose keys stand for more than their values


class _Form(NamedTuple):
    """What points that differ by values alone share."""

    config: DictConfig  # as Hydra has composed it, in which each point's values are set
    prefixes: list[str]  # of the overrides in it, e.g. ++ where dpframe has added that


class Points:
    """Composes points: Hydra composes the first of each form, and the next one of that form is the
    same config with other values."""

    def __init__(self, configs: ConfigLoader) -> None:
        self.configs = configs
        self._value_of = lru_cache(WORDS)(_value_of)
        self._forms: dict[tuple[str, ...], _Form] = {}

    def compose(self, words: Sequence[str], number: int) -> tuple[Composed, str]:
        """A run, and its directory in the sweep's."""
        values = {key_of(word): self._value_of(with_path_quoted(word)) for word in words}
        what = tuple(word if values[key_of(word)] is None else key_of(word) for word in words)
        form = self._forms.pop(what, None)
        job = form and self._with_values(form, values, words, number)
        if form is not None and job is not None:
            config = form.config
        else:
            job, config = compose_point(self.configs, list(words), number)
            form = _form(config, words)
        if form is not None:
            self._forms[what] = form
            if len(self._forms) > KEPT:
                del self._forms[next(iter(self._forms))]
        return job, str(config.hydra.sweep.subdir)

    def _with_values(
        self, form: _Form, values: dict[str, Any], words: Sequence[str], number: int
    ) -> Composed | None:
        """None: Hydra has to say what is wrong with the point, or to compose it."""
        config = form.config
        pairs = zip(form.prefixes, _of_run(words), strict=True)
        try:
            for key, value in values.items():
                if value is not None:
                    OmegaConf.update(config, key, value)
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.overrides.task = [prefix + word for prefix, word in pairs]
                config.hydra.job.override_dirname = _dirname(config)
            job = _job(config, words, number)
        except (UserError, OmegaConfBaseException):
            return None
        if self.configs.taken:  # `compose` asks whether what is taken brings calls
            texts: Any = OmegaConf.to_container(config)
            del texts["hydra"]
            return job if calls_in(job.config) == calls_in(texts) else None
        return job


def compose_point(
    configs: ConfigLoader, words: list[str], number: int
) -> tuple[Composed, DictConfig]:
    """A run, and the config that Hydra composes of it."""
    config = compose(configs, words)
    return _job(config, words, number), config


def _job(config: DictConfig, words: Sequence[str], number: int) -> Composed:
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num, config.hydra.job.id = number, str(number)
    hydra: Any = HydraConfig.instance()
    hydra.cfg = config  # `set_config` would copy it
    job = from_hydra(config, words)
    job.number = number
    return job


def _value_of(word: str) -> Any:
    """The value that is all a word sets; None: it may choose what other keys there are."""
    key = key_of(word)
    is_of_value = "." in key or key == "seed"
    if not is_of_value or word[0] == "~" or "@" in key or re.split(r"\W", key)[0] in COMPOSED:
        return None
    try:
        value = OverridesParser.create().parse_override(word).value()
    except Exception:  # Hydra tells of it when it composes the point
        return None
    return (
        value if isinstance(value, SCALARS) and not re.search(r"\$\{|\?{3}", str(value)) else None
    )


def _form(config: DictConfig, words: Sequence[str]) -> _Form | None:
    """None: what Hydra writes into its own keys is not to be told from the words alone."""
    lines, own = list(map(str, config.hydra.overrides.task)), _of_run(words)
    is_known = len(lines) == len(own) == len({key_of(word) for word in own})
    is_known &= config.hydra.job.override_dirname == _dirname(config)
    if not is_known or not all(map(str.endswith, lines, own)):
        return None
    return _Form(config, [line.removesuffix(word) for line, word in zip(lines, own, strict=True)])


def _of_run(words: Sequence[str]) -> list[str]:
    """Without Hydra's own, as they are written into a config."""
    return [with_path_quoted(word) for word in words if re.split(r"\W", key_of(word))[0] != "hydra"]


def _dirname(config: DictConfig) -> str:
    """`hydra.job.override_dirname`, as Hydra's documentation has it."""
    how = config.hydra.job.config.override_dirname
    lines = map(str, config.hydra.overrides.task)
    differing = [line for line in lines if key_of(line).split("@")[0] not in how.exclude_keys]
    return str(how.item_sep).join(sorted(differing)).replace("=", how.kv_sep)
