"""A config is its author's code; a run directory and a checkpoint are data, and run nothing."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from attempted import Attempt
from command import attempts, environment, write
from forked import fresh

import dpframe
from dpframe.config.overrides import key_of
from dpframe.config.untrusted import must_be_typed
from dpframe.errors import UserError
from dpframe.strategies.ddp import DDP

TASKS = """
import dpframe
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Victim(dpframe.Task):
    def __init__(self, net=None, optimizer=None, width=1):
        super().__init__(net or nn.Linear(1, width), optimizer)

    def training_step(self, batch):
        return {"loss": self.net(batch[0]).square().mean()}


class VictimData(dpframe.DataModule):
    def train_dataset(self):
        return TensorDataset(torch.ones(4, 1))


class Quiet(dpframe.Callback):
    pass
"""
RECIPE = """
# @package _global_
task:
  _target_: mine.tasks.Victim
  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}
data: {_target_: mine.tasks.VictimData}
trainer: {max_epochs: 1}
"""
NAMED = """
# @package _global_
defaults: [victim, _self_]
recipe: named
task: {net: {_target_: '${vars.net}', in_features: 1, out_features: 1}}
vars: {net: torch.nn.Linear}
"""
GROUPED = NAMED.replace("named", "grouped").replace("vars.net", "callbacks.net")
COPY = "{_target_:shutil.copyfile,_args_:[mine/tasks.py,canary]}"
SPAWN = "{_target_:setuptools._distutils.spawn.spawn,_args_:[[touch,canary]]}"
DATA, NONE, GONE = "not taken from a run directory; if", "there is no such", "can't be used"
# Reads as a mapping with a `_target_`, once what stands for it is filled in.
HALVES = (
    r"\\\{_tar${oc.env:NOPE,get_}\\\: shutil.copyfile\\\, _ar${oc.env:NOPE,gs_}\\\: \\\[a\\\]\\\}"
)
ATTACKS = {  # what overrides.yaml has, and what the one line says
    "a key": (["+task.net._target_=os.getcwd"], DATA),
    "two keys": (["+task.net._target_=shutil.copyfile", "+task.net._args_=[a,b]"], DATA),
    "arguments": (["+task.optimizer._args_=[1]"], DATA),
    "a mapping": ([f"+task.net={COPY}"], DATA),
    "spawn": ([f"+task.net={SPAWN}"], DATA),
    "with spaces": ([f" ++task.net={COPY.replace(':', ' : ')}"], DATA),
    "in a list": ([f"+task.net=[[{COPY}]]"], DATA),
    "a whole group": ([f"callbacks={{x:{COPY}}}"], DATA),
    "a slot": ([f"data={COPY}"], DATA),
    "an own part": (["task._target_=run.own.Own"], DATA),
    "a package": (["+callbacks@task.net._target_=checkpoint"], DATA),
    "an option of its own": (["callbacks=theirs"], NONE),
    "an option elsewhere": (["callbacks=../../theirs/callbacks/theirs"], "outside of the config"),
    "a path": ([f"+callbacks=//{'/tmp'}/theirs"], ""),
    "a reference": ([f"+vars.x={COPY}", "+task.net=${vars.x}"], DATA),
    "a file's mapping": (["+task.net=${vars.tool}"], DATA),
    "a file's name": (["recipe=named", "vars.net=shutil.copyfile"], DATA),
    "a group's mapping": (["recipe=grouped", "++callbacks={net:shutil.copyfile}"], DATA),
    "a resolver": (["+task.net=${oc.create:'{_target_: os.getcwd}'}"], DATA),
    "two halves": (
        ["+vars.a='{_tar'", "+vars.b='get_: x}'", "+task.net=${oc.create:${vars.a}${vars.b}}"],
        DATA,
    ),
    "a reference that hides another": (
        ["+vars.s=${hydra.job.name}", "+task.net=${vars.tool}"],
        DATA,
    ),
    "a reference to Hydra's own": (["recipe=named", "vars.net=this.x", "+vars.s=${hydra.x}"], DATA),
    "an escaped reference": ([rf"+task.net=$\{{oc.create:{HALVES}\}}"], DATA),
    "a mapping behind a space": (["++logger= {x: ${vars.tool}}"], DATA),
    "a text behind a tab": ([rf"++logger=\t{{x: $\{{oc.create:{HALVES}\}}}}"], DATA),
    "an option in another place": (["+recipe@task.net=victim"], DATA),
    "a resolver of one's own": (["task.width=${eval:1+1}"], DATA),
    "a nested name": (["+task.net=${${vars.a}:x}", "+vars.a=oc.create"], DATA),
    "a sweep's values": ([f"+task.net=choice({COPY},1)"], DATA),
    "hydra's launcher": (["hydra.launcher._target_=os.system", "hydra/launcher=theirs"], GONE),
    "hydra's folders": (["hydra.searchpath=[file://theirs]", "hydra.run.dir=canary"], GONE),
    "hydra's environment": (["++hydra.job.env_set.X=x", "hydra={job:{chdir:true}}"], GONE),
    "a logger that sends": (["logger=[csv,wandb]", "+logger.wandb.entity=theirs"], DATA),
    "a logger's account": (["+logger.wandb.entity=theirs"], DATA),
    "what is read": (["mode=predict", "data.input=/etc/passwd"], DATA),
    "a cluster": (["strategy=ray"], DATA),
    "of one start": (["resume=x", "resume_anyway=true", "mode=predict"], GONE),
}  # fmt: skip
# One of each kind: what refuses all of them in a resume refuses these through the other doors.
OTHER_DOORS = (
    *("a key", "arguments", "a mapping", "a slot", "an own part", "an option of its own"),
    *("an option elsewhere", "a reference", "a file's name", "two halves", "an escaped reference"),
    *("a mapping behind a space", "a sweep's values", "hydra's launcher", "of one start"),
    *("a logger that sends", "what is read"),
)
OF_NOTES = {  # overrides.yaml that is no list of texts
    "laughs": "- &a0 [x, x, x]\n"
    + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
    "merged": "- &a {x: x}\n- {<<: [*a, *a]}\n",
    "deep": "[" * 5000,
    "long": "- " + "9" * 5000,
}
START = ["--config-dir", "mine"]
QUIET = ["callbacks=none", "logger=none"]
FILES = {
    "mine/tasks.py": TASKS,
    "mine/recipe/victim.yaml": RECIPE + f"vars: {{tool: {COPY.replace(':', ': ')}, x: 1}}\n",
    "mine/recipe/named.yaml": NAMED,
    "mine/recipe/grouped.yaml": GROUPED,
    "theirs/callbacks/theirs.yaml": f"x: {COPY}\n",
    "run/own.py": "open('canary', 'w').close()\nclass Own: pass\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = write(tmp_path_factory.mktemp("place"), FILES)
    texts = [yaml.safe_dump(["recipe=victim", *words]) for words, _ in ATTACKS.values()]
    for number, text in enumerate([*texts, *OF_NOTES.values()]):
        overrides = f"a{number}/.hydra/overrides.yaml"
        write(place, {overrides: text, f"a{number}/checkpoints/last.ckpt": "nothing"})
    for number, (words, _) in enumerate(ATTACKS.values()):
        content = {"runs": [], "overrides": ["recipe=victim", *words], "sweeper": "basic"}
        write(place, {f"s{number}/sweep.json": json.dumps(content)})
    return place


def said(attempt: Attempt) -> str:
    """The one line of a refusal; nothing was written or called."""
    assert attempt.code == 2 and attempt.err.startswith("dpframe: "), attempt
    assert attempt.err.count("\n") == 1 and len(attempt.err) < 600, attempt.err
    assert not {"canary", "outputs", "multirun"} & set(attempt.files)
    return attempt.err


@pytest.mark.parametrize("line", ["resume={}", "mode=validate checkpoint={}"])
def test_what_a_run_directory_names_is_not_called(place, line):
    is_resumed = line.startswith("resume")
    wanted = {name: says for name, (_, says) in ATTACKS.items()}
    wanted |= dict.fromkeys(OF_NOTES, "overrides.yaml")
    numbers = {name: number for number, name in enumerate(wanted)}
    tried = [*wanted] if is_resumed else [*OTHER_DOORS, *OF_NOTES]
    files = [f"a{numbers[name]}/checkpoints/last.ckpt" for name in tried]
    done = attempts([[*START, *line.format(file).split()] for file in files], place)
    for name, attempt in zip(tried, done, strict=True):
        told = said(attempt)
        assert wanted[name] in told or (name == "of one start" and not is_resumed), (name, told)


def test_what_a_sweeps_directory_names_is_not_called(place):
    numbers = {name: number for number, name in enumerate(ATTACKS)}
    lines = [["-m", *START, f"sweep.resume=s{numbers[name]}"] for name in OTHER_DOORS]
    for name, attempt in zip(OTHER_DOORS, attempts(lines, place), strict=True):
        says = ATTACKS[name][1]
        if says == GONE:  # a sweep of one run, which has no checkpoint to begin with
            assert not {"canary"} & set(attempt.files), name
        else:
            assert says in said(attempt), name


def loaded(paths: list[str]) -> list[str]:
    return [_said_of(path) for path in paths]


def _said_of(path: str) -> str:
    try:
        dpframe.load(path, config_dir="mine")
    except UserError as error:
        return str(error)
    return "loaded"


def test_what_a_run_directory_names_is_not_called_by_load(place):
    numbers = {name: number for number, name in enumerate([*ATTACKS, *OF_NOTES])}
    told = fresh(loaded, [f"a{numbers[name]}" for name in (*OTHER_DOORS, *OF_NOTES)], folder=place)
    assert not (place / "canary").exists()
    for name, line in zip(OTHER_DOORS, told, strict=False):
        words, says = ATTACKS[name]
        is_of_a_task = key_of(words[0]) not in ("callbacks", "logger")
        says = says if is_of_a_task else GONE  # what a load composes has none
        assert says in line and "\n" not in line, (name, line)
    assert all("overrides.yaml" in line for line in told[len(OTHER_DOORS) :])


@pytest.mark.parametrize(
    ("override", "is_typed"),
    [
        ("++logger.wandb=false", False),
        ("++logger.wandb=False", False),
        ("logger.mine=null", False),
        ("logger.wandb=true", True),
        ("logger.wandb.offline=false", True),
        ("+logger.wandb[offline]=false", True),
        ("logger.wandb='false'", True),
        ("+logger.wandb={offline: false}", True),
        ("+logger.wandb._target_=null", True),
    ],
)
def test_a_logger_that_a_run_has_switched_off_sends_nothing(override, is_typed):
    assert must_be_typed(override) is is_typed


def test_a_resume_and_a_sweep_keep_a_logger_of_any_kind_switched_off(tmp_path):
    off = ["logger.wandb=false", "logger.mlflow=null"]
    run = ["recipe=boston", "trainer.max_epochs=1", *off]
    first, resumed, swept, again = attempts(
        [
            [*run, "hydra.run.dir=own"],
            ["resume=own", "trainer.max_epochs=2"],
            ["-m", *run, "seed=0,1", "hydra.sweep.dir=both"],
            ["sweep.resume=both"],
        ],
        tmp_path,
    )
    assert (first.code, resumed.code, swept.code, again.code) == (0, 0, 0, 0), (resumed, again)
    assert "dpframe mode=test checkpoint=own/checkpoints/best.ckpt" in first.out
    kept = (tmp_path / "own" / ".hydra" / "overrides.yaml").read_text()
    assert "logger.wandb=false" in kept and "logger.mlflow=null" in kept


def test_an_own_run_is_resumed_with_what_is_typed_again(tmp_path):
    place = write(tmp_path, FILES)
    quiet = "+callbacks.quiet={_target_:mine.tasks.Quiet}"
    lines = [
        [*START, "recipe=named", *QUIET[1:], quiet, "task.width=2", "hydra.run.dir=own"],
        [*START, "resume=own", "trainer.max_epochs=2"],
        [*START, "resume=own", "trainer.max_epochs=2", quiet],
        [*START, "mode=predict", "checkpoint=own/checkpoints/last.ckpt"],
        [*START, "recipe=victim", "+task.net=" + COPY],
    ]
    first, refused, again, evaluated, sings = attempts(lines, place)
    assert first.code == 0, first.err
    assert f"type them again: '{quiet}'\n" in said(refused)
    assert again.code == 0 and "epoch 2/2" in again.out, again.err
    assert "type them again" in said(evaluated)
    assert sings.code != 0 and "canary" in sings.files  # else the other tests would pass, too
    write(place, {"own/mine/tasks.py": f"open('canary', 'w').close()\n{TASKS}"})
    inside = ["--config-dir", str(place / "mine"), "resume=.", "trainer.max_epochs=3", quiet]
    (there,) = attempts([inside], place / "own")
    assert there.code == 0 and "epoch 3/3" in there.out, there.err
    assert "canary" not in there.files


@pytest.mark.parametrize("loose", ["mybest.ckpt", "checkpoints/mybest.ckpt", "../mybest.ckpt"])
def test_a_loose_checkpoint_hides_no_module_of_the_current_directory(tmp_path, loose):
    """A run directory is data; a file that was copied out of one is not in one."""
    files = {"here/mine/tasks.py": TASKS, "conf/recipe/victim.yaml": RECIPE}
    place = write(tmp_path, files) / "here"
    words = ["--config-dir", "../conf", "recipe=victim", *QUIET[1:]]
    (done,) = attempts([[*words, "hydra.run.dir=own"]], place)
    assert done.code == 0, done.err
    (place / loose).parent.mkdir(exist_ok=True)
    shutil.copy(place / "own/checkpoints/last.ckpt", place / loose)
    (found,) = attempts([[*words, f"checkpoint={loose}"]], place)
    assert found.code == 0, found.err


STOLEN = (
    *("yaml", "argparse", "hydra", "omegaconf", "antlr4", "typing", "json", "logging", "tempfile"),
    *("torch", "numpy", "tensorflow", "opt_einsum", "pickle", "multiprocessing", "hydra_plugins.x"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_nothing_in_the_current_directory_stands_for_a_package(tmp_path):
    """Not for one that is not installed either; a config's own module is found there, at last."""
    sings = "import os\nprint(__name__)\nopen(os.environ['CANARY'], 'a').write(__name__)\n"
    place = write(tmp_path, FILES | {f"{n.replace('.', '/')}.py": sings for n in STOLEN})
    ddp = ("strategy=ddp", "trainer.gpus=2", "trainer.accelerator=cpu", "mode=validate")
    words = [*START, "recipe=victim", *QUIET, *ddp, "checkpoint=none"]
    script = Path(sys.executable).with_name("dpframe")
    commands = [
        [sys.executable, "-P", "-m", "dpframe", "--help"],
        [sys.executable, "-m", "dpframe", *words],
        *([[script, "--help"]] if script.is_file() else []),
    ]
    canary = tmp_path.with_name("sung")
    for command in commands:
        env = environment(CANARY=str(canary))
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
        assert not canary.exists(), (command, canary.read_text(), done.stderr)
        assert "there is no module" not in done.stderr, done.stderr


def test_a_spawned_rank_begins_without_the_current_directory(tmp_path, monkeypatch):
    write(tmp_path, dict.fromkeys(("pickle.py", "socket.py", "torch.py"), "open('canary', 'w')\n"))
    monkeypatch.chdir(tmp_path)
    before, over = dict(os.environ), threading.Event()
    thread = threading.Thread(target=over.wait)  # beside it, no rank is forked
    thread.start()
    try:
        assert DDP(2, "cpu").launch(os.getenv, "PYTHONSAFEPATH") is None
    finally:
        over.set()
        thread.join()
    assert not (tmp_path / "canary").exists() and dict(os.environ) == before
