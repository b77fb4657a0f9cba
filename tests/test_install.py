"""The command works from a wheel, from an editable installation, and from the repository alone."""

import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from command import ROOT, Environment, output, write
from packaging.metadata import Metadata

SOURCES = ("dpframe", "conf", "recipes", "hydra_plugins", "docs", "pyproject.toml", "MANIFEST.in")
SOURCES += ("setup.py", "README.md", "LICENSE")
RUN = ("recipe=boston", "trainer.max_epochs=1", "strategy=cpu")
SWEEP, SWEPT = ("-m", *RUN, "seed=1,2"), "sweep: 2 of 2 runs finished"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy: building writes into it."""
    copy = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(
            source, copy / name, **({"ignore": ignored} if source.is_dir() else {})
        )
    return copy


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """Built from the sdist, as an installer does where there is no wheel."""
    made = tmp_path_factory.mktemp("made")
    backend = "from setuptools import build_meta; build_meta.build_{}({!r})"
    output(sys.executable, "-c", backend.format("sdist", str(made)), cwd=repository)
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(made, filter="data")
    unpacked = made / sdist.name.removesuffix(".tar.gz")
    output(sys.executable, "-c", backend.format("wheel", str(made)), cwd=unpacked)
    (built,) = made.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(str(wheel))
    return environment


def test_the_wheel_carries_every_module_config_and_table_and_nothing_else(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {f"dpframe/{path}" for path in files("dpframe", "*.py")} | {"dpframe/py.typed"}
    wanted |= {f"dpframe/conf/{path}" for path in (*files("conf", "*.yaml"), "__init__.py")}
    wanted |= {f"dpframe/recipes/{path}" for path in (*files("recipes", "*.py"), "data/boston.csv")}
    wanted |= {"dpframe/recipes/data/digits.csv.gz"}
    wanted |= {f"dpframe/{path}" for path in files("dpframe", "*.yaml")}  # of its plugins
    wanted |= {f"hydra_plugins/{path}" for path in files("hydra_plugins", "*.py")}
    assert wanted - inside == set()
    assert {name.split("/")[0] for name in inside} == {"dpframe", "hydra_plugins"}
    wanted_texts = {f"dpframe/{path}" for path in files("dpframe", "*.txt")}
    assert wanted_texts <= inside, "what dpframe new writes"
    others = inside - wanted_texts
    assert not [name for name in others if "__pycache__" in name or "/tests/" in name]


def test_the_package_index_takes_the_metadata_and_shows_the_readme_with_links_that_lead_somewhere(
    wheel,
):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    told = Metadata.from_email(archive.read(name), validate=True)
    assert told.description_content_type == "text/markdown"
    readme = (ROOT / "README.md").read_text()
    links, own = (re.findall(r"\]\(([^)#]+)", text) for text in (told.description, readme))
    assert len(links) == len(own) > 20
    for link, path in zip(links, own, strict=True):
        assert link == path if ":" in path else link.startswith("https://")
        assert link.endswith(path)
    assert told.project_urls["Homepage"] in links[-1]


def test_the_version_is_that_of_the_installation(wheel, installed, tmp_path):
    built = wheel.name.split("-")[1]
    assert installed("dpframe", "--version", cwd=tmp_path) == f"dpframe {built}\n"


def test_a_new_project_trains_from_a_wheel(installed, tmp_path):
    installed("dpframe", "new", "lines", cwd=tmp_path)
    assert "val/loss" in installed("dpframe", "recipe=lines", cwd=tmp_path / "lines")


def files(folder, pattern):
    return {str(path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob(pattern)}


def test_nothing_called_conf_or_recipes_is_at_the_top(installed):
    names = {path.name for path in installed.packages.iterdir()}
    assert not names & {"conf", "recipes", "tests", "benchmarks"}
    assert "dpframe" in names


def test_a_wheel_runs_in_an_empty_directory(installed, tmp_path):
    code = "import dpframe, dpframe.conf, dpframe.recipes as r; print(dpframe.__file__, r.__file__)"
    for file in installed("-c", code, cwd=tmp_path).split():
        assert Path(file).is_relative_to(installed.packages), "another dpframe is in front"
    for command in (["dpframe"], ["-m", "dpframe"]):
        assert "strategy=ddp" in installed(*command, "--help", cwd=tmp_path)
    assert "val/loss" in installed("dpframe", *RUN, cwd=tmp_path)
    assert len(list(tmp_path.glob("outputs/boston/*/summary.json"))) == 1
    assert SWEPT in installed("dpframe", *SWEEP, cwd=tmp_path), "Hydra finds the launcher"


def test_another_program_composes_from_an_installed_package(installed, tmp_path):
    write(tmp_path, {"config/mine.yaml": "defaults:\n  - config\n  - _self_\nseed: 5\n"})
    app = """
import hydra

@hydra.main(version_base="1.3", config_path="config", config_name="mine")
def main(config):
    print(config.recipe, config.seed)

main()
"""
    write(tmp_path, {"app.py": app})
    search = "hydra.searchpath=[pkg://dpframe.conf]"
    words = ("app.py", search, "recipe=boston", "hydra.run.dir=.", "hydra.output_subdir=null")
    assert installed(*words, cwd=tmp_path) == "boston 5\n"


@pytest.mark.parametrize(
    "words",
    [
        ["dpframe", "recipe=boston", "strategy=cpu"],
        ["-m", "dpframe", "recipe=lenet", "strategy=ddp", "trainer.gpus=2"],
    ],
)
def test_a_module_in_the_current_directory_is_a_target(words, installed, tmp_path):
    """And the digits are in the wheel."""
    recipe = "Boston" if "recipe=boston" in words else "LeNet"
    own = f"import dpframe.recipes.{recipe.lower()} as built_in\n"
    write(tmp_path, {"own.py": f"{own}class Own(built_in.{recipe}): pass\n"})
    words += ["experiment=debug", "task._target_=own.Own", "trainer.accelerator=cpu"]
    assert "(Own, seed 0)" in installed(*words, cwd=tmp_path)


def test_an_editable_installation_runs_anywhere(repository, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("editable"))
    environment.install("--editable", str(repository))
    empty = tmp_path_factory.mktemp("empty")
    file = environment("-c", "import dpframe; print(dpframe.__file__)", cwd=empty).strip()
    assert Path(file) == repository / "dpframe" / "__init__.py"
    write(environment.packages, {"hydra_plugins/other.py": ""})
    assert SWEPT in environment("dpframe", *SWEEP, cwd=empty), "beside plugins of others"


def test_a_repository_runs_without_an_installation(repository, tmp_path_factory):
    bare = Environment(tmp_path_factory.mktemp("bare"))
    file = bare("-c", "import dpframe; print(dpframe.__file__)", cwd=repository).strip()
    assert Path(file) == repository / "dpframe" / "__init__.py"
    words = (*RUN, f"hydra.run.dir={bare.packages}/run")
    assert "val/loss" in bare("-m", "dpframe", *words, cwd=repository)
