"""How the ranks of torchrun, srun or mpirun end together: no process of dpframe's watches them all.

They tell each other by the store of their process group.
"""

import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from dpframe.errors import Interrupted, first_line
from dpframe.launch import signals
from dpframe.launch.rank_errors import is_consequence

if TYPE_CHECKING:
    from torch.distributed import Store

FIRST = "failed first"  # in the store
DONE = "main is done"
FIRST_SECONDS = 1.0  # for the rank that has failed first to say so


def end_with_peers(error: BaseException, store: "Store", rank: int, *, machines: int) -> None:
    """Called by a rank that an error ends, while its peers may still be at work."""
    if isinstance(error, Interrupted):
        _leave_after_main(store, rank)
    elif machines > 1:
        _name_first(error, store, rank)


def _leave_after_main(store: "Store", rank: int) -> None:
    """A launcher ends all ranks when the first of them leaves: the main one may be saving."""
    from torch.distributed import DistError

    if (stop := signals.current()) is None:
        return
    with suppress(DistError):  # it has left, and its store with it
        if rank == 0:
            store.set(DONE, "")
        else:
            store.wait([DONE], timedelta(seconds=stop.grace_seconds))


def _name_first(error: BaseException, store: "Store", rank: int) -> None:
    """Each machine shows its own ranks' errors: all end with the one that failed first."""
    who = f"rank {rank} on {socket.gethostname()}"
    if is_consequence(error):
        first = _exchange(store)
        error.add_note(f"dpframe: {who} ended after {first or 'another one was gone'}")
    else:
        _exchange(store, f"{who} had failed: {type(error).__name__}: {first_line(error)}")
        error.add_note(f"dpframe: {who} has failed")


def _exchange(store: "Store", own: str = "") -> str:
    """Tells the others of this rank's failure, or asks for theirs; by a thread, which may never
    come back from a network that is cut."""
    from torch.distributed import DistError

    found = [""]

    def exchange() -> None:
        with suppress(DistError):  # rank 0 is gone, and the store with it
            if own:
                store.set(FIRST, own)
            else:
                store.wait([FIRST], timedelta(seconds=FIRST_SECONDS))
                found[0] = store.get(FIRST).decode()

    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(2 * FIRST_SECONDS)
    return found[0]
