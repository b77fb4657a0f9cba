"""A stopwatch for what a process computes by itself in its forwards, on the CPU or on a card."""

import time
from typing import Any

import torch

AT_MOST = {"cpu": 10_000}  # forwards between two readings
ON_A_CARD = 20  # each of its marks is an event


class Stopwatch:
    """Times the forwards of shares of so many `rows`, without the time between `pause` and `go_on`,
    in which this process waits for others. Nothing here waits for a card."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._device = device
        self._at_most = AT_MOST.get(device.type, ON_A_CARD)
        self._is_on = False
        self._forwards = 0
        self._marks: list[Any] = []  # when it has started, stopped, started …

    def begin(self, rows: int) -> None:
        if rows == self.rows and self._forwards < self._at_most:
            del self._marks[len(self._marks) // 2 * 2 :]  # of a forward that has failed
            self._is_on = True
            self._mark()

    def end(self) -> None:
        if self._is_on:
            self._mark()
            self._is_on = False
            self._forwards += 1

    def pause(self) -> None:
        if self._is_on:
            self._mark()

    go_on = pause

    def _mark(self) -> None:
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._marks.append(event)

    def read(self) -> float:
        """Seconds of a forward since the last call; 0.0: nobody knows."""
        marks, forwards = self._marks, self._forwards
        self._marks, self._forwards, self._is_on = [], 0, False
        if not forwards:
            return 0.0
        starts, stops = marks[::2], marks[1::2]
        pairs = zip(starts, stops, strict=False)
        if self._device.type == "cpu":
            return sum(stop - start for start, stop in pairs) / forwards
        if not stops[-1].query():  # the card is that late: it did not come to the last of them
            return 0.0
        return sum(start.elapsed_time(stop) for start, stop in pairs) / forwards / 1000
