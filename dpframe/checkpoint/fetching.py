"""A program that copies files from addresses by fsspec.

It has a process of its own: fsspec's threads would be in the one that forks ranks. It reads a list
of [address, file] and the version that is there already, as JSON, and prints the version of the
first one; nothing is copied if that is the same.
"""

import json
import sys
from typing import Any

VERSIONED = ("ETag", "Last-Modified", "LastModified", "mtime", "size")


def main() -> None:
    pairs, known = json.load(sys.stdin)
    try:
        version = fetch(pairs, known)
    except FileNotFoundError as error:  # of a server that is away or refuses, too
        cause = error.__cause__
        is_away = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        if is_away or getattr(cause, "status", 404) != 404:
            tell(error=f"{type(cause).__name__}: {cause}")
        else:
            tell(error="there is no such file", is_mistake=True)
    except ImportError as error:
        tell(error=f"{error}; pip install 'dpframe[remote]'", is_mistake=True)
    except ValueError as error:  # of fsspec: the protocol is not known
        tell(error=str(error), is_mistake=True)
    except Exception as error:  # of aiohttp, botocore, …
        tell(error=f"{type(error).__name__}: {error}")
    else:
        tell(version=version)


def tell(**facts: Any) -> None:
    print(json.dumps(facts))


def fetch(pairs: list[list[str]], known: str | None) -> str | None:
    """The version, or None: the server tells none, so it may differ each time."""
    from fsspec.core import url_to_fs

    version = None
    for number, (address, file) in enumerate(pairs):
        store, path = url_to_fs(address, **options(address))
        facts = store.info(path)
        if number == 0:
            version = version_of(facts)
            if version is not None and version == known:
                break
        print(f"dpframe: fetching {address}{size_of(facts)}", file=sys.stderr, flush=True)
        store.get_file(path, file)
    return version


def options(address: str) -> dict[str, Any]:
    if not address.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout

    quiet = ClientTimeout(total=None, sock_connect=30, sock_read=60)  # a large file may take hours
    return {"client_kwargs": {"timeout": quiet, "trust_env": True}}  # proxies


def version_of(facts: dict[str, Any]) -> str | None:
    told = {name: str(facts[name]) for name in VERSIONED if facts.get(name) is not None}
    return json.dumps(told, sort_keys=True) if told.keys() - {"size"} else None


def size_of(facts: dict[str, Any]) -> str:
    size = facts.get("size")
    return f", {size / 1e6:.1f} MB" if size else ""


if __name__ == "__main__":
    main()
