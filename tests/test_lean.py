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
from dpframe.trainer.update import fuse

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


@pytest.mark.parametrize(
    ("setting", "is_imported"), [("trainer.lean=true", False), ("trainer.lean=false", True)]
)
def test_a_plain_run_imports_dynamo_only_when_told_to(
    setting: str, is_imported: bool, tmp_path: Path
) -> None:
    run_dir = f"hydra.run.dir={tmp_path / 'run'}"
    told = python(RUN, "recipe=boston", "trainer.max_epochs=2", setting, run_dir)
    assert told.splitlines()[-1] == f"dynamo {is_imported}"
