"""What a config names is looked at before it is called, and told in one line where it is wrong."""

import functools
import pickle
import sys

import hydra
import pytest
from command import write
from small import Small

from dpframe.config.build import build, check
from dpframe.config.target import find
from dpframe.errors import UserError
from dpframe.task import Task
from dpframe.trainer.callback import Callback

OWN = """
class Typed:
    def __init__(self, count: int, name: str = "x", rate: float | None = None, old: int = None):
        self.count = count


class Strict:
    def __init__(self, width=1):
        if width < 1:
            raise ValueError(f"width {width} is too small")


class Narrow(Strict):
    def __init__(self, width=1, depth=1):
        super().__init__(width)


class Buggy:
    def __init__(self, width=1):
        self.helper(width)

    def helper(self, width):
        try:
            {}["missing"]
        except KeyError as cause:
            raise ValueError(f"width {width}") from cause


class Keeps:
    def __init__(self, value):
        self.value = value


import torch


class Misuses:
    def __init__(self, net):
        torch.nn.Linear([1], 1)


def misuses(net):
    torch.nn.Linear([1], 1)


def function(width):
    raise RuntimeError("no width will do")


VALUE = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "own.py": OWN,
        "pack/__init__.py": "",
        "pack/good.py": "class Thing: pass\n",
        "pack/typo.py": "import math\nfrom collections import OrderedDic\n",
        "pack/deep.py": "import math\n\nimport pack.typo\n",
        "pack/absent.py": "\nimport nowhere_to_be_found\n",
        "pack/syntax.py": "x = 1\ndef f(:\n",
        "pack/bug.py": "1 / 0\n",
    }
    yield write(tmp_path, files)
    for name in [name for name in sys.modules if name.split(".")[0] in ("own", "pack")]:
        del sys.modules[name]


def said(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("own.Typd", "task._target_=own.Typd: own has no Typd; did you mean Typed?"),
        ("pack.goo.Thing", "task._target_=pack.goo.Thing: pack has no goo; did you mean good?"),
        ("pack.zzz", "pack has no zzz; pack is {folder}/pack; check it, and PYTHONPATH"),
        ("pack.good.Thing.x", "pack.good.Thing has no x; check it, and PYTHONPATH"),
        ("pakc.good.Thing", "there is no module pakc; did you mean pack?"),
        ("qqqqqqqq.Thing", "there is no module qqqqqqqq; check it, and PYTHONPATH"),
        ("own.VALUE", "own.VALUE is a int, which builds nothing; name a class"),
        ("own", "own is a module, which builds nothing"),
        ("own..Typed", "is not a dotted path; write package.module.Class"),
        ("", "is not a dotted path; write package.module.Class"),
    ],
)
def test_a_misspelt_target_names_the_nearest(path, line, own):
    assert line.format(folder=own) in said(find, path, "task._target_")


@pytest.mark.parametrize(
    ("module", "error", "file", "line"),
    [
        ("typo", "ImportError: cannot import name 'OrderedDic'", "typo.py", 2),
        ("deep", "ImportError: cannot import name 'OrderedDic'", "typo.py", 2),
        ("absent", "No module named 'nowhere_to_be_found'", "absent.py", 2),
        ("syntax", "SyntaxError: invalid syntax", "syntax.py", 2),
    ],
)
def test_an_import_error_inside_a_module_tells_its_file_and_line(module, error, file, line, own):
    text = said(find, f"pack.{module}.Thing", "task._target_")
    assert error in text
    assert text.endswith(f"({own / 'pack' / file}, line {line})")


def test_a_bug_that_runs_on_import_stays_an_exception(own):
    with pytest.raises(ZeroDivisionError):
        find("pack.bug.Thing", "task._target_")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "x.count is missing; Typed needs it, add +x.count=…"),
        ({"count": 1, "nmae": "y"}, "x.nmae: Typed takes no such argument; did you mean name?"),
        ({"count": "two"}, "x.count=two is text; use a whole number"),
        ({"count": 1.0}, "x.count=1.0 is a fraction; use a whole number"),
        ({"count": True}, "x.count=true is a truth value; use a whole number"),
        ({"count": None}, "x.count=null is nothing; use a whole number"),
        ({"count": 1, "rate": "a"}, "x.rate=a is text; use a number or null"),
        ({"count": 1, "name": 3}, "x.name=3 is a whole number; use text"),
        (
            {"count": [{"_target_": "own.Strict", "wdith": 1}]},
            "x.count[0].wdith: Strict takes no such argument; did you mean width?",
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_told_by_its_key(arguments, line, own):
    assert said(check, {"_target_": "own.Typed", **arguments}, "x") == line


@pytest.mark.parametrize(
    "arguments",
    [
        {"count": 1},
        {"count": 1, "rate": 2},
        {"count": 1, "rate": None},
        {"count": 1, "old": None},
        {"_args_": [1]},
    ],
)
def test_an_argument_that_fits_is_built(arguments, own):
    assert build({"_target_": "own.Typed", **arguments}, "x").count == 1
    check({"_target_": "own.Typed", "_partial_": True}, "x")  # need not be whole


def test_what_is_not_of_the_kind_is_refused(own):
    line = said(check, {"_target_": "own.Typed", "count": 1}, "callbacks.x", Callback)
    assert line.startswith("callbacks.x._target_=own.Typed is not a dpframe Callback; ")
    without = "has no _target_; name its class"
    for node, name in ((5, "callbacks.x=5"), ({"a": 1}, "callbacks.x")):
        off = f"{name} {without}, or leave it out by callbacks.x=null"
        assert said(check, node, "callbacks.x", Callback) == off
    assert said(check, {"a": 1}, "task", Task) == f"task {without}"


def test_what_a_constructor_says_of_its_arguments_is_one_line(own):
    inner = {"_target_": "own.Narrow", "width": -7, "depth": 7}
    line = said(build, {"_target_": "own.Strict", "width": inner}, "task")
    assert line.startswith("task.width: Narrow says: width -7 is too small (")
    assert line.endswith("own.py, line 10)")
    assert "no width will do" in said(build, {"_target_": "own.function", "width": 1}, "x")


LAYERS = {"_target_": "torch.nn.Sequential"}
LINEAR = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({**LAYERS, "_args_": [1, 2]}, "x: Sequential says: int is not a Module subclass ("),
        ({**LINEAR, "in_features": [13]}, "x: Linear says: empty(): argument"),
        (
            {**LAYERS, "_args_": [{"_target_": "collections.OrderedDict", "a.b": LINEAR}]},
            "x: Sequential says: module name can't contain",
        ),
        (
            {"_target_": "torch.nn.Linear", "_args_": [*"abcdefg"]},
            "x: Linear says: ",
        ),
        ({**LINEAR, "_args_": [1]}, "x: Linear says: Linear.__init__() got multiple"),
    ],
)
def test_a_value_of_a_kind_that_torch_does_not_take_is_one_line(node, line):
    assert said(build, node, "x").startswith(line)


@pytest.mark.parametrize(
    ("part", "node"),
    [
        ("optimizer", {"_target_": "torch.optim.Adam", "lr": [1]}),
        ("optimizer", {"_target_": "torch.optim.Adam", "betas": 5}),
        ("scheduler", {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": 5}),
    ],
)
def test_a_value_that_an_optimizer_or_a_scheduler_does_not_take_is_one_line(part, node):
    partials = {"optimizer": {"_target_": "torch.optim.Adam"}, part: node}
    partials = {name: {**each, "_partial_": True} for name, each in partials.items()}
    task = Small(**{name: build(each, name) for name, each in partials.items()})
    name = node["_target_"].rpartition(".")[2]
    assert said(task.configure_optimizer).startswith(f"{part}: {name} says: ")


def test_the_name_of_a_function_in_its_place_is_told_with_what_to_write():
    node = {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": "mine.warm_up"}
    scheduler = build({**node, "_partial_": True}, "task.scheduler")
    task = Small(scheduler=scheduler)
    assert said(task.configure_optimizer) == (
        "task.scheduler.lr_lambda=mine.warm_up is text, and LambdaLR calls it; for a function "
        "write task.scheduler.lr_lambda={_target_:mine.warm_up,_partial_:true}"
    )


def test_a_bug_below_a_constructor_keeps_its_traceback_and_cause(own):
    for name in ("own.Misuses", "own.misuses"):  # torch's constructor, called wrongly
        with pytest.raises(TypeError, match="empty"):
            build({"_target_": name, "net": LINEAR}, "x")
    with pytest.raises(ValueError, match="width 1") as caught:
        build({"_target_": "own.Buggy", "width": 1}, "x")
    assert isinstance(caught.value.__cause__, KeyError)
    assert "helper" in [entry.name for entry in caught.traceback]


def test_what_a_partial_says_when_it_is_called_is_told_by_its_key(own):
    node = {"_target_": "own.Typed", "count": {"_target_": "own.Strict", "_partial_": True}}
    make = build(node, "task").count
    assert said(make, -3).startswith("task.count: Strict says: width -3")
    assert said(make, 1, 2).startswith("task.count: Strict says: Strict.__init__() takes from 1")
    with pytest.raises(TypeError, match="not supported between"):
        make("a")
    assert pickle.loads(pickle.dumps(make))().__class__.__name__ == "Strict"


@pytest.mark.parametrize(
    ("special", "line"),
    [
        ({"_args_": "ab"}, "x._args_=ab is text; use a list"),
        ({"_partial_": "yes"}, "x._partial_=yes is text; use true or false"),
        ({"_recursive_": 3}, "x._recursive_=3 is a whole number; use true or false"),
        (
            {"_convert_": "none"},
            "x._convert_=none is not one of partial, object, all",
        ),
        ({"_target_": 5}, "x._target_=5 is a whole number; use text"),
        ({"_target_": ["own.Typed"]}, "x._target_=[own.Typed] is a list; use text"),
        ({"_target_": {"_target_": "own.Typed"}}, "is a group of keys; use text"),
        ({"_target_": None}, "x._target_=null is nothing; use text"),
    ],
)
def test_a_key_about_the_call_itself_that_does_not_fit_is_refused(special, line, own):
    assert line in said(check, {"_target_": "own.Typed", "count": 1, **special}, "x")


def test_what_hydra_allows_of_a_call_is_allowed(own):
    value = {"a": [1, "${x}"], "b": {"_target_": "own.Strict"}}
    node = {"_target_": "own.Keeps", "value": value}
    made = build(node, "x").value
    assert type(made) is dict and type(made["b"]).__name__ == "Strict"
    assert build({**node, "_recursive_": False}, "x").value == value
    assert type(build({**node, "_convert_": "all"}, "x").value) is dict


NOT_CALLED = ["os.system", "builtins.eval", "pickle.loads", "own.torch.os.system"]


@pytest.mark.parametrize("path", NOT_CALLED)
def test_what_hydra_does_not_call_is_one_line_and_no_noise(path, own, capfd):
    line = said(build, {"_target_": path, "_args_": ["touch canary"]}, "x")
    assert line.startswith(f"x._target_={path}: Hydra says: Target ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2},
        {"_target_": "numpy.linspace", "start": 0, "stop": 1},
        {"_target_": "rich.text.Text", "text": "${x}"},
        {"_target_": "builtins.dict", "a": {"_target_": "builtins.tuple", "_args_": [[1]]}},
        {"_target_": "torch.nn.Embedding.from_pretrained", "_partial_": True},
        {"_target_": "dpframe.recipes.lenet.LeNet", "_partial_": True},
    ],
)
def test_whatever_is_installed_is_built(node, capfd):
    check(node, "x")
    assert build(node, "x") is not None
    assert capfd.readouterr() == ("", "")


def test_hydra_takes_the_whitelist_by_the_name_under_which_it_is_given(monkeypatch):
    """Under another name nothing is given, which Hydra 1.5 refuses for every class."""
    if hydra.__version__.startswith("1.3."):
        pytest.skip("Hydra has a whitelist from 1.4 on")
    given, instantiate = [], hydra.utils.instantiate

    @functools.wraps(instantiate)
    def seen(*arguments, **keywords):
        given.append(keywords)
        return instantiate(*arguments, **keywords)

    monkeypatch.setattr(hydra.utils, "instantiate", seen)
    build({"_target_": "fractions.Fraction"}, "x")
    assert "fractions.Fraction" in given[0]["_execution_whitelist_"]


def test_what_is_made_later_is_a_plain_partial(own):
    node = {"_target_": "own.Keeps", "value": {"_target_": "own.Strict", "_partial_": True}}
    make = build(node, "x").value
    assert isinstance(make, functools.partial) and not hasattr(make, "_hydra_full_key")
    assert make.func.__name__ == "Strict"


def test_text_is_never_read_as_a_node_or_a_reference(own):
    text = "${oc.create:'{_target_: own.Strict, width: -7}'}"
    assert build({"_target_": "own.Keeps", "value": text}, "x").value == text
