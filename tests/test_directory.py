"""A run's directory: one each, made when all is checked, unmade when nothing was trained."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from command import attempts, cold_dpframe, write
from disk import library
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from dpframe.config.earlier_run import resumed_file, with_saved
from dpframe.config.loader import quoted
from dpframe.config.overrides import as_notes
from dpframe.errors import UserError
from dpframe.modes.directory import UTF8, Directory


def test_two_runs_of_one_second_get_a_directory_each(tmp_path):
    both = [Directory(tmp_path / "boston" / "now", is_given=False) for _ in range(2)]
    assert [Path(one.make({})).name for one in both] == ["now", "now-2"]
    for one in both:
        one.release()


MOVES = """
import os

from dpframe.recipes.boston import Boston


class Moves(Boston):
    def setup(self, trainer):
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
"""


def test_a_setup_that_changes_the_working_directory_does_not_move_the_run(tmp_path):
    write(tmp_path, {"moves.py": MOVES})
    moves = ["task._target_=moves.Moves", "callbacks.progress=null"]
    line = ["recipe=boston", *moves, "hydra.run.dir=run", "trainer.max_epochs=1"]
    first, again = attempts([line, ["resume=run", *moves, "trainer.max_epochs=2"]], tmp_path)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert not list((tmp_path / "elsewhere").iterdir())
    assert {"summary.json", "checkpoints", "run.log"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 2


# What a stranger's file could say, and what the one line names.
PLAIN = "is not a plain name, but it names the folder of its runs"
ELSEWHERE = {
    "hydra: {run: {dir: ../out}}": "hydra.run.dir=../out on the command line",
    "hydra: {run: {dir: 'outputs/${recipe}/${vars.x}'}}\nvars: {x: ../../..}": "hydra.run.dir",
    "hydra: {sweep: {dir: /tmp/out}}": "hydra.sweep.dir=/tmp/out on the command line",
    "hydra: {sweep: {subdir: ../../../out}}": "hydra.sweep.subdir=../../../out on",
    "hydra: {output_subdir: ../../../out}": "hydra.output_subdir: dpframe has no use for this",
    "hydra: {job: {chdir: true}}": "hydra.job.chdir: dpframe has no use for this",
    # What the check sees of the next two is not what Hydra makes the folder of.
    "recipe: ${oc.select:hydra.help.header,boston}\nhydra: {help: {header: ../../../out}}": PLAIN,
    "recipe: ${oc.env:DPFRAME_TOKEN,secret}": PLAIN,
    "recipe: [boston]": "recipe=['boston'] is a list; use text",
    "recipe: ../../out": "recipe=../../out is not a plain name",
    "recipe: a/../../../out": "recipe=a/../../../out is not a plain name",
    "recipe: ~out": "recipe=~out is not a plain name",
    "recipe: ''": "recipe= is not a plain name",
}
SWEPT = 10  # of these, the first, are tried as sweeps, too


def test_where_dpframe_writes_comes_from_the_command_line_alone(tmp_path):
    texts = {f"experiment/e{n}.yaml": text for n, text in enumerate(ELSEWHERE)}
    files = {name: f"# @package _global_\n{text}\n" for name, text in texts.items()}
    write(tmp_path / "mine", files)
    start = ["--config-dir=mine", "recipe=boston", "trainer.max_epochs=1"]
    lines = [[*start, f"experiment=e{n}"] for n in range(len(texts))]
    swept = [["-m", "hydra/sweeper=basic", *line] for line in lines[:SWEPT]]
    saved = "- recipe=boston\n- logger=csv\n- +hydra.run.dir=../out\n"
    write(tmp_path / "theirs", {".hydra/overrides.yaml": saved, "checkpoints/last.ckpt": ""})
    resumed = ["resume=theirs/checkpoints/last.ckpt", "-c", "job"]
    typed = [[*lines[0], "hydra.run.dir=mine/out"], [*lines[0], "hydra.run={dir: mine/out}"]]
    shown = [[*line, "-c", "all"] for line in typed]
    *done, again, out, out_too = attempts([*lines, *swept, resumed, *shown], tmp_path)
    wanted = [*ELSEWHERE.values(), *list(ELSEWHERE.values())[:SWEPT]]
    for line, attempt, said in zip([*lines, *swept], done, wanted, strict=True):
        assert (attempt.code, attempt.err.count("\n")) == (2, 1), (line, attempt.err)
        assert said in attempt.err, line
        assert attempt.files == ["mine", "theirs"], line
    assert again.code == 0 and "csv" in again.out
    for attempt in (out, out_too):
        assert attempt.code == 0 and "dir: mine/out" in attempt.out


LINKS = ["run.log", "summary.json", "metrics.csv", "events.out.tfevents.1.a.1.0", "predictions.csv"]
LINKS += [".hydra", "checkpoints", ".hydra/hydra.yaml", ".lock", "checkpoints/last.ckpt"]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_directory_that_was_there_leads_nowhere_else(tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    run = tmp_path / "run"
    link = run / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if name in (".hydra", "checkpoints") else outside / "file")
    with pytest.raises(UserError, match=f"{name} is a link out of the run directory"):
        Directory(run, is_given=True).make({})
    assert os.listdir(outside) == ["file"] and (outside / "file").read_text() == "mine"


def test_a_pipe_in_a_run_directory_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.log")
    with pytest.raises(UserError, match="run.log is neither a file nor a folder"):
        Directory(tmp_path / "run", is_given=True).make({})
    (tmp_path / "run" / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "run" / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match="is whole: it is no file"):
        resumed_file(str(tmp_path / "run"), tmp_path)


@pytest.mark.parametrize("name", ["tables/val", "checkpoints/last.ckpt/part", "a/b/c"])
def test_no_folder_of_a_run_directory_leads_out_of_it_however_deep(tmp_path, name):
    (outside := tmp_path / "outside").mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(UserError, match=f"{name} is a link out of the run directory"):
        Directory(tmp_path / "run", is_given=True).make({})
    assert not [*outside.iterdir()]


def test_no_more_does_a_file_behind_a_link_within_it(tmp_path):
    (tmp_path / "run/sub").mkdir(parents=True)
    (tmp_path / "run/checkpoints").symlink_to("sub")
    (tmp_path / "run/sub/last.ckpt").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="last.ckpt is a link out of the run directory"):
        Directory(tmp_path / "run", is_given=True).make({})


def test_what_a_logger_has_linked_to_a_file_is_left_in_its_folder(tmp_path):
    """`wandb.save` does so."""
    (tmp_path / "model.py").touch()
    (folder := tmp_path / "run/wandb/files").mkdir(parents=True)
    (folder / "model.py").symlink_to(tmp_path / "model.py")
    (tmp_path / "run/wandb/latest").symlink_to("files")
    Directory(tmp_path / "run", is_given=True).make({})


def test_a_run_directory_that_is_itself_behind_a_link_is_used(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to("disk")
    run = tmp_path / "outputs" / "run"
    (run / "run.log").touch()
    (run / "newest.log").symlink_to("run.log")
    directory = Directory(run, is_given=True)
    directory.make({"config.yaml": "a: 1"})
    directory.release()
    assert (tmp_path / "disk" / "run" / ".hydra" / "config.yaml").is_file()


def test_a_defaults_list_reads_no_file_outside_of_the_config_folders(tmp_path):
    write(tmp_path, {"secret.yaml": "token: abc\n", "mine/vars/fine.yaml": "x: 1\n"})
    named = [f"//{tmp_path}/secret@vars", "/../secret@vars", "../../secret@vars"]
    named += [{"/vars": "../../secret"}, {"/vars": "fine"}]
    for number, default in enumerate(named):
        text = "# @package _global_\n" + yaml.safe_dump({"defaults": [default]})
        write(tmp_path, {f"mine/experiment/e{number}.yaml": text})
    start = ["--config-dir=mine", "recipe=boston", "-c", "job"]
    lines = [[*start, f"experiment=e{number}"] for number in range(len(named))]
    *refused, fine = attempts([*lines[:-1], [*start, "recipe=../../secret"], lines[-1]], tmp_path)
    for attempt in refused:
        assert (attempt.code, attempt.err.count("\n")) == (2, 1), attempt.err
        assert "is outside of the config folders" in attempt.err and "abc" not in attempt.out
    assert fine.code == 0 and "x: 1" in fine.out


def test_a_given_directory_is_used_as_it_is_and_a_refused_run_leaves_nothing(tmp_path):
    start, text = ["recipe=boston", "trainer.max_epochs=1"], "+vars.name='ü, =\"'"
    lines = [
        [*start, "hydra.run.dir=a b=c,é", text],
        [*start, "hydra.run.dir='a b=c,é'", text],
        ["recipe=boston", "mode=test", "checkpoint=a b=c,é/checkpoints/best.ckpt"],
        ["recipe=boston", "callbacks.checkpoint.monitor=val/los"],
        ["recipe=boston", "hydra.run.dir=/proc/run"],
    ]
    (tmp_path / "outputs" / "boston").mkdir(parents=True)  # was there before: stays
    refused, first, tested, misspelt, read_only = attempts(lines, tmp_path)
    assert "quote it" in refused.err and refused.files == ["outputs"]
    assert (first.code, first.files) == (0, ["a b=c,é", "outputs"])
    assert tested.code == 0 and "test/loss" in tested.out
    tests = [path.name for path in tmp_path.glob("outputs/test/boston/*/*.json")]
    assert tests == ["summary.json"]
    for attempt, said in ((misspelt, "did you mean val/loss?"), (read_only, "can't be made")):
        assert (attempt.code, attempt.err.count("\n")) == (2, 1) and said in attempt.err
    # Nothing is left of a run that is refused in its first epoch.
    assert len(list(tmp_path.glob("outputs/*/*"))) == len(tests)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("strategy=cpu", ["+vars.x=1"]),
        ("strategy=ddp", ["strategy.timeout_seconds=60", "+vars.x=1"]),
        ("strategy.timeout_seconds=70", ["strategy=ddp", "+vars.x=1"]),
        ("vars.x=2", ["strategy=ddp", "strategy.timeout_seconds=60", "+vars.x=1"]),
        ("+vars.x=2", ["strategy=ddp", "strategy.timeout_seconds=60"]),
    ],
)
def test_of_a_resumed_runs_overrides_those_are_kept_that_still_have_their_key(
    tmp_path, given, kept
):
    saved = ["strategy=ddp", "strategy.timeout_seconds=60", "+vars.x=1", "mode=fit"]
    assert taken_over(tmp_path / "run", saved, given) == kept


@pytest.mark.parametrize(
    "override",
    [
        "+vars.layers={widths: [1, 2], a b: c}",
        "data.file='rows #2.csv'",
        f"+vars.name='{'long ' * 30}ü \udcff: x'",
        "~callbacks.checkpoint",
    ],
)
def test_a_resumed_run_has_each_override_letter_by_letter(tmp_path, override):
    saved = ["recipe=boston", override]
    assert taken_over(tmp_path / "run", saved) == saved


def taken_over(run: Path, saved: list[str], *given: str) -> list[str]:
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra/overrides.yaml").write_text(as_notes(saved), **UTF8)
    write(run, {"checkpoints/last.ckpt": ""})
    resumed = f"resume={run}/checkpoints/last.ckpt"
    *taken, first = with_saved([resumed, *given], lambda: run)[: -len(given) or None]
    assert first == resumed
    return taken


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is the Linux linker's")
def test_a_file_system_without_locks_and_directory_sync_is_told_and_the_run_goes_on(tmp_path):
    lacks = {"LD_PRELOAD": library(tmp_path), "NO_LOCKS": "1", "NO_DIRECTORY_SYNC": "1"}
    words = ["recipe=boston", "trainer.max_epochs=2", "hydra.run.dir=run"]
    done = cold_dpframe(*words, cwd=tmp_path, **lacks)
    assert (done.returncode, done.stderr) == (
        0,
        "dpframe: the file system of run has no locks (No locks available); "
        "make sure that nothing else writes there\n",
    )
    unsynced = "warning: the file system of run/checkpoints can't sync all it writes (Invalid"
    assert done.stdout.count(unsynced) == 1
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    assert (tmp_path / "run/summary.json").is_file()


def test_a_name_that_is_too_long_is_one_line(tmp_path):
    long = "x" * 300
    given = [f"hydra.run.dir={long}", f"resume={long}", f"--config-dir={long}"]
    given += [f"hydra.run.dir={'/'.join(['y' * 200] * 30)}", f"resume=run/{long}"]
    lines = [["recipe=boston", word] for word in given]
    lines.append(["recipe=boston", "mode=test", f"checkpoint={long}"])
    for line, done in zip(lines, attempts(lines, tmp_path), strict=True):
        assert (done.code, done.err.count("\n"), done.files) == (2, 1, []), (line, done.err)


ODD = ["a b", "a\\b c", "a${b}", "a\\${b}", "q'x", "q\\'x", "end\\", "e\\\\", "${", "a\\\\b ${x} '"]


def test_text_in_quotes_is_read_back_letter_by_letter():
    parser = OverridesParser.create()
    for text in ODD:
        config = OmegaConf.create({"key": parser.parse_override(f"key={quoted(text)}").value()})
        assert OmegaConf.to_container(config, resolve=True) == {"key": text}


def test_a_directory_may_have_a_name_that_hydra_would_read_otherwise(tmp_path):
    directory = tmp_path / "a${b}\\'~\\"
    write(directory, {"recipe/mine.yaml": "# @package _global_\ndefaults: [boston, _self_]\n"})
    run = directory / "outputs/mine/${now}~"
    lines = [
        ["recipe=mine", f"--config-dir={directory}", f"hydra.run.dir={quoted(str(run))}"],
        [f"resume={run}", "trainer.max_epochs=2", "--config-dir=."],
        ["resume=last", "recipe=mine", "trainer.max_epochs=3", "--config-dir=."],
        ["mode=test", f"checkpoint={run}/checkpoints/best.ckpt", "--config-dir=."],
        ["-m", "recipe=boston", "seed=1,2"],
    ]
    lines[0].append("trainer.max_epochs=1")
    *done, swept = attempts(lines, directory)
    assert [one.code for one in done] == [0] * 4, [one.err for one in done]
    assert "resume=last is outputs/mine/${now}~/checkpoints/last.ckpt\n" in done[2].out
    assert "epoch 3/3" in done[2].out and "test/loss" in done[3].out
    assert (run / "summary.json").is_file()
    assert (swept.code, swept.err.count("\n")) == (2, 1)
    assert "has a ${, which Hydra would take for a reference" in swept.err


def test_a_remote_address_of_what_a_run_writes_is_one_line_and_no_directory_of_that_name(tmp_path):
    recipe, url = ["recipe=boston"], "s3://bucket/x"
    lines = {
        f"hydra.run.dir={url}": recipe,
        "hydra.run.dir=gs://bucket/${recipe}": recipe,
        f"hydra.sweep.dir={url}": ["-m", *recipe, "seed=1,2"],
        f"hydra.sweep.subdir={url}": ["-m", *recipe, "seed=1,2"],
        f"sweep.resume={url}": ["-m"],
        f"data.input={url}.csv": [*recipe, "mode=predict"],
        "hydra.run.dir=file:///tmp/x": [*recipe, "mode=validate", "checkpoint=none"],
    }
    done = attempts([[*given, word] for word, given in lines.items()], tmp_path)
    for word, one in zip(lines, done, strict=True):
        said = word.replace("${recipe}", "boston")
        assert (one.code, one.err.count("\n"), one.files) == (2, 1, []), one
        assert one.err.startswith(f"dpframe: {said} is a URL, and dpframe reads and writes"), (
            one.err
        )


def test_a_directory_may_begin_with_a_tilde_and_a_user_may_be_nobody(tmp_path):
    start = ["recipe=boston", "logger=none", "callbacks.progress=null"]
    lines = {
        (
            *start,
            "trainer.max_steps=1",
            "hydra.run.dir='~tilde'",
        ): "\nresume     dpframe 'resume=~tilde' ",
        (*start, "trainer.max_steps=2", "resume=~tilde"): "\nrun        ~tilde\n",
        ("resume=~nobody-here",): "resume=~nobody-here: there is no such file",
        (
            "recipe=boston",
            "mode=test",
            "checkpoint=~nobody-here",
        ): "checkpoint=~nobody-here: there is",
        ("-m", "sweep.resume=~nobody-here"): "sweep.resume=~nobody-here: there is no sweep.json",
    }
    for done, said in zip(attempts([*map(list, lines)], tmp_path), lines.values(), strict=True):
        assert said in done.out + done.err and done.files == ["~tilde"]
        assert done.code == (2 if "nobody" in said else 0), done.err


@pytest.mark.skipif(sys.platform == "win32", reason="needs the sockets of Unix")
def test_the_sockets_of_data_workers_need_no_short_tmpdir(tmp_path):
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    words = ["recipe=shapes", "trainer.max_epochs=1", "trainer.limit_train_batches=2"]
    words += ["data.workers=2", "trainer.data_timeout_seconds=60", "hydra.run.dir=run"]
    done = cold_dpframe(*words, cwd=tmp_path, TMPDIR=str(folder))
    assert (done.returncode, done.stderr, list(folder.glob("pymp*"))) == (0, "", [])
