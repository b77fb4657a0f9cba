"""A signal asks a run to stop: the handler notes it, the ranks agree on a step, and stop there."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO_SECONDS = 2.0  # a signal to the process group reaches a rank twice: once through its parent


class Interrupted(BaseException):
    """The run stopped because of a signal, at a step's end, with its checkpoint written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


class Interruption:
    """Between `with` and its end, SIGTERM, SIGINT and SIGHUP are noted; a second one ends at once.

    `agreement` is a file that the ranks of one machine share. The first to see a signal writes
    down a step two ahead: the others can't be past it, since every step has a collective.
    """

    def __init__(self, agreement: Path | None = None) -> None:
        self.agreement = agreement
        self.number = 0
        self.noted_at = 0.0
        self.stop_step: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def is_due(self, step: int) -> bool:
        """Whether this is the step to stop after; costs a look at a variable, or at a file."""
        if self.agreement is None:
            return self.number != 0
        if self.stop_step is None:
            self._agree(step)
        return self.stop_step is not None and step >= self.stop_step

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number and (self.agreement is None or now - self.noted_at > ECHO_SECONDS):
            os._exit(128 + number)
        if not self.number:
            self.number, self.noted_at = number, now

    def _agree(self, step: int) -> None:
        assert self.agreement is not None
        if self.number and not self.agreement.exists():
            part = self.agreement.with_name(f"{self.agreement.name}.{os.getpid()}")
            part.write_text(f"{step + 2} {self.number}")
            try:
                os.link(part, self.agreement)  # whole, and only if nobody was faster
            except FileExistsError:
                pass
            finally:
                part.unlink()
        if self.agreement.exists():
            stop_step, number = self.agreement.read_text().split()
            self.stop_step, self.number = int(stop_step), int(number)
