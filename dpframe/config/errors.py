"""Turns what Hydra, OmegaConf or YAML refuses into one line: what, what was given, what to do."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from dpframe.config.hints import has, hint, is_taken
from dpframe.config.start import key_of
from dpframe.errors import UserError, first_line, suggestion


@contextmanager
def one_line(
    overrides: Sequence[str],
    compose: Callable[[Sequence[str]], DictConfig],
    options: Callable[[str], list[str]],
    offers: Callable[[str], list[str]],
) -> Iterator[None]:
    """Turns an error inside into a UserError.

    `compose` returns the config with those overrides that are right, `options` the options of a
    group, `offers` those that bring a key: all are where the nearest name is looked for.
    """
    try:
        yield
    except UserError:
        raise
    except MissingConfigException as error:
        raise _unknown_option(error, options) from None
    except OverrideParseException as error:
        key, _, value = error.override.partition("=")
        quote = f"if that is text, quote it: \"{key}='{value}'\""
        try_this = "check its quotes" if set(value) & set("\"'\\") else quote
        raise UserError(f"{error.override}: can't be read; {try_this}") from None
    except ConfigCompositionException as error:
        raise _not_composed(error, overrides, compose, options, offers) from None
    except yaml.YAMLError as error:
        raise UserError(_yaml_line(error)) from None
    except RecursionError:
        raise UserError(
            "the config files name each other in a circle; leave one out of the defaults"
        ) from None
    except Exception as error:
        # `strategy=null` is a ValueError that doesn't name it
        is_null = "Config group override must be" in str(error)
        raise (is_null and _no_option(overrides, options)) or _nothing_better(error) from None


def unresolved(error: OmegaConfBaseException, config: DictConfig) -> UserError:
    """A `${…}` without its key, or a `???` that is still there."""
    key = error.full_key or ""
    missing = re.search(r"Interpolation key '([^']+)' not found", str(error))
    if isinstance(error, InterpolationKeyError) and missing:
        try_this = hint(config, missing[1])
        return UserError(f"{key}=${{{missing[1]}}}: there is no key {missing[1]}; {try_this}")
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        named = str(error).splitlines()[0].rpartition(": ")[2]
        key = named if isinstance(error, InterpolationToMissingValueError) else key or named
        return UserError(f"{key} is not set; set {key}=VALUE")
    return UserError(f"{key}: {first_line(error)}")


def _unknown_option(error: MissingConfigException, options: Callable) -> UserError:
    text = str(error)
    loaded = re.search(r"Could not load '([^']+)'", text)
    group, _, option = (error.missing_cfg_file or (loaded[1] if loaded else "")).rpartition("/")
    names = list(error.options or options(group))
    if not names or not group:
        return UserError(first_line(error))
    near = suggestion("data_parallel" if option == "dp" else option, names)
    there = f" (there is: {', '.join(names)})" if near.startswith("did") else ""
    source = re.match(r"In '([^']+)'", text)
    where = f"in {source[1]}.yaml, " if source and source[1] != "config" else ""
    return UserError(
        f"{where}{group}={option}: there is no such {group.removesuffix('s')}; {near}{there}"
    )


def _not_composed(
    error: Exception,
    overrides: Sequence[str],
    compose: Callable,
    options: Callable,
    offers: Callable,
) -> UserError:
    text = str(error)
    if match := re.search(r"[Yy]ou must specify '([\w/@.]+)'", text):
        there = ", ".join(options(match[1]))
        return UserError(
            f"{match[1]} is not set; set {match[1]}=NAME, one of: {there} (see --help)"
        )
    if match := re.search(r"Ambiguous value for argument '(.+)'", text):
        key, _, value = match[1].partition("=")
        return UserError(
            f"{match[1]}: several values are a sweep, which needs -m; for one list write "
            f"{key}=[{value}], for one text \"{key}='{value}'\""
        )
    if match := re.search(r"already at '([^']+)'|Multiple values for ([^.]+)\.", text):
        key = match[1] or match[2]
        return UserError(f"{key} has a value already; write {key}=… without the +")
    try:
        base = compose(overrides)
    except Exception:  # another of the overrides is wrong, too
        return _nothing_better(error.__cause__ or error)
    new = [f"{key_of(override)}." for override in overrides if override.startswith("+")]
    for override in overrides:
        key = key_of(override)
        is_new = any(f"{key}.".startswith(name) for name in new)
        is_known = has(base, key) or is_taken(base, key)
        if not (is_new or re.search(r"[@/\[]", key) or is_known):
            return UserError(f"{override}: there is no key {key}; {hint(base, key, offers)}")
        inside = getattr(error.__cause__, "full_key", None) or ""
        is_dict = override.partition("=")[2].startswith("{")
        if is_dict and inside.startswith(f"{key}.") and not has(base, inside):
            near = hint(base, inside, offers)
            return UserError(f"{override}: there is no key {inside}; {near}")
    return _nothing_better(error.__cause__ or error)


def _no_option(overrides: Sequence[str], options: Callable) -> UserError | None:
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        is_name = re.search(r"[^\W\d]", value) and value not in ("null", "true", "false")
        if not is_name and re.fullmatch(r"\w+", key) and (there := options(key)):
            return UserError(f"{override}: name one {key}; there is: {', '.join(there)}")
    return None


def _nothing_better(error: BaseException) -> UserError:
    is_clear = isinstance(error, OmegaConfBaseException | HydraException)
    return UserError(("" if is_clear else "the config can't be composed: ") + first_line(error))


def _yaml_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or first_line(error)
    return f"{mark.name}, line {mark.line + 1}: {problem}" if mark else f"broken YAML: {problem}"
