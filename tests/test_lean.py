"""Runs that compile nothing never import torch._dynamo, and lose nothing by it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpframe import lean

STOCK = [
    name
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]

# Each runs in an interpreter of its own: once dynamo is imported, lean leaves everything stock.
TRAINED = """
import inspect, sys, torch
from torch import nn
from dpframe import lean
from dpframe.trainer.fused import fuse

def varied(kind):
    # Each of its options alone, at another value than its own.
    yield {}
    for name, option in inspect.signature(kind).parameters.items():
        value = option.default
        if name in ("params", "differentiable"):  # lean leaves the second to torch
            continue
        if name in ("foreach", "fused"):
            yield from ({name: True}, {name: False})
        elif isinstance(value, bool):
            yield {name: not value}
        elif isinstance(value, int):
            yield {name: value + 1}
        elif isinstance(value, float):
            yield {name: 0.7 * value or 0.1}
        elif isinstance(value, tuple) and None not in value:
            yield {name: tuple(0.7 * number for number in value)}
        if isinstance(value, bool) and "decay" in name:  # it says what is made of another one
            yield {name: not value, "weight_decay": 0.3}
    yield {"lr": torch.tensor(0.01)}

def trained(kind, options, is_lean):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    if is_lean:
        lean.prepare()
    torch.manual_seed(0)
    weights = [weight for weight in net.parameters() if kind.__name__ != "Muon" or weight.ndim == 2]
    optimizer = kind(weights, **{"lr": 0.01, **options})
    fuse(optimizer, net)
    step = lean.step_of(optimizer) if is_lean else optimizer.step
    for number in range(5):
        net(torch.randn(8, 3)).square().mean().backward()
        step()
        optimizer.zero_grad()
    return net.state_dict(), optimizer.state_dict()

def attempted(kind, options, is_lean):
    try:
        return trained(kind, options, is_lean)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        return type(error), str(error)  # torch can't do that

kinds = [getattr(torch.optim, name) for name in sys.argv[1:]]
cases = [(kind, options) for kind in kinds for options in varied(kind)]
lean_results = [attempted(*case, True) for case in cases]
assert "torch._dynamo" not in sys.modules
import torch._dynamo
trained_to_the_end = 0
for case, mine in zip(cases, lean_results):
    stock = attempted(*case, False)
    if isinstance(mine[0], dict) and isinstance(stock[0], dict):
        trained_to_the_end += 1
        assert all(torch.equal(mine[0][key], stock[0][key]) for key in stock[0]), case
        torch.testing.assert_close(mine[1], stock[1], rtol=0, atol=0)
    else:
        assert mine == stock, (case, mine, stock)
assert trained_to_the_end > 0.85 * len(cases), (trained_to_the_end, len(cases))
print("equal", len(kinds))
"""

ADAMS = """
import sys, torch
from torch import nn
from dpframe import adam, lean

class Net(nn.Module):  # its second part rests in some of the steps, and is then not stepped
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, rows, number):
        made = self.first(rows)
        return made.square().mean() if number in (1, 4) else self.second(made).square().mean()

quick = 0

def trained(kind, settings, is_lean):
    global quick
    torch.manual_seed(0)
    net = Net().to(settings.pop("dtype", torch.float32))
    more = {"params": net.second.parameters(), "lr": 0.05, "weight_decay": 0.3}
    if is_lean:
        lean.prepare()
    groups = [{"params": net.first.parameters()}, more]
    optimizer = kind(groups, fused=True, **settings)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    step = lean.step_of(optimizer) if is_lean else optimizer.step
    for number in range(8):
        rows = torch.randn(8, 3, dtype=net.first.weight.dtype)
        loss = net(rows, number)
        lean.backward(loss) if is_lean else loss.backward()
        step()
        optimizer.zero_grad()
        schedule.step()
        if number == 5:
            optimizer.load_state_dict(optimizer.state_dict())  # other tensors from here on
    return net.state_dict(), optimizer.state_dict()

stepped = adam.Adams.step

def counting(adams):
    global quick
    done = stepped(adams)
    quick += done
    return done

adam.Adams.step = counting
CASES = [{}, {"weight_decay": 0.1}, {"maximize": True}, {"amsgrad": True}]
CASES += [{"dtype": torch.float64}, {"eps": 1e-3, "betas": (0.5, 0.9)}, {"capturable": True}]
found = []
for kind in (torch.optim.Adam, torch.optim.AdamW):
    for case in CASES:
        quick = 0
        found.append((kind, case, trained(kind, dict(case), True)))
        is_slow = "amsgrad" in case or "capturable" in case
        assert quick == (0 if is_slow else 7), (kind, case, quick)
assert "torch._dynamo" not in sys.modules
import torch._dynamo
for kind, case, (weights, state) in found:
    stock_weights, stock_state = trained(kind, dict(case), False)
    assert all(torch.equal(weights[key], stock_weights[key]) for key in stock_weights), case
    torch.testing.assert_close(state, stock_state, rtol=0, atol=0)
print("equal", len(found))
"""

BACKWARD = """
import sys, torch
from dpframe import lean

def gradients(backward):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    for number in range(3):
        loss = net(torch.randn(5, 3)).square().mean()
        loss.register_hook(lambda gradient: gradient.mul_(number + 1))  # in place
        backward(loss)
    return [weight.grad for weight in net.parameters()]

pairs = list(zip(gradients(lean.backward), gradients(torch.Tensor.backward), strict=True))
assert len(pairs) == 2 and all(torch.equal(one, other) for one, other in pairs)
calls = []
class Noticed(torch.Tensor):
    def backward(self, *args, **kwargs):
        calls.append(1)
        super().backward(*args, **kwargs)
weight = torch.nn.Parameter(torch.ones(()))
lean.backward((2 * weight).as_subclass(Noticed))
print("backward", float(weight.grad), len(calls))
"""

HOOKED = """
import sys, torch
from dpframe import lean

lean.prepare()
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
step = lean.step_of(optimizer)
calls = []
optimizer.register_step_post_hook(lambda *args: calls.append(1))
weight.sum().backward()
step()
print("hooks", len(calls))
"""

COMPILED = """
import sys, torch
from dpframe import lean

lean.prepare()
net = torch.nn.Linear(2, 1)
step = lean.step_of(torch.optim.SGD(net.parameters(), lr=0.1))
net(torch.ones(1, 2)).sum().backward()
step()
assert "torch._dynamo" not in sys.modules
print("compiled", tuple(torch.compile(net, backend="eager")(torch.ones(1, 2)).shape))
"""


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_stock_optimiser_steps_alike_to_the_bit_with_any_of_its_options() -> None:
    assert len(STOCK) >= 12
    assert python(TRAINED, *STOCK) == f"equal {len(STOCK)}"


def test_adams_own_kernels_are_called_as_torch_calls_them() -> None:
    """In seven of eight steps: the first, which makes the state, is torch's."""
    assert python(ADAMS) == "equal 14"


def test_a_backward_is_torchs_to_the_bit_and_a_losss_own_is_called() -> None:
    assert python(BACKWARD) == "backward 2.0 1"


def test_a_hook_registered_after_the_fact_is_called() -> None:
    assert python(HOOKED) == "hooks 1"


def test_torch_compile_still_works_in_a_lean_process() -> None:
    assert python(COMPILED) == "compiled (1, 1)"


def test_an_optimiser_of_the_users_own_keeps_its_step() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            return super().step(closure)

    optimizer = Mine([nn.Parameter(torch.ones(1))], lr=0.1)
    assert lean.step_of(optimizer) == optimizer.step


RUN = """
import sys
from dpframe.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
print("dynamo", "torch._dynamo" in sys.modules)
"""


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class Fixed(nn.Module):
    training = property(lambda self: False, lambda self, mode: vars(self).update(told=mode))


class Notes(nn.Module):
    """Is told of what it is assigned."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name != "told":
            super().__setattr__("told", (name, value))


def modes(module: nn.Module) -> dict[str, object]:
    return {
        name: (one.training, getattr(one, "told", None)) for name, one in module.named_modules()
    }


def modular() -> nn.Module:
    """All that one can meet."""
    shared, stubborn = nn.Dropout(), nn.Linear(2, 2)
    stubborn.train = lambda mode: stubborn  # type: ignore[assignment,method-assign]
    net = nn.Sequential(shared, Frozen(2), nn.Sequential(shared, stubborn), Fixed(), Notes())
    net.register_module("none", None)
    return nn.ModuleDict({"net": net, "scripted": torch.jit.script(nn.Dropout())})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("mode", [True, False])
def test_modules_are_set_to_train_as_torch_does_it(mode: bool) -> None:
    ours, torchs = modular(), modular()
    for begins_with in (True, False):
        for module in (ours, torchs):
            module.train(begins_with)
        lean.set_training(ours, mode, True)
        torchs.train(mode)
        assert modes(ours) == modes(torchs)
        assert modes(ours)["net.0"] == (mode, None)


@pytest.mark.parametrize(
    ("setting", "is_imported"), [("trainer.lean=true", False), ("trainer.lean=false", True)]
)
def test_a_plain_run_imports_dynamo_only_when_told_to(
    setting: str, is_imported: bool, tmp_path: Path
) -> None:
    run_dir = f"hydra.run.dir={tmp_path / 'run'}"
    told = python(RUN, "recipe=boston", "trainer.max_epochs=2", setting, run_dir)
    assert told.splitlines()[-1] == f"dynamo {is_imported}"


RANK = """
import sys, torch
import dpframe.strategies.ranks
from dpframe.strategies.ddp import DDP
from dpframe import lean

def work():
    strategy = DDP(gpus=2, accelerator="cpu")
    strategy.setup()
    lean.prepare()
    with lean.no_dynamo_in_ddp():
        net = strategy.wrap(torch.nn.Linear(2, 1), training=True)
    net(torch.ones(1, 2)).sum().backward()
    strategy.close()
    return "torch._dynamo" in sys.modules

if __name__ == "__main__":
    print("dynamo", DDP(gpus=2, accelerator="cpu").launch(work))
"""


def test_a_rank_of_ddp_does_not_import_dynamo(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "dynamo False", done.stderr
