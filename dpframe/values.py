"""A value against the annotation and the range of what takes it, in a config and from Python."""

import inspect
import math
import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from itertools import chain
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, Union, cast, get_args, get_origin

from dpframe.errors import UserError

ABOVE_0 = math.ulp(0)  # the least number
KINDS = {
    "bool": "a truth value",
    "int": "a whole number",
    "float": "a fraction",
    "str": "text",
    "NoneType": "nothing",
    "list": "a list",
    "dict": "a group of keys",
    "ListConfig": "a list",
    "DictConfig": "a group of keys",
    "AnyNode": "one value",
}
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    PathLike: "a path",
    list: "a list",
    list[str]: "a list of names",
    list[int]: "a list of whole numbers",
    Mapping[str, int]: "a whole number for each training set",
}


def check_types(settings: Any, group: str) -> None:
    """Refuses what the annotations of a dataclass of settings do not have. NumPy's numbers become
    Python's, which a resumed run compares them with."""
    for each in fields(settings):
        value, hint = getattr(settings, each.name), cast("Any", each.type)
        options = options_of(hint)
        if type(value) in options or (type(value) is str and value in options):
            continue
        check_type(f"{group}.{each.name}", value, hint)
        if getattr(value, "shape", None) == ():
            setattr(settings, each.name, value.item())


def check_type(key: str, value: Any, hint: Any) -> None:
    if type(value) not in options_of(hint) and not fits(value, hint):
        raise unfit(key, value, hint)


def refuse_below(key: str, value: Any, least: float = 1, use: str = "") -> None:
    """None is allowed, NaN is not, nor a fraction where `least` is whole; `use` says in words what
    is."""
    if value is None:
        return
    if type(value) is not type(least):
        check_type(key, value, type(least))
    if not value >= least:
        raise UserError(f"{key}={value} is out of range; use {use or f'{least:g} or more'}")


def check_gpus(gpus: Any) -> None:
    if gpus == 0 and type(gpus) is int:
        raise UserError("trainer.gpus=0 is out of range; leave it out, and use strategy=cpu")
    if gpus in (None, "auto", "all"):
        return
    ids = gpus if isinstance(gpus, list) else [gpus]
    are_numbers = all(fits(one, int) and one >= 0 for one in ids)
    if not (ids and are_numbers and len(set(ids)) == len(ids)):
        if gpus in (-1, "-1"):
            raise UserError("trainer.gpus=-1 is no count; for all GPUs use trainer.gpus=all")
        raise UserError(
            f"trainer.gpus={gpus} is neither a count, a list of different ids, auto, all "
            "nor null; use e.g. trainer.gpus=4, or trainer.gpus=[0,1,3]"
        )


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    """None of a builtin without a signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation has the value. A whole number is a number, and NumPy's are, too."""
    return any(_is_of(value, option) for option in options_of(hint))


@cache
def options_of(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows, and the texts of a Literal."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(chain.from_iterable(map(options_of, get_args(hint))))
    return get_args(hint) if get_origin(hint) is Literal else (hint,)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if isinstance(kind, str | int):  # of a Literal
        return type(value) is type(kind) and bool(value == kind)
    if kind in (int, float):
        is_number = isinstance(value, Integral if kind is int else Real)
        return is_number and not isinstance(value, bool)
    if kind is bool:
        return type(value).__name__ in ("bool", "bool_")
    try:
        return isinstance(value, get_origin(kind) or kind)
    except TypeError:  # e.g. a Protocol
        return False


def unfit(key: str, value: Any, hint: Any) -> UserError:
    """`hint` is the annotation of what the key takes."""
    return UserError(f"{key}={shown(value)} is {kind_of(value)}; use {describe_type(hint)}")


def shown(value: Any) -> str:
    """A value as it is typed."""
    words = {True: "true", False: "false", None: "null"}
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return words[value] if value is None or isinstance(value, bool) else str(value)


def kind_of(value: Any) -> str:
    name = type(value).__name__
    return KINDS.get(name, f"a {name}")


def describe_type(hint: Any) -> str:
    """A type annotation in words."""
    options = options_of(hint)
    kept = [each for each in options if each is not int or float not in options]
    return " or ".join(WORDS.get(each) or str(getattr(each, "__name__", each)) for each in kept)
