"""What docs/stability.md calls public is what there is, and a release is made as it says."""

import re
from importlib import import_module

import pytest
import yaml
from command import ROOT, attempts
from test_contributing import PROJECT

PAGE = (ROOT / "docs" / "stability.md").read_text()
TABLE = dict(re.findall(r"^\| `(dpframe[.\w]*)` \| (.+) \|$", PAGE, re.M))
HOME = PROJECT["project"]["urls"]["Homepage"]


@pytest.mark.parametrize("module", TABLE)
@pytest.mark.whole
def test_public_names_are_those_of_the_page(module):
    assert re.findall(r"`(\w+)`", TABLE[module]) == sorted(import_module(module).__all__)
    assert len(TABLE) == 6


@pytest.mark.whole
def test_a_public_name_is_one_object_wherever_it_is_imported_from():
    homes = [import_module(module) for module in (*TABLE, "dpframe.trainer")]
    for name in {name for home in homes for name in home.__all__}:
        assert len({id(getattr(home, name)) for home in homes if name in home.__all__}) == 1, name


def test_the_summary_of_a_run_has_what_the_page_promises(tmp_path):
    """A script that reads it is a user."""
    (promised,) = re.findall(r"`summary.json` with (.+?),", PAGE)
    words = ["recipe=boston", "trainer.max_epochs=1", "logger=none", "hydra.run.dir=run"]
    (done,) = attempts([words], tmp_path)
    assert done.code in (0, None), done.err
    summary = yaml.safe_load((tmp_path / "run/summary.json").read_text())
    assert set(re.findall(r"`(\w+)`", promised)) <= summary.keys()
    for name in ("last.ckpt", "best.ckpt"):
        assert (tmp_path / "run/checkpoints" / name).is_file()


def test_versions_are_the_same_on_the_page_in_the_package_and_in_the_workflow():
    classified = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"]]
    pythons = [version for version in classified if re.fullmatch(r"3\.\d+", version)]
    oldest, newest = pythons[0], pythons[-1]
    assert f"| Python | {oldest} | 3.12 | {newest} |" in PAGE
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    torch, hydra = PROJECT["project"]["dependencies"][:2]
    assert f"| torch | {torch.removeprefix('torch>=')} (" in PAGE
    hydra_from, hydra_below = hydra.removeprefix("hydra-core>=").split(",<")
    assert f"| Hydra | {hydra_from} |" in PAGE
    assert hydra_below == "1.5" and "| 1.4, its release candidates too |" in PAGE
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    rows = {row["name"]: row for row in jobs["tests"]["strategy"]["matrix"]["include"]}
    assert len(rows) == 8
    tried = {re.sub(r"^~|(?<=\.\d\d)\..*", "", row["python"]) for row in rows.values()}
    assert tried == set(pythons)
    assert rows["pinned"] == {"name": "pinned", "python": "3.12", "run": ".ci/run"}
    assert rows["long"] == {"name": "long", "python": "3.12", "run": ".ci/long"}
    assert rows["oldest torch"]["python"].startswith(f"~{oldest}.")
    assert f"'torch=={torch.removeprefix('torch>=')}.*'" in rows["oldest torch"]["run"]
    assert rows["newest of all"]["python"] == newest
    assert {name for name, row in rows.items() if row.get("may_fail")} == {"macOS", "Windows"}


def test_every_address_of_the_repository_is_that_of_the_package():
    """An owner who moves it changes them together."""
    for name in ("CITATION.cff", "pyproject.toml", "docs/mkdocs.yml"):
        found = re.findall(r"https://[\w./-]*dpframe[\w./-]*", (ROOT / name).read_text())
        assert all(link.startswith((HOME, "https://dpframe.github.io")) for link in found)
