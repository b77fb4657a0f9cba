"""What a run shows: a banner, a bar with a table of epochs or a line an epoch, and its numbers.

A bar is redrawn at most ten times a second. The lines of epochs that are shorter than that are
shown several at once, at the end of a step, and before anything else that is logged. An epoch that
takes longer has a line every few seconds.
"""

import logging
import math
import os
import sys
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dpframe.callbacks.monitor import Best, Epoch, Monitor
from dpframe.data import split
from dpframe.errors import not_one_of, printable
from dpframe.trainer.callback import Callback

if TYPE_CHECKING:
    from dpframe.callbacks.screen import Screen
    from dpframe.data import Batch
    from dpframe.trainer import Predictions, Trainer

log = logging.getLogger("dpframe")
REDRAW_SECONDS = 0.1
LINE_SECONDS = 5.0  # without one; in a run of hours, more: a twentieth of its time
MOST_LINE_SECONDS = 60.0
PACE_SECONDS = 2.0
SHOWN_EPOCHS = 10


class Progress(Callback):
    """`bar`: auto draws one on a terminal and prints a line an epoch elsewhere."""

    reads_metrics = True

    def __init__(self, bar: str | bool = "auto") -> None:
        if bar not in ("auto", True, False):
            raise not_one_of("callbacks.progress.bar", bar, ("auto", "true", "false"))
        self.has_bar = _can_redraw() if bar == "auto" else bool(bar)
        self.screen: Screen | None = None
        self.pending: list[str] = []  # lines
        self.epochs: list[Epoch] = []  # the last ones
        self.best: Best | None = None  # of what a callback monitors
        self.best_epoch: Epoch | None = None
        self.began = 0.0
        self.next_draw = 0.0
        self.next_line = math.inf  # in all processes but the main one

    def on_fit_start(self, trainer: "Trainer") -> None:
        if not trainer.strategy.is_main:
            self.has_bar = False
            return
        print(printable(banner(trainer)), flush=True)
        for handler in logging.getLogger().handlers:
            handler.addFilter(self._lines_first)
        self.best = _best_so_far(trainer)
        self.pace = Pace(trainer)
        self._begin(self.pace.began)
        if self.has_bar:
            from dpframe.callbacks.screen import Screen

            self.screen = Screen()

    def on_step_end(self, trainer: "Trainer") -> None:
        if self.screen is not None or self.pending or time.perf_counter() >= self.next_line:
            self._draw_in_time(trainer)

    def on_validation_start(self, trainer: "Trainer") -> None:
        if trainer.mode != "fit" and trainer.strategy.is_main:
            self._begin(time.perf_counter())

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: "Trainer", batch: "Batch", outputs: list[Any]
    ) -> None:
        if self.screen is not None or time.perf_counter() >= self.next_line:
            self._draw_in_time(trainer, _batches_done(trainer, batch.name))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if not trainer.strategy.is_main:
            return
        metrics = _loss_first(trainer.metrics, self.best)
        epoch = Epoch(trainer.progress.current_epoch, trainer.global_step, metrics)
        self.epochs = [*self.epochs[1 - SHOWN_EPOCHS :], epoch]
        if self.best is not None:
            self.best.on_epoch_end(trainer)
            if self.best.step == epoch.step:
                self.best_epoch = epoch
        numbers = _inline(trainer.metrics)
        self.pending.append(f"{_epoch(trainer)}  step {trainer.global_step}  {numbers}")
        self._put_off_line(time.perf_counter())
        self._draw_in_time(trainer)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._draw(trainer)
        self._stop()
        peaks = trainer.peak_memory()
        if not trainer.strategy.is_main:
            return
        if trainer.stop_reason:
            log.info("stopped: %s", trainer.stop_reason)
        rows, seconds = trainer.progress.rows_seen, trainer.progress.seconds
        rate = rows / seconds if seconds else 0.0
        memory = f", {' + '.join(map(_gib, peaks))} GiB at most" if peaks else ""
        print(
            f"{printable(table(trainer.metrics))}\n"
            f"{trainer.global_step} steps in {seconds:.2f} s, {rate:,.0f} samples/s{memory}",
            flush=True,
        )

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        with suppress(OSError):  # the reader has gone: that must not hide what ended the run
            self._print_lines()
        self._stop()

    def on_validation_end(self, trainer: "Trainer") -> None:
        if self.best is not None:
            self.best.on_validation_end(trainer)
        if trainer.mode == "validate" and trainer.strategy.is_main:
            print(printable(table(trainer.metrics)), flush=True)

    def on_test_end(self, trainer: "Trainer") -> None:
        if trainer.strategy.is_main:
            metrics = trainer.metrics
            if trainer.has_begun:  # training, which has shown the others
                metrics = {k: v for k, v in metrics.items() if k.startswith("test/")}
            print(printable(table(metrics)), flush=True)

    def on_predict_end(self, trainer: "Trainer", predictions: "Predictions") -> None:
        count = len(predictions.batches)
        print(f"predicted    {count} batch{'' if count == 1 else 'es'}", flush=True)

    def _begin(self, now: float) -> None:
        self.began = now
        self._put_off_line(now)

    def _draw_in_time(self, trainer: "Trainer", within: str = "") -> None:
        """`within` an evaluation: how far it is."""
        now = time.perf_counter()
        if now >= self.next_line:
            self._put_off_line(now)
            self.pending.append("  ".join(filter(None, self._line(trainer, within))))
        if now >= self.next_draw:
            self.next_draw = now + REDRAW_SECONDS
            self._draw(trainer, within)

    def _line(self, trainer: "Trainer", within: str) -> list[str]:
        if trainer.mode != "fit":
            return [within]
        step = f"step {trainer.global_step}" + _of(trainer.total_steps)
        if within:
            return [_epoch(trainer), step, within]
        numbers = _newest(trainer, self.best)
        first = {name: numbers[name] for name in numbers if _is_first(name, self.best)}
        return [_epoch(trainer), step, self.pace.told(trainer), _inline(first)]

    def _draw(self, trainer: "Trainer", within: str = "") -> None:
        self._print_lines()
        if self.screen is not None:
            self.screen.draw(
                self.epochs,
                self._best_epoch(),
                where=_epoch(trainer),
                done=_share_done(trainer),
                pace=within or self.pace.told(trainer),
                metrics=_newest(trainer, self.best),
            )

    def _best_epoch(self) -> Epoch | None:
        """The best epoch, which may be before a resume; the best step may be within an epoch."""
        if self.best is None or not self.best.step:
            return None
        if self.best_epoch is not None and self.best_epoch.step == self.best.step:
            return self.best_epoch
        return Epoch(self.best.epoch, self.best.step, self.best.value)

    def _put_off_line(self, now: float) -> None:
        seconds = max(LINE_SECONDS, (now - self.began) / 20)
        self.next_line = now + min(seconds, MOST_LINE_SECONDS)

    def _lines_first(self, record: logging.LogRecord) -> bool:
        self._print_lines()
        return True

    def _print_lines(self) -> None:
        lines = self.pending[:]
        if not lines:
            return
        del self.pending[: len(lines)]  # another thread may add a line meanwhile: it stays
        text = "\n".join(lines)
        log.info(text, extra={"on_screen": self.screen is None})
        if self.screen is None and not log.hasHandlers():  # no command line around this Trainer
            print(text, flush=True)

    def _stop(self) -> None:
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._lines_first)
        if self.screen is not None:
            self.screen.stop()
            self.screen = None


class Pace:
    """How fast a training is at the moment, and how long it will take."""

    def __init__(self, trainer: "Trainer") -> None:
        self.began = time.perf_counter()
        self.first_step = trainer.global_step
        self.marks = deque([(self.began, trainer.progress.rows_seen)], maxlen=3)

    def told(self, trainer: "Trainer") -> str:
        """The rate of the last seconds, and the time left; the step where nobody knows that."""
        now, rows = time.perf_counter(), trainer.progress.rows_seen
        then, rows_then = self.marks[0]
        if now - self.marks[-1][0] >= PACE_SECONDS:
            self.marks.append((now, rows))
        rate = f"{(rows - rows_then) / (now - then):,.0f} samples/s"
        left = self._seconds_left(trainer, now)
        if left is None:
            return rate if trainer.total_steps else f"step {trainer.global_step}  {rate}"
        return f"{rate}  {_clock(left)} left" if left else rate

    def _seconds_left(self, trainer: "Trainer", now: float) -> float | None:
        """The shorter one, by steps and by the clock."""
        limit = trainer.settings.max_seconds
        done, total = trainer.global_step - self.first_step, trainer.total_steps
        ways = [] if limit is None else [max(0.0, limit - trainer.clock)]
        if total and done:
            ways.append((total - trainer.global_step) * (now - self.began) / done)
        return min(ways, default=None)


def banner(trainer: "Trainer") -> str:
    strategy = trainer.strategy
    rows = [
        ("recipe", f"{trainer.run.recipe}  ({type(trainer.task).__name__}, seed {trainer.seed})"),
        ("strategy", f"{strategy.name} on {_devices(strategy.devices)}{_nodes(trainer)}"),
        ("step", _batch(trainer)),
        ("data", _data(trainer)),
        ("precision", trainer.settings.precision),
    ]
    if shares := trainer.strategy.logical_shares:
        rows.append(("bits", f"the same on 1 to {shares} replicas: {shares} shares of each batch"))
    if trainer.layout:
        rows.append(("layout", trainer.layout))
    if trainer.run.directory:
        rows.append(("run", trainer.run.directory))
    dashboards = (logger.dashboard(trainer.run.directory) for logger in trainer.loggers)
    rows += [("dashboard", command) for command in dashboards if command]
    facts = "\n".join(f"{name:<10} {value}" for name, value in rows)
    return f"{facts}\n\n{parameters(trainer)}\n"


def _batch(trainer: "Trainer") -> str:
    batches = trainer.settings.accumulate
    text = batch(trainer.feed.source.batch_size, trainer.strategy.replicas)
    return text + (f", {batches} batches a step" if batches > 1 else "")


def batch(rows: int, replicas: int) -> str:
    """A global batch as the replicas share it, e.g. `batch 128 = 4 replicas x 32`."""
    shares = [len(share) for share in split(range(rows), replicas)]
    if len(set(shares)) == 1:
        return f"batch {rows} = {replicas} replica{'s' if replicas > 1 else ''} x {shares[0]}"
    return f"batch {rows} = {' + '.join(map(str, shares))}"


def _data(trainer: "Trainer") -> str:
    """How the data is read, and whether it is on the GPU or copied there batch by batch."""
    loader = trainer.feed.train
    if loader.device.type != "cpu":
        return f"{len(trainer.feed.dataset):,} rows on {loader.device}"
    on_gpu = trainer.strategy.device.type != "cpu"
    return f"{loader.how}, copied by the batch" if on_gpu else loader.how


def parameters(trainer: "Trainer") -> str:
    """The layers that own parameters, with their shapes and counts."""
    rows: list[tuple[str, ...]] = [("layer", "kind", "shapes", "parameters")]
    counted: set[int] = set()
    total = 0
    for name, module in trainer.task.named_modules():
        direct = [p for p in module.parameters(recurse=False) if id(p) not in counted]
        counted |= {id(p) for p in direct}
        count = sum(p.numel() for p in direct)
        total += count
        if direct:
            shapes = " ".join("x".join(map(str, p.shape)) or "1" for p in direct)
            rows.append((name or "(task)", type(module).__name__, shapes, f"{count:,}"))
    rows.append(("total", "", "", f"{total:,}"))
    return _columns(rows)


def table(metrics: dict[str, float]) -> str:
    return _columns([("metric", "value"), *((k, f"{v:.6g}") for k, v in sorted(metrics.items()))])


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = tuple("-" * width for width in widths)
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _devices(names: list[str]) -> str:
    kinds = sorted(set(names))
    return f"{len(names)} x {kinds[0]}" if len(kinds) == 1 and len(names) > 1 else ", ".join(names)


def _nodes(trainer: "Trainer") -> str:
    nodes, replicas = trainer.strategy.nodes, trainer.strategy.replicas
    return f": {replicas} replicas = {nodes} nodes x {replicas // nodes}" if nodes > 1 else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _inline(metrics: dict[str, float]) -> str:
    return printable("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def _can_redraw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _best_so_far(trainer: "Trainer") -> Best | None:
    """The best value of what the summary, the checkpoints or early stopping monitor."""
    owners = [c for c in trainer.callbacks if isinstance(getattr(c, "monitor", None), Monitor)]
    owners.sort(key=lambda callback: not isinstance(callback, Best))
    if not owners:
        return None
    owner: Any = owners[0]
    best = Best(owner.monitor.name, owner.monitor.mode, owner.monitor.key)
    best.load_state_dict(owner.state_dict())
    return best


def _newest(trainer: "Trainer", best: Best | None) -> dict[str, float]:
    """In an epoch of many steps, the means of the last ones stand for those of the epoch before."""
    metrics, of_steps = trainer.metrics, trainer.step_metrics
    is_short = 0 < trainer.steps_per_epoch <= trainer.settings.log_every
    if is_short and any(name.startswith("train/") for name in metrics):
        of_steps = {}
    replaced = {name.replace("step/", "train/", 1) for name in of_steps}
    others = {name: value for name, value in metrics.items() if name not in replaced}
    return _loss_first(of_steps | others, best)


def _loss_first(metrics: dict[str, float], best: Best | None) -> dict[str, float]:
    """Sorts the losses first, then what is monitored, then the others."""
    names = sorted(metrics, key=lambda name: not _is_first(name, best))
    return {name: metrics[name] for name in names}


def _is_first(name: str, best: Best | None) -> bool:
    is_loss = name.startswith(("step/", "train/")) and name.endswith("/loss")
    return is_loss or (best is not None and name == best.monitor.name)


def _share_done(trainer: "Trainer") -> float | None:
    limit, total = trainer.settings.max_seconds, trainer.total_steps
    shares = [] if limit is None else [trainer.clock / limit]
    if total:
        shares.append(trainer.global_step / total)
    return min(1.0, max(shares)) if shares else None


def _batches_done(trainer: "Trainer", name: str) -> str:
    """How far the evaluation of this data set is."""
    done, total = trainer.task.run_context.batch_index + 1, trainer.task.run_context.batches
    words = [trainer.phase, printable(name), f"batch {done}{_of(total)}"]
    return " ".join(filter(None, words))


def _epoch(trainer: "Trainer") -> str:
    return f"epoch {trainer.progress.current_epoch}{_of(trainer.settings.max_epochs)}"


def _of(total: int | None) -> str:
    return f"/{total}" if total else ""


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
