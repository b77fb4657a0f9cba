"""The modes: dpframe's own, those that packages bring, and what all of them print."""

import re

import pytest
from command import ROOT, attempts, cold_attempts, dpframe, write

from dpframe import UserError
from dpframe.config import modes, plugins
from dpframe.config.compose import composed
from dpframe.modes import report

PAGE = (ROOT / "docs" / "strategies.md").read_text()
LATE = '''"""`mode=late`: tells how late it is."""

from dataclasses import dataclass, field


@dataclass
class Settings:
    hour: int = field(default=22, metadata={"help": "of the day"})


def run(job):
    import torch

    hour = job.settings.modes["late"].hour
    print(f"{hour} o'clock in {job.settings.recipe}")
    if hour > 24:
        raise torch.OutOfMemoryError("there is no more time")
    return {"metrics": {"hour": hour}}
'''


GRADE = '''"""`mode=grade`: says how good a checkpoint is."""

EVALUATES = True


def run(job):
    from dpframe.modes.run import launch

    return launch(job, grade)


def grade(trainer, job, directory):
    if trainer.strategy.is_main:
        weights = len(list(trainer.task.parameters()))
        print(f"{weights} weights, {trainer.settings.max_epochs} epoch")
'''


QUIET = '''"""`mode=quiet`: returns nothing."""


def run(job):
    pass
'''


ODD = """from dataclasses import dataclass, field


@dataclass
class Settings:
    hours: set[int] = field(default_factory=set)


def run(job):
    return {"metrics": {}}
"""


def install(site, package, **points):
    """What pip leaves behind of a package with these modes."""
    lines = [f"{name} = {module}" for name, module in points.items()]
    notes = {
        "METADATA": f"Metadata-Version: 2.1\nName: dpframe-{package}\nVersion: 1.0\n",
        "entry_points.txt": "\n".join(["[dpframe.modes]", *lines, ""]),
    }
    write(site, {f"dpframe_{package}-1.0.dist-info/{name}": text for name, text in notes.items()})


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    install(site, "late", late="late", both="late", tally="tally", grade="grade", quiet="quiet")
    install(site, "rival", both="late", broken="broken", odd="odd", fit="late")
    tally = re.search(r"^```python\n(\"{3}`mode=tally`.*?)^```$", PAGE, re.M | re.S)[1]
    modules = {
        "late": LATE,
        "tally": tally,
        "grade": GRADE,
        "quiet": QUIET,
        "odd": ODD,
        "broken": "import wishful_driver\n",
    }
    write(site, {f"{name}.py": text for name, text in modules.items()})
    return {"PYTHONPATH": f"{ROOT}:{site}"}


def test_a_file_and_an_entry_point_are_a_mode_as_the_docs_have_one(site, tmp_path):
    late = ["recipe=boston", "mode=late"]
    lines = [
        late,
        [*late, "late.hour=3", "hydra.run.dir=a"],
        ["recipe=boston", "mode=tally", "tally.frozen=true"],
        ["-m", *late, "late.hour=4,5"],
        [*late, "late.hour=25"],
        ["recipe=boston", "mode=both"],
        ["recipe=boston", "mode=broken"],
        ["recipe=boston", "mode=odd"],
    ]
    plain, set_, counted, swept, full, both, broken, odd = attempts(lines, tmp_path, **site)
    assert (plain.code, plain.out, plain.files) == (0, "22 o'clock in boston\n", [])
    assert set_.out == "3 o'clock in boston\n"
    assert "4 o'clock in boston" in swept.out and "5 o'clock in boston" in swept.out, swept
    assert full.code == 1 and full.err.startswith("dpframe: cpu is out of memory in mode=late: ")
    assert full.err.endswith("; take a smaller task, or a smaller batch\n")
    assert (counted.out, counted.files) == ("boston: 801 parameters\n", [])
    refused = "mode=both is in dpframe-late 1.0 and dpframe-rival 1.0; uninstall one"
    assert (both.code, both.err) == (2, f"dpframe: {refused}\n")
    assert broken.code == 2 and broken.err.startswith(
        "dpframe: mode=broken of dpframe-rival 1.0: ModuleNotFoundError: No module named 'wish"
    )
    assert odd.code == 2 and odd.err.startswith("dpframe: mode=odd of dpframe-rival 1.0: "), odd


def test_a_sweep_compares_what_a_mode_returns_or_nothing(site, tmp_path):
    by_size = ["sweep.metric=parameters", "sweep.mode=min"]
    lines = [
        ["-m", "recipe=boston", "mode=quiet", "seed=1,2"],
        ["-m", "recipe=boston", "mode=tally", "tally.frozen=true,false", *by_size],
    ]
    quiet, sized = attempts(lines, tmp_path, **site)
    assert quiet.code == 0 and "sweep: 2 of 2 runs finished; " in quiet.out, quiet.err
    assert sized.code == 0 and "best: run 1, parameters 801, " in sized.out, sized.err


def test_a_mode_that_is_unknown_is_told_before_its_keys_and_one_of_this_folder_with_what_to_do(
    tmp_path,
):
    points = (
        '[project]\nname = "mine"\n[project.entry-points."dpframe.modes"]\nhello = "mine.hello"\n'
    )
    write(tmp_path, {"pyproject.toml": points})
    lines = [["recipe=boston", f"mode={name}", f"{name}.x=1"] for name in ("lat", "hello")]
    unknown, here = attempts(lines, tmp_path)
    assert unknown.err.startswith("dpframe: mode=lat is not one of fit, validate, "), unknown.err
    assert here.err == (
        "dpframe: mode=hello is a mode of the project in this folder, which has to be installed: "
        "pip install -e .\n"
    )


def test_a_mode_of_a_package_evaluates_a_checkpoint_with_the_config_of_its_run(site, tmp_path):
    train = ["recipe=boston", "trainer.max_epochs=1", "hydra.run.dir=run"]
    best = "checkpoint=run/checkpoints/last.ckpt"
    grade = ["recipe=boston", "mode=grade", best]
    trained, graded, wrong = attempts([train, grade, [*grade, "grade.by=1"]], tmp_path, **site)
    assert trained.code == graded.code == 0, graded.err
    assert wrong.err.startswith("dpframe: grade.by=1: there is no key grade.by; ")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "\n6 weights, 1 epoch\n" in graded.out


@pytest.mark.whole
def test_a_mode_of_a_package_is_in_the_help_and_its_settings_are_checked_before_torch(
    site, tmp_path
):
    lines = [
        ["--help"],
        ["--help", "late"],
        ["--help", "mode=tune"],
        ["--help", "mode"],
        ["recipe=boston", "mode=late", "late.hours=3"],
        ["recipe=boston", "mode=late", "late.hour=noon"],
        ["recipe=boston", "mode=lat"],
        ["recipe=boston", "late.hour=3", "-c", "job"],
        ["recipe=boston", "mode=tune", "tune.memry=1"],
    ]
    done, heavy = cold_attempts(lines, tmp_path, **site)
    page, topic, tune, all_modes, misspelt, text, near, job, own = done
    assert heavy == []
    assert "\n  mode=late      Tells how late it is. (dpframe-late 1.0)\n" in page.out
    assert all(f"  mode={name} " in page.out for name in modes.OWN)
    assert topic.out.splitlines() == [
        "mode=late  Tells how late it is. (dpframe-late 1.0)",
        "  late.hour=22  of the day",
    ]
    assert tune.out.startswith("mode=tune  The largest batch") and "\n  tune.steps=100 " in tune.out
    assert all(f"  mode={name} " in all_modes.out for name in (*modes.OWN, "late"))
    line = "late.hours=3: there is no key late.hours; did you mean late.hour?"
    assert misspelt.err == f"dpframe: {line}\n"
    assert text.err == "dpframe: late.hour=noon is text; use a whole number\n"
    assert "mode=lat is not one of fit, " in near.err and "did you mean late?" in near.err
    assert "there is no key tune.memry; did you mean tune.memory?" in own.err
    assert {misspelt.code, text.code, near.code, own.code} == {2}
    assert job.code == 0 and "late:\n  hour: 3\n" in job.out
    query = dpframe("-sc", "query=bash", cwd=tmp_path, **site, COMP_LINE="dpframe late.")
    assert query.stdout == "late.hour=\n"


def test_a_package_takes_no_mode_of_dpframes_own_and_one_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(plugins, "modes", lambda: {"fit": [("rival 1.0", None)]})
    assert modes.names() == list(modes.OWN)
    assert modes.load("fit").__name__ == "dpframe.modes.fit"
    said = "mode=plan is not installed; pip install examples/dpframe-plan, in dpframe's"
    for more in ([], ["plan.steps=2"]):
        with pytest.raises(UserError, match=said):
            composed(["recipe=boston", "mode=plan", *more])


@pytest.mark.whole
def test_a_key_of_a_mode_that_has_none_is_not_told_to_be_uninstalled():
    with pytest.raises(UserError, match="there is no key doctor.zzz; there is: callbacks, "):
        composed(["recipe=boston", "doctor.zzz=1"])


def test_every_file_of_a_mode_is_a_mode():
    files = (ROOT / "dpframe" / "modes").glob("*.py")
    with_run = {path.stem for path in files if "\ndef run(job: Composed) -> " in path.read_text()}
    assert with_run == set(modes.OWN)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (25 * 2**40, "25 TiB")]
)
def test_bytes_have_their_unit(count, text):
    assert report.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (5e-5, "50 us"),
        (0.25, "250 ms"),
        (2345.6, "2346 s"),
        (12345.6, "3.43 h"),
        (1e6, "11.6 days"),
    ],
)
def test_seconds_have_their_unit(seconds, text):
    assert report.time(seconds) == text
