"""A profile of a run: torch.profiler records some of its steps, and says where their time went."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import profile, record_function, schedule

RECORDED_STEPS = 100  # after the first two, which allocate memory and fill caches
PARTS = ("data wait", "forward", "backward", "optimizer", "logging", "callbacks", "validation")
VIEWER = "https://ui.perfetto.dev"
PREFIX, STEPS = "dpframe: ", "ProfilerStep*"  # names of ranges: ours, and torch.profiler's own
log = logging.getLogger("dpframe")


def timed(part: str, function: Callable[..., Any], *, is_profiled: bool) -> Callable[..., Any]:
    """Makes a function one of the PARTS, a range of torch.profiler, where there is a profile."""
    return record_function(PREFIX + part)(function) if is_profiled else function


def timed_batches(read: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Makes each wait for a batch a range."""

    def batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
        reading = read(*args, **kwargs)
        following = timed("data wait", lambda: next(reading, None), is_profiled=True)
        while (batch := following()) is not None:
            yield batch

    return batches


class Profile:
    """Records every operation of some steps, of which the parts of the loop are ranges.

    Seconds are the host's: on a GPU a part lasts until its work is queued, and the part that reads
    a number waits for the device. What the GPU computed for each part is told beside them.
    """

    def __init__(self) -> None:
        self._is_on = self._has_recorded = False
        self._profiler = profile(
            schedule=schedule(wait=1, warmup=1, active=RECORDED_STEPS, repeat=1),
            on_trace_ready=self._note,
        )

    def start(self) -> None:
        self._profiler.start()
        self._is_on = True

    def end_step(self) -> None:
        self._profiler.step()

    def stop(self) -> None:
        if self._is_on:
            self._is_on = False
            self._profiler.stop()

    def summarize(self, directory: str, *, is_main: bool) -> dict[str, float]:
        """Where the time went: as `profile/forward` … for the loggers, and as a table in the log.

        The main process writes the whole record to `trace.json.gz` of the directory, if it has one.
        """
        self.stop()
        if not self._has_recorded:
            if is_main:
                log.info("trainer.profile=true: there were too few steps to record any")
            return {}
        ranges = {
            event.key.removeprefix(PREFIX): event
            for event in self._profiler.key_averages()
            if event.device_type == DeviceType.CPU and event.key.startswith((PREFIX, STEPS))
        }
        whole, steps = ranges[STEPS].cpu_time_total / 1e6, 1
        seconds, on_gpu = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        for part in ranges.keys() & PARTS:
            seconds[part] = ranges[part].cpu_time_total / 1e6
            on_gpu[part] = ranges[part].device_time_total / 1e6
        if "optimizer" in ranges:
            steps = ranges["optimizer"].count
        seconds["rest"] = max(0.0, whole - sum(seconds.values()))
        if is_main:
            table = _table(seconds, on_gpu, whole, steps)
            if directory and self._export(path := Path(directory) / "trace.json.gz"):
                table += f"\nevery operation on a timeline: open {path} in {VIEWER}"
            log.info("%s", table)
        return {f"profile/{part.replace(' ', '_')}": value for part, value in seconds.items()}

    def _export(self, path: Path) -> bool:
        try:
            self._profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            log.warning("%s can't be written: %s", path, error)
            return False
        return True

    def _note(self, _: Any) -> None:
        self._has_recorded = True


def _table(seconds: dict[str, float], on_gpu: dict[str, float], whole: float, steps: int) -> str:
    has_gpu = any(on_gpu.values())
    rows = [f"{'where the time went':<20}{'seconds':>9}{'share':>8}{'ms a step':>11}"]
    rows[0] += f"{'on the GPU':>12}" * has_gpu
    for part, value in seconds.items():
        row = f"{part:<20}{value:>9.3f}{value / whole:>8.1%}{1e3 * value / steps:>11.3f}"
        rows.append(row + f"{1e3 * on_gpu.get(part, 0.0) / steps:>12.3f}" * has_gpu)
    return "\n".join([*rows, f"in {steps} steps after the first two"])
