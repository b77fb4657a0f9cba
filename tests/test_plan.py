"""examples/dpframe-plan: a mode that a package brings. The package has tests of its arithmetic."""

import json
import os
import re
import tomllib

import forked
import pytest
import small
import torch
from command import ROOT, attempts, cold_attempts, write
from dpframe_plan.measure import measure
from test_fsdp import Deep
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpframe import TrainerSettings
from dpframe.strategies.fsdp import FSDP

EXAMPLE = ROOT / "examples" / "dpframe-plan"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """The environment where the package is installed, as pip leaves it behind."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((name, module),) = project["entry-points"]["dpframe.modes"].items()
    notes = {
        "METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n",
        "entry_points.txt": f"[dpframe.modes]\n{name} = {module}\n",
    }
    site = tmp_path_factory.mktemp("site")
    write(site, {f"dpframe_plan-0.1.0.dist-info/{file}": text for file, text in notes.items()})
    return {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLE, site)))}


def measured(strategy, **settings):
    kept = TrainerSettings(max_epochs=1, threads=1, **settings)
    given = {"accelerator": "cpu", "seed": 0, "steps": 1, "wanted": strategy}
    return measure(Deep(), small.Rows(), kept, **given).costs


class Log(TorchDispatchMode):
    """What a step sends to other ranks: the operations, and the bytes of the larger tensor."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        for name in ("allgather_base", "reduce_scatter_base", "all_reduce", "allreduce"):
            if "c10d" in str(function) and name in str(function):
                tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                self.sent.append((name.replace("_", ""), max(t.nbytes for t in tensors)))
        return function(*args, **(kwargs or {}))


def sent_in_a_step(strategy):
    with Log() as log:
        steps = small.Hooks(on_step_end=lambda trainer: log.sent.append(("end", 0)))
        settings = {"clip_norm": 1.0, "max_epochs": 1, "sanity_batches": 0, "log_every": 50}
        small.fitted(
            None, small.Rows(), make=Deep, strategy=strategy, callbacks=[steps], **settings
        )
    ends = [at for at, (name, _) in enumerate(log.sent) if name == "end"]
    return log.sent[ends[1] + 1 : ends[2]]


def test_a_plan_of_fsdp_has_the_collectives_of_a_real_step():
    strategy = FSDP(2, "cpu")
    costs = measured(strategy, clip_norm=1.0)
    assert costs.sharded is not None and costs.small_reduces == 1  # the scalar
    rest, *blocks = reversed(costs.sharded.units)
    assert [call.unit for call in costs.sharded.calls] == [2, 1, 0]
    again = measured(strategy, checkpoint_activations=True).sharded
    assert [call.unit for call in again.calls] == [2, 1, 0]  # not those within the backward
    ends = [call.done for call in costs.sharded.calls]
    assert 0 < ends[2] <= ends[1] <= ends[0] <= 1
    sizes = [unit.gathered(2) for unit in blocks]
    gathers = sorted([rest.gathered(2), *sizes, *sizes])
    scatters = sorted([rest.reduced(2), *(unit.reduced(2) for unit in blocks)])
    real = forked.on(strategy, sent_in_a_step)
    assert sorted(size for name, size in real if name == "allgatherbase") == gathers
    assert sorted(size for name, size in real if name == "reducescatterbase") == scatters
    sums = [size for name, size in real if name == "allreduce"]
    assert sums[-2:] == [4, costs.sharded.norms]  # before these a look at the clock, now and then


def test_help_and_an_assumption_that_can_not_be_import_no_torch(tmp_path, installed):
    refused = {
        "plan.bandwith=1": "did you mean plan.bandwidth?",
        "plan.bandwidth=10Gbit": "plan.bandwidth=10Gbit is text; use a number",
        "plan.bandwidth=0": "plan.bandwidth=0.0 is out of range; use more than 0 bytes a second",
        "plan.latency=-1": "plan.latency=-1.0 is out of range; use 0 seconds or more",
        "plan.latency=nan": "plan.latency=nan is out of range; use 0 seconds or more",
        "plan.max_replicas=0": "plan.max_replicas=0 is out of range; use 1 to 1048576",
        "plan.least_gain=1": "plan.least_gain=1.0 is out of range",
        "plan.steps=0": "plan.steps=0 is out of range; use 1 or more",
        "plan.per_node=0": "plan.per_node=0 is out of range; use 1 or more replicas",
        "plan.node_bandwidth=-1": "plan.node_bandwidth=-1.0 is out of range; use more than 0 bytes",
        "plan.node_latency=nan": "plan.node_latency=nan is out of range; use 0 seconds or more",
        "plan.disk_bandwidth=0": "plan.disk_bandwidth=0.0 is out of range; use more than 0 bytes",
        "plan.node_mtbf_hours=0": "plan.node_mtbf_hours=0.0 is out of range; use more than 0 hours",
        "plan.restart_seconds=inf": "plan.restart_seconds=inf is out of range; use 0 seconds",
        "plan=3": "plan=3 is one value; set its keys, as plan.KEY=VALUE",
    }
    lines = [["recipe=boston", "mode=plan", override] for override in refused]
    shown = [["--help"], ["--help", "plan.bandwidth"]]
    (page, topic, *tried), heavy = cold_attempts([*shown, *lines], tmp_path, **installed)
    assert heavy == []
    assert "  mode=plan      How fast 1 to 4096 replicas would be, in how much" in page.out
    assert "what failures cost. (dpframe-plan 0.1.0)\n" in page.out
    assert re.search(r"^  plan\.bandwidth=1\.25e\+09  bytes a second, from one", topic.out, re.M)
    for attempt, said in zip(tried, refused.values(), strict=True):
        assert (attempt.code, said in attempt.err) == (2, True), attempt
        assert attempt.err.count("\n") == 1 and attempt.files == []


def test_the_command_prints_a_table_and_leaves_nothing(tmp_path, installed):
    kept = tmp_path / "kept"
    (tmp_path / "a.ckpt").touch()
    fast = ["recipe=boston", "mode=plan", "strategy=cpu", "plan.steps=2"]
    plain, *others = attempts(
        [
            [*fast, "plan.bandwidth=1e9", "plan.latency=50e-6"],
            [*fast, f"hydra.run.dir={kept}", "plan.max_replicas=2", "plan.node_mtbf_hours=100"],
            ["recipe=shapes", *fast[1:]],
            [*fast[:2], "strategy=fsdp", "strategy.shard=Linear", *fast[3:], "plan.per_node=2"],
            ["recipe=lenet", "mode=plan", "strategy=ddp", "strategy.bucket_cap_mb=0.01", *fast[3:]],
            [*fast[:2], "strategy=fsdp", "strategy.replicate=3"],
            [*fast[:2], "strategy=fsdp", "strategy.cpu_offload=true"],
            [*fast, "checkpoint=a.ckpt"],
        ],
        tmp_path,
        **installed,
    )
    assert plain.code == 0 and plain.err == "" and plain.files == ["a.ckpt"]
    rows = [line.split() for line in plain.out.splitlines() if re.match(r" *\d+  ", line)]
    assert [int(row[0]) for row in rows] == [2**power for power in range(13)]
    assert [int(row[1]) for row in rows[:4]] == [128, 64, 32, 16]
    assert rows[8][2] == "128" and {row[3] for row in rows} == {"4"}
    assert "1e+09 bytes/s and 50 us" in plain.out
    assert re.search(r"stops paying past \d+ replicas?: .* \(a doubling has to save 10%", plain.out)
    written, trains_nothing, parts, buckets, thirds, offloaded, weights = others
    assert written.code == 0
    assert json.loads((kept / "summary.json").read_text())["plan"][1]["replicas"] == 2
    assert (kept / "plan.txt").read_text() == written.out
    one, two = json.loads((kept / "summary.json").read_text())["failures"]
    assert one["machines"] == two["machines"] == 1 and one["every"] == 0.5  # seconds_between
    assert 0 < one["goodput"] < one["best_goodput"] < 1
    assert "a save    " in written.out and "one of each machine in 100 h" in written.out
    assert re.search(r"with failures the quickest is . replicas?, .*every_n_minutes=", written.out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "kept"]
    assert max(map(len, written.out.splitlines()[-3:-1])) <= 120
    assert trains_nothing.code == 2 and "returned None; return a data set" in trains_nothing.err
    assert "as strategy=fsdp shares them" in parts.out and "machines of 2 (plan.per" in parts.out
    assert re.search(r"gathers of \d blocks of .* and the rest, .*; by gloo: rings", parts.out)
    assert int(re.search(r"all-reduce of (\d+) buckets", buckets.out)[1]) > 1  # of 1 MiB it is one
    assert "strategy.replicate=3 divides none of the 2, 4, 8 … 4096 replicas" in thirds.err
    assert thirds.code == offloaded.code == 2 and "cpu_offload=true: mode=plan" in offloaded.err
    assert "mode=plan measures what no weights change; leave it out" in weights.err
