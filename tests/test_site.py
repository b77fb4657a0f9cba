"""The site is built from docs/, and needs no network."""

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest

import dpframe

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/build.py")
assert spec is not None and spec.loader is not None
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


class Page(HTMLParser):
    """What a page has, leads to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.ids |= {has.get("id", ""), has.get("name", "")}
        self.links += [has["href"]] if tag == "a" and "href" in has else []
        self.loaded += [has["src"]] if "src" in has else []
        self.loaded += [has["href"]] if tag == "link" and has["rel"] != "canonical" else []


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    pytest.importorskip("zensical", reason="dpframe[docs] is not installed")
    folder = tmp_path_factory.mktemp("docs")
    assert site.build(folder) == 0
    files = (folder / "site").rglob("*.html")
    return {file: Page(file.read_text(encoding="utf-8")) for file in files if file.stem != "404"}


def test_a_build_says_where_the_site_is(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site.subprocess, "run", lambda command, cwd: SimpleNamespace(returncode=0))
    assert site.build(tmp_path / "docs") == 0
    assert capsys.readouterr().out.startswith("the site is in docs/site; python -m http.server -d ")


def test_every_link_of_the_site_leads_to_a_page_and_a_place_in_it(pages):
    wrong = [
        f"{file.name}: {link}"
        for file, page in pages.items()
        for link in page.links
        if not re.match(r"https?:", link) and not leads_somewhere(file, link, pages)
    ]
    assert not wrong
    assert {"index", "config", "api"} <= {file.stem for file in pages}


def leads_somewhere(file: Path, link: str, pages: dict[Path, Page]) -> bool:
    path, _, anchor = link.partition("#")
    linked = (file.parent / unquote(path)).resolve() if path else file
    if linked not in pages:
        return linked.is_file()
    return not anchor or unquote(anchor) in pages[linked].ids


def test_no_page_of_the_site_loads_anything_from_elsewhere(pages):
    loaded = [(file, link) for file, page in pages.items() for link in page.loaded]
    assert len(loaded) > len(pages)
    assert not [link for file, link in loaded if not (file.parent / link).resolve().is_file()]


def test_the_references_have_every_setting_and_every_public_name(pages):
    ids = {file.stem: page.ids for file, page in pages.items()}
    public = {f"dpframe.{name}" for name in dpframe.__all__}
    assert not {name for name in public if not ids["api"] & {name, f"{name}.__init__"}}
    text = next(file for file in pages if file.stem == "config").read_text(encoding="utf-8")
    for key in ("trainer.max_epochs", "strategy.bucket_cap_mb", "callbacks.ema.decay", "seed"):
        assert f"<code>{key}</code>" in text


def test_every_page_is_in_the_menu():
    menu = re.findall(r": (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE)
    there = [path.name for path in ROOT.glob("docs/*.md")]
    assert sorted(menu) == sorted([*site.AT_THE_TOP.values(), *there]), "edit docs/mkdocs.yml"
