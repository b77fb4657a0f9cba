"""`dpframe schema` prints a JSON Schema of configs, for an editor."""

import json
from collections.abc import Sequence

from dpframe.errors import UserError

HELP = """dpframe schema [--config-dir DIR] > dpframe.schema.json

Prints a JSON Schema of the files of recipes and experiments: each key with its type, choices and
comment, and the arguments of the classes that files name. An editor with a YAML language server
checks and completes a file that begins with

  # yaml-language-server: $schema=dpframe.schema.json"""


def schema(words: Sequence[str], config_dir: str | None) -> str:
    if words:
        raise UserError(f"dpframe schema {words[0]}: it takes nothing but --config-dir DIR")
    from dpframe.config.json_schema import json_schema  # imports torch, to look at its classes

    return json.dumps(json_schema(config_dir), indent=1)
