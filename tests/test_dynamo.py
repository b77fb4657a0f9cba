"""Runs that compile nothing never import torch._dynamo, and lose nothing by it."""

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from dpframe.trainer.compute import dynamo

STOCK = [
    name
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]

# Each runs in an interpreter of its own: once dynamo is imported, it leaves everything stock.
TRAINED = """
import sys, torch
from torch import nn
from dpframe.trainer.compute import dynamo

def trained(kind, is_skipped):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    if is_skipped:
        dynamo.skip_import()
    weights = [weight for weight in net.parameters() if kind.__name__ != "Muon" or weight.ndim == 2]
    optimizer = kind(weights, lr=0.01)
    step = dynamo.step_of(optimizer) if is_skipped else optimizer.step
    calls = []
    optimizer.register_step_post_hook(lambda *args: calls.append(1))
    for number in range(5):
        net(torch.randn(8, 3)).square().mean().backward()
        step()
        optimizer.zero_grad()
    return net.state_dict(), optimizer.state_dict(), calls

kinds = [getattr(torch.optim, name) for name in sys.argv[1:]]
skipped_results = [trained(kind, True) for kind in kinds]
assert "torch._dynamo" not in sys.modules
import torch._dynamo
for kind, mine in zip(kinds, skipped_results):
    torch.testing.assert_close(mine, trained(kind, False), rtol=0, atol=0)
    assert len(mine[2]) == 5, kind
print("equal", len(kinds))
"""

COMPILED = """
import sys, torch
from dpframe.trainer.compute import dynamo

dynamo.skip_import()
net = torch.nn.Linear(2, 1)
step = dynamo.step_of(torch.optim.SGD(net.parameters(), lr=0.1))
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


def test_every_stock_optimiser_steps_alike_to_the_bit_and_calls_its_hooks() -> None:
    assert len(STOCK) >= 12
    assert python(TRAINED, *STOCK) == f"equal {len(STOCK)}"


def test_torch_compile_still_works_where_its_import_is_skipped() -> None:
    assert python(COMPILED) == "compiled (1, 1)"


def test_an_optimiser_of_the_users_own_keeps_its_step() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            return super().step(closure)

    optimizer = Mine([nn.Parameter(torch.ones(1))], lr=0.1)
    assert dynamo.step_of(optimizer) == optimizer.step


RUN = """
import sys
from dpframe.cli import main
for skips in ("true", "false"):
    try:
        main([*sys.argv[1:], f"trainer.skip_dynamo_import={skips}"])
    except SystemExit as end:
        assert end.code == 0, end.code
    print("dynamo", "torch._dynamo" in sys.modules)
"""


def test_a_plain_run_imports_dynamo_only_when_told_to(tmp_path: Path) -> None:
    folder = f"hydra.run.dir={tmp_path}/${{trainer.skip_dynamo_import}}"
    told = python(RUN, "recipe=boston", "trainer.max_epochs=2", folder).splitlines()
    assert [line for line in told if line.startswith("dynamo ")] == ["dynamo False", "dynamo True"]
