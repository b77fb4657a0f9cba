"""Several machines: where their commands meet, which node is which, and what they tell each other.

Nodes meet at torch's TCPStore, which one of them hosts. A thread does all that waits for the
network: where that is cut, the command itself still heeds signals, and can say so.
"""

import errno
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from dpframe.errors import Interrupted, NodeLost, UserError
from dpframe.launch import signals
from dpframe.launch.rank import ALIKE, LINES, Fault

TICK_SECONDS = 0.1  # between two exchanges of a few nodes
TOLD_SECONDS = 5.0  # of waiting, before the screen says for what
LOST_SECONDS = 30.0  # without a word from a node; TCP bridges a network that is cut for less
LAST_SECONDS = 3.0  # to hear what the other nodes say last
STORE_SECONDS = 10.0  # for the store to answer that has taken a connection


@dataclass
class Words:
    """What a node says: all of it, again and again."""

    node: str  # the name of its host
    facts: dict[str, Any]
    is_host: bool = False
    told: dict[str, Any] = field(default_factory=dict)  # for `agree`
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)  # by rank
    number: int | None = None  # of the signal that ends it
    reason: str = ""  # why it leaves before there are ranks
    value: Any = None  # what the main rank returns
    has_ended: bool = False
    has_left: bool = False
    beats: int = 0
    sent: int = 0  # nanoseconds, by its clock


class Meeting:
    """The nodes of a job, from before the start of their ranks to after their end."""

    def __init__(self, count: int, address: str, *, timeout_seconds: float) -> None:
        self.count = count
        self.address = address
        self.timeout_seconds = timeout_seconds
        self.lost_seconds = min(LOST_SECONDS, timeout_seconds)
        self.ip, self.port = "", 0
        self.index = 0  # of this node
        self.names: list[str] = []  # of the nodes, in their order
        self._order: list[int] = []  # the places in which they came
        self._arrival = 0
        self._mine = Words(socket.gethostname(), {})
        self._all: dict[int, Words] = {}  # by place
        self._heard_at: dict[int, float] = {}
        self._answered_at = time.monotonic()
        self._waits_for = "nothing answers there"
        self._problem: Exception | None = None
        self._known: set[str] = set()  # ranks of other nodes whose faults were heard
        self._are_gone = False
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held while the thread is at the store
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.names[self.index]

    @property
    def place(self) -> dict[str, Any]:
        """This node's numbers and address, for the environment of its ranks."""
        return {"node": self.index, "nodes": self.count, "address": self.ip}

    # ---- before there are ranks

    def join(self, facts: dict[str, Any], *, first: Callable[[Any], Any]) -> list[dict[str, Any]]:
        """All nodes' facts: of those with the least `first(facts)` first, and of them the host."""
        self.ip, self.port = _resolved(self.address)
        self._mine.facts = facts
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        self._thread.start()
        self._wait(self._is_complete, self._missing)

        def order(place: int) -> tuple[Any, bool, int]:
            return first(self._all[place].facts), not self._all[place].is_host, place

        self._order = sorted(self._all, key=order)
        self.index = self._order.index(self._arrival)
        self.names = numbered(self._all[place].node for place in self._order)
        return [self._all[place].facts for place in self._order]

    def agree(self, what: str, value: Any) -> list[Any]:
        """What each node says of it, in their order."""
        with self._changed:
            self._mine.told[what] = value
        self._wait(
            lambda: all(what in words.told for words in self._all.values()),
            lambda: f"at {self.address} not all nodes told their {what}",
        )
        return [self._all[place].told[what] for place in self._order]

    def agree_on(self, what: str, value: Any) -> None:
        """Refuses nodes that say anything else of it than the first one."""
        values = self.agree(what, value)
        for name, other in zip(self.names, values, strict=True):
            if other != values[0]:
                raise UserError(
                    f"{what} is {other} on {name}, and {values[0]} on {self.names[0]}; {ALIKE}"
                )

    def _wait(self, is_done: Callable[[], bool], missing: Callable[[], str]) -> None:
        began, is_told = time.monotonic(), False
        while True:
            signals.raise_if_signaled()
            with self._changed:
                self._changed.wait(TICK_SECONDS)
                if self._problem is not None:
                    raise self._problem
                if is_done():
                    return
                self._refuse_gone()
                line = missing()
            seconds = time.monotonic() - began
            if seconds > self.timeout_seconds:
                raise UserError(
                    f"{line}, after strategy.timeout_seconds={self.timeout_seconds:g}; {ALIKE}"
                )
            if seconds > TOLD_SECONDS and not is_told:
                is_told = True
                print(f"waiting: {line}; {ALIKE}", file=sys.stderr, flush=True)

    def _is_complete(self) -> bool:
        return len(self._all) == self.count

    def _missing(self) -> str:
        if not self._all:
            return f"trainer.rendezvous={self.address}: {self._waits_for}"
        came = ", ".join(words.node for words in self._all.values())
        return f"{len(self._all)} of trainer.nodes={self.count} came to {self.address}: {came}"

    def _refuse_gone(self) -> None:
        for words in self._others():
            if words.number is not None:
                raise Interrupted(words.number, f" on {words.node}")
            if words.has_ended:
                raise UserError(f"{words.node}: {words.reason or 'it ended'}")
        if late := self._silence():
            raise NodeLost(late)

    # ---- while there are ranks

    @property
    def threads(self) -> tuple[int, int]:
        """Python's and others: this one's, and the store's."""
        return 1, int(self._mine.is_host)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Within, both wait and hold no lock that a fork would need."""
        if not self._turn.acquire(timeout=self.lost_seconds):
            raise NodeLost(self._silence())
        try:
            yield
        finally:
            self._turn.release()

    def tell(self, faults: Iterable[Fault], number: int | None) -> None:
        """What has happened to this node, and the signal that ends it."""
        with self._changed:
            for fault in faults:
                fault.node = self.name
                kind = LINES.index(fault.kind)
                self._mine.faults[str(fault.rank)] = asdict(fault) | {"kind": kind}
            self._mine.number = number

    def heard(self) -> list[Fault]:
        """What has happened to other nodes since the last call."""
        with self._changed:
            faults = []
            for words in self._others():
                for rank in words.faults.keys() - self._known:
                    fault = Fault(**words.faults[rank])
                    fault.kind = LINES[words.faults[rank]["kind"]]
                    fault.time += time.time_ns() - words.sent  # clocks differ
                    faults.append(fault)
                    self._known.add(rank)
            if "lost" not in self._known and (late := self._silence()):
                self._known.add("lost")
                faults.append(Fault(-1, late, line=late, kind=NodeLost))
            return faults

    @property
    def number(self) -> int | None:
        """The signal that ends another node."""
        return next((words.number for words in self._others() if words.number is not None), None)

    @property
    def main_has_ended(self) -> bool:
        return self.index > 0 and self._all[self._order[0]].has_ended

    def last_words(self, value: Any, *, is_done: bool) -> Any:
        """The main rank's value, once all nodes have ended. Not `is_done`: this one was broken off,
        and the others are about to be."""
        until = float("inf") if is_done else 0.0
        with self._changed:
            self._mine.value, self._mine.has_ended = value, True
            while not all(words.has_ended for words in self._others()) and not self._silence():
                is_broken = any(words.faults or words.number for words in self._others())
                if (is_broken or not is_done) and until in (0.0, float("inf")):
                    until = time.monotonic() + LAST_SECONDS
                if time.monotonic() > until:
                    break
                self._changed.wait(TICK_SECONDS)
            return self._all[self._order[0]].value if self.index else value

    def gone(self) -> Fault | None:
        """A node that did not say its last words, where ranks have only missed others."""
        with self._changed:
            names = [words.node for words in self._others() if not words.has_ended]
            self._are_gone = bool(names)
        line = f"{', '.join(names)} left without a word: it is down, or the network is cut"
        return Fault(-1, line, line=line, kind=NodeLost) if names else None

    # ---- at the end

    def leave(self, error: BaseException | None = None) -> None:
        """Says why; the host of the store is the last to go."""
        if self._thread is None:
            return
        with self._changed:
            if isinstance(error, Interrupted):
                self._mine.number = error.number
            elif error is not None and not self._mine.has_ended:
                self._mine.reason = str(error).partition("\n")[0]
            self._mine.has_ended = self._mine.has_left = True
            if self._mine.is_host and not self._are_gone:
                self._changed.wait_for(self._is_free, LAST_SECONDS)
        if self._mine.is_host or not self._all:
            self._is_over.set()
        self._thread.join(1.0)  # it may never come back from a network that is cut
        self._is_over.set()

    def _is_free(self) -> bool:
        is_alone = all(words.has_left for words in self._others())
        return is_alone or self._problem is not None or bool(self._silence())

    def _others(self) -> list[Words]:
        return [words for place, words in self._all.items() if place != self._arrival]

    def _silence(self) -> str:
        """A line about a node that was not heard of for too long; '' if there is none."""
        now, limit = time.monotonic(), self.lost_seconds
        if not self._all:
            return ""
        if self._problem is not None or now - self._answered_at > limit:
            return (
                f"{self._mine.node} lost the rendezvous {self.address}: that machine is down, or "
                "the network is cut"
            )
        for place, words in self._all.items():
            if now - self._heard_at[place] > limit and not words.has_left:
                return (
                    f"{words.node} was not heard of for {limit:g} s: it is down or stopped, or the "
                    "network is cut"
                )
        return ""

    # ---- in the thread

    def _exchange(self) -> None:
        try:
            store = self._entered()
            while store is not None and not self._is_over.is_set():
                with self._turn:
                    is_last = self._mine.has_left and not self._mine.is_host
                    self._tell(store)
                    if is_last:  # the host may be gone from now on
                        return
                    self._hear(store)
                self._is_over.wait(TICK_SECONDS * max(1.0, self.count / 16))
        except (UserError, DistError, OSError, ValueError) as error:
            with self._changed:
                self._problem = error
                self._changed.notify_all()

    def _tell(self, store: TCPStore) -> None:
        with self._changed:
            self._mine.beats += 1
            self._mine.sent = time.time_ns()
            mine = json.dumps(asdict(self._mine))
        store.set(str(self._arrival), mine)

    def _hear(self, store: TCPStore) -> None:
        places = list(range(self.count))
        if not self._is_complete():
            places = [place for place in places if store.check([str(place)])]
        texts = store.multi_get([str(place) for place in places])
        with self._changed:
            self._answered_at = time.monotonic()
            for place, text in zip(places, texts, strict=True):
                words = Words(**json.loads(text))
                if place not in self._all or self._all[place].beats != words.beats:
                    self._heard_at[place] = self._answered_at
                self._all[place] = words
            self._changed.notify_all()

    def _entered(self) -> TCPStore | None:
        """The store, as soon as there is one with room for this node."""
        while not self._is_over.is_set():
            store = self._hosted() or self._reached()
            if store is not None:
                count = int(store.compare_set("count", "", str(self.count)))
                if count != self.count:
                    raise UserError(
                        f"trainer.nodes={self.count} here, and {count} on the node that was first "
                        f"at {self.address}; {ALIKE}"
                    )
                self._arrival = store.add("came", 1) - 1
                if self._arrival < self.count:
                    return store
                self._waits_for = f"it has its {count} nodes already"
            self._is_over.wait(TICK_SECONDS)
        return None

    def _hosted(self) -> TCPStore | None:
        """A store here, if the address is one of this machine's, and free."""
        family = socket.AF_INET6 if ":" in self.ip else socket.AF_INET
        try:
            listening = socket.create_server((self.ip, self.port), family=family)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return None
            raise UserError(
                f"trainer.rendezvous={self.address}: {error.strerror}; use a port from 1024 on"
            ) from None
        self._mine.is_host = True
        return self._store(is_master=True, master_listen_fd=listening.detach())

    def _reached(self) -> TCPStore | None:
        try:
            socket.create_connection((self.ip, self.port), timeout=1.0).close()
            return self._store(is_master=False)
        except DistError:
            self._waits_for = "another program answers there, or a job that ends"
        except OSError as error:
            self._waits_for = f"nothing answers there ({error.strerror or error})"
        return None

    def _store(self, **options: Any) -> TCPStore:
        timeout = timedelta(seconds=STORE_SECONDS)
        return TCPStore(self.ip, self.port, wait_for_workers=False, timeout=timeout, **options)


def _resolved(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"trainer.rendezvous={address}: {host} is no machine that is known here ({reason}); "
            "use an address of one of the nodes"
        ) from None
    ip = str(found[0][4][0])
    if ip.startswith("127.") and not host.startswith(("127.", "localhost")):
        raise UserError(
            f"trainer.rendezvous={address}: {host} is {ip} here, which other machines can't reach; "
            "use its address in their network"
        )
    return ip, int(port)


def numbered(names: Iterable[str]) -> list[str]:
    """Two nodes on one machine are told apart."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return numbered
