"""What two ranks do, in order: hooks and steps, collectives, and draws of random numbers.

Each case is a small run. Its events are lines of text, and tests/data/sequences/ has those that are
agreed: tests/test_sequence.py compares. After a change that is meant,

    python tests/sequence.py

writes them again; the diff shows what else has changed. Nothing of how dpframe is built inside is
named here: hooks and steps are what users write, collectives are torch's own operators (DDP's
reducer and fully_shard call these too), and a draw shows in the state of a generator. The clock
stands still, so that how often the processes look at it does not depend on the machine.
"""

import random
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy
import small
import torch
import torch.distributed as dist
from forked import on
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from dpframe import Callback, Logger, Strategy, Task
from dpframe.callbacks.checkpoint import Checkpoint
from dpframe.callbacks.early_stopping import EarlyStopping
from dpframe.strategies.ddp import DDP
from dpframe.strategies.fsdp import FSDP

FOLDER = Path(__file__).parent / "data/sequences"
SEEN: list[str] = []  # in this process
COLLECTIVE = "    collective: "


def note(event: str) -> None:
    """After what was drawn since the event before."""
    _note_draws()
    SEEN.append(event)


# ---- random numbers

_states: dict[str, int] = {}


def _note_draws() -> None:
    """The first digits of a state that is another one: of draws, a seed, or one put back."""
    python, numpys = random.getstate()[1], numpy.random.get_state()
    now = {
        "python": zlib.crc32(repr(python).encode()),
        "numpy": zlib.crc32(numpys[1].tobytes() + repr(numpys[2:]).encode()),
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
    }
    changed = [f"{n} {state >> 16:04x}" for n, state in now.items() if _states.get(n) != state]
    _states.update(now)
    if changed:
        SEEN.append(f"    drawn: {', '.join(changed)}")


# ---- collectives


class Collectives(TorchDispatchMode):
    """Notes torch's operators that send something, the ranks of their group, and what they send."""

    def __torch_dispatch__(self, call: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented  # its own operators come next
        if call.namespace in ("c10d", "_c10d_functional") and (group := _group(args)):
            name = call.name().rpartition("::")[2].strip("_")
            note(f"{COLLECTIVE}{name} of {group}:{_forms(args)}")
        return call(*args, **(options or {}))


def _group(args: Sequence[Any]) -> str:
    """Its ranks, or its name; '' for operators that send nothing, e.g. wait."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):  # the first is the group
            members = dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
            return f"ranks {' '.join(map(str, members))}"
    return next((f"group {arg}" for arg in reversed(args) if isinstance(arg, str)), "")


def _forms(value: Any) -> str:
    """Types and sizes of tensors; but of bytes, i.e. of pickled objects, no size."""
    if isinstance(value, Tensor):
        size = "" if value.dtype == torch.uint8 else list(value.shape)
        return f" {str(value.dtype).removeprefix('torch.')}{size}"
    return "".join(map(_forms, value)) if isinstance(value, (list, tuple)) else ""


# ---- hooks and steps


def _rows(batch: Any) -> str:
    name = f" of {batch.name}" if batch.name else ""
    return f"{[share.rows for share in batch.shares]} of {batch.rows} rows{name}"


def _noted(hook: str) -> Callable[..., None]:
    def noted(self: Callback, trainer: Any, *args: Any) -> None:
        told = ""
        if hook.endswith(("batch_start", "batch_end")):
            told = f": {_rows(args[0])}"
            if args[1:]:
                told += f", {len(args[1])} outputs"
        elif hook == "on_exception":
            told = f": {type(args[0]).__name__}"
        else:
            told = f": epoch {trainer.epoch}, step {trainer.global_step}"
        if hook == "on_batch_start":
            told += _gradients(trainer.task)
        if hook in ("on_validation_end", "on_epoch_end", "on_test_end"):
            told += f", {' '.join(sorted(trainer.metrics))}"
        note(f"{type(self).__name__}.{hook}{told}")

    return noted


def _gradients(task: Task) -> str:
    gradients = (weight.grad for weight in task.parameters() if weight.grad is not None)
    local = (g.to_local() if isinstance(g, DTensor) else g for g in gradients)
    return ", gradients" if any(gradient.any() for gradient in local) else ""


class All(Callback):
    def state_dict(self) -> dict[str, Any]:
        note("All.state_dict")
        return {"one": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        note(f"All.load_state_dict {state}")


class Reader(Callback):
    reads_metrics = True


class Last(Callback):
    runs_last = True


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
for _hook in HOOKS:
    setattr(All, _hook, _noted(_hook))
for _hook in ("on_validation_end", "on_step_end", "on_epoch_end"):
    setattr(Reader, _hook, _noted(_hook))
    setattr(Last, _hook, _noted(_hook))


class Stops(Exception):
    pass


class StopsAt(Callback):
    """The rank stops there by an error, as if it had been killed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.global_step == self.step:
            raise Stops


class Scalars(Logger):
    def open(self, run_dir: str, **options: Any) -> None:
        note(f"logger.open purge_step={options['purge_step']}")

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        note(f"logger.log at {step}: {' '.join(scalars)}")

    def close(self, *args: Any, **options: Any) -> None:
        note("logger.close")


class Stepped(torch.optim.SGD):
    def __init__(self, parameters: Any, name: str = "", lr: float = 0.05) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.called = name

    def step(self, closure: Any = None) -> Any:
        note(f"optimizer.step {self.called}".rstrip())
        return super().step(closure)


class Halves(StepLR):
    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, step_size=2, gamma=0.5)

    def step(self, epoch: Any = None) -> None:
        note("scheduler.step")
        super().step()


class Noted(Task):
    """A network with dropout by torch.rand, whose draws are the same on every machine."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
            **{"optimizer": Stepped, "scheduler": Halves, **options},
        )
        self.register_buffer("rows_seen", torch.zeros(()))  # as of a batch norm

    def training_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        note(f"training_step: {len(x)} rows")
        kept = torch.rand(x.shape) > 0.25
        self.rows_seen += len(x)
        error = self.net(x * kept)[:, 0] - y
        return {"loss": error.square().mean(), "mae": error.abs().mean()}

    def validation_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        note(f"validation_step: {len(x)} rows{', training' * self.training}")
        return {"loss": (self.net(x)[:, 0] - y).square().mean()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        note(f"test_step: {len(batch[0])} rows{', training' * self.training}")
        return {"loss": (self.net(batch[0])[:, 0] - batch[1]).square().mean()}

    def predict_step(self, batch: Any) -> Any:
        note(f"predict_step: {len(batch[0])} rows{', training' * self.training}")
        return self.net(batch[0])

    def on_epoch_start(self, trainer: Any) -> None:
        note("task.on_epoch_start")

    def on_epoch_end(self, trainer: Any) -> None:
        note("task.on_epoch_end")


class Turns(Noted):
    """The generator has its turn every second step."""

    def __init__(self) -> None:
        optimizers = {name: partial(Stepped, name=name) for name in ("critic", "generator")}
        super().__init__(
            optimizer=None,
            scheduler=None,
            optimizers=optimizers,
            schedulers={"generator": Halves},
        )
        del self.net
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

    def turns(self) -> list[str]:
        names = ["critic", "generator"] if self.global_step % 2 else ["critic"]
        note(f"turns: {' '.join(names)}")
        return names

    def training_step(self, batch: Any, turn: str) -> dict[str, Any]:
        note(f"training_step: {len(batch[0])} rows, {turn}")
        sign = 1 if turn == "generator" else -1
        return {"loss": (sign * self.critic(self.generator(batch[0]))).tanh().mean()}

    def validation_step(self, batch: Any) -> dict[str, Any]:
        note(f"validation_step: {len(batch[0])} rows{', training' * self.training}")
        return {"loss": self.critic(batch[0]).mean()}


class Blocks(Noted):
    """For fsdp: a list of blocks, and weights in none of them."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(*blocks), nn.Linear(4, 1))


class Rows(small.Rows):
    """Draws in its batches by all generators; two sets to validate, and one of a single row."""

    def collate(self, rows: Any) -> Any:
        x, y = super().collate(rows)
        return [x + torch.rand(x.shape) / 10 + random.random() / 10 + numpy.random.rand() / 10, y]

    def val_dataset(self) -> Any:
        return {"near": self.held_out, "far": small.Listed([self.held_out[0]])}

    def predict_dataset(self) -> Dataset:
        return self.held_out


# ---- the cases


def recorded(call: Callable[..., object], strategy: Strategy, folder: str) -> list[str]:
    """The events of `call` in this rank."""
    SEEN.clear()
    _states.clear()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    ticks = count()
    clock = patch.object(time, "perf_counter", lambda: next(ticks) * 1e-6)
    with clock, Collectives():
        call(strategy, folder)
    _note_draws()
    return list(SEEN)


def trainer(strategy: Strategy, folder: str, make: Callable[[], Task], **options: Any) -> Any:
    defaults = {"max_epochs": 2, "accumulate": 2, "log_every": 2, "sanity_batches": 1}
    callbacks = options.pop("callbacks", [])
    return small.trainer(
        make=make,
        data=Rows(13, 3),  # five batches, the last of one row: an epoch has three steps
        strategy=strategy,
        callbacks=[Last(), Reader(), *callbacks, All()],
        loggers=[Scalars()],
        seed=3,
        directory=folder,
        **{**defaults, **options},
    )


def accumulation(strategy: Strategy, folder: str) -> None:
    """Two validation sets, in the middle of epochs too, and a checkpoint every two steps."""
    keeps = Checkpoint("val/near/loss", every_n_steps=2, seconds_between=0)
    stops = EarlyStopping("val/near/loss", patience=9)
    trainer(strategy, folder, Noted, callbacks=[keeps, stops], validate_every_steps=2).fit()


def resumed(strategy: Strategy, folder: str) -> None:
    """It is stopped within its second epoch, and goes on from the last checkpoint."""

    def begun() -> Any:
        keeps = Checkpoint("val/near/loss", every_n_steps=2, seconds_between=0)
        return trainer(strategy, folder, Noted, callbacks=[keeps, *stops])

    stops: list[Callback] = [StopsAt(5)]
    try:
        begun().fit()
    except Stops:
        note("---- resumed")
        dist.barrier()  # the main rank has written its checkpoint
    stops.clear()
    begun().fit("last")


def turns(strategy: Strategy, folder: str) -> None:
    trainer(strategy, folder, Turns, clip_norm={"critic": 1.0}).fit()


def other_modes(strategy: Strategy, folder: str) -> None:
    for mode in ("validate", "test", "predict"):
        note(f"---- {mode}")
        getattr(trainer(strategy, folder, Noted), mode)()


def sharded_weights(strategy: Strategy, folder: str) -> None:
    keeps = Checkpoint("val/near/loss", every_n_steps=2, seconds_between=0)
    trainer(strategy, folder, Blocks, callbacks=[keeps], clip_norm=1.0, max_epochs=1).fit()


CASES: dict[str, tuple[Callable[[], Strategy], Callable[..., None]]] = {
    "accumulation": (partial(DDP, 2, "cpu"), accumulation),
    "resume": (partial(DDP, 2, "cpu"), resumed),
    "turns": (partial(DDP, 2, "cpu"), turns),
    "other_modes": (partial(DDP, 2, "cpu"), other_modes),
    "fsdp": (partial(FSDP, 2, "cpu", checkpoints="whole"), sharded_weights),
}


def of_case(name: str) -> list[list[str]]:
    """The events of each rank."""
    strategy, call = CASES[name]
    with TemporaryDirectory() as folder:
        return on(strategy(), _of_ranks, call, folder)


def _of_ranks(strategy: Strategy, call: Callable[..., None], folder: str) -> list[list[str]]:
    events = recorded(call, strategy, folder)
    return strategy.collectives.gather(events)


def path(name: str, rank: int) -> Path:
    return FOLDER / f"{name}.rank{rank}.txt"


def write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        for rank, lines in enumerate(of_case(name)):
            path(name, rank).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    import sequence  # what the ranks import

    sequence.write()
