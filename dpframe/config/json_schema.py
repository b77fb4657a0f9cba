"""`dpframe schema`: a JSON Schema of a recipe's or an experiment's file, for an editor.

It has every key with its type, choices, range and comment, and the arguments of each class that a
file on the search path names. A key or an argument that nobody takes is an error; a value has a
type where that is certain, and `${…}` may stand for any.
"""

import inspect
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, get_origin, get_type_hints

import yaml

from dpframe.config import modes, plugins
from dpframe.config.arguments import GROUPS, MATCH, OF_ALL, SPECIAL
from dpframe.config.help import settings_of, top_level
from dpframe.config.loader import ConfigLoader
from dpframe.config.schema import RunSettings, groups
from dpframe.config.target import find, see_own_folders, taken_by
from dpframe.errors import UserError
from dpframe.trainer.settings import CHOICES, LEAST, POSITIVE
from dpframe.values import options_of

Schema = dict[str, Any]
Nodes = list[tuple[str, dict[str, Any]]]
"""The content of options' files, each with its group."""
VERSION = "http://json-schema.org/draft-07/schema#"  # which editors know
NODE = {"$ref": "#/$defs/node"}
VALUE = {"$ref": "#/$defs/value"}
INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": ["string", "number", "boolean"]},  # as it is without quotes
    types.NoneType: {"type": "null"},
}


def json_schema(config_dir: str | None) -> Schema:
    configs = ConfigLoader(config_dir)
    told = [*settings_of("trainer", "default", configs), *top_level()]
    comments = {each.key: each.comment for each in told}
    nodes = list(_nodes(configs))
    see_own_folders(
        {str(number): node for number, (_, node) in enumerate(nodes)}, configs.folder, None
    )
    targets = _targets(node for _, node in nodes)
    properties = {
        "defaults": {"type": "array"},
        **_settings(RunSettings, "", comments),
        **{name: _closed(_settings(kind, f"{name}.", comments)) for name, kind in groups().items()},
        "task": _part("task", schedule=_unless_named(_chosen("task/schedule", nodes, targets), {})),
        "data": _part("data"),
        "strategy": _unless_named(_chosen("strategy", nodes, targets), NODE),
        **{name: _parts(name, nodes, targets) for name in ("callbacks", "logger")},
        "mode": {"enum": modes.names()},
        "vars": {"type": "object"},
        "hydra": {"type": "object"},
    }
    return {
        "$schema": VERSION,
        "title": "A recipe or an experiment of dpframe",
        "$defs": {
            "node": _node(targets),
            "value": _if("object", NODE, _if("array", {"items": VALUE}, {})),
            **targets,
        },
        **_closed({key: _described(each, comments.get(key)) for key, each in properties.items()}),
    }


# Settings


def _settings(kind: type[Any], prefix: str, comments: Mapping[str, str]) -> dict[str, Schema]:
    """The fields of a dataclass."""
    hints = get_type_hints(kind)
    found = {}
    for each in fields(kind):
        key = f"{prefix}{each.name}"
        about = comments.get(key) or each.metadata.get("help")
        found[each.name] = _described(_limited(_typed(hints[each.name]), key), about)
    return found


def _limited(schema: Schema, key: str) -> Schema:
    """With the choices or the range of a key of the trainer."""
    name = key.removeprefix("trainer.")
    if name == key:
        return schema
    if name in CHOICES:
        numbers = [int(choice) for choice in CHOICES[name] if choice.isdigit()]
        return {"anyOf": [{"enum": [*CHOICES[name], *numbers, None]}, INTERPOLATION]}
    if name in LEAST:
        return schema | {"minimum": LEAST[name]}
    return schema | ({"exclusiveMinimum": 0} if name in POSITIVE else {})


def _typed(hint: Any) -> Schema:
    """What is certain of an annotation: a value of plain types, or a list; else anything."""
    options = options_of(hint)
    schemas = [PLAIN.get(option) for option in options]
    lists = [get_origin(option) in (list, Sequence, Iterable) for option in options]
    schemas = [{"type": "array"} if lists[i] else schema for i, schema in enumerate(schemas)]
    if None in schemas:
        return VALUE
    return {"anyOf": [*schemas, INTERPOLATION]}


def _if(kind: str, then: Schema, otherwise: Schema) -> Schema:
    return {"if": {"type": kind}, "then": then, "else": otherwise}


def _closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _described(schema: Schema, about: str | None) -> Schema:
    return schema | ({"description": about} if about else {})


# What files name to be called, and what that takes

OF_EACH: Schema = {  # the keys of the call itself, and those that dpframe takes out before it
    **{name: _typed(kind) for name, kind in SPECIAL.items()},
    **{name: VALUE for parameters in OF_ALL.values() for name in parameters},
    GROUPS.name: VALUE,
    MATCH.name: VALUE,
}


def _nodes(configs: ConfigLoader) -> Iterator[tuple[str, dict[str, Any]]]:
    for group in configs.groups():
        for option in configs.options(group):
            paths = plugins.files_of(group, option, configs.folder)
            with suppress(yaml.YAMLError, OSError, UnicodeDecodeError):
                content = yaml.safe_load(paths[0][1].read_text(encoding="utf-8")) if paths else None
                yield group, content if isinstance(content, dict) else {}


def _targets(nodes: Iterable[Any]) -> dict[str, Schema]:
    """The arguments of each `_target_` that can be imported here."""
    found: dict[str, Schema] = {}
    for name in sorted({name for node in nodes for name in _named(node)}):
        with suppress(UserError):  # of a package that is not installed
            found[name] = _arguments(find(name, "_target_"))
    return found


def _named(node: Any) -> Iterator[str]:
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict) and isinstance(name := node.get("_target_"), str):
        yield name
    for part in parts:
        yield from _named(part)


def _arguments(target: Any) -> Schema:
    """Closed, unless the target takes any keyword."""
    names, is_all = taken_by(target)
    maker = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    hints: dict[str, Any] = {}
    with suppress(Exception):  # annotations that don't resolve are no reason to leave it out
        hints = get_type_hints(maker)
    properties = OF_EACH | {name: _typed(hints.get(name, Any)) for name in names}
    about = (inspect.getdoc(target) or "").partition("\n\n")[0].replace("\n", " ")
    more = False if is_all and names else VALUE
    return _described({"properties": properties, "additionalProperties": more}, about)


def _node(targets: Collection[str]) -> Schema:
    """A mapping: what its `_target_` takes, and else anything."""
    cases = [
        {
            "if": {"properties": {"_target_": {"const": name}}, "required": ["_target_"]},
            "then": {"$ref": f"#/$defs/{name}"},
        }
        for name in targets
    ]
    is_known = {"properties": {"_target_": {"enum": [*targets]}}, "required": ["_target_"]}
    cases.append({"if": is_known, "then": {}, "else": {"additionalProperties": VALUE}})
    return {"type": "object", "allOf": cases}


def _part(name: str, **known: Schema) -> Schema:
    """`task` or `data`, whose class another file may name."""
    own = {key: _typed(each.annotation) for key, each in OF_ALL[name].items()}
    return {"allOf": [NODE], "properties": own | known}


def _chosen(group: str, nodes: Nodes, targets: Mapping[str, Schema]) -> Schema:
    """What any class of the group's files takes."""
    kinds = [str(content.get("_target_")) for each, content in nodes if each == group]
    known = [targets[kind]["properties"] for kind in kinds if kind in targets]
    arguments = {key: value for each in known for key, value in each.items()}
    return _closed(arguments)


def _unless_named(without: Schema, with_class: Schema) -> Schema:
    """A file need not name the class that another file has chosen; text is neither."""
    return {"if": {"required": ["_target_"]}, "then": with_class, "else": without}


def _parts(name: str, nodes: Nodes, targets: Mapping[str, Schema]) -> Schema:
    """`callbacks` or `logger`: what the class of each key's file takes, or another class, or false
    or null to switch it off."""
    has_class = {"type": "object", "required": ["_target_"]}
    of_keys: Schema = {}
    for key, node in [
        pair for group, content in nodes if group == name for pair in content.items()
    ]:
        target = str(node.get("_target_")) if isinstance(node, dict) else ""
        if target in targets:
            kept = {"type": ["object", "null"], "allOf": [{"$ref": f"#/$defs/{target}"}]}
            of_keys[key] = {"if": has_class, "then": NODE, "else": kept}
            of_keys[key] = {"if": {"const": False}, "else": of_keys[key]}
    return {"type": "object", "properties": of_keys, "additionalProperties": VALUE}
