"""What a run shows: a banner, a bar with a table of epochs or lines of epochs, and its numbers.

A bar is redrawn at most ten times a second, and takes at most a twenty-fifth of the time. Elsewhere
each epoch has a line, and a long one has a line every few seconds. Of epochs that are shorter than
a second there is one every few seconds, with the first, the best and the last.
"""

import logging
import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dpframe.callbacks.banner import banner, side_by_side, table
from dpframe.callbacks.monitor import Best, EpochRow, Monitor
from dpframe.callbacks.newest import NewestLoss
from dpframe.errors import Interrupted, not_one_of, printable
from dpframe.trainer.callback import Callback
from dpframe.util.terminal import can_redraw

if TYPE_CHECKING:
    from dpframe.callbacks.screen import Screen
    from dpframe.data import Batch
    from dpframe.trainer import Predictions, Trainer

log = logging.getLogger("dpframe")
REDRAW_SECONDS = 0.1
PAUSE = 25  # times what the bar took to draw, until it is drawn again
SHORT_EPOCH_SECONDS = 1.0
LINE_SECONDS = 5.0  # without one; in a run of hours, more: a twentieth of its time
MOST_LINE_SECONDS = 60.0
PACE_SECONDS = 2.0
SHOWN_EPOCHS = 10


class Progress(Callback):
    """`bar`: auto draws one on a terminal and prints lines elsewhere."""

    reads_metrics = True
    shows_banner = True

    def __init__(self, bar: str | bool = "auto") -> None:
        if bar not in ("auto", True, False):
            raise not_one_of("callbacks.progress.bar", bar, ("auto", "true", "false"))
        self.has_bar = can_redraw() if bar == "auto" else bool(bar)
        self.reset()

    def reset(self) -> None:
        self.screen: Screen | None = None
        self.epochs: list[EpochRow] = []  # the last ones
        self.with_line: set[int] = set()  # the steps of epochs that have one
        self.newest = NewestLoss()
        self.best: Best | None = None  # of what a callback monitors
        self.began = self.epoch_began = 0.0
        self.next_draw = self.next_line = math.inf  # without a screen; in other processes

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.has_bar = self.has_bar and trainer.strategy.is_main
        if not trainer.strategy.is_main:
            return
        print(printable(banner(trainer)), flush=True)
        self.best = _best_so_far(trainer)
        self.pace = Pace(trainer)
        self._begin(self.pace.began)
        if self.has_bar:
            from dpframe.callbacks.screen import Screen

            self.screen = Screen()
            self.next_draw = self.began

    def on_step_end(self, trainer: "Trainer") -> None:
        if (now := time.perf_counter()) >= self.next_draw or now >= self.next_line:
            self._show(trainer, now)

    def on_validation_start(self, trainer: "Trainer") -> None:
        if trainer.mode != "fit" and trainer.strategy.is_main:
            self._begin(time.perf_counter())

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: "Trainer", batch: "Batch", outputs: list[Any]
    ) -> None:
        if (now := time.perf_counter()) >= self.next_draw or now >= self.next_line:
            self._show(trainer, now, within=_batches_done(trainer, batch.name))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_epoch_end(self, trainer: "Trainer") -> None:
        if not trainer.strategy.is_main:
            return
        epoch = EpochRow(trainer.progress.current_epoch, trainer.global_step, {**trainer.metrics})
        self.epochs = [*self.epochs[1 - SHOWN_EPOCHS :], epoch]
        if self.best is not None:
            self.best.on_epoch_end(trainer)
        now = time.perf_counter()
        is_short = now - self.epoch_began < SHORT_EPOCH_SECONDS
        self.epoch_began = now
        if not (is_short and self.with_line) or now >= self.next_line:
            self._put_off_line(now)
            self._print_epoch(trainer, epoch)
        self.on_step_end(trainer)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._draw(trainer, is_over=True)
        self._stop(trainer)
        from dpframe.devices.memory import peaks as peaks_of

        peaks = peaks_of(trainer.strategy)
        if not trainer.strategy.is_main:
            return
        if trainer.stop_reason:
            log.info("stopped: %s", trainer.stop_reason)
        rows, seconds = trainer.progress.rows_seen, trainer.progress.seconds
        rate = rows / seconds if seconds else 0.0
        each = " + ".join(f"{peak / 2**30:.2f}" for peak in peaks or ())
        memory = f", {each} GiB at most" if peaks else ""
        print(
            f"{self._last_table(trainer)}\n"
            f"{trainer.global_step} steps in {seconds:.2f} s, {rate:,.0f} samples/s{memory}",
            flush=True,
        )

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        with suppress(OSError):  # the reader has gone: that must not hide what ended the run
            if isinstance(error, Interrupted):  # else what is drawn may be what has failed
                self._draw(trainer, is_over=True)
            self._stop(trainer)

    def on_validation_end(self, trainer: "Trainer") -> None:
        if self.best is not None:
            self.best.on_validation_end(trainer)
        if trainer.mode == "validate" and trainer.strategy.is_main:
            print(table(trainer.metrics), flush=True)

    def on_test_end(self, trainer: "Trainer") -> None:
        if trainer.strategy.is_main:
            metrics = trainer.metrics
            if trainer.has_begun:  # training, which has shown the others
                metrics = {k: v for k, v in metrics.items() if k.startswith("test/")}
            print(table(metrics), flush=True)

    def on_predict_end(self, trainer: "Trainer", predictions: "Predictions") -> None:
        count = len(predictions.batches)
        print(f"predicted    {count} batch{'' if count == 1 else 'es'}", flush=True)

    def _begin(self, now: float) -> None:
        self.began = self.epoch_began = now
        self._put_off_line(now)

    def _put_off_line(self, now: float) -> None:
        seconds = max(LINE_SECONDS, (now - self.began) / 20)
        self.next_line = now + min(seconds, MOST_LINE_SECONDS)

    def _show(self, trainer: "Trainer", now: float, within: str = "") -> None:
        """`within` an evaluation: how far it is."""
        if now >= self.next_line:
            self._put_off_line(now)
            self._print("  ".join(filter(None, self._line(trainer, within))))
        if now >= self.next_draw:
            self._draw(trainer, within)
            drawn = time.perf_counter()
            self.next_draw = drawn + max(REDRAW_SECONDS, PAUSE * (drawn - now))

    def _line(self, trainer: "Trainer", within: str) -> list[str]:
        if trainer.mode != "fit":
            return [within]
        step = f"step {trainer.global_step}" + out_of(trainer.total_steps)
        if within:
            return [current_epoch(trainer), step, within]
        numbers = _newest(trainer, self.best)
        first = {name: numbers[name] for name in numbers if _is_first(name, self.best)}
        return [current_epoch(trainer), step, self.pace.describe(trainer), inline(first)]

    def _print_epoch(self, trainer: "Trainer", epoch: EpochRow, mark: str = "") -> None:
        self.with_line.add(epoch.step)
        number = f"epoch {epoch.number}{out_of(trainer.settings.max_epochs)}"
        self._print(f"{number}  step {epoch.step}  {inline(epoch.metrics)}{mark}")

    def _print(self, line: str) -> None:
        log.info("%s", line, extra={"on_screen": self.screen is None})
        if self.screen is None and not log.hasHandlers():  # no command line around this Trainer
            print(line, flush=True)

    def _draw(self, trainer: "Trainer", within: str = "", *, is_over: bool = False) -> None:
        if self.screen is not None:
            numbers = _newest(trainer, self.best)
            if not is_over:  # what stays on screen are means over all replicas
                numbers = _loss_first(self.newest.beside(trainer, numbers), self.best)
            done = _share_done(trainer)
            epochs = [e._replace(metrics=_loss_first(e.metrics, self.best)) for e in self.epochs]
            self.screen.draw(
                epochs,
                self._best_epoch(),
                where=current_epoch(trainer),
                done=done,
                has_bar=not is_over or done == 1.0,
                pace=within or self.pace.describe(trainer, is_over=is_over),
                metrics=numbers,
            )

    def _best_epoch(self) -> EpochRow | None:
        """The best epoch, which may be before a resume; the best step may be within an epoch."""
        if self.best is None or not self.best.step:
            return None
        return EpochRow(self.best.epoch, self.best.step, self.best.metrics)

    def _last_table(self, trainer: "Trainer") -> str:
        best = self._best_epoch()
        if best is None or best.step == trainer.global_step:
            return table(trainer.metrics)
        columns = {
            f"best, step {best.step}": best.metrics,
            f"last, step {trainer.global_step}": trainer.metrics,
        }
        return side_by_side(columns)

    def _stop(self, trainer: "Trainer") -> None:
        """Prints this run's best epoch and the last one, if they have no line yet, and ends the
        bar. The table at the end has a best epoch from before a resume."""
        try:
            for epoch in self.epochs[-1:]:
                best, first = self._best_epoch(), self.pace.first_step
                with_line = {*self.with_line, epoch.step}
                if best is not None and best.step > first and best.step not in with_line:
                    self._print_epoch(trainer, best, mark="  best")
                if epoch.step not in self.with_line:
                    self._print_epoch(trainer, epoch)
        finally:
            self.newest = NewestLoss()
            if self.screen is not None:
                self.screen.stop()
                self.screen = None
                self.next_draw = math.inf


class Pace:
    """How fast a training is at the moment, and how long it will take."""

    def __init__(self, trainer: "Trainer") -> None:
        self.began = time.perf_counter()
        self.first_step = trainer.global_step
        self.marks = deque([(self.began, trainer.progress.rows_seen)], maxlen=3)

    def describe(self, trainer: "Trainer", *, is_over: bool = False) -> str:
        """The rate of the last seconds, and the time left; the step where the end is unknown."""
        now, rows = time.perf_counter(), trainer.progress.rows_seen
        then, rows_then = self.marks[0]
        if now - self.marks[-1][0] >= PACE_SECONDS:
            self.marks.append((now, rows))
        rate = f"{(rows - rows_then) / (now - then):,.0f} samples/s"
        left = self._seconds_left(trainer, now)
        if left is None:
            return rate if trainer.total_steps else f"step {trainer.global_step}  {rate}"
        return f"{rate}  {_clock(left)} left" if left and not is_over else rate

    def _seconds_left(self, trainer: "Trainer", now: float) -> float | None:
        """The shorter one, by steps and by the clock."""
        limit = trainer.settings.max_seconds
        done, total = trainer.global_step - self.first_step, trainer.total_steps
        ways = [] if limit is None else [max(0.0, limit - trainer.clock)]
        if total and done:
            ways.append((total - trainer.global_step) * (now - self.began) / done)
        return min(ways, default=None)


def current_epoch(trainer: "Trainer") -> str:
    return f"epoch {trainer.progress.current_epoch}{out_of(trainer.settings.max_epochs)}"


def out_of(total: int | None) -> str:
    return f"/{total}" if total else ""


def inline(metrics: dict[str, float]) -> str:
    return printable("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


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
    is_loss = f"/{name}".endswith("/loss") and not name.startswith("val/")
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
    words = [trainer.phase, printable(name), f"batch {done}{out_of(total)}"]
    return " ".join(filter(None, words))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
