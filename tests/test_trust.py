"""A config from a stranger calls nothing but parts: each attack is one line, and nothing ran."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from attempted import Attempt
from command import attempts, environment, write
from forked import fresh, run

import dpframe
from dpframe.config import locate
from dpframe.config.build import build, check_targets
from dpframe.config.compose import composed
from dpframe.config.trust import FUNCTIONS, NOBODY, Trust, known
from dpframe.errors import UserError
from dpframe.strategies.ddp import DDP
from dpframe.task import Task

TOUCH = '["touch canary"]'

TASKS = """
import builtins
import code
import functools
import operator
import os
import pickle
import subprocess
import threading
from os import system as innocent

import torch
import torchlike
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpframe
from torchlike import Backbone, Fine


class Victim(dpframe.Task):
    def __init__(self, net=None, optimizer=None, scheduler=None):
        super().__init__(net, optimizer, scheduler)

    def training_step(self, batch):
        return {"loss": self.net(batch[0]).square().mean()}


class Typed(Victim):
    def __init__(self, net: nn.Module, optimizer=None):
        super().__init__(net, optimizer)


class VictimData(dpframe.DataModule):
    def train_dataset(self):
        return TensorDataset(torch.ones(4, 1))


class Net(nn.Linear):
    system = staticmethod(os.system)

    @classmethod
    def of(cls, width):
        return cls(width, 1)


@functools.wraps(os.system)
def wrapper(command):
    return os.system(command)


@functools.cache
def cached(width):
    return nn.Linear(width, 1)


narrow = functools.partial(nn.Linear, bias=False)


@torch.no_grad()
def undifferentiated(width):
    return nn.Linear(width, 1)


class Maker:
    def __call__(self, width):
        return nn.Linear(width, 1)


maker = Maker()
hidden = functools.partial(os.system, "touch canary")
bound = [].append
locked = threading.Lock().acquire
loads = functools.lru_cache(pickle.loads)
logged = code.InteractiveConsole().push
caller = operator.methodcaller("system", "touch canary")
whole = functools.partial(functools.partial, os.system)
methodical = nn.ParameterDict


def named(path):
    value = builtins
    for name in path.split("."):
        value = __import__(name) if value is builtins else getattr(value, name)
    return value


def make_task():
    return Victim()


def make_annotated() -> dpframe.Task:
    return Victim(nn.Linear(1, 1), functools.partial(torch.optim.SGD, lr=0.1))
"""

RECIPE = """
# @package _global_
task:
  _target_: mine.tasks.Victim
  optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}
data: {_target_: mine.tasks.VictimData}
trainer: {max_epochs: 1}
"""

FILES = {
    "mine/tasks.py": TASKS,
    "mine/deep/__init__.py": "",
    "mine/deep/nets.py": "from torch.nn import Linear\nclass Deep(Linear):\n    pass\n",
    "mine/recipe/victim.yaml": RECIPE,
    "mine/recipe/vouches.yaml": RECIPE + "trusted_modules: [os]\n",
    "mine/recipe/unsafe.yaml": RECIPE + "vars: !!python/object/apply:os.system ['touch canary']\n",
    "torchlike.py": "from torch import nn\nclass Backbone(nn.Linear): pass\nclass Fine: pass\n"
    "def touch(path): open(path, 'w').close()\n",
    "touches.py": "open('canary', 'w').close()\ndef anything(): pass\n",
    "beside.py": TASKS,
    "cleanup.py": "open('canary', 'w').close()\nimport os\nfrom pathlib import Path\n"
    "import dpframe\nclass Anything: pass\nclass Bag(dict): pass\nclass Home(Path): pass\n"
    "class Asks(dpframe.UserError): pass\ndef main(): pass\ndef work() -> int: pass\n"
    "VALUE = 3\nmade = Anything()\nhome = Path('.')\nif VALUE == 4:\n  from beside import Net\n",
    "pack/__init__.py": "open('canary', 'w').close()\n",
    "pack/parts.py": "class Nothing: pass\n",
    "pack/empty/code.py": "open('canary', 'w').close()\n",
    "broken.py": "open('canary', 'w').close()\nclass Own(\n",
}
START = ["--config-dir", "mine", "recipe=victim", "callbacks=none", "logger=none"]


# What a config names inside a part: nothing of it may run.
NESTED = """
os.system posix.system os.popen subprocess.Popen builtins.eval builtins.open builtins.getattr
builtins.__import__ importlib.import_module runpy.run_path shutil.rmtree pathlib.Path.write_text
pathlib.Path ctypes.CDLL pickle.loads yaml.unsafe_load hydra.utils.instantiate hydra.utils.call
omegaconf.OmegaConf.load functools.partial functools.reduce operator.methodcaller types.CodeType
numpy.load torch.load torch.save torch.hub.load torch.jit.load torch.ops.load_library
torch.classes.foo.bar torch.from_file torch.compile torch.tensor torch.utils.cpp_extension.load
torch.utils.data.DataLoader torch.package.PackageImporter torch.multiprocessing.spawn
torch.distributed.launcher.api.elastic_launch torch.nn.functional.torch.load
torch.nn.modules.module.torch.load torch.nn.functional.importlib.import_module
torch.nn.functional.has_torch_function torch.nn.functional.boolean_dispatch torch.nn.Module.apply
torch.nn.Module.register_forward_hook torch.nn.Module.__init__.__globals__ torch.nn.Linear.to
torch.nn.Module.__class__ torch.nn.Linear.__subclasses__ torch.optim.Optimizer.load_state_dict
torch.nn.modules.module.functools.partial torch.nn.modules.linear.math.floor torch.nn.Container
torch.nn.utils.rnn.bind torch.nn.utils._deprecation_utils.lazy_deprecated_import
torch.nn.utils.stateless.functional_call torch.nn.utils._named_member_accessor.swap_tensor
torch.nn.ParameterDict torch.nn.modules.container.ParameterDict torch.nn.utils.skip_init
torch.nn.parallel.DistributedDataParallel torch.nn.Parameter torch.nn.utils.fusion.copy.deepcopy
torch.nn.utils.parametrize.register_parametrization torch.nn.utils.prune.custom_from_mask
torch.nn.Embedding.from_pretrained.__func__ torch.optim.swa_utils.update_bn
torch.optim.swa_utils.itertools torch.optim.optimizer.register_optimizer_step_pre_hook
torch.optim.lr_scheduler.partial dpframe.cli.main dpframe.config.build.build dpframe.modes.run.run
dpframe.config.build.locate dpframe.config.locate.importlib.import_module dpframe.config.trust.known
dpframe.config.trust.Trust dpframe.checkpoint.load dpframe.launch.local.launch dpframe.Trainer
dpframe.launch.local.os.system dpframe.recipes.boston.csv.reader dpframe.recipes.boston.Path
dpframe.recipes.boston.Path.write_text dpframe.recipes.boston.torch.load
dpframe.importlib.import_module mine.tasks.os.system mine.tasks.innocent mine.tasks.Net.system
mine.tasks.hidden mine.tasks.wrapper mine.tasks.bound mine.tasks.locked mine.tasks.loads
mine.tasks.logged mine.tasks.caller mine.tasks.whole mine.tasks.methodical mine.tasks.torch.load
mine.tasks.builtins.eval mine.tasks.DataLoader mine.tasks.Backbone mine.tasks.Fine
mine.tasks.torchlike.Backbone mine.tasks.Net.__init__ mine.tasks.Net.mro mine.tasks.dpframe.cli.main
mine.tasks.functools.partial touches.anything antigravity.fly code.InteractiveConsole
"""


def said(attempt: Attempt) -> str:
    """The one line of a refusal; nothing was written or called."""
    assert (attempt.code, attempt.out) == (2, ""), attempt
    assert attempt.err.startswith("dpframe: ") and attempt.err.count("\n") == 1, attempt.err
    assert not {"canary", "outputs", "multirun"} & set(attempt.files)
    return attempt.err.removeprefix("dpframe: ").rstrip()


def nested(target: str) -> list[str]:
    return [*START, f"+task.net={{_target_:{target},_args_:{TOUCH}}}"]


def asked(rows: list[tuple[list[str], list, list]]) -> list[list[str]]:
    """What a config is told with each part checked, and then each node built; "fine" if nothing."""
    return [list(_answers(*row)) for row in rows]


def _answers(typed: list[str], parts: list[dict], nodes: list[dict]) -> Iterator[str]:
    overrides = ["recipe=victim", "callbacks=none", "logger=none", *typed]
    job = composed(overrides, config_dir="mine")
    for part in parts:
        yield _answer(check_targets, replace(job, settings=replace(job.settings, **part)))
    trust = check_targets(job)
    for node in nodes:
        yield _answer(build, node, "x", trust=trust)


def _answer(ask: Callable, *arguments, **more) -> str:
    try:
        ask(*arguments, **more)
    except UserError as error:
        return str(error)
    return "fine"


@pytest.fixture(scope="module")
def answers(place) -> dict[str, list[str]]:
    """To all of ASKED, in one process."""
    answers = fresh(asked, list(ASKED.values()), folder=place)
    assert not (place / "canary").exists()
    return dict(zip(ASKED, answers, strict=True))


def victim(**arguments: object) -> dict:
    return {"task": {"_target_": "mine.tasks.Victim", **arguments}}


def test_no_name_but_a_part_is_called_inside_a_part(answers):
    targets = NESTED.split()
    assert len(targets) > 100
    for target, line in zip(targets, answers["nested"], strict=True):
        assert line.startswith(f"task.net._target_={target}"), line
        is_told = "is not one of the names that a config may call; " in line
        assert is_told or "is not a dotted path" in line or "which builds nothing" in line, line


SYSTEM = {"_target_": "os.system", "_args_": ["touch canary"]}
SLOTS = [  # a part that is none, or has a node somewhere; and what its line says
    ({"task": SYSTEM}, "task._target_=os.system is not a dpframe Task"),
    ({"data": {"_target_": "subprocess.check_output"}}, "check_output is not a dpframe DataModule"),
    ({"callbacks": {"x": {"_target_": "torch.load"}}}, "callbacks.x._target_=torch.load is not a"),
    ({"callbacks": {"x": {"_target_": "mine.tasks.Victim"}}}, "is not a dpframe Callback"),
    ({"logger": {"x": {"_target_": "dpframe.testing.measure.Curves"}}}, "is not a dpframe Log"),
    ({"strategy": {"_target_": "builtins.eval"}}, "strategy._target_=builtins.eval is not a"),
    ({"task": {"_target_": "torch.classes.foo.bar"}}, "foo.bar is not a dpframe Task"),
    ({"task": {"_target_": "torchlike.Fine"}}, "torchlike.Fine is not a dpframe Task"),
    (victim(net=[SYSTEM]), "task.net[0]._target_=os.system is"),
    (victim(net={"a": [[SYSTEM]]}), "task.net.a[0][0]._target_=os.system is"),
    (victim(net={"_partial_": True, **SYSTEM}), "task.net._target_=os.system is"),
    (victim(net={"_target_": "mine.tasks.Net", "_recursive_": False}), "task.net._recursive_: "),
    (victim(net={"_target_": ["os.system"]}), "task.net._target_=['os.system'] is a list"),
    (victim(net={"_target_": SYSTEM}), "is a group of keys; use text"),
    (victim(net={"_target_": 3}), "task.net._target_=3 is a whole number"),
    (victim(net={"_target_": "nowhere.at_all"}), "there is no module nowhere"),
]


def test_no_slot_and_no_depth_lets_another_name_in(answers):
    for (part, line), told in zip(SLOTS, answers["slots"], strict=True):
        assert line in told, (part, told)


HYDRAS = {  # words of a command, and what its line says
    "+task.net._target_=${vars.x}": "task.net._target_=os.system is not one of the names",
    "hydra.launcher._target_=os.system": "hydra.launcher",
    "hydra.sweeper._target_=os.system": "hydra.sweeper",
    "+hydra.sweeper.sampler={_target_:os.system,command:touch canary}": "hydra.sweeper",
    "+hydra.sweeper.sampler=${vars.node}": "hydra.sweeper",
    "+hydra={callbacks:{x:{_target_:os.system}}}": "hydra.callbacks",
    "hydra.job_logging.root={level:INFO}": "hydra.job_logging",
    "+hydra={job:{env_set:{LD_PRELOAD:canary.so}}}": "hydra.job.env_set",
    "hydra.sweeper=null": "hydra.sweeper has no _target_",
    "hydra.launcher=null": "hydra.launcher has no _target_",
    "hydra.sweeper._target_=hydra_plugins.x.Y": "is no plugin of Hydra's",
    "hydra.sweeper._target_=hydra._internal.core_plugins.basic_launcher.BasicLauncher": "no plugin",
    "+hydra.sweeper._recursive_=3": "hydra.sweeper._recursive_: dpframe has no use for this",
}
GIVEN = ["+vars.x=os.system", "+vars.node={_target_:os.system,command:touch canary}"]

PATH = "!!python/object/apply:pathlib.PosixPath"
# What only the command line may say, in an experiment file.
SAYS = {
    "resume: last": "a config file sets resume, which only you can",
    "vars: {x: last}\nresume: ${vars.x}": "a config file sets resume, which only you can",
    "sweep: {resume: theirs}": "a config file sets sweep.resume, which only you can",
    "vars: {x: {resume: theirs}}\nsweep: ${vars.x}": "sweep=${vars.x} is one value; set its keys",
    "hydra: {sweeper: {params: {sweep.resume: theirs}}}": "hydra.sweeper.params.sweep.resume",
    "resume_anyway: true": "a config file sets resume_anyway, which only you can",
    "hydra: {sweeper: {_target_: mine.tasks.Net}}": "is no plugin of Hydra's",
    "hydra: {launcher: {_target_: hydra_plugins.x.Y}}": "is no plugin of Hydra's",
    "hydra: {callbacks: '${vars}'}": "hydra.callbacks: ",
    "hydra: {job: {env_set: {LD_PRELOAD: x.so}}}": "hydra.job.env_set: ",
    "hydra: {job: {name: '#SBATCH x'}}": "a config file sets hydra.job.name",
    "hydra: {job: {name: '${vars}'}}": "a config file sets hydra.job.name",
    "hydra: {job_logging: {root: '${oc.select:hydra.job.num,null}', handlers: {x: {(): os.system}}"
    "}}": "hydra.job_logging: ",
    "hydra: {sweeper: {params: {trusted_modules: '[os]'}}}": "hydra.sweeper.params.trusted_modules",
    "hydra: {sweeper: {params: {+resume: 'a,b'}}}": "hydra.sweeper.params.+resume",
    "hydra: {sweeper: {params: {hydra.run.dir: 'a,b'}}}": "hydra.sweeper.params.hydra.run.dir",
    "hydra: {searchpath: ['file:///tmp']}": "only supported from the primary config",
    "defaults: [override /hydra/launcher: setup]": "a config file sets hydra.launcher.setup, which",
    "defaults: [override /hydra/launcher: srun]": "a config file sets hydra.launcher.srun, which",
    "defaults: [override /hydra/launcher: deep]": "a config file sets hydra.launcher.more.x, which",
    "defaults: [override /hydra/launcher: name]": "a config file sets hydra.launcher.name, which",
    "defaults: [override /hydra/launcher: setup]\n"
    "hydra: {overrides: {hydra: ['+hydra.launcher.setup=[touch canary]']}}": "hydra.overrides: ",
    "hydra: {overrides: {task: ['trusted_modules=[os]']}}": "hydra.overrides: ",
    "defaults: [override /hydra/sweeper: draws]": "a config file sets hydra.sweeper.storage, which",
    "defaults: [override /hydra/sweeper: own]": "sets hydra.sweeper.custom_search_space, which",
}
FINE_SWEEPER = "hydra: {sweeper: {max_batch_size: 3, params: {seed: '1,2'}}}"
OBJECTS = {  # what YAML makes beside texts and numbers
    "logger: {x: {_target_: dpframe.testing.measure.Curves, _args_: "
    "'${hydra:sweeper.params.${oc.env:NOT_SET,a}}'}}\n"
    f"hydra: {{sweeper: {{params: {{a: [{PATH} [../outside]]}}}}}}": "is a PosixPath; use text",
    f"vars: {{x: {PATH} [/etc/passwd]}}": "vars.x is a PosixPath; use text, in quotes",
    "task: {1: 2}": "task.1: its key is no text; put it in quotes",
    "data: {true: 2}": "data.True: its key is no text; put it in quotes",
    f"seed: 0x{'f' * 5000}": "seed has more than 1024 bits; use a smaller number",
}
OPTIONS = {
    "launcher/setup": "setup: [touch canary]",
    "launcher/srun": "srun: --x=y",
    "launcher/deep": "more: {x: 3}",
    "launcher/name": "name: '${recipe}'",
    "sweeper/draws": "storage: sqlite:///x",
    "sweeper/own": "custom_search_space: run",
}


def option(name: str, text: str) -> str:
    """Hydra's own launcher or sweeper, with one more key."""
    kind = name.split("/")[0]
    basic = f"hydra._internal.core_plugins.basic_{kind}.Basic{kind.title()}"
    return f"_target_: {basic}\n{text}\n"


NOTES = {  # overrides in a run directory that are no texts
    "laughs": "- &a0 [x, x, x]\n"
    + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
    "deep": "[" * 5000,
    "long": "- " + "9" * 5000,
}
VOUCHED_FOR = (
    *(*START[2:], "trusted_modules=[os]", " trusted_modules=[os]", "++trusted_modules=[os]"),
    *("resume=x", "hydra.run.dir=x", "hydra/launcher=x", "++hydra.job.chdir=true"),
    f"+task.net={{_target_:os.system,_args_:{TOUCH}}}",
)
SINGS = "open('canary', 'w').close()\nfrom mine.tasks import Victim\nclass Own(Victim): pass\n"
PLACE = {
    **FILES,
    **{
        f"mine/experiment/x{number}.yaml": f"# @package _global_\n{text}\n"
        for number, text in enumerate([*SAYS, *OBJECTS, FINE_SWEEPER])
    },
    **{f"mine/hydra/{name}.yaml": option(name, text) for name, text in OPTIONS.items()},
    **{f"{name}/.hydra/overrides.yaml": text for name, text in NOTES.items()},
    "theirs/.hydra/overrides.yaml": "".join(f"- '{each}'\n" for each in VOUCHED_FOR),
    "run/.hydra/overrides.yaml": "- recipe=victim\n- task._target_=run.own.Own\n",
    **dict.fromkeys(("run/own.py", "run/checkpoints/beside.py", "down/beside.py"), SINGS),
    **dict.fromkeys(("linked/own.py", "far.py"), SINGS),
    **{f"{name}/checkpoints/last.ckpt": "not looked at" for name in (*NOTES, "theirs", "run")},
    **dict.fromkeys(("down/some.ckpt", "linked/held/last.ckpt"), "not looked at"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = write(tmp_path_factory.mktemp("place"), PLACE)
    (place / "linked" / "checkpoints").symlink_to("held")
    (place / "linked" / "far.py").symlink_to("../far.py")
    return place


HYDRAS_LINES = [([*START, *GIVEN, word], says) for word, says in HYDRAS.items()]
BESIDE = ", beside what this run starts from; "
BEGUN = [*START[:2], *START[3:], "recipe=victim"]
FROM_RUN = [*BEGUN, "resume=run/checkpoints/last.ckpt"]
COMMANDS = {  # lines of a test, each with what it is told
    "keys": [
        *HYDRAS_LINES,
        *((["-m", *line], says) for line, says in HYDRAS_LINES if "hydra" in says),
        *(
            ([mode, *nested("os.system")], "task.net._target_=os.system is")
            for mode in ("-m", "mode=predict", "mode=verify", "trainer.gpus=2")
        ),
        *(
            ([*mode, *START[:2], f"recipe={recipe}"], says)
            for recipe, says in (("vouches", "trusted_modules"), ("unsafe", ""))
            for mode in ([], ["-m"])
        ),
        # Resolved once, it is text; resolved twice, as Hydra would, it is a node that is let pass.
        (
            [*START, "+task.net='\\${oc.create:\"{_target_: torchlike.touch, path: canary}\"}'"],
            "Victim has no parameter to train",
        ),
    ],
    "files": [
        *(
            ([*START, f"experiment=x{number}", "-c", "job"], says)
            for number, says in enumerate([*SAYS.values(), *OBJECTS.values()])
        ),
        ([*START, "trusted_modules=os"], "trusted_modules=os is text; use a list of names, e.g. ["),
        ([*START, "trusted_modules=null"], "trusted_modules=null is nothing; use a list of names"),
    ],
    "notes": [
        ([*BEGUN, "resume=theirs/checkpoints/last.ckpt"], "net._target_=os.system is not one of"),
        *(
            ([*BEGUN, f"resume={name}/checkpoints/last.ckpt"], f"{name}/.hydra/ov")
            for name in NOTES
        ),
    ],
    "beside": [
        (FROM_RUN, BESIDE),
        ([*FROM_RUN, "task._target_=run.checkpoints.beside.Own"], BESIDE),
        (
            [*FROM_RUN, "task._target_=mine.tasks.Victim", "+callbacks.x._target_=run.own.Own"],
            BESIDE,
        ),
        ([*BEGUN, "checkpoint=down/some.ckpt", "task._target_=down.beside.Own"], BESIDE),
        ([*BEGUN, "resume=linked/checkpoints/last.ckpt", "task._target_=linked.own.Own"], BESIDE),
        ([*BEGUN, "resume=linked/checkpoints/last.ckpt", "task._target_=linked.far.Own"], BESIDE),
    ],
}


@pytest.fixture(scope="module")
def done(place) -> dict[str, list[Attempt]]:
    """All of COMMANDS, in one process."""
    each = iter(attempts([line for rows in COMMANDS.values() for line, _ in rows], place))
    return {name: [next(each) for _ in rows] for name, rows in COMMANDS.items()}


def assert_refused(name: str, done: dict[str, list[Attempt]]) -> None:
    for (line, says), attempt in zip(COMMANDS[name], done[name], strict=True):
        told = said(attempt)
        assert says in told and len(told) < 400, (line, told)


def test_no_key_of_hydras_and_no_mode_calls_it_either(done):
    assert_refused("keys", done)


def test_what_names_code_or_a_run_to_go_on_with_comes_from_the_command_line_alone(done, place):
    assert_refused("files", done)
    typed = [
        [*START, "experiment=x0", "resume=null"],
        [*START, f"experiment=x{len(SAYS | OBJECTS)}"],
    ]
    for attempt in attempts([[*line, "-c", "job"] for line in typed], place):
        assert attempt.code == 0, attempt.err


def test_a_run_directory_from_a_stranger_cannot_vouch_for_itself(done):
    """A resume takes the overrides that are written there."""
    assert_refused("notes", done)


def test_python_in_a_run_directory_or_beside_a_checkpoint_is_not_imported(done):
    """Nor where the folder of checkpoints, or the module, is a link."""
    assert_refused("beside", done)


UNSAID = {
    "cleanup": "is a module, which builds nothing",
    "cleanup.Nothing": "cleanup has no Nothing; ",
    "cleanup.Anythin": "cleanup has no Anythin; did you mean Anything?",
    **dict.fromkeys(
        [
            *("cleanup.Anything", "cleanup.Bag", "cleanup.Home", "cleanup.Asks", "cleanup.main"),
            *("cleanup.work", "cleanup.VALUE", "cleanup.made", "cleanup.home", "cleanup.os"),
            *("cleanup.os.system", "cleanup.Path", "cleanup.Net", "cleanup.Anything.x"),
            *("cleanup.dpframe.cli.main", "cleanup.Asks.training_step", "pack.parts.Nothing"),
        ],
        "is not a dpframe Task; annotate a function that returns one with '-> Task', or add",
    ),
    "pack.parts": "is a module, which builds nothing",
    "pack.empty.code.Own": "has no Own",
    "pack.nowhere.Own": "pack has no nowhere",
    "broken.Own": "broken can't be read: '(' was never closed (broken.py, line 2)",
    "nowhere.Own": "there is no module nowhere",
}


def test_no_module_is_imported_that_does_not_say_it_has_such_a_part(answers):
    for (name, line), told in zip(UNSAID.items(), answers["unsaid"], strict=True):
        assert told.startswith(f"task._target_={name}") and line in told


def test_what_lies_in_a_checkout_beside_dpframe_is_not_a_part_of_it(tmp_path, monkeypatch):
    """A checkout finds conf/ and recipes/ by its `__path__`, which has the whole folder."""
    sings = f"open({str(tmp_path / 'canary')!r}, 'w').close()\n"
    parts = "import dpframe\nclass Task(dpframe.Task): pass\ndef main(): pass\n"
    write(tmp_path, {"cleanup.py": sings + parts})
    monkeypatch.setattr(dpframe, "__path__", [*dpframe.__path__, str(tmp_path)])
    for name in ("Task", "main"):
        with pytest.raises(UserError, match="dpframe has no cleanup"):
            NOBODY.part(f"dpframe.cleanup.{name}", "task", Task)
        with pytest.raises(UserError, match="dpframe has no cleanup"):
            NOBODY.nested(f"dpframe.cleanup.{name}", "task.net")
    assert not (tmp_path / "canary").exists()


def test_a_source_made_to_keep_its_reader_busy_is_read_in_no_time(tmp_path, monkeypatch):
    elifs = "".join(f"elif {n}:\n    pass\n" for n in range(900))
    write(
        tmp_path,
        {
            "bombmod.py": "A = A | A | A | A\nB = B.a | B.b | B.c | B.d\nC = '1' + "
            + "1 + " * 900
            + "1\n",
            "minus.py": f"A = {'-' * 100_000}1\n",
            "elifs.py": f"from dpframe import Task as Own\nif 1:\n    pass\n{elifs}",
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not any(locate.says(f"bombmod.{name}", Task) for name in "ABC")
    assert locate.says("elifs.Own", Task)
    with pytest.raises(UserError, match=r"^task._target_=minus.A: minus can't be read: "):
        locate.refuse_unsaid("minus.A", "task._target_", Task)


LINES = {
    "os.system": "=os.system is not one of the names that a config may call; if you know what it "
    "does, add trusted_modules=[os.system] to the command",
    "mine.tasks.innocent": "=mine.tasks.innocent is posix.system, which is not one of the names",
    "mine.tasks.Backbone": "is torchlike.Backbone, which is not one of the names that a config may "
    "call; if you know what it does, add trusted_modules=[torchlike] to the command",
    "torch.load": "=torch.load is not one",
    "numpy.load": "add trusted_modules=[numpy] to the command",
}


def test_a_refusal_names_what_it_really_is_and_the_key_to_add(answers):
    for line, told in zip(LINES.values(), answers["lines"], strict=True):
        assert line in told


def test_the_canary_sings_when_it_is_let_out(tmp_path):
    """Else the other tests would pass whatever ran."""
    place = write(tmp_path, FILES)
    done = run([*nested("os.system"), "trusted_modules=[os.system]"], place)
    assert done.returncode != 0 and (place / "canary").is_file(), done.stderr


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
WIDTH, PARTIAL = {"width": 1}, {"_partial_": True}
FINE = [
    {"net": {**LINEAR, "_target_": "mine.tasks.Net"}},
    {"net": {**LINEAR, "_target_": "mine.deep.nets.Deep"}},
    {"net": {"_target_": "mine.tasks.Net.of", **WIDTH}},
    {"net": {"_target_": "mine.tasks.maker", **WIDTH}},
    {"net": {"_target_": "mine.tasks.cached", **WIDTH}},
    {"net": {"_target_": "mine.tasks.undifferentiated", **WIDTH}},
    {"net": {"_target_": "torch.nn.utils.parametrizations.weight_norm", "module": LINEAR}},
    {"net": {"_target_": "torch.nn.Embedding.from_pretrained", "_partial_": True}},
    {"net": {**LINEAR, "_target_": "torch.nn.modules.linear.Linear"}},
    {"net": {**LINEAR, "_target_": "mine.tasks.narrow"}},
    {"net": {"_target_": "torch.optim.swa_utils.get_ema_multi_avg_fn"}},
    {"net": {"_target_": "torch.nn.functional.gelu", "_partial_": True}},
    {"net": {"_target_": "torch.nn.functional.conv2d", "_partial_": True}},
    {"net": {"_target_": "torch.nn.functional.max_pool2d", "_partial_": True}},
    {"net": {"_target_": "torch.nn.init.xavier_uniform_", "_partial_": True}},
    {"net": {"_target_": "torch.nn.Sequential", "_args_": [LINEAR, {"_target_": "torch.nn.ReLU"}]}},
    {"net": {"_target_": "dpframe.recipes.lenet.LeNet", "_partial_": True}},
    {"net": {"_target_": "collections.OrderedDict", "a": LINEAR}},
    {"net": {"_target_": "builtins.tuple", "_args_": [[1, 2]]}},
    {"scheduler": {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 1, **PARTIAL}},
    {"scheduler": {"_target_": "torch.optim.swa_utils.SWALR", "swa_lr": 1, **PARTIAL}},
    {"optimizer": {"_target_": "mine.tasks.undifferentiated", "_partial_": True}},
    {"optimizer": {"_target_": "mine.tasks.Maker"}},
    {"net": LINEAR, "_target_": "mine.tasks.Typed"},
    {"_target_": "mine.tasks.make_annotated"},
    {"_target_": "mine.tasks.make_task"},
    {"_target_": "beside.Victim"},
]


def test_what_is_ones_own_and_torchs_needs_no_key(answers):
    for part, line in zip(FINE, answers["fine"], strict=True):
        assert line == "fine", part


def test_what_was_vouched_for_may_be_called(answers):
    assert answers["a package"] == ["fine", "fine"]
    *alone, other = answers["names"]
    assert alone == ["fine"] * 3 and "torchlike.Fine is not one" in other


GIVES = {
    "os.system": "is posix.system, which is not one of the names",
    "os": "is os, which is not one of the names",
    "pathlib.Path": "is pathlib.Path, which is not one",
    "torch.load": "torch.serialization.load",
    "torch.nn.utils.stateless.functional_call": "functional_call, which is not one",
    "torch.nn.ParameterDict": "ParameterDict, which is not one",
    "torch.nn.Linear": "",
    "torch.nn.functional.gelu": "",
    "torch.tanh": "",
    "mine.tasks.Net": "",
    "mine.tasks.narrow": "",
}


def test_a_node_gives_no_other_one_a_function_that_a_config_may_not_call(answers):
    """A function of one's own may look one up by its name, and a stranger may call it."""
    *gives, average = answers["gives"]
    for path, line in zip(GIVES, gives, strict=True):
        if GIVES[path]:
            assert line.startswith("x._target_=mine.tasks.named(…) is ") and "; if you know" in line
            assert GIVES[path] in line
        else:
            assert line == "fine", path
    assert average == "fine"  # a function within a known one


MEAN = {"_target_": "torch.optim.swa_utils.get_ema_multi_avg_fn"}
VOUCHED = ("mine.tasks.Backbone", "torchlike.Backbone", "torch.tensor", "torchlike.Fine")
PARTIALS = [victim(net={"_target_": name, "_partial_": True}) for name in VOUCHED]
ASKED = {  # overrides, parts to check, and nodes to build
    "nested": ([], [victim(net={**SYSTEM, "_target_": name}) for name in NESTED.split()], []),
    "slots": ([], [part for part, _ in SLOTS], []),
    "unsaid": ([], [{"task": {"_target_": name}} for name in UNSAID], []),
    "lines": ([], [victim(net={**SYSTEM, "_target_": name}) for name in LINES], []),
    "fine": ([], [victim(**part) for part in FINE], []),
    "a package": (["trusted_modules=[torchlike]"], PARTIALS[:2], []),
    "names": (["trusted_modules=[torchlike.Backbone,torch.tensor]"], PARTIALS, []),
    "gives": ([], [], [*({"_target_": "mine.tasks.named", "path": path} for path in GIVES), MEAN]),
}


def test_what_is_known_are_layers_optimisers_schedulers_and_a_list_of_functions():
    """Every name below torch.nn and torch.optim, private ones too, by whatever path."""
    from torch import nn, optim

    kinds = (nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler)
    listed = {f"{at}.{name}" for at, names in FUNCTIONS.items() for name in names.split()}
    functions = [known()[name] for name in listed if name in known()]
    walked = dict(_below("torch.nn", nn) | _below("torch.optim", optim))
    assert len(walked) > 3000
    for path, target in walked.items():
        if path in known():
            assert not any(part.startswith("_") for part in path.split(".")), path
        target = getattr(target, "__origin__", target)  # list[int] is list
        if NOBODY.allows(target):
            is_class = isinstance(target, type) and issubclass(target, kinds)
            is_named = any(target is each for each in [*functions, *known().values()])
            is_bound = path.endswith(("Embedding.from_pretrained", "Bag.from_pretrained"))
            assert is_class or is_named or is_bound, path
            assert path.split(".")[-1] not in ("ParameterDict", "Container", "bind"), path


def _below(path: str, owner: object, depth: int = 4) -> dict[str, object]:
    found = {}
    for name in dir(owner):
        try:
            value = getattr(owner, name)
        except Exception:
            continue
        if callable(value) and not name.startswith("__"):
            found[f"{path}.{name}"] = value
        is_inside = str(getattr(value, "__name__", "")).startswith(("torch.nn", "torch.optim"))
        if depth and type(value) is type(sys) and is_inside or depth and isinstance(value, type):
            found |= _below(f"{path}.{name}", value, depth - 1 if type(value) is type(sys) else 0)
    return found


STOLEN = (
    *("yaml", "argparse", "hydra", "omegaconf", "antlr4", "typing", "json", "logging", "tempfile"),
    *("torch", "numpy", "tensorflow", "opt_einsum", "pickle", "multiprocessing", "hydra_plugins.x"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_nothing_in_the_current_directory_stands_for_a_package(tmp_path):
    """Not for one that is not installed either; a config's own module is found there, at last."""
    sings = "import os\nprint(__name__)\nopen(os.environ['CANARY'], 'a').write(__name__)\n"
    place = write(tmp_path, FILES | {f"{n.replace('.', '/')}.py": sings for n in STOLEN})
    run = ("recipe=shapes", "trainer.max_steps=1", "callbacks=none", "hydra.run.dir=out")
    ddp = ("strategy=ddp", "trainer.gpus=2", "trainer.accelerator=cpu", "callbacks=none")
    script = Path(sys.executable).with_name("dpframe")
    commands = [
        [sys.executable, "-P", "-m", "dpframe", "--help"],
        [sys.executable, "-m", "dpframe", *run],
        [sys.executable, "-m", "dpframe", *START, *ddp, "mode=validate", "checkpoint=none"],
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


def test_a_part_vouches_for_its_own_package_of_a_shared_namespace(tmp_path, monkeypatch):
    code = "import dpframe\n\nclass Part(dpframe.Task):\n    pass\n"
    for name in ("ours", "theirs"):
        write(tmp_path / name, {f"shared_by_two/{name}/__init__.py": code})
        monkeypatch.syspath_prepend(tmp_path / name)
    import shared_by_two.ours
    import shared_by_two.theirs

    trust = Trust().within(shared_by_two.ours.Part)
    assert trust.allows(shared_by_two.ours.Part)
    assert not trust.allows(shared_by_two.theirs.Part)
