"""Builds the site: `python docs/build.py` writes build/docs/pages, and build/docs/site from them.

The pages are those of docs/, the README, and whatever file of the repository these link to: so a
link works in a checkout, where the repository is hosted, and in the site, which needs no network.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from os.path import normpath, relpath
from pathlib import Path
from typing import get_type_hints

from dpframe.config.help import Setting, comment_of, settings_of, top_level
from dpframe.config.loader import GROUPS, ConfigLoader
from dpframe.config.schema import RunSettings
from dpframe.trainer.settings import CHOICES

ROOT = Path(__file__).resolve().parent.parent
AT_THE_TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".md": "markdown"}
SETTINGS = "<!-- settings -->"  # where their tables go
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")


def build(folder: Path) -> int:
    """Writes `pages` and `site` into the folder; returns the exit code of a strict build."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting = [*AT_THE_TOP, *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += write(path, folder / "pages" / page_of(path))
    for name in ("mkdocs.yml", "pages/site.css"):
        shutil.copy(ROOT / "docs" / Path(name).name, folder / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", folder / "mkdocs.yml"]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code == 0:
        site = relpath(folder / "site")
        print(f"the site is in {site}; python -m http.server -d {shlex.quote(site)} shows it")
    return code


def write(path: str, page: Path) -> list[str]:
    """Writes the page that shows a file or a folder; returns what it links to."""
    page.parent.mkdir(parents=True, exist_ok=True)
    if page_of(path).startswith("source/"):
        page.write_text(source(ROOT / path), encoding="utf-8")
        return []
    text, links = with_links((ROOT / path).read_text(encoding="utf-8"), path)
    text = re.sub(r"^`(\S+)`:\n```(\w+)", r'```\2 title="\1"', text, flags=re.M)
    if SETTINGS in text:
        text = text.replace(SETTINGS, "\n\n".join(settings()))
    page.write_text(text, encoding="utf-8")
    return links


def page_of(path: str) -> str:
    """Where a file of the repository is among the pages."""
    is_docs = Path(path).parent == Path("docs") and path.endswith(".md")
    return AT_THE_TOP.get(path) or (Path(path).name if is_docs else f"source/{path}.md")


def with_links(text: str, path: str) -> tuple[str, list[str]]:
    """The text with its links leading to pages, and the files that they lead to."""
    links: list[str] = []

    def rewritten(match: re.Match[str]) -> str:
        links.append(normpath(Path(path).parent / match[1]))
        return relpath(page_of(links[-1]), Path(page_of(path)).parent)

    code = [match.span() for match in FENCE.finditer(text)]
    ends = [0, *(at for span in code for at in span), len(text)]
    parts = [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    parts[::2] = [LINK.sub(rewritten, part) for part in parts[::2]]
    return "".join(parts), links


def source(path: Path) -> str:
    """A page with the text of a file, of a notebook's cells, or of the files in a folder."""
    parts = ["---\nsearch:\n  exclude: true\n---", f"# {escaped(str(path.relative_to(ROOT)))}"]
    if path.suffix == ".ipynb":
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            is_code = cell["cell_type"] == "code"
            parts += [fenced(text, "python") if is_code else re.sub("^#", "##", text)]
    elif path.is_file():
        parts += [fenced(path.read_text(encoding="utf-8"), LANGUAGES.get(path.suffix, "text"))]
    else:
        for file in sorted(file for file in path.rglob("*") if file.suffix in LANGUAGES):
            text = file.read_text(encoding="utf-8")
            parts += [
                f"## {escaped(str(file.relative_to(path)))}",
                fenced(text, LANGUAGES[file.suffix]),
            ]
    return "\n\n".join(parts)


def fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def settings() -> Iterator[str]:
    """What `--help TOPIC` prints, as tables, with the types of the keys that have one."""
    configs, types = ConfigLoader(None), dict(types_of(RunSettings))
    types |= {f"trainer.{key}": ", ".join(choices) for key, choices in CHOICES.items()}
    yield from ("## The top level", table(top_level(), types))
    for group in GROUPS:
        yield f"## {group}"
        for name in sorted(path.stem for path in ROOT.glob(f"conf/{group}/*.yaml")):
            yield from (f"### {group}={name}", escaped(comment_of(group, name, configs)))
            yield table(settings_of(group, name, configs), types)


def table(settings: list[Setting], types: dict[str, str]) -> str:
    rows = ["| key | default | |", "|---|---|---|"] if settings else []
    for key, value, comment in settings:
        kind = f"*{types[key]}*" if key in types else ""
        told = ": ".join(filter(None, (kind, escaped(comment))))
        rows += [f"| `{key}` | {f'`{value}`' if value else ''} | {told} |"]
    return "\n".join(rows)


def types_of(settings: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, kind in get_type_hints(settings).items():
        if is_dataclass(kind):
            yield from types_of(kind, f"{prefix}{name}.")
        elif "Any" not in str(kind):
            text = kind.__name__ if type(kind) is type else str(kind)
            yield prefix + name, escaped(text.replace(" | ", " or ").replace("None", "null"))


def escaped(text: str) -> str:
    """As it is, but for `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\*_{}\[\]<>|$])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    if not all(map(importlib.util.find_spec, ("zensical", "mkdocstrings"))):
        sys.exit("the site needs dpframe[docs]: pip install -c constraints.txt -e '.[docs]'")
    sys.exit(build(ROOT / "build/docs"))
