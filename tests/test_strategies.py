"""Where a job runs: which devices, what reaches torch's DDP, when ranks talk, and who logs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from forked import on
from recorded import Recorder, once, weights, weights_apart
from small import Given, Rows, Small
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpframe import Callback, DataModule, Strategy, Task, Trainer, UserError
from dpframe.strategies import devices
from dpframe.strategies.data_parallel import DataParallel
from dpframe.strategies.ddp import BUFFERS, DDP
from dpframe.strategies.processes import backend_of
from dpframe.strategies.single import CPU, SingleGPU, auto
from dpframe.trainer.compute.placement import Precision

# Devices, on a machine that has none


def machine(monkeypatch, kind: str | None, count: int, *, usable: bool = True) -> None:
    """What torch says where it is built for `kind` and the driver tells of `count` devices."""
    device = None if kind is None else torch.device(kind)
    current = [0]

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    for name, answer in {
        "device_index": device_index,
        "current_accelerator": lambda: device,
        "device_count": lambda: count,
        "is_available": lambda: usable and count > 0,
        "current_device_index": lambda: current[0],
        "set_device_index": lambda one: current.__setitem__(0, getattr(one, "index", one)),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    for name in (name for names in devices.HIDES.values() for name in names):
        monkeypatch.delenv(name, raising=False)


def driver_says(monkeypatch, text: str) -> None:
    def init() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.fixture
def two_gpus(monkeypatch):
    machine(monkeypatch, "cuda", 2)


@pytest.fixture
def no_gpu(monkeypatch):
    machine(monkeypatch, "cuda", 0)
    driver_says(monkeypatch, "Found no NVIDIA driver on your system. Please check that")


NONE = "torch can use no CUDA device: Found no NVIDIA driver on your system"
SEVERAL = [DataParallel, DDP]
REFUSED = [  # which strategies, on how many GPUs, what they are given, and what is said
    *[
        (SEVERAL, 2, {"gpus": gpus}, f"trainer.gpus={gpus} but this machine has 2 CUDA devices; "
         "use trainer.gpus=2, or trainer.accelerator=cpu to rehearse")
        for gpus in (4, [0, 3])
    ],
    (
        [*SEVERAL, SingleGPU], 0, {"accelerator": "cuda"},
        f"trainer.accelerator=cuda but {NONE}; use trainer.accelerator=auto, or cpu to rehearse",
    ),
    (
        [*SEVERAL, SingleGPU], 2, {"accelerator": "mps"},
        f"trainer.accelerator=mps but torch {torch.__version__} is built for CUDA devices; "
        "use trainer.accelerator=auto, or cpu to rehearse",
    ),
    *[
        ([CPU], 2, {"accelerator": kind},
         f"trainer.accelerator={kind} but strategy=cpu; use strategy=single_gpu")
        for kind in ("cuda", "xpu")
    ],
    *[
        ([kind], 2, {"gpus": gpus}, f"trainer.gpus={gpus} but {kind.__name__} is one replica; use "
         "trainer.gpus=1, strategy=ddp or strategy=data_parallel")
        for kind in (Strategy, CPU, SingleGPU) for gpus in (2, [0, 1], "all")
    ],
]  # fmt: skip


@pytest.mark.parametrize("kinds, gpus, given, said", REFUSED)
def test_devices_that_can_not_be_had_are_refused_in_one_line(monkeypatch, kinds, gpus, given, said):
    machine(monkeypatch, "cuda", gpus)
    driver_says(monkeypatch, "Found no NVIDIA driver on your system. Please check that")
    for kind in kinds:
        strategy = kind(**given)
        with pytest.raises(UserError) as error:
            strategy.launch(strategy.setup)
        assert str(error.value) == said


def test_more_replicas_than_the_cpu_can_bear_are_refused(no_gpu):
    with pytest.raises(UserError, match="asks for 1000 replicas on"):
        DataParallel(1000).setup()


@pytest.mark.parametrize(
    ("gpus", "accelerator", "devices"),
    [
        (None, "auto", ["cuda:0", "cuda:1"]),
        (2, "cuda", ["cuda:0", "cuda:1"]),
        (1, "auto", ["cuda:0"]),
        ([1], "auto", ["cuda:1"]),
        ([1, 0], "auto", ["cuda:1", "cuda:0"]),
        ("all", "auto", ["cuda:0", "cuda:1"]),
        ("auto", "auto", ["cuda:0", "cuda:1"]),
        (3, "cpu", ["cpu", "cpu", "cpu"]),
        ("all", "cpu", ["cpu", "cpu"]),
    ],
)
def test_the_devices_are_those_that_were_asked_for(two_gpus, gpus, accelerator, devices):
    for strategy in SEVERAL:
        chosen = strategy(gpus, accelerator).choose_devices(default=None)
        assert [str(device) for device in chosen] == devices
    strategy = DataParallel(gpus, accelerator)
    strategy.setup()
    assert (strategy.devices, strategy.replicas) == (devices, len(devices))


@pytest.mark.parametrize(
    ("there_are", "gpus", "accelerator", "kind"),
    [
        (0, None, "auto", CPU),
        (0, 1, "auto", SingleGPU),  # it rehearses, and says so
        (0, 3, "auto", DDP),
        (2, None, "auto", SingleGPU),
        (2, None, "cpu", CPU),
        (2, [1], "auto", SingleGPU),
        (2, [0, 1], "auto", DDP),
        (2, 2, "cpu", DDP),
        (2, "all", "auto", DDP),
        (1, "all", "auto", SingleGPU),
        (0, "all", "auto", DDP),  # it rehearses
        (2, "auto", "auto", SingleGPU),
        (0, None, "cuda", SingleGPU),  # which refuses
    ],
)
def test_auto_takes_the_strategy_that_fits(monkeypatch, there_are, gpus, accelerator, kind):
    machine(monkeypatch, "cuda", there_are)
    assert type(auto(gpus, accelerator)) is kind


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (DataParallel(3), "3 virtual replicas stand in for 3 GPUs"),
        (DataParallel([0, 1, 3]), "3 virtual replicas stand in for 3 GPUs"),
        (DataParallel(), "2 virtual replicas stand in for 2 GPUs"),
        (SingleGPU(1), "1 process stands in for 1 GPU"),
        (DDP(1), "1 gloo rank stands in for 1 GPU"),
        (DDP(2), "2 gloo ranks stand in for 2 GPUs"),
        (DataParallel(2, "cpu"), ""),
        (CPU(), ""),
    ],
    ids=lambda given: given.name if isinstance(given, Strategy) else "",
)
def test_a_rehearsal_is_announced_in_one_line(no_gpu, capfd, strategy, said):
    strategy.launch(strategy.setup if strategy.name != "DDP" else int)
    printed = capfd.readouterr()
    line = f"*** REHEARSAL ON THE CPU: {NONE}, so {said} ***\n"
    assert (printed.out, printed.err) == ("", line if said else "")


@pytest.mark.parametrize(
    "make, variables, where",
    [
        (DDP, {"SLURM_JOB_ID": "7"}, "Slurm"),
        (DataParallel, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        (auto, {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}, "Slurm"),
    ],
)
def test_a_job_of_a_cluster_whose_driver_fails_is_refused_unless_the_cpu_is_meant(
    no_gpu, monkeypatch, make, variables, where
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        make().choose_devices(default=None)
    assert str(caught.value) == (
        f"{NONE}, and this is a job of {where}, which might train on the CPU for days; give it "
        "devices that work, or set trainer.accelerator=cpu"
    )
    meant = make(accelerator="cpu").choose_devices(default=2)
    assert {device.type for device in meant} == {"cpu"}
    machine(monkeypatch, None, 0)  # a torch without CUDA has no driver that fails
    assert make().choose_devices(default=2)[0].type == "cpu"


def test_a_job_of_slurm_that_was_given_no_gpu_trains_on_the_cpu(no_gpu, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert auto().launch(int) == 0


@pytest.mark.parametrize(
    "kind, count, variables, driver, said",
    [
        (None, 0, {}, "", f"torch {torch.__version__} is built for the CPU alone"),
        ("mps", 0, {}, "", "this machine has no MPS device"),
        (
            *(
                "cuda",
                2,
                {},
                "The NVIDIA driver on your system is too old (found version 11040). P",
            ),
            "torch can use no CUDA device: "
            "The NVIDIA driver on your system is too old (found version 11040)",
        ),
        (
            *("cuda", 0, {"CUDA_VISIBLE_DEVICES": ""}, "No CUDA GPUs are available"),
            "torch can use no CUDA device (CUDA_VISIBLE_DEVICES=): No CUDA GPUs are available",
        ),
    ],
)
def test_a_rehearsal_says_why_there_is_no_gpu(
    monkeypatch, capfd, kind, count, variables, driver, said
):
    machine(monkeypatch, kind, count, usable=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if driver:
        driver_says(monkeypatch, driver)
    strategy = auto(1)
    strategy.setup()
    rest = "so 1 process stands in for 1 GPU ***\n"
    assert capfd.readouterr().err == f"*** REHEARSAL ON THE CPU: {said}, {rest}"
    strategy = SingleGPU(accelerator=kind or "cuda")
    with pytest.raises(
        UserError, match=f"^trainer.accelerator={kind or 'cuda'} but {re.escape(said)}; "
    ):
        strategy.setup()


def test_gpus_that_the_driver_tells_of_and_torch_can_not_use_are_no_silent_cpu_run(
    monkeypatch, capfd
):
    machine(monkeypatch, "cuda", 1, usable=False)
    driver_says(monkeypatch, "The NVIDIA driver on your system is too old (found version 11040). P")
    auto().setup()
    assert "too old (found version 11040), so 1 process" in capfd.readouterr().err


@pytest.mark.parametrize(
    "kind, gpus, there",
    [("mps", 1, ["mps:0"]), ("xpu", 3, ["xpu:0", "xpu:1", "xpu:2"]), ("hpu", 1, ["hpu:0"])],
)
def test_auto_takes_the_devices_that_torch_names(monkeypatch, kind, gpus, there):
    machine(monkeypatch, kind, len(there))
    for accelerator in ("auto", kind):
        chosen = Strategy(gpus, accelerator).choose_devices(default=None)
        assert [str(device) for device in chosen] == there


def test_ranks_that_see_one_gpu_each_take_it(monkeypatch):
    machine(monkeypatch, "cuda", 1)
    given = {"RANK": 3, "LOCAL_RANK": 3, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}
    for name, value in (given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    one_gpu = "this machine has 1 CUDA device; use --nproc-per-node=1, or trainer.accelerator=cpu"
    with pytest.raises(UserError, match=f"^torchrun started 4 ranks but {one_gpu}"):
        DDP().launch(int)  # which would share it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    places = DDP().choose_devices(default=4)
    assert [str(place) for place in places] == ["cuda:0"] * 4
    with pytest.raises(UserError, match=r"=2 but this machine has 1 CUDA device \(CUDA_VISIBLE_DE"):
        DDP(2).launch(int)


@pytest.mark.parametrize(
    "kind, backend", [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_ranks_talk_by_the_backend_of_their_devices(kind, backend):
    assert backend_of(torch.device(kind)) == backend


@pytest.mark.parametrize(
    "kind, count, strategy, said",
    [
        ("mps", 1, DDP(), "ranks can't run on MPS devices: torch.distributed has no backend "
         "for them; use strategy=single_gpu, or trainer.accelerator=cpu to rehearse"),
        ("mps", 1, DDP(2), "trainer.gpus=2 but this machine has 1 MPS device; use trainer.gpus=1"),
        ("xpu", 2, DataParallel(), "strategy=data_parallel on 2 XPU devices: torch copies modules "
         "only to CUDA devices; use strategy=ddp"),
    ],
)  # fmt: skip
def test_what_torch_can_not_do_on_a_kind_of_device_is_refused_in_one_line(
    monkeypatch, kind, count, strategy, said
):
    machine(monkeypatch, kind, count)
    with pytest.raises(UserError, match=f"^{said}"):
        strategy.launch(strategy.setup)


def test_one_device_of_any_kind_is_one_replica_of_data_parallel(monkeypatch):
    machine(monkeypatch, "mps", 1)
    strategy = DataParallel()
    strategy.setup()
    assert (strategy.devices, strategy.replicates_task) == (["mps:0"], False)


@pytest.mark.parametrize("kind, gpus", [(DataParallel, [1, 0]), (SingleGPU, [1])])
def test_the_first_device_is_the_current_one_until_the_strategy_closes(two_gpus, kind, gpus):
    strategy = kind(gpus)
    strategy.setup()
    assert torch.accelerator.current_device_index() == 1
    strategy.close()
    assert torch.accelerator.current_device_index() == 0


def test_float64_is_refused_where_the_device_has_none():
    line = "trainer.precision=64 but MPS has no floats of 64 bits; use trainer.precision=32, or tr"
    with pytest.raises(UserError, match=f"^{line}"):
        Precision("64", torch.device("mps", 0))


# What reaches torch's DDP


OPTIONS = ("find_unused_parameters", BUFFERS, "gradient_as_bucket_view")


def test_the_options_of_ddp_reach_torch():
    assert results()["options"] == dict.fromkeys(OPTIONS, [True, False])


def test_the_size_of_buckets_reaches_torch_and_one_of_nothing_is_refused():
    assert results()["bucket"] == 3 * 2**20
    with pytest.raises(UserError, match=r"strategy.bucket_cap_mb=0 is out of range; use more"):
        DDP(bucket_cap_mb=0)


def test_the_timeout_reaches_torch():
    assert results()["timeout"] == 77


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_of_nothing_is_refused(seconds):
    with pytest.raises(UserError, match=f"strategy.timeout_seconds={seconds}"):
        DDP(timeout_seconds=seconds)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["routed", "bucket_copies"])
def test_training_with_the_option_equals_one_process(name, accumulate):
    wanted = trained(CPU(), name, accumulate)["weights"]
    assert weights_apart(results()[name, accumulate]["weights"], wanted) <= 1e-12


def test_a_parameter_that_no_rank_uses_keeps_its_value():
    found = results()["routed", 1]["weights"]
    torch.manual_seed(0)
    assert (found["unused"] == Routed().unused.detach().double().numpy()).all()


def test_buffers_are_those_of_the_main_process_only_where_they_are_broadcast():
    # Each rank adds 1 + its rank to the buffer in each of two steps; a broadcast comes before.
    assert results()["buffers", True] == [2.0, 3.0]
    assert results()["buffers", False] == [2.0, 4.0]


@pytest.mark.parametrize("are_broadcast", [True, False])
def test_after_training_all_ranks_have_the_buffers_of_the_main_process(are_broadcast):
    assert results()["final buffers", are_broadcast] == [2.0, 2.0]


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 9), (4, 3)])
def test_ranks_talk_once_an_update_however_many_batches_it_has(accumulate, updates):
    first = 1  # of zeros, after which torch's buckets stay as they are
    assert results()["all_reduces", accumulate] == [first + updates] * 2


def test_only_the_main_process_logs():
    opened, logged = results()["logs"]
    assert opened == [True, False]
    assert logged[0] > 0
    assert logged[1] == 0


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_facade_of_facts_is_the_same_on_every_strategy(replicas):
    strategy = CPU() if replicas == 1 else DataParallel(replicas, "cpu")
    strategy.setup()
    facts = (strategy.rank, strategy.world_size, strategy.replicas, strategy.is_main)
    assert facts == (0, 1, replicas, True)
    assert strategy.devices == ["cpu"] * replicas


def test_the_facts_of_a_rank_are_its_own():
    assert results()["facts"] == [
        {"rank": rank, "world_size": 2, "replicas": 2, "devices": ["cpu", "cpu"]} for rank in (0, 1)
    ]


class Normed(Small):
    """Has statistics, a count that it sets anew, and a mean over rows that its loss is about."""

    def __init__(self, *, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers
        self.net.insert(1, nn.BatchNorm1d(8))
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("center", torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> dict[str, Any]:
        x, y = batch
        rows = self.all_gather(x) if self.gathers else x
        output = super().training_step([x, y + self.center])
        if self.training:
            self.rows = self.rows + len(x)
            self.center.lerp_(rows.mean(), 0.5)
        return output


def normed(strategy: Strategy, gathers: bool) -> Any:
    run = small.fitted(
        make=partial(Normed, gathers=gathers),
        data=Rows(30, 10),
        strategy=strategy,
        precision="64",
        accumulate=2 if gathers else 1,  # between the batches of one update ddp has each rank's
        share_check="off",
    )
    return weights(run.task), run.metrics


@pytest.mark.parametrize("gathers", [False, True])
def test_a_step_moves_statistics_once_by_the_first_replicas_rows(gathers):
    on_one, metrics = normed(DataParallel(3, "cpu"), gathers)
    on_ranks, of_ranks = on(DDP(3, "cpu"), normed, gathers)
    assert on_one["net.1.num_batches_tracked"] == 2 * 3
    assert on_one["rows"] == 2 * 3 * 4
    assert weights_apart(on_one, on_ranks) <= 1e-12
    assert metrics == pytest.approx(of_ranks, rel=1e-12)


# What the ranks do


class Routed(Task):
    """Even rows take one head, odd rows the other, and a third parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(3, 1), nn.Linear(3, 1)
        self.unused = nn.Parameter(torch.rand(2))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y, is_odd = batch
        heads = [(self.even, ~is_odd), (self.odd, is_odd)]
        losses = [(h(x[m]) - y[m]).square().sum() for h, m in heads if m.any()]
        return {"loss": torch.stack(losses).sum() / len(x)}

    def configure_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Buffered(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        self.count += 1 + (dist.get_rank() if dist.is_initialized() else 0)
        self.trained_count = float(self.count)
        return {"loss": self.even(batch[0]).square().mean() + 0 * self.odd(batch[0]).sum()}


class Plain(Routed):
    def __init__(self) -> None:
        super().__init__()
        del self.odd, self.unused

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"loss": (self.even(batch[0]) - batch[1]).square().mean()}


def table() -> DataModule:
    """Nine batches of four rows: every fifth batch is all even or all odd."""
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(2))
    is_odd = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]] * 3, dtype=torch.bool)
    return Given(TensorDataset(draw(36, 3), draw(36, 1), is_odd.flatten()), shuffle=False)


TRAINED: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "routed": (Routed, {"find_unused_parameters": True}),
    "bucket_copies": (Plain, {"gradient_as_bucket_view": False}),
}


class Counts(Callback):
    """How often the gradients were reduced over the ranks."""

    def __init__(self) -> None:
        self.count = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.strategy.module.register_comm_hook(None, self.hook)

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.count += 1
        reduced = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return reduced.get_future().then(lambda future: future.value()[0])


class Opened(Recorder):
    is_open = False

    def open(self, *args: Any, **kwargs: Any) -> None:
        self.is_open = True


def fitted(strategy: Strategy, task: Task, **given: Any) -> Trainer:
    settings = {"max_epochs": 1, "precision": "64"} | given.pop("settings", {})
    trainer = Trainer(task, table(), strategy=strategy, **settings, **given)
    trainer.fit()
    return trainer


def trained(strategy: Strategy, name: str, accumulate: int) -> dict[str, Any]:
    torch.manual_seed(0)
    task = TRAINED[name][0]()
    fitted(strategy, task, settings={"max_epochs": 3, "accumulate": accumulate})
    return {"weights": weights(task)}


def in_a_rank(strategy: DDP) -> dict[Any, Any]:
    """All that the tests above ask of two ranks, in one group of them."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    found: dict[Any, Any] = {"timeout": backend.options._timeout.total_seconds()}
    facts = {name: getattr(strategy, name) for name in ("rank", "world_size", "replicas")}
    found["facts"] = strategy.collectives.gather(facts | {"devices": strategy.devices})
    found["options"] = {
        name: [seen_by_torch(strategy, name, value) for value in (True, False)] for name in OPTIONS
    }
    strategy.options = DDP(bucket_cap_mb=3).options
    found["bucket"] = strategy.wrap(nn.Linear(1, 1), training=True).bucket_bytes_cap
    for name, (_, options) in TRAINED.items():
        for accumulate in (1, 2):
            strategy.options = DDP(**options).options
            found[name, accumulate] = trained(strategy, name, accumulate)
    for value in (True, False):
        strategy.options = DDP(broadcast_buffers=value, find_unused_parameters=True).options
        task = Buffered()
        fitted(strategy, task, settings={"max_steps": 2})
        found["buffers", value] = strategy.collectives.gather(task.trained_count)
        found["final buffers", value] = strategy.collectives.gather(float(task.count))
    strategy.options = DDP().options
    for accumulate in (1, 4):
        counts = Counts()
        fitted(strategy, Plain(), settings={"accumulate": accumulate}, callbacks=[counts])
        found["all_reduces", accumulate] = strategy.collectives.gather(counts.count)
    logger = Opened()
    fitted(strategy, Plain(), loggers=[logger], settings={"log_every": 2})
    opened, logged = (
        strategy.collectives.gather(logger.is_open),
        strategy.collectives.gather(len(logger.log_)),
    )
    return found | {"logs": (opened, logged)}


def seen_by_torch(strategy: DDP, name: str, value: bool) -> bool:
    own = "broadcast_buffers" if name == BUFFERS else name
    strategy.options = DDP(**{own: value}).options
    return getattr(strategy.wrap(nn.Linear(1, 1), training=True), name)


@once
def results() -> dict[Any, Any]:
    return on(DDP(2, "cpu", timeout_seconds=77), in_a_rank)


@pytest.mark.parametrize("kind", [Strategy, CPU, SingleGPU, DataParallel])
def test_one_process_refuses_to_be_one_of_torchruns(kind: type, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="one of WORLD_SIZE=2; use strategy=ddp"):
        kind().launch(lambda: None)


def test_auto_joins_the_ranks_that_torchrun_started(monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert type(auto()).__name__ == "DDP"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert type(auto(accelerator="cpu")) is CPU
