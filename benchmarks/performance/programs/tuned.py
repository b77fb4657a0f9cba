"""Boston with every trick that this project knows, written out, and the default config's features.

At the start: no garbage collector, and no import of torch._dynamo or of TensorBoard's writer. Per
step: rows by index_select, a fused Adam, losses summed as tensors, a look for NaN. Per epoch:
validation, one TensorBoard event, a CSV row, a line on screen, and a checkpoint of weights,
optimizer and random state where it is the best or half a second is over, written at most twice a
second, synced and renamed on a thread.
"""

# ruff: noqa: E402
import gc

if __name__ == "__main__":
    gc.disable()  # before the imports, which make a million objects and no garbage

import inspect
import io
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import problems
import torch
from marks import Marks
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
from torch.optim import Optimizer

SECONDS_BETWEEN = 0.5  # two checkpoints; the newest state waits


def main() -> None:
    options = problems.parser(__doc__).parse_args()
    gc.freeze()
    marks = Marks()
    *_, loss = epochs(options.epochs, marks, Path.cwd())
    marks.tell(loss=loss, steps_per_epoch=4)


def epochs(
    count: int,
    marks: Marks,
    folder: Path,
    *,
    is_bare: bool = False,
    steps_by_torch: bool = False,
) -> Iterator[float]:
    """Yields each epoch's loss when the epoch is over. `is_bare`: no line, no checkpoint;
    `steps_by_torch`: `optimizer.step()`, with what torch has put around it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    problem = problems.problem()
    net = problem.network()
    without_dynamo()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)
    update = optimizer.step if steps_by_torch else step_of(optimizer)
    events = Events(folder / "tuned")
    saver = Saver(folder)
    step, best = 0, math.inf
    with (folder / "tuned.csv").open("w") as table:
        for epoch in range(count):
            marks.begin()
            means = train(net, update, *problem.train.tensors, problem.batch_size)
            marks.train()
            step += 4
            scalars = {f"train/{name}": value for name, value in means.items()}
            scalars |= validate(net, *problem.held_out.tensors)
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            events.add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            table.write(f"{step},{','.join(map(repr, scalars.values()))}\n")
            table.flush()
            if not is_bare:
                print(f"epoch {epoch + 1} {scalars}", flush=True)
                is_best = scalars["val/loss"] < best
                best = min(best, scalars["val/loss"])
                is_last = epoch == count - 1
                if is_best or is_last or saver.is_due():
                    state = {
                        "epoch": epoch,
                        "net": net.state_dict(),
                        "random": torch.get_rng_state(),
                    }
                    state["optimizer"] = optimizer.state_dict()
                    saver.keep(state, ["last.ckpt", "best.ckpt"] if is_best else ["last.ckpt"])
            marks.end()
            yield means["loss"]
    saver.close()
    events.close()


def without_dynamo() -> None:
    """Sets what torch would set on these methods after it had imported dynamo."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        function = inspect.unwrap(getattr(Optimizer, name))
        function.__dynamo_disable = function


def step_of(optimizer: Optimizer) -> Callable[[], object]:
    """Less the wrapper that calls the hooks of steps and names each step for the profiler."""
    return torch.no_grad()(inspect.unwrap(type(optimizer).step)).__get__(optimizer)


class Events:
    """An event file, by TensorBoard's protobuf classes alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self.file = (folder / name).open("wb")
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Event) -> None:
        record = event.SerializeToString()
        length = struct.pack("<Q", len(record))
        self.file.write(length + masked(length) + record + masked(record))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def masked(data: bytes) -> bytes:
    """The CRC-32C of a record, as TensorFlow writes it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [entry(byte) for byte in range(256)]


def train(
    net: nn.Module, update: Callable[[], object], x: Tensor, y: Tensor, batch_size: int
) -> dict[str, float]:
    parameters = list(net.parameters())
    net.train()
    losses: list[Tensor] = []
    errors: list[Tensor] = []
    rows: list[int] = []
    for index in torch.randperm(len(x)).split(batch_size):
        error = net(x.index_select(0, index)) - y.index_select(0, index)
        loss = error.square().mean()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"the loss is {loss.item()}")
        loss.backward()
        update()
        for parameter in parameters:
            parameter.grad = None
        losses.append(loss.detach())
        errors.append(error.detach().abs().mean())
        rows.append(len(index))
    weights = torch.tensor(rows, dtype=torch.float64)
    means = torch.stack([torch.stack(losses), torch.stack(errors)]).double() @ weights
    loss_mean, error_mean = (means / weights.sum()).tolist()
    return {"loss": loss_mean, "mae": error_mean}


def validate(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    net.eval()
    with torch.no_grad():
        error = net(x) - y
        loss, mae = error.square().mean().item(), error.abs().mean().item()
    return {"val/loss": loss, "val/mae": mae, "val/rmse": math.sqrt(loss)}


class Saver:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.waiting: dict[str, dict[str, Any]] = {}  # the newest state of each file
        self.saved_at = -math.inf

    def is_due(self) -> bool:
        return time.monotonic() - self.saved_at > SECONDS_BETWEEN

    def keep(self, state: dict[str, Any], names: list[str]) -> None:
        # Copied here, as training goes on; turned into bytes there.
        self.waiting |= dict.fromkeys(names, deepcopy(state))
        if self.is_due():
            self.start()

    def start(self) -> None:
        if self.writing is not None:
            self.writing.result()  # one at a time, and a failure is not lost
        states, self.waiting, self.saved_at = self.waiting, {}, time.monotonic()
        self.writing = self.thread.submit(self.write, states)

    def write(self, states: dict[str, dict[str, Any]]) -> None:
        for name, state in states.items():
            content = io.BytesIO()
            torch.save(state, content)
            temporary = self.folder / f"{name}.partial"
            with temporary.open("wb") as file:
                file.write(content.getvalue())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)

    def close(self) -> None:
        self.start()
        self.thread.shutdown()


if __name__ == "__main__":
    main()
