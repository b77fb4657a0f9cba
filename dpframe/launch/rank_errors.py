"""How ranks fail, and which of them is the one to tell of: the others mostly ended after it."""

import os
import time
from dataclasses import dataclass, field
from typing import Any

from dpframe.errors import DeviceLost, Failure, OutOfMemory, UserError
from dpframe.launch.watchdog import FRAME, HOUSE
from dpframe.util import traces

KINDS = (OutOfMemory, DeviceLost, Failure)  # of lines that end a job, beside UserError
TORCH = f"{os.sep}torch{os.sep}"


class RankFailed(Exception):
    """A rank ended the job; its own traceback is in the message."""

    has_traceback = True  # in its message
    told: dict[str, Any] = {}  # what the ranks have told their parent
    whole = ""  # the message, with all frames
    reason = ""  # a line


@dataclass
class Fault:
    """How a rank failed."""

    rank: int
    text: str  # a traceback, a stack, or a line
    shown: str = ""  # the traceback as it is printed
    reason: str = ""  # a line for it
    line: str | None = None  # a UserError's, which is shown alone
    kind: type[UserError] = UserError  # of the line
    details: str = ""
    exit_code: int = 1
    is_consequence: bool = False  # its peers were gone, or did not come
    is_hang: bool = False
    advice: str = ""  # about a hang; it is shown last
    time: int = field(default_factory=time.time_ns)


def describe(error: BaseException) -> Fault:
    """How this rank fails."""
    return Fault(
        rank=int(os.environ["RANK"]),
        text=traces.whole(error),
        shown=traces.shown(error),
        reason=traces.last_lines(error).splitlines()[-1],
        line=str(error) if isinstance(error, UserError) else None,
        kind=next((kind for kind in KINDS if isinstance(error, kind)), UserError),
        details=getattr(error, "details", ""),
        exit_code=getattr(error, "exit_code", 1),
        is_consequence=is_consequence(error),
    )


def is_consequence(error: BaseException) -> bool:
    """Whether it comes of another rank that is gone, or did not come."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo/transport" in str(error)


def explain(faults: list[Fault]) -> RankFailed | UserError:
    """Hangs come first, then the ranks' own errors by time; the rest are mostly consequences."""

    def order(fault: Fault) -> tuple[bool, bool, bool, int]:
        # Of ranks that waited for each other in vain, one that did so by itself is the odd one.
        return not fault.is_hang, fault.is_consequence, not _is_in_users_code(fault), fault.time

    if line := _explain_lone_gather(faults):
        return line
    first, *rest = sorted(faults, key=order)
    if first.line is not None:
        line = first.kind(first.line)
        line.details = first.details
        return line
    lines = [f"rank {fault.rank} {_describe_peer(fault)}" for fault in rest]
    if first.is_consequence:
        lines.append("the ranks waited for each other in different collectives")
    heading = "hung; its stack:" if first.is_hang else "failed:"
    lines.append(f"rank {first.rank} {heading}")
    shown, whole = (
        "\n".join(filter(None, [*lines, text, first.advice]))
        for text in (first.shown or first.text, first.text)
    )
    failed = RankFailed(shown)
    failed.whole, failed.reason = whole, first.reason or shown.splitlines()[-1]
    return failed


def _explain_lone_gather(faults: list[Fault]) -> UserError | None:
    """The line if some ranks waited in `self.all_gather`, and others elsewhere."""
    calls = {fault.rank: place for fault in faults if (place := _find_gather(fault))}
    others = [fault for fault in faults if fault.rank not in calls]
    if not (calls and others and all(fault.is_consequence for fault in faults)):
        return None
    rank, place = min(calls.items())
    error = UserError(
        f"rank {rank} called self.all_gather in {place}, and rank {others[0].rank} did not; every "
        "rank that has rows has to call it equally often in each step"
    )
    error.details = "\n".join(fault.text for fault in faults)
    return error


def _find_gather(fault: Fault) -> str:
    """The caller of `Task.all_gather` in a traceback that ends there, else ''."""
    frames = [frame for frame in FRAME.findall(fault.text) if TORCH not in frame[0]]
    names = [name for _, _, name in frames]
    if names[-3:-1] != ["all_gather", "gather_rows"]:
        return ""
    file, line, name = frames[-4]
    return f"{name} ({os.path.basename(file)}, line {line})"


def _describe_peer(fault: Fault) -> str:
    if fault.is_hang:
        return f"hung as well; its stack:\n{fault.text}"
    return f"ended after it: {fault.reason or fault.text.splitlines()[-1]}"


def _is_in_users_code(fault: Fault) -> bool:
    """And not in a collective of dpframe's, by its innermost frame that is not torch's."""
    files = [file for file, _, _ in FRAME.findall(fault.text) if TORCH not in file]
    innermost = files[:1] if fault.is_hang else files[-1:]  # a traceback ends with it
    return bool(innermost) and not innermost[0].startswith(HOUSE)
