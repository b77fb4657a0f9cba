"""How a rank failed, and the report of a job's faults: the first one's own words come last."""

import os
import re
import signal
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from dpframe import heartbeat
from dpframe.errors import Failure, UserError

# Torch has no types for these.
PEERS = re.compile("by peer|Broken pipe|remote process exited|[Tt]imed out|Wait timeout")
TORCH = f"{os.sep}torch{os.sep}"


class RankFailed(Exception):
    """A rank ended the job; its own traceback is in the message."""

    has_traceback = True  # in its message
    told: dict[str, Any] = {}  # what the ranks have told their parent


@dataclass
class Fault:
    rank: int
    text: str  # what is shown last
    brief: str  # what is shown of a peer
    line: str | None = None  # a UserError's or a Failure's, alone
    exit_code: int = 1
    is_echo: bool = False  # its peers were gone, or did not come
    is_hang: bool = False
    is_in_users_code: bool = False  # and not in a collective of dpframe's
    was_noted: bool = False  # by the rank itself
    verdict: str = ""  # what is shown after everything else
    time: int = field(default_factory=time.time_ns)


def noted(error: BaseException) -> Fault:
    """In the rank itself."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"it left by sys.exit({error.code!r}) before its work was done"
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Fault(
        rank=int(os.environ["RANK"]),
        text="".join(traceback.format_exception(error)).rstrip(),
        brief=message.splitlines()[0],
        line=str(error) if isinstance(error, UserError) else None,
        exit_code=getattr(error, "exit_code", 1),
        is_echo=_is_about_peers(error) and PEERS.search(message) is not None,
        is_in_users_code=_ends_in_users_code(list(reversed(files))),
        was_noted=True,
    )


def ended(rank: int, pid: int, exit_code: int) -> Fault:
    """Of a rank that had no time to note anything."""
    if exit_code < 0:
        text = f"killed by {signal.Signals(-exit_code).name} (pid {pid})"
    else:
        text = f"left with exit code {exit_code} before its work was done (pid {pid})"
    return Fault(rank, text, text)


def hung(rank: int, stack: str, hang_seconds: float | None = None) -> Fault:
    """With `hang_seconds`: of a rank that made no progress in that time, as its parent has seen."""
    files = [file for file, _, _ in heartbeat.FRAME.findall(stack)]
    return Fault(
        rank,
        stack,
        f"hung as well; its stack:\n{stack}",
        is_hang=True,
        is_in_users_code=_ends_in_users_code(files),
        verdict=""
        if hang_seconds is None
        else heartbeat.verdict(stack, hang_seconds, who=f"rank {rank}"),
    )


def left(rank: int) -> Fault:
    """Of a rank that only waited for the others, and was ended with them."""
    return Fault(rank, "", "it was ended", is_echo=True)


def report(faults: list[Fault]) -> RankFailed | UserError:
    """Hangs come first, then the ranks' own errors by time; the rest are mostly echoes of them."""

    def order(fault: Fault) -> tuple[bool, bool, bool, int]:
        # Of ranks that waited for each other in vain, one that did so by itself is the odd one.
        return not fault.is_hang, fault.is_echo, not fault.is_in_users_code, fault.time

    first, *rest = sorted(faults, key=order)
    if first.line is not None:
        return Failure(first.line) if first.exit_code == 1 else UserError(first.line)
    lines = [f"rank {fault.rank} {_of_peer(fault, first)}" for fault in rest]
    if first.is_echo:
        lines.append("the ranks waited for each other in different collectives")
    heading = "hung; its stack:" if first.is_hang else "failed:"
    words = [*lines, f"rank {first.rank} {heading}", first.text, first.verdict]
    return RankFailed("\n".join(filter(None, words)))


def _of_peer(fault: Fault, first: Fault) -> str:
    if fault.is_hang:
        return fault.brief
    if fault.is_echo and fault.text and first.is_hang:
        return f"waited for it in vain: {fault.brief}"
    if fault.is_echo and fault.text and not first.is_echo:
        return "ended after it: its connection was cut"
    return f"ended after it: {fault.brief}"


def _ends_in_users_code(files: list[str]) -> bool:
    """By the innermost frame, which comes first, that is not torch's."""
    rest = [file for file in files if TORCH not in file]
    return bool(rest) and not rest[0].startswith(heartbeat.HOUSE)


def _is_about_peers(error: BaseException) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo/transport" in str(error)
