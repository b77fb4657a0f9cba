"""Boston with every trick that this project knows, written out, and the default config's features.

Per step: rows by index_select, a fused Adam, losses summed as tensors, a look for NaN. Per epoch:
validation, one TensorBoard event, a CSV row, a line on screen, and a checkpoint of weights,
optimiser and random state where it is the best or half a second is over, written at most twice a
second, synced and renamed on a thread.
"""

import io
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import boston
import torch
from marks import Marks
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor

SECONDS_BETWEEN = 0.5  # two checkpoints; the newest state waits


def main() -> None:
    options = boston.options(__doc__)
    marks = Marks()
    for loss in epochs(options.epochs, marks, Path.cwd()):  # noqa: B007  the last one is told
        pass
    marks.tell(loss=loss, steps_per_epoch=math.ceil(404 / boston.BATCH_SIZE))


def epochs(
    count: int, marks: Marks, directory: Path, *, saves: bool = True, speaks: bool = True
) -> Iterator[float]:
    """Yields each epoch's loss when the epoch is over."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run(directory, saves=saves, speaks=speaks)
    for epoch in range(count):
        marks.begin()
        means = run.train()
        marks.train()
        run.finish(epoch, means)
        marks.end()
        yield means["loss"]
    run.close(count)


class Run:
    def __init__(self, directory: Path, *, saves: bool, speaks: bool) -> None:
        train, held_out = boston.datasets()
        (self.x, self.y), (self.val_x, self.val_y) = train.tensors, held_out.tensors
        self.net = boston.network()
        parameters = list(self.net.parameters())
        self.optimizer = torch.optim.Adam(parameters, lr=boston.LEARNING_RATE, fused=True)
        self.directory = directory
        self.events = EventFileWriter(str(directory / "tuned"))
        self.table = (directory / "tuned.csv").open("w")
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.saves, self.speaks = saves, speaks
        self.owed: dict[str, dict[str, Any]] = {}  # the newest state of each file
        self.saved_at = -math.inf
        self.step, self.best = 0, math.inf

    def train(self) -> dict[str, float]:
        x, y, net, optimizer = self.x, self.y, self.net, self.optimizer
        parameters = list(net.parameters())
        net.train()
        losses: list[Tensor] = []
        errors: list[Tensor] = []
        rows: list[int] = []
        for index in torch.randperm(len(x)).split(boston.BATCH_SIZE):
            error = net(x.index_select(0, index)) - y.index_select(0, index)
            loss = error.square().mean()
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"the loss is {loss.item()} at step {self.step}")
            loss.backward()
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            losses.append(loss.detach())
            errors.append(error.detach().abs().mean())
            rows.append(len(index))
            self.step += 1
        weights = torch.tensor(rows, dtype=torch.float64)
        means = torch.stack([torch.stack(losses), torch.stack(errors)]).double() @ weights
        loss_mean, error_mean = (means / weights.sum()).tolist()
        return {"loss": loss_mean, "mae": error_mean}

    def finish(self, epoch: int, means: dict[str, float]) -> None:
        self.net.eval()
        with torch.no_grad():
            error = self.net(self.val_x) - self.val_y
            loss, mae = error.square().mean().item(), error.abs().mean().item()
        scalars = {f"train/{name}": value for name, value in means.items()}
        scalars |= {"val/loss": loss, "val/mae": mae, "val/rmse": math.sqrt(loss)}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        summary = Summary(value=values)
        self.events.add_event(Event(wall_time=time.time(), step=self.step, summary=summary))
        line = ",".join(map(repr, scalars.values()))
        self.table.write(f"{self.step},{line}\n")
        self.table.flush()
        if self.speaks:
            print(f"epoch {epoch + 1} {scalars}", flush=True)
        if self.saves:
            self._save(epoch, loss)

    def _save(self, epoch: int, loss: float) -> None:
        is_best = loss < self.best
        self.best = min(loss, self.best)
        if is_best or time.monotonic() - self.saved_at > SECONDS_BETWEEN:
            self._keep(epoch, ["last.ckpt", "best.ckpt"] if is_best else ["last.ckpt"])

    def _keep(self, epoch: int, names: list[str]) -> None:
        # Copied here, as training goes on; turned into bytes there.
        state: dict[str, Any] = {
            "epoch": epoch,
            "net": self.net.state_dict(),
            "random": torch.get_rng_state(),
        }
        state["optimizer"] = self.optimizer.state_dict()
        self.owed |= dict.fromkeys(names, deepcopy(state))
        if time.monotonic() - self.saved_at > SECONDS_BETWEEN:
            self._write_owed()

    def _write_owed(self) -> None:
        if self.writing is not None:
            self.writing.result()  # one at a time, and a failure is not lost
        owed, self.owed, self.saved_at = self.owed, {}, time.monotonic()
        self.writing = self.writer.submit(write, self.directory, owed)

    def close(self, epochs: int) -> None:
        if self.saves:
            self._keep(epochs, ["last.ckpt"])
        self._write_owed()
        self.writer.shutdown()
        self.events.close()
        self.table.close()


def write(directory: Path, states: dict[str, dict[str, Any]]) -> None:
    for name, state in states.items():
        content = io.BytesIO()
        torch.save(state, content)
        temporary = directory / f"{name}.partial"
        with temporary.open("wb") as file:
            file.write(content.getvalue())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / name)


if __name__ == "__main__":
    main()
