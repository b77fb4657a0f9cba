"""Networks that people have, with BatchNorm and dropout: the same on any number of replicas."""

import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from exact_nets import NETS, SETTINGS_OF, USES, case_of
from forked import fresh, on
from recorded import once
from small import Given, Hooks, fitted
from torch.utils.data import TensorDataset

from dpframe import Strategy, Task, UserError
from dpframe.strategies import CPU, DDP, FSDP, DataParallel

EXACT = 1e-10
SETTINGS: dict[str, Any] = {"precision": "64", "max_epochs": 1, "exact_layers": True}
UNCHECKED: dict[str, Any] = {"share_check": "off"}  # once a network is enough
RANKS = {"ddp-2": DDP(2, "cpu"), "ddp-3": DDP(3, "cpu"), "fsdp-2": FSDP(2, "cpu")}
HALF = 2  # of an epoch's four steps


def trained(strategy: Strategy, name: str, **settings: Any) -> tuple[Any, Any, str]:
    """The weights and buffers, the metrics, and what each replica has of its own."""
    torch.manual_seed(0)
    settings = SETTINGS | SETTINGS_OF.get(name, {}) | settings
    made = fitted(*case_of(name), strategy=strategy, **settings)
    state = made.whole_state_dict(made.task)
    return {key: value.double() for key, value in state.items()}, made.metrics, made.training.own


def half_trained(strategy: Strategy, name: str) -> Any:
    """What a checkpoint has in the middle of the epoch."""
    states = []
    hooks = Hooks(
        on_step_end=lambda t: t.global_step == HALF and states.append(deepcopy(t.state_dict()))
    )
    trained(strategy, name, callbacks=[hooks], **UNCHECKED)
    return states[0]


def all_ways(strategy: Strategy, halves: bytes = b"") -> Any:
    """By network and way; `halves` are resumed. And halves of its own."""
    states = pickle.loads(halves) if halves else {}
    found = {}
    for name in NETS:
        checked = UNCHECKED if strategy.launches_ranks else {}
        found[name, "plain"] = trained(strategy, name, **checked)
        found[name, "accumulated"] = trained(strategy, name, accumulate=3, **UNCHECKED)
        if states:
            found[name, "resumed"] = trained(strategy, name, resume=states[name], **UNCHECKED)
    return found, pickle.dumps({name: half_trained(strategy, name) for name in NETS})


@once
def one_process() -> Any:
    found, _ = all_ways(CPU())
    return found | {(name, "resumed"): found[name, "plain"] for name in NETS}


@once
def everywhere(place: str) -> Any:
    if place == "data_parallel-3":
        return all_ways(DataParallel(3, "cpu"))
    halves = everywhere("data_parallel-3")[1]
    if place == "data_parallel-2":
        return all_ways(DataParallel(2, "cpu"), halves)
    return on(RANKS[place], all_ways, halves)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("place", ["data_parallel-2", "data_parallel-3", *RANKS])
def test_it_is_as_in_one_process(place, name):
    found, wanted = everywhere(place)[0], one_process()
    for way in ("plain", "accumulated", "resumed"):
        if (name, way) not in found:
            continue
        state, metrics, own = found[name, way]
        assert own == ""
        check(state, metrics, *wanted[name, way][:2])


@pytest.mark.parametrize("name", NETS)
def test_what_ranks_began_one_process_ends_within_an_epoch(name):
    half = pickle.loads(everywhere("ddp-2")[1])[name]
    state, metrics, _ = trained(CPU(), name, resume=half)
    check(state, metrics, *one_process()[name, "plain"][:2])


def check(state: Any, metrics: Any, wanted: Any, numbers: Any) -> None:
    assert state.keys() == wanted.keys() and metrics.keys() == numbers.keys()
    for key, value in wanted.items():
        assert float((state[key] - value).abs().max()) < EXACT, key
    for key, number in numbers.items():
        assert metrics[key] == pytest.approx(number, rel=EXACT), key


@pytest.mark.parametrize("name", NETS)
def test_without_the_keys_it_is_another_one_and_a_line_says_so(name):
    state, _, own = trained(DataParallel(2, "cpu"), name, exact_layers=False)
    wanted = one_process()[name, "plain"][0]
    assert any(float((state[key] - value).abs().max()) > 1e-6 for key, value in wanted.items())
    has = {kind for kind in ("BatchNorm", "Dropout") if f" {kind} " in own}
    kinds = {type(part).__name__.rstrip("12d") for part in case_of(name)[0].modules()}
    assert has == {"BatchNorm", "Dropout"} & kinds


def all_uses(strategy: Strategy) -> Any:
    return {name: trained(strategy, name, max_epochs=2) for name in USES}


@once
def uses_in(place: str) -> Any:
    places = {"cpu": CPU(), "data_parallel-3": DataParallel(3, "cpu"), "ddp-2": DDP(2, "cpu")}
    return on(places[place], all_uses)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("place", ["data_parallel-3", "ddp-2"])
def test_however_it_is_used_it_is_as_in_one_process(place, name):
    state, metrics, own = uses_in(place)[name]
    assert own == ""
    check(state, metrics, *uses_in("cpu")[name][:2])


def compiled(strategy: Strategy, name: str, settings: Any) -> tuple[Any, int, int]:
    """The run, the graphs of it, and how often one ended within a step."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with pytest.MonkeyPatch.context() as patched:
        compile = torch.compile
        patched.setattr(torch, "compile", lambda call, mode=None, backend=backend, **options: (
            compile(call, backend=backend, **options)
        ))  # fmt: skip
        run = trained(strategy, name, **settings)
    breaks = torch._dynamo.utils.counters["graph_break"]
    return run, len(graphs), breaks.total()


COMPILED: dict[str, Any] = {"compile": True, "max_epochs": 2}


@pytest.mark.parametrize(
    ("name", "strategy", "graphs"), [("vit", CPU(), 2), ("gpt", DataParallel(2, "cpu"), 2)]
)
def test_a_compiled_step_with_dropout_by_row_is_a_graph_for_each_size(name, strategy, graphs):
    run, found, breaks = fresh(compiled, strategy, name, COMPILED)
    assert (found, breaks) == (graphs, 0)
    check(*run[:2], *trained(CPU(), name, max_epochs=2)[:2])


def test_a_compiled_step_with_batch_norm_of_all_rows_ends_a_graph_at_each(caplog):
    run, graphs, breaks = on(DDP(2, "cpu"), compiled, "recomputed", {**COMPILED, **PLAIN})
    assert graphs and breaks
    check(*run[:2], *trained(CPU(), "recomputed", max_epochs=2, **PLAIN)[:2])


PLAIN: dict[str, Any] = {"checkpoint_activations": None}


@pytest.mark.parametrize("strategy", [CPU(), DataParallel(2, "cpu")], ids=lambda s: s.name)
def test_a_model_that_is_compiled_by_its_task_drops_the_same(strategy):
    run, _, _ = fresh(compiled, strategy, "compiles", {})
    check(*run[:2], *trained(CPU(), "recomputed", **PLAIN)[:2])


COMPILES = {"mode": "default", "fullgraph": True}
REFUSED = [
    (DDP(2, "cpu"), {"compile": COMPILES}, "trainer.compile.fullgraph=true wants one graph, and a"),
    (
        CPU(),
        {"compile": True, "checkpoint_activations": "net.2"},
        "trainer.dropout=row can't count",
    ),
]


@pytest.mark.parametrize(("strategy", "settings", "said"), REFUSED)
def test_what_can_not_be_exact_is_one_line(strategy, settings, said):
    with pytest.raises(UserError, match=said):
        on(strategy, partial(trained, name="lbfgs", **settings))


class Classifies(Task):
    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), y)}


def photos() -> TensorDataset:
    x = torch.randn(11, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(11) % 4)


@pytest.mark.parametrize(
    ("library", "make"),
    [
        ("torchvision", lambda of: of.models.resnet18(num_classes=4)),
        ("torchvision", lambda of: of.models.mobilenet_v3_small(num_classes=4)),
        ("timm", lambda of: of.create_model("efficientnet_b0", num_classes=4)),
    ],
    ids=["resnet18", "mobilenet_v3", "efficientnet_b0"],
)
def test_a_model_of_a_library_is_as_in_one_process(library, make):
    package = pytest.importorskip(library)
    settings = {**SETTINGS, **UNCHECKED, "limit_train_batches": 2}

    def run(strategy: Strategy) -> tuple[Any, Any]:
        torch.manual_seed(0)
        task = Classifies(make(package), partial(torch.optim.SGD, lr=0.001))
        made = fitted(task, Given(photos, batch_size=6), strategy=strategy, **settings)
        return made.task.state_dict(), made.metrics

    check(*run(DataParallel(2, "cpu")), *run(CPU()))
