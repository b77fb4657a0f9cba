"""Small sums over the ranks of one machine, each sending to each.

Gloo passes a few numbers through its threads, which takes thirty times as long as sending them.
"""

import os
import secrets
import socket
import struct
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from dpframe.errors import Failure

LARGEST = 64 << 10  # bytes of a tensor: two of them fit into a socket, so that no sender waits
MOST = 8  # ranks
HEADER = struct.Struct("<QQ")  # the number of the sum, and its bytes
CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of who connected


def is_possible(world_size: int, local_world_size: int) -> bool:
    """The same in every rank."""
    is_one_machine = 1 < world_size == local_world_size <= MOST
    return is_one_machine and sys.platform == "linux"


class Door:
    """Where a rank hears the others knock; its address has to be theirs before they `meet`."""

    def __init__(self) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self.address = f"\0dpframe-{os.getpid()}-{secrets.token_hex(8)}"  # no file: Linux alone
        self._listening.bind(self.address)
        self._listening.listen(MOST)

    def meet(self, rank: int, addresses: list[str], timeout_seconds: float) -> "Direct":
        others: dict[int, socket.socket] = {}
        for other in range(rank):
            others[other] = socket.socket(socket.AF_UNIX)
            try:
                others[other].connect(addresses[other])
            except OSError as error:
                raise Failure(
                    f"rank {rank} can't reach rank {other} on this machine: {error.strerror}; "
                    "strategy.direct_sums=false does without"
                ) from None
            others[other].sendall(bytes([rank]))
        self._listening.settimeout(timeout_seconds)
        while len(others) < len(addresses) - 1:
            visitor, _ = self._listening.accept()
            said = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(said)[1] == os.getuid():
                others[visitor.recv(1)[0]] = visitor
            else:
                visitor.close()
        self._listening.close()
        for one in others.values():
            one.settimeout(timeout_seconds)
        return Direct(rank, others)


class Direct:
    def __init__(self, rank: int, others: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._others = others
        self._parts = [bytearray(HEADER.size + LARGEST) for _ in range(len(others) + 1)]
        self._done = 0

    def sum(self, tensor: Tensor) -> None:
        """In place and in the order of the ranks, so that all of them get the same bits."""
        if not tensor.numel():
            return
        self._done += 1
        header = HEADER.pack(self._done, tensor.nbytes)
        mine = self._parts[self._rank]
        mine[: len(header)] = header
        self._values(self._rank, tensor).copy_(tensor.reshape(-1))
        message = memoryview(mine)[: len(header) + tensor.nbytes]
        for act in (self._send, self._receive):
            for rank, other in self._others.items():
                try:
                    act(rank, other, message)
                except TimeoutError:
                    waited = f"Timed out waiting {1000 * (other.gettimeout() or 0):.0f}ms"
                    raise dist.DistNetworkError(f"{waited} for rank {rank}") from None
                except OSError:
                    raise dist.DistNetworkError(f"Connection closed by peer: rank {rank}") from None
        total = self._values(0, tensor).clone()
        for rank in range(1, len(self._parts)):
            total += self._values(rank, tensor)
        tensor.copy_(total.view_as(tensor))

    def _send(self, rank: int, other: socket.socket, message: memoryview) -> None:
        other.sendall(message)

    def _receive(self, rank: int, other: socket.socket, message: memoryview) -> None:
        part = memoryview(self._parts[rank])[: len(message)]
        got = 0
        while got < len(part):
            more = other.recv_into(part[got:])
            if not more:
                raise ConnectionResetError
            got += more
            if got >= HEADER.size and part[: HEADER.size] != message[: HEADER.size]:
                (theirs, many), (ours, few) = map(HEADER.unpack_from, (part, message))
                raise RuntimeError(
                    f"rank {rank} adds up {many} bytes at its sum {theirs}, this rank {few} "
                    f"at its sum {ours}: they don't do the same"
                )

    def _values(self, rank: int, like: Tensor) -> Tensor:
        return torch.frombuffer(
            self._parts[rank], dtype=like.dtype, count=like.numel(), offset=HEADER.size
        )

    def hook(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls with a backward's gradients; their mean over the ranks comes of it."""
        gradients = bucket.buffer()
        self.sum(gradients.div_(len(self._parts)))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done

    def close(self) -> None:
        for other in self._others.values():
            other.close()
