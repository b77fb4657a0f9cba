"""Parameter groups by patterns, and what is refused in them."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from small import Small
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.swa_utils import SWALR

from dpframe import UserError
from dpframe.config.build import build, check
from dpframe.parameters import first_hooked
from dpframe.util.patterns import match_parameters

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3, "weight_decay": 0.1}


class Affine(nn.Linear): ...


class Tuned(Small):
    """net.backbone and net.head, and a scale that has no dimension."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        norm = nn.LayerNorm(8)
        backbone = nn.Sequential(nn.Linear(3, 8), norm)
        self.net = nn.Sequential()
        self.net.add_module("backbone", backbone)
        self.net.add_module("head", nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(()))
        self.tied = norm  # a second name for the same weights


def said(call: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


def names(task: nn.Module, found: Any) -> list[str]:
    by_id = {id(weight): name for name, weight in task.named_parameters()}
    return [by_id[id(weight)] for weight in found]


BACKBONE = [f"net.backbone.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
HEAD = ["net.head.weight", "net.head.bias"]


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        ("net.backbone", BACKBONE),
        ("net.backbone.*", BACKBONE),
        ("*.bias", ["net.backbone.0.bias", "net.backbone.1.bias", "net.head.bias"]),
        ("1d", ["scale", *BACKBONE[1:], "net.head.bias"]),
        (["*", "!net.backbone", "!scale"], HEAD),
        (["!net.head", "net.head.bias"], ["net.head.bias"]),
        ("tied", BACKBONE[2:]),
        ("LayerNorm", BACKBONE[2:]),
        ("Affine", HEAD),
        (["Sequential", "!Linear"], BACKBONE[2:]),
    ],
)
def test_a_pattern_is_of_names_modules_classes_or_vectors_and_may_leave_out(patterns, wanted):
    task = Tuned()
    task.net.head.__class__ = type("Sharded", (Affine,), {})  # as a strategy may make one
    named = task.named_parameters(remove_duplicate=False)
    assert names(task, match_parameters(named, patterns, key="x", within=task)) == wanted


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, groups=groups),
        lambda groups: build({**ADAMW, "groups": groups}, "task.optimizer"),
    ],
)
def test_a_parameter_has_the_options_of_all_its_groups_and_the_last_ones_win(make):
    groups = {
        "backbone": {"match": "net.backbone", "lr": 1e-5},
        "off": None,
        "vectors": {"match": "1d", "weight_decay": 0.0},
        "scale": {"match": ["scale"], "weight_decay": 0.2, "lr": 1e-2},
    }
    task = Tuned(make(groups))
    optimizer = task.configure_optimizer()
    assert type(optimizer) is torch.optim.AdamW
    made = [
        (group["lr"], group["weight_decay"], group.get("name"), names(task, group["params"]))
        for group in optimizer.param_groups
    ]
    assert made == [
        (1e-3, 0.1, None, HEAD[:1]),
        (1e-2, 0.2, "scale", ["scale"]),
        (1e-5, 0.1, "backbone", BACKBONE[:1]),
        (1e-5, 0.0, "backbone", BACKBONE[1:]),
        (1e-3, 0.0, None, HEAD[1:]),
    ]
    groups = task.parameter_groups({"head": {"match": "net.head", "lr": 1.0}})
    assert [names(task, group["params"]) for group in groups][1] == HEAD
    assert "groups" in task.make_optimizer.keywords  # which may make another


def test_groups_that_are_null_are_one_group_of_all_parameters():
    task = Tuned(build({**ADAMW, "groups": None}, "task.optimizer"))
    (group,) = task.configure_optimizer().param_groups
    assert sorted(names(task, group["params"])) == sorted([*BACKBONE, *HEAD, "scale"])


def test_what_is_frozen_is_in_the_optimizer_since_it_may_thaw():
    task = Tuned(partial(torch.optim.SGD, lr=0.1))
    task.net.backbone.requires_grad_(False)
    [group] = task.configure_optimizer().param_groups
    assert len(group["params"]) == len(list(task.parameters()))


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        ({"a": {"match": "net.bakbone", "lr": 1}}, ".a.match=net.bakbone matches no parameter; did "
            "you mean net.backbone?"),
        ({"a": {"match": "LayerNrom"}}, ".a.match=LayerNrom matches no parameter; did you mean "
            "LayerNorm?"),
        ({"a": {"match": "qqqqqq"}}, ".a.match=qqqqqq matches no parameter; there is, e.g., scale"),
        ({"a": {"match": "1d", "weigth_decay": 0}}, ".a.weigth_decay: AdamW has no such option for "
            "a group; did you mean weight_decay?"),
        ({"a": {"lr": 1}}, ".a has no match; name its parameters, e.g. match: net.head"),
        ({"a": 5}, ".a has no match; name its parameters, e.g. match: net.head"),
        (["1d"], "=['1d']; map a name to each group's match and options"),
    ],
)  # fmt: skip
def test_a_group_that_can_not_be_is_one_line(groups, line):
    for make in (
        partial(torch.optim.AdamW, groups=groups),
        build({**ADAMW, "groups": groups}, "task.optimizer"),
    ):
        assert said(Tuned(make).configure_optimizer) == f"task.optimizer.groups{line}"


def test_a_value_that_the_optimizer_refuses_is_refused_in_a_group():
    for lr, says in ((-1.0, "Invalid learning rate: -1.0"), ("fast", "'<=' not supported")):
        make = build({**ADAMW, "groups": {"a": {"match": "1d", "lr": lr}}}, "task.optimizer")
        line = said(Tuned(make).configure_optimizer)
        assert line.startswith(f"task.optimizer: AdamW says: {says}")


def test_groups_are_of_optimizers_alone_and_may_be_misspelt():
    line = said(check, {**ADAMW, "gruops": {}}, "task.optimizer")
    assert line == "task.optimizer.gruops: AdamW takes no such argument; did you mean groups?"
    step = {"_target_": "torch.optim.lr_scheduler.StepLR", "_partial_": True, "step_size": 1}
    line = said(check, {**step, "groups": {}}, "task.scheduler")
    assert line.startswith("task.scheduler.groups: StepLR takes no such argument; ")


def test_a_schedule_that_would_make_the_rates_of_groups_equal_is_refused():
    groups = {"a": {"match": "net.head", "lr": 0.01}}
    make = partial(torch.optim.SGD, lr=0.1, groups=groups)
    task = Tuned(make)
    task.make_scheduler = partial(OneCycleLR, max_lr=0.1, total_steps=9)
    assert said(task.configure_optimizer) == (
        "OneCycleLR gives all groups of SGD one learning rate; pass it a list of 2 rates, or leave "
        "lr out of groups"
    )
    for scheduler in (
        partial(OneCycleLR, max_lr=[0.1, 0.01], total_steps=9),
        partial(LambdaLR, lr_lambda=lambda step: step / 9),
        partial(SWALR, swa_lr=0.01),
    ):
        task.make_scheduler = scheduler
        task.configure_optimizer()


def test_a_warning_that_comes_meanwhile_is_no_hook_of_a_weight():
    """E.g. of a file that is collected, or of another thread."""

    class Warns(nn.Linear):
        def named_parameters(self, *args, **kwargs):
            warnings.warn("unclosed file", ResourceWarning, stacklevel=1)
            yield from super().named_parameters(*args, **kwargs)

    net = Warns(1, 1)
    assert first_hooked(net) is None
    net.bias.register_hook(lambda gradient: gradient)
    assert first_hooked(net) == "bias"
