"""What a run shows on screen: a banner, a bar or a line an epoch, and a table at the end.

A bar is redrawn at most ten times a second. The lines of epochs that are shorter than that are
shown several at once, at the end of a step, and before anything else that is logged.
"""

import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dpframe.callbacks.base import Callback
from dpframe.data import split
from dpframe.errors import not_one_of, printable

if TYPE_CHECKING:
    from dpframe.trainer import Predictions, Trainer

log = logging.getLogger("dpframe")
REDRAW_SECONDS = 0.1


class Progress(Callback):
    """`bar`: auto draws one on a terminal and prints a line an epoch elsewhere."""

    reads_metrics = True

    def __init__(self, bar: str | bool = "auto") -> None:
        if bar not in ("auto", True, False):
            raise not_one_of("callbacks.progress.bar", bar, ("auto", "true", "false"))
        self.has_bar = sys.stdout.isatty() if bar == "auto" else bool(bar)
        self.bar: Any = None
        self.pending: list[str] = []  # lines of epochs
        self.next_draw = 0.0

    def on_fit_start(self, trainer: "Trainer") -> None:
        if not trainer.strategy.is_main:
            self.has_bar = False
            return
        print(printable(banner(trainer)), flush=True)
        for handler in logging.getLogger().handlers:
            handler.addFilter(self._lines_first)
        if self.has_bar:
            self._start_bar(trainer)

    def on_step_end(self, trainer: "Trainer") -> None:
        if self.bar is not None or self.pending:
            self._draw_in_time(trainer)

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if not trainer.strategy.is_main:
            return
        total = trainer.settings.max_epochs
        of = f"/{total}" if total else ""
        metrics = _inline(trainer.metrics)
        self.pending.append(f"epoch {trainer.epoch}{of}  step {trainer.global_step}  {metrics}")
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

    def _start_bar(self, trainer: "Trainer") -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}{task.fields[of]} steps"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            auto_refresh=False,  # no thread: the hooks redraw it
        )
        total = trainer.total_steps or None  # None: only the clock ends it
        self.line = self.bar.add_task(
            f"epoch {trainer.epoch}",
            total=total,
            completed=trainer.global_step,
            of=f"/{total}" if total else "",
            metrics="",
        )
        self.bar.start()

    def _draw_in_time(self, trainer: "Trainer") -> None:
        now = time.perf_counter()
        if now >= self.next_draw:
            self.next_draw = now + REDRAW_SECONDS
            self._draw(trainer)

    def _draw(self, trainer: "Trainer") -> None:
        self._print_lines()
        if self.bar is not None:
            self.bar.update(
                self.line,
                completed=trainer.global_step,
                description=f"epoch {trainer.epoch}",
                metrics=_inline(trainer.metrics),
                refresh=True,
            )

    def _lines_first(self, record: logging.LogRecord) -> bool:
        self._print_lines()
        return True

    def _print_lines(self) -> None:
        lines = self.pending[:]
        if not lines:
            return
        del self.pending[: len(lines)]  # another thread may add a line meanwhile: it stays
        text = "\n".join(lines)
        log.info(text, extra={"on_screen": self.bar is None})
        if self.bar is None and not log.hasHandlers():  # no command line around this Trainer
            print(text, flush=True)

    def _stop(self) -> None:
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self._lines_first)
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def banner(trainer: "Trainer") -> str:
    strategy = trainer.strategy
    rows = [
        ("recipe", f"{trainer.run.recipe}  ({type(trainer.task).__name__}, seed {trainer.seed})"),
        ("strategy", f"{strategy.name} on {_devices(strategy.devices)}"),
        ("step", _batch(trainer)),
        ("data", _data(trainer)),
        ("precision", trainer.settings.precision),
    ]
    if trainer.layout:
        rows.append(("layout", trainer.layout))
    if trainer.run.directory:
        rows.append(("run", trainer.run.directory))
    dashboards = (logger.dashboard(trainer.run.directory) for logger in trainer.report.loggers)
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
    """How it is read, and whether all of it is on the GPU or is copied there batch by batch."""
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


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _inline(metrics: dict[str, float]) -> str:
    return printable("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
