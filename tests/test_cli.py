"""A mistake is one line on stderr, exit code 2, and leaves nothing behind; help is quick."""

import gc
import itertools
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from unittest.mock import patch

import pytest
from attempted import refusals
from command import ROOT, attempts, cold_refusals, environment, write
from forked import fresh

from dpframe.cli import main
from dpframe.config.compose import compose, from_hydra
from dpframe.config.loader import ConfigLoader
from dpframe.errors import UserError

BOSTON = "# @package _global_\ndefaults:\n  - boston\n  - _self_\n"

# What is typed after `recipe=boston`, and what the one line has to say.
BEFORE_TORCH = {
    "recipe=bostn": "did you mean boston?",
    "recip=boston": "did you mean recipe?",
    "strategy=dpp": "strategy=dpp: there is no such strategy; did you mean ddp?",
    "experiment=debgu": "did you mean debug?",
    "strategy=dp": "there is no such strategy; did you mean data_parallel?",
    "callbacks=model_checkpoint": "no such callback; callbacks.checkpoint.* is on by default",
    "callbacks=lr_monitor": "there is no such callback; step/lr is always logged",
    "callbacks=early_stoping": "there is no such callback; did you mean early_stopping?",
    "strategy=null": "name one strategy; there is: auto, cpu",
    "strategy=-Inf": "name one strategy; there is: auto, cpu",
    "strategy=[cpu,ddp]": "a run has one strategy; -m strategy=cpu,ddp runs each",
    "+strategy=cpu": "strategy has a value already; write strategy=… without the +",
    "trainer.max_epoch=3": "did you mean trainer.max_epochs?",
    "+trainer.max_epoch=3": "did you mean trainer.max_epochs?",
    "~trainer.max_epoch": "did you mean trainer.max_epochs?",
    "trainr.max_epochs=3": "did you mean trainer.max_epochs?",
    "+foo=1": "there is no key foo; there is: callbacks, checkpoint, ",
    "lr=0.1": "there is no key lr; did you mean task.optimizer.lr?",
    "gpus=2": "there is no key gpus; did you mean trainer.gpus?",
    "num_workers=2": "did you mean data.workers?",
    "ckpt_path=best": "did you mean checkpoint?",
    "test=true": "there is no key test; did you mean test_after_fit=true?",
    "+train=false": "there is no key train; did you mean mode=fit?",
    "debug=default": "there is no key debug; did you mean experiment=debug?",
    "trainer.accumulate_grad_batches=2": "did you mean trainer.accumulate?",
    "trainer.num_nodes=2": "did you mean strategy=ddp, started by torchrun?",
    "trainer.gradient_clip_val=1": "did you mean trainer.clip_norm?",
    "trainer.fast_dev_run=true": "did you mean experiment=debug?",
    "ddp": "'ddp' is not an override; did you mean strategy=ddp?",
    "test": "'test' is not an override; did you mean mode=test?",
    "train": "'train' is not an override; did you mean mode=fit?",
    "trainer/max_epochs=3": "no key trainer/max_epochs; did you mean trainer.max_epochs?",
    "trainer/gpu=2": "no key trainer/gpu; did you mean trainer.gpus?",
    "task/optimizer=sgd": "no key task/optimizer; did you mean task.optimizer?",
    "task/schedul=linear": "no key task/schedul; did you mean task/schedule?",
    "trainer.strategy=ddp": "no key trainer.strategy; did you mean strategy?",
    "trainer.callbacks=ema": "no key trainer.callbacks; did you mean callbacks?",
    "+callbacks=ema": "callbacks has a value already; write callbacks=… without the +",
    "task.net.width=3": "there is no key task.net.width; its parts are the list task.net._args_",
    "callbacks.sam._target_=my.SAM": "sam._target_; +callbacks.sam._target_=… adds it",
    "task.metrics.f1._target_=my.F1": "f1._target_; +task.metrics.f1._target_=… adds it",
    "task.optimizer.groups.x.match=net": "match; +task.optimizer.groups.x.match=… adds it",
    "vars.mine=1": "+vars.mine=… adds it",
    "+trainer.max_epochs=3": "write trainer.max_epochs=… without the +",
    "trainer.max_epochs.x=3": "trainer.max_epochs is one value",
    "trainer.max_epochs=ten": "trainer.max_epochs=ten is text; use a whole number or null",
    "trainer.compile.mode=reduce": "did you mean reduce-overhead?",
    "trainer.compile=fast": "is not one of default, reduce-overhead",
    "callbacks.early_stopping.patience=3": "callbacks=early_stopping has it",
    "callbacks.mine.x=3": "+callbacks.mine._target_=… adds it",
    "seed=1,2": "several values are a sweep, which needs -m; for one list write seed=[1,2]",
    "data.file=a,b": "for one text \"data.file='a,b'\"",
    "trainer.gpus=${trainer.gpu}": "no key trainer.gpu; did you mean trainer.gpus?",
    "callbacks={zzz:{x:1}}": "no key callbacks.zzz; +callbacks.zzz._target_=… adds it",
    "task.optimizer={l:1}": "no key task.optimizer.l; did you mean task.optimizer.lr?",
    "task.scheduler._target_=x": "name it, too: +task.scheduler._target_=… +task",
    "task.net._args_.9.bias=1": "task.net._args_ is a list; set all of it, as task.net._args_",
    "callbacks.chekpoint.keep=1": "did you mean callbacks.checkpoint.keep?",
    "~task": "~task: every recipe has one; set its keys, as task.KEY=VALUE",
    "seed=${nosuch:1}": "seed: Unsupported interpolation type nosuch",
    "checkpoint=last": "there is no run with a checkpoint in outputs/boston",
    "checkpoint=missing.ckpt": "checkpoint=missing.ckpt: there is no such file",
    "checkpoint=.": "is a directory; name a file in it",
    "checkpoint=a=b": "if that is text, quote it: \"checkpoint='a=b'\"",
    "checkpoint=été": "if that is text, quote it",
    "checkpoint='": "check its quotes",
    "resume=last": "resume=last: there is no run with a checkpoint in outputs/boston",
    "resume=missing": "there is no such file; use resume=last, of the newest run, or a",
    "resume=best": "a run continues from its newest checkpoint: use resume=last; check",
    "checkpoint=bets": "checkpoint=bets: there is no such file; did you mean checkpoint=best?",
    "resume=lst": "resume=lst: there is no such file; did you mean resume=last?",
    "hydra.run.dir=": "hydra.run.dir is empty; name a directory",
    "hydra.run.dri=x": "did you mean hydra.run.dir?",
    "hydra.job.chdir=true": "dpframe has no use for this",
    "trainer": "'trainer' is not an override; write key=value",
}

# What the command refuses before it composes.
OPTIONS = {
    "--hlp": "there is no option --hlp; did you mean --help?",
    "--strategy=ddp": "there is no option --strategy; write strategy=ddp, without dashes",
    "--trainer.gpus": "there is no option --trainer.gpus; write trainer.gpus=VALUE, without dashes",
    "--gpus 2": "there is no option --gpus; write trainer.gpus=VALUE, without dashes",
    "--max-epochs=3": "there is no option --max-epochs; write trainer.max_epochs=3, without dashes",
    "--trainer.devices 2": "write trainer.gpus=VALUE, without dashes",
    "--model.learning_rate 0.1": "write task.optimizer.lr=VALUE, without dashes",
    "--precision bf16": "write trainer.precision=VALUE, without dashes",
    "--fast-dev-run": "write experiment=debug, without dashes",
    "--output-dir x": "write hydra.run.dir=VALUE, without dashes",
    "--fp16": "write trainer.precision=fp16, without dashes",
    "--test": "write mode=test, without dashes",
    "--config mine": "there is no option --config; did you mean --config-dir?",
    "--embedding 3": "there is no option --embedding; write KEY=VALUE, or see dpframe --help",
    "--resolve": "--resolve goes with --cfg job",
    "--cfg=hydra --resolve": "--resolve goes with --cfg job",
    "--cfg=jub": "choose from",
    "--config-dir=. --config-dir=mine": "twice, . and mine; keep one, and add the other by hydra.",
    "--config-dir=missing": "--config-dir=missing can't be read: No such file",
}

# Of BEFORE_TORCH, one of each kind, which the whole command refuses; the others are composed.
TYPED = [
    "recipe=bostn",
    "trainer.max_epoch=3",
    "lr=0.1",
    "trainer.max_epochs=ten",
    "callbacks.early_stopping.patience=3",
    "checkpoint=last",
    "checkpoint=été",
    "hydra.run.dri=x",
]

# Keys of a sweep, typed without -m; a file may have them.
OF_A_SWEEP = {
    each: f"dpframe: {each} is of a sweep; add -m, or leave it out"
    for each in ("sweep.compare=task.optimizer.lr", "sweep.over=[seed,data.fold]", "sweep.jobs=2")
}

# What the settings refuse, whatever composed them.
REFUSED = {
    "trainer.max_epochs=1.5": "trainer.max_epochs=1.5 is a fraction; use a whole number",
    "trainer.max_epochs=null": "training would never end",
    "trainer.precision=16": "bf16, fp16, bf16-true, 16-true; did you mean fp16?",
    "trainer.precision=fp32": "did you mean 32?",
    "trainer.precision=bf32": "is not one of 32, 64, bf16, fp16, bf16-true, 16-true",
    "trainer.precision=fp8": "is not one of 32, 64, bf16, fp16, bf16-true, 16-true",
    "trainer.accelerator=tpu": "is not one of auto, cpu, cuda, mps, xpu",
    "trainer.accelerator=gpu": "is not one of auto, cpu, cuda, mps, xpu; did you mean cuda?",
    "mode=train": "; did you mean fit?",
    "trainer.deterministic=maybe": "use true or false",
    "trainer.channels_last=auto": "trainer.channels_last=auto is text; use true or false",
    "trainer.gpus=[0,0]": "list of different ids",
    "trainer.gpus=-1": "trainer.gpus=-1 is no count; for all GPUs use trainer.gpus=all",
    "trainer.gpus=[-1]": "trainer.gpus=[-1] is neither",
    "trainer.gpus=0": "leave it out, and use strategy=cpu",
    "trainer.gpus=1.5": "neither a count",
    "trainer.gpus=GPU-x": "use e.g. trainer.gpus=4, or trainer.gpus=[0,1,3]",
    "trainer.gpus=[0,four]": "trainer.gpus=[0, 'four'] is neither",
    "trainer.clip_norm=nan": "trainer.clip_norm=nan is out of range; use a number above 0",
    "data.batch_size=0": "data.batch_size=0 is out of range; use 1 or more",
    "data.batch_size=1.5": "data.batch_size=1.5 is a fraction; use a whole number",
    "data.batch_size=null": "data.batch_size=null is nothing; use a whole number",
    "data.workers=-1": "data.workers=-1 is out of range; use 0 or more",
    "data.workers=atuo": "data.workers=atuo is text; use a whole number or auto",
    "data.persistent_workers=on": "data.persistent_workers=on is text; use true or false or auto",
    "data.pin_memory=auto": "data.pin_memory=auto is text; use true or false",
    "task=5": "task=5 is one value; set its keys, as task.KEY=VALUE",
    "mode=null": "mode=null is nothing; use text",
    "predict=true": "predict=true: did you mean mode=predict?",
    "tune=true": "tune=True is one value; set its keys, as tune.KEY=VALUE",
    "predict.columns=id": "predict.columns=id is text; use a list of names or null",
    "predict.columns=[null]": "predict.columns=[null]: an item of it is null; use a list of names",
    "tags=[a,null]": "tags=[a,null]: an item of it is null; use a list of names",
    "compare.gpus=[1,null]": "[1,null]: an item of it is null; use a list of whole numbers or null",
    "tune.find=lr": "tune.find=lr is text; use a list of names, e.g. [lr]",
    "compare.gpus=[1,x]": "compare.gpus=x is text; use a list of whole numbers or null",
    "trainer.log_every=true": "trainer.log_every=True is a truth value; use a whole number",
    "trainer.limit_val_batches=few": "trainer.limit_val_batches=few is text; use a number or null",
    "mode=tset": "mode=tset is not one of fit, validate, test, predict",
    "seed=-1": "seed=-1 is out of range",
    "seed=abc": "seed=abc is text; use a whole number",
}

WITH_TORCH = {
    "task._target_=dpframe.recipes.boston.Bostn": "boston has no Bostn; did you mean Boston?",
    "task._target_=dpframe.recipes.bostn.Boston": "dpframe.recipes has no bostn; did you mean b",
    "task.optimizer._target_=torch.optim.Adm": "torch.optim has no Adm; did you mean Adam?",
    "task.optimizer._target_=torch.optim.Sgd": "torch.optim has no Sgd; did you mean SGD?",
    "task.optimizer.lr=-1": "task.optimizer.lr=-1: Adam says: Invalid learning rate: -1",
    "task.optimizer._target_=torh.optim.Adam": "there is no module torh; did you mean torch?",
    "task.optimizer._target_=Adam": "=Adam is not a complete path; write task.optimizer._target_=",
    "task.optimizer._target_=optim.sgd": "write task.optimizer._target_=torch.optim.SGD",
    "task.net._target_=nn.Linear": "write task.net._target_=torch.nn.Linear",
    "+callbacks.x._target_=EMA": "write callbacks.x._target_=dpframe.callbacks.EMA",
    "task.optimizer._target_=torch": "=torch is a module, which builds nothing; name a class",
    "task.optimizer=sgd": "=sgd is text; name its class: task.optimizer._target_=torch.optim.SGD",
    "task.optimizer=mine": "=mine is text; name its class: task.optimizer={_target_:…}",
    "task.net=5": "task.net=5 is a whole number; name its class: task.net={_target_:…}",
    "task.optimizer._partial_=false": "makes its Adam later; add ++task.optimizer._partial_",
    "task.optimizer._target_=": "is not a dotted path",
    "task._target_=torch.nn.Linear": "is not a dpframe Task",
    "data.batch_sise=3": "BostonData takes no such argument; did you mean batch_size?",
    "task.optimizer.l=1": "Adam takes no such argument; did you mean lr?",
    "+strategy.gpu=3": "auto takes no such argument; did you mean gpus?",
    "~task.net": "task.net is missing; Boston needs it, add +task.net=…",
    "task.optimizer.lr=abc": "task.optimizer.lr=abc is text; use a number",
    "+task.optimizer.betas=[5,2]": "task.optimizer: Adam says: Invalid beta parameter",
    "callbacks.checkpoint=0": "=0 has no _target_; name its class, or leave it out",
    "callbacks.checkpoint=5": "class, or leave it out by callbacks.checkpoint=null",
    "callbacks.checkpoint.mode=mni": "callbacks.checkpoint.mode=mni is not one of min, max",
    "data.file=missing.csv": "cannot read missing.csv",
    "checkpoint=text.ckpt": "checkpoint=text.ckpt can't be used",
    "hydra.run.dir=text.ckpt": "the run directory text.ckpt can't be made: File exists",
    "hydra.run.dir=text.ckpt/x": "can't be made",
    "trainer.gpus=2 strategy=cpu": "CPU is one replica",
    "trainer.gpus=999 strategy=ddp trainer.accelerator=cpu": "asks for 999 replicas on",
}

RECIPES = {
    "empty": ("", "in recipe/empty.yaml, there is no key in it"),
    "nopackage": ("task: {}\n", "its first line must be '# @package _global_'"),
    "notask": ("# @package _global_\nrecipe: x\n", "task has no _target_"),
    "broken": (BOSTON + "data: [1\n", "broken.yaml, line "),
    "tab": (BOSTON + "\tdata: 1\n", "tab.yaml, line "),
    "twice": ("# @package _global_\nrecipe: a\nrecipe: b\n", "found duplicate key recipe"),
    "typo": (BOSTON + "trainer: {max_epoch: 3}\n", "did you mean trainer.max_epochs?"),
    "top": (BOSTON + "trianer: {max_epochs: 3}\n", "did you mean trainer?"),
    "kind": (BOSTON + "trainer: {max_epochs: ten}\n", "trainer.max_epochs=ten is text"),
    "scalar": (BOSTON + "trainer: 3\n", "in recipe/scalar.yaml, trainer=3 is one value; set"),
    "range": (BOSTON + "data: {workers: -1}\n", "data.workers=-1 is out of range"),
    "nowhere": (BOSTON + "seed: ${data.batchsize}\n", "did you mean data.batch_size?"),
    "unfilled": (BOSTON + "vars:\n  s: ???\n", "vars.s is not set; set vars.s=VALUE"),
    "referred": (BOSTON + "seed: ${vars.s}\nvars:\n  s: ???\n", "vars.s is not set; set"),
    "parent": ("# @package _global_\ndefaults:\n  - bosten\n", "in recipe/parent.yaml, recipe=bos"),
    "circle": ("# @package _global_\ndefaults:\n  - circle\n", "name each other in a circle"),
    "lenet": (BOSTON, "both dpframe's and"),
    "chosen": (
        BOSTON.replace("- _", "- /callbacks: ema\n  - _"),
        "chosen already; write override /callbacks: ema",
    ),
    "group": (
        BOSTON.replace("- _", "- callbacks: ema\n  - _"),
        "no group recipe/callbacks; write override /callbacks: ema",
    ),
    "inner": (
        BOSTON.replace("- _", "- override callbacks: ema\n  - _"),
        "write override /callbacks: OPTION",
    ),
    "half": (BOSTON.replace(" _global_", ""), "has the line '# @package'; write '# @package _gl"),
    "strategy": (BOSTON.replace("- _", "- override /strategy: dpp\n  - _"), "did you mean ddp?"),
}


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """What the command prints for each line, what composing says of each of the others, and the
    heavy modules that these lines have imported."""
    folder = tmp_path_factory.mktemp("light")
    files = {f"recipe/{name}.yaml": text for name, (text, _) in RECIPES.items()}
    files["recipe/copied.yaml"] = (ROOT / "conf/recipe/boston.yaml").read_text(encoding="utf-8")
    write(folder / "mine", files | {"net/small.yaml": "# Few.\n"})
    lines = [
        *map(typed, [*OPTIONS, *TYPED, *OF_A_SWEEP]),
        of_recipe("broken"),
        *map(odd, ODD_OPTIONS),
    ]
    lines += [line.split(" ") for line in SHOWN]
    composed = [*map(typed, BEFORE_TORCH), *(["recipe=boston", word] for word in ODD)]
    of_recipes = [[f"recipe={name}"] for name in RECIPES]
    given = [(composed, None), (of_recipes, "mine")]
    done, said, heavy = cold_refusals(lines, given, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["mine"]
    refused = [
        (tuple(line), one)
        for (each, _), all in zip(given, said, strict=True)
        for line, one in zip(each, all, strict=True)
    ]
    return dict(zip(map(tuple, lines), done, strict=True)), dict(refused), heavy


def typed(words):
    return words.split(" ") if words.startswith("recipe=") else ["recipe=boston", *words.split(" ")]


def of_recipe(name):
    return ["--config-dir=mine", f"recipe={name}"]


def odd(word):
    return ["recipe=boston", word, "--cfg=job"]


def test_a_mistake_is_one_line(light):
    told = OPTIONS | {words: BEFORE_TORCH[words] for words in TYPED} | OF_A_SWEEP
    said = {(words, says): light[0][*typed(words)] for words, says in told.items()}
    said["broken", RECIPES["broken"][1]] = light[0][*of_recipe("broken")]
    assert_refused(said, files=["mine"])
    composed = {(words, says): light[1][*typed(words)] for words, says in BEFORE_TORCH.items()}
    composed |= {(name, says): light[1][f"recipe={name}",] for name, (_, says) in RECIPES.items()}
    wrong = {line: one for line, one in composed.items() if line[1] not in one or "\n" in one}
    assert wrong == {}


def test_a_recipe_that_is_misspelt_alone_is_told_with_the_key():
    (line,) = refusals([["recipie=boston"]], None)
    assert line == "there is no key recipie; did you mean recipe?"


@pytest.mark.whole
def test_a_value_that_a_setting_does_not_take_is_told_with_what_it_takes():
    configs = ConfigLoader(None)
    for line, says in REFUSED.items():
        words = ["recipe=boston", line]
        with pytest.raises(UserError, match=re.escape(says)) as refused:
            from_hydra(compose(configs, words), words)
        assert "\n" not in str(refused.value), line


def test_a_mistake_in_what_a_target_names_is_one_line(tmp_path):
    write(tmp_path, {"text.ckpt": "no checkpoint"})
    lines = [["recipe=boston", *line.split(" ")] for line in WITH_TORCH]
    done = attempts(lines, tmp_path)
    assert_refused(dict(zip(WITH_TORCH.items(), done, strict=True)), files=["text.ckpt"])


def assert_refused(said, *, files):
    wrong = {}
    for (line, says), done in said.items():
        is_one_line = done.err.startswith("dpframe: ") and done.err.count("\n") == 1
        is_quiet = done.out == "" and done.files == files
        if not (done.code == 2 and is_one_line and is_quiet and says in done.err):
            wrong[line] = (says, done)
    assert wrong == {}


ODD_VALUES = (
    *("", " ", "==", "'", "\\", "[", "]", "{", "}", "[,]", "{:}", "(", "$", "${", "${}", "${a"),
    *("${oc.env:}", "${oc.env:NO}", "???", "~", "nan", "-inf", "1e999", "9" * 40, "a b"),
    *("\t", "\n", "{0}", "*", "@", "../..", "#", "`ls`", "choice(1,2)", "sort("),
)
ODD_WORDS = (
    *("+", "++", "~", "+=", "a.b.c=1", "..=1", "trainer..x=1", "/=1", "@=1"),
    *("hydra=1", "hydra.=1", "hydra/launcher=no", "~hydra", "~recipe", "recipe@x=boston"),
    *("+trainer@x.y=default", "trainer.gpus.0=1", "task.net._args_.x=1", "seed=\x00", "vars=[1]"),
    *("hydra.searchpath=[file://no]", "hydra.searchpath=no", "hydra.mode=no", "vars=1"),
    *("hydra.sweeper=1", "~hydra.sweeper", "hydra.launcher._target_=x", "hydra.job=1"),
)


KEYS = itertools.cycle(("seed", "trainer", "data.file"))
ODD = [*(f"{key}={value}" for key, value in zip(KEYS, ODD_VALUES, strict=False)), *ODD_WORDS]
# What the command takes for options, or prints.
ODD_OPTIONS = ["-x", "-", "--", "---", "-m=3", "--cfg=", "-cd", "--info=no", "", "=", "\x00"]
ODD_OPTIONS += ["data.file=日本", "data.file=\n", "data.file=\U0001f600", "trainer=${"]


def test_odd_strings_never_end_in_a_traceback(light):
    done = {word: light[0][*odd(word)] for word in ODD_OPTIONS}
    wrong = [
        (word, one)
        for word, one in done.items()
        if not (one.code == 0 or (one.code == 2 and one.err.count("\n") == 1))
        or one.files != ["mine"]
        or "Traceback" in one.err
    ]
    assert wrong == []  # nor did any of ODD, or there were no `light`


# What is shown without a run


SHOWN = {  # the words that each line prints, and after a None those that it does not
    "--help": ["  mode=predict   A checkpoint", "  strategy=ddp ", "examples", None, "nowhere"],
    "--help --config-dir=mine": ["  recipe=nowhere", "net=small  Few."],
    "--version": ["dpframe "],
    "-sc install=bash": ["COMPREPLY"],
    "-sc install=fish": ["complete -c dpframe", None, "COMPREPLY"],
    "-sc install=bsh": ["dpframe: --shell-completion install=bsh", "did you mean bash?"],
    "recipe=boston --cfg=job": ["recipe: boston\n", "gpus: ${trainer.gpus}", None, "hydra:"],
    "--config-dir=mine recipe=copied -c job": ["recipe: copied\n"],
    "recipe=boston -c job --resolve trainer.gpus=3": ["  gpus: 3\n", None, "${trainer.gpus}"],
    "recipe=boston -c hydra": ["dir: multirun/${mode_folder:${mode}}${recipe}/", None, "gpus"],
    "-m recipe=boston seed=1,abc": ["dpframe: seed=abc is text"],
}


def test_what_is_shown_without_a_run(light):
    for line, words in SHOWN.items():
        done = light[0][*line.split(" ")]
        is_mistake = words[0].startswith("dpframe: ")
        assert (done.code, done.err.count("\n")) == (2 * is_mistake, is_mistake), (line, done)
        end = words.index(None) if None in words else len(words)
        said, unsaid = words[:end], words[end + 1 :]
        assert all(word in done.out + done.err for word in said), (line, done)
        assert not any(word in done.out for word in unsaid), (line, done)


def test_help_mistakes_completion_and_cfg_import_nothing_heavy(light):
    assert light[2] == []


def test_garbage_is_collected_in_a_run_but_not_among_what_was_imported(tmp_path):
    assert fresh(garbage, folder=tmp_path) == (True, True)


def garbage():
    seen = []

    def run(job):
        seen.extend((gc.isenabled(), gc.get_freeze_count() > 100_000))

    with patch("dpframe.modes.run.run", run), suppress(SystemExit):
        main(["recipe=shapes"])
    return tuple(seen)


def test_hydra_is_not_imported_for_a_mistake_in_the_options(tmp_path):
    code = (
        "import sys; from dpframe.cli import main\nfor word in sys.argv[1:]:\n    try: main([word])"
    )
    code += "\n    except SystemExit as left: print(left.code, 'hydra' in sys.modules)"
    words = [sys.executable, "-c", code, "--version", "--hlp"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.stdout.splitlines()[1:] == ["0 False", "2 False"]


def test_a_users_own_module_recipe_and_group(tmp_path):
    write(
        tmp_path,
        {
            "own.py": "import dpframe.recipes.boston as b\nclass Own(b.Boston): pass\n",
            "mine/recipe/own.yaml": BOSTON
            + "task: {_target_: own.Own}\ntrainer: {max_epochs: 1}\n",
            "mine/net/small.yaml": "# @package task.net\n_target_: torch.nn.Linear\n"
            "in_features: 13\nout_features: 1\n_args_: []\n",
        },
    )
    (done,) = attempts([["--config-dir=mine", "recipe=own", "+net=small"]], tmp_path)
    assert done.code == 0, done.err
    assert "(Own, seed 0)" in done.out and "1x13 1" in done.out


def test_an_exception_in_user_code_is_a_traceback_and_exit_code_1(tmp_path):
    own = "import dpframe.recipes.boston as b\nclass Own(b.Boston):\n"
    own += "    def training_step(self, batch):\n        raise KeyError('a bug')\n"
    write(tmp_path, {"own.py": own})
    (done,) = attempts([["recipe=boston", "task._target_=own.Own"]], tmp_path)
    assert done.code == 1
    assert done.err.startswith("Traceback") and done.err.endswith("KeyError: 'a bug'\n")


def test_without_an_installation_the_repository_is_enough(tmp_path):
    copy = tmp_path / "dpframe"
    shutil.copytree(ROOT / "dpframe", copy / "dpframe")
    shutil.copytree(ROOT / "conf", copy / "conf")
    code = "import dpframe, dpframe.conf; print(dpframe.__file__, dpframe.conf.__file__)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=copy, env=environment(PYTHONPATH="")
    )
    assert done.stdout.split() == [
        str(copy / "dpframe/__init__.py"),
        str(copy / "conf/__init__.py"),
    ]


def test_a_measure_of_untrained_weights_is_refused_unless_it_is_meant(tmp_path):
    refused = [
        ["recipe=boston", "mode=test"],
        ["recipe=transfer", "mode=validate", "checkpoint=null"],
        ["-m", "recipe=boston", "mode=test,validate"],
    ]
    for line, done in zip(refused, attempts(refused, tmp_path), strict=True):
        mode = "validate" if "mode=validate" in line else "test"
        assert (done.code, done.out, done.files) == (2, "", []), done
        assert done.err == (
            f"dpframe: mode={mode} without a checkpoint measures untrained weights; add "
            "checkpoint=best, of the newest run, or checkpoint=FILE; checkpoint=none measures the "
            "task as it is built, e.g. with pretrained weights\n"
        )
    meant = [["recipe=boston", f"mode={mode}", "checkpoint=none"] for mode in ("test", "predict")]
    lines = [*meant, ["recipe=boston", "mode=predict"], ["recipe=shapes", "checkpoint=none"]]
    *meant, predicted, shapes = attempts(lines, tmp_path)
    for done in meant:
        assert done.code == 0 and "untrained" not in done.out + done.err, done
        assert "checkpoint  none: the task as it is built" in done.out
    assert "test/loss" in meant[0].out
    warning = "no checkpoint=FILE: these are the predictions of untrained weights"
    assert predicted.code == 0 and warning in predicted.out
    assert shapes.code == 0 and "untrained" not in shapes.out, "it has no training_step"


def test_what_evaluates_a_checkpoint_names_it(tmp_path):
    fit = ["recipe=boston", "trainer.max_epochs=1", "hydra.run.dir=run"]
    file = "checkpoint=run/checkpoints/last.ckpt"
    modes = [["recipe=boston", f"mode={mode}", file] for mode in ("test", "predict")]
    _, *evaluated = attempts([fit, *modes], tmp_path)
    for done in evaluated:
        assert done.out.startswith("checkpoint  run/checkpoints/last.ckpt, step 4\n"), done


def test_a_run_without_a_checkpoint_has_no_file_to_name(tmp_path):
    none = ["trainer.max_epochs=1", "callbacks.checkpoint=null", "logger=none"]
    lines = [
        ["recipe=boston", *none, "hydra.run.dir=run"],
        ["recipe=boston", "mode=test", "checkpoint=run"],
    ]
    _, tested = attempts(lines, tmp_path)
    said = "dpframe: checkpoint=run: there is no checkpoint in run/checkpoints\n"
    assert (tested.code, tested.err) == (2, said)


STEPLR = "task.scheduler={_target_:torch.optim.lr_scheduler.StepLR}"
LATER = "++task.scheduler._partial_=true"
FOLLOWED = [  # a mistake, and what its line says to type, as often as it says something
    [["task.optimizer=sgd"], ["task.optimizer={_target_:torch.optim.SGD}"]],
    [
        ["task.scheduler=5"],
        [STEPLR],
        [STEPLR, LATER],
        [STEPLR, LATER, "+task.scheduler.step_size=3"],
    ],
    [["callbacks.early_stopping.patience=3"], ["callbacks=early_stopping"]],
    [["trainer.gpus=0"], ["strategy=cpu"]],
    [["strategy=cpu", "trainer.gpus=2"], ["strategy=data_parallel", "trainer.gpus=2"]],
    [["vars.x=1"], ["+vars.x=1"]],
]


def test_what_a_refusal_says_to_type_is_not_refused(tmp_path):
    short = ["recipe=boston", "trainer.max_steps=1", "callbacks.progress=null"]
    lines = [[*short, *words] for chain in FOLLOWED for words in chain]
    done = iter(attempts(lines, tmp_path))
    for chain in FOLLOWED:
        *refused, followed = [next(done) for _ in chain]
        assert [each.code for each in refused] == [2] * len(refused), refused
        assert all(each.err.count("\n") == 1 for each in refused), refused
        for each, words in zip(refused, chain[1:], strict=True):
            said = words[-1].split("=")[0] if len(chain) > 2 else words[0].split("=")[0]
            assert said.lstrip("+") in each.err, each
        assert followed.code == 0, followed
