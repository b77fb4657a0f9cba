"""Who started this process, and as which of several: what torchrun, srun and mpirun say of it."""

import os
import re
import socket
import struct
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dpframe.errors import UserError

FIRST_PORT, PORTS = 20000, 10000  # below those that Linux gives to clients
USUAL_PORT = 29500  # torchrun's
SIOCGIFADDR = 0x8915  # Linux's request for an interface's address, which Python has no name for
COUNT_OPTIONS = {
    "torchrun": "--nproc-per-node=",
    "srun": "--ntasks-per-node=",
    "mpirun": "--npernode ",
}


class Rank(NamedTuple):
    """Which of several processes this one is."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.local_world_size)


def is_rank() -> bool:
    given = os.environ | read_variables(os.environ)
    return "RANK" in given and "WORLD_SIZE" in given


def is_one_of_several() -> bool:
    """Whether this process is one of several that a launcher, e.g. torchrun, has started."""
    given = os.environ | read_variables(os.environ)
    return "RANK" in given and given.get("WORLD_SIZE", "") not in ("", "0", "1")


def read_rank() -> Rank:
    """What torchrun, its like and our own launch put into the environment, checked."""
    complete()
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": os.environ.get("LOCAL_RANK") or rank,
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE") or size,
    }
    address = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
    if all(value.isdigit() for value in values.values()) and all(address.values()):
        this = Rank(*map(int, values.values()))
        if this.rank < this.world_size and this.local_rank < this.local_world_size:
            return this
    if find_launcher() == "mpirun" and not address["MASTER_ADDR"]:
        raise UserError(
            "mpirun does not tell the ranks of several machines where to meet; add -x "
            "MASTER_ADDR=HOST -x MASTER_PORT=29500, with the machine of rank 0 (with MPICH and "
            "Intel MPI: -genv MASTER_ADDR HOST -genv MASTER_PORT 29500)"
        )
    shown = " ".join(f"{name}={value or '(unset)'}" for name, value in (values | address).items())
    raise UserError(
        f"the environment {shown} fits no rank of strategy=ddp; start this program by torchrun "
        "--nproc-per-node=N, or use the command, dpframe … strategy=ddp"
    )


def complete() -> None:
    """Where srun or mpirun started this process, adds what torchrun would have put into its
    environment; the rest of dpframe, and torch, read that."""
    os.environ.update(read_variables(os.environ))


def find_launcher() -> str:
    """The command that started the processes of this job."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        for name, found in (("mpirun", _read_mpi(os.environ)), ("srun", _read_slurm(os.environ))):
            if _are_several(found):
                return name
    return "torchrun"


def count_option(count: int) -> str:
    """What tells it the number of ranks on a machine."""
    return COUNT_OPTIONS[find_launcher()] + str(count)


def has_store() -> bool:
    """Whether another process than rank 0 keeps the store where ranks meet, or torch knows."""
    return find_launcher() == "torchrun" or "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address alone."""
    try:
        place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[4][:2], family=place[0])
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python adds where it was tried
        raise UserError(
            f"rank 0 on {socket.gethostname()} can't listen on MASTER_ADDR={host} "
            f"MASTER_PORT={port}: {reason}; export an address of that machine and a free "
            "port before you start the job"
        ) from None


def choose_interface() -> None:
    """Has gloo take the network interface that leads to rank 0. Its own choice is the one that this
    machine's name leads to, often its loopback."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := find_interface(host, int(port))):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def find_interface(host: str, port: int) -> str | None:
    """The interface of this machine that leads to this address; None if that is unknown."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            own = probe.getsockname()[0].partition("%")[0]
        if own.startswith("127.") and not host.startswith(("127.", "localhost")):
            return None  # this machine's own name, as its /etc/hosts has it: others can't use that
        return _interfaces().get(own)
    return None


def _interfaces() -> dict[str, str]:
    """The names of this machine's network interfaces by their addresses."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return found


def read_variables(given: Mapping[str, str]) -> dict[str, str]:
    """What is missing of torchrun's variables; nothing for a process that is alone, or that has a
    RANK already, e.g. under `srun torchrun`."""
    if given.get("RANK"):
        return {}
    # mpirun under Slurm starts its daemons by srun: their variables are no rank's.
    found = _read_mpi(given) or _read_slurm(given)
    if not _are_several(found):
        return {}
    kept = ("MASTER_ADDR", "MASTER_PORT")  # a user's, who knows the network better
    return found | {key: given[key] for key in kept if given.get(key)}


def _are_several(found: Mapping[str, str]) -> bool:
    return found.get("WORLD_SIZE", "1") != "1"


def _read_slurm(given: Mapping[str, str]) -> dict[str, str]:
    """Only a task of a step has such peers. A batch script and the shell of salloc have a number of
    tasks as well, and those of a step in which they were submitted; under --pty a shell waits for
    its user, and its peers wait for nobody."""
    size = given.get("SLURM_STEP_NUM_TASKS", "")
    if size != given.get("SLURM_NTASKS") or "SLURM_PTY_PORT" in given:
        return {}
    node, counts = given.get("SLURM_NODEID", ""), given.get("SLURM_STEP_TASKS_PER_NODE", "")
    job = f"{given.get('SLURM_JOB_ID')}.{given.get('SLURM_STEP_ID')}"
    return {
        "RANK": given.get("SLURM_PROCID", ""),
        "WORLD_SIZE": size,
        "LOCAL_RANK": given.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": _count_tasks(node, counts),
        "MASTER_ADDR": _first_node(given.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": _choose_port(job),
    }


def _read_mpi(given: Mapping[str, str]) -> dict[str, str]:
    """Open MPI's, and MPICH's and Intel's. Rank 0 is on the first node of Slurm's; elsewhere none
    is told which machine that is, and only several machines need it."""
    prefix = "OMPI_COMM_WORLD_"
    names = [f"{prefix}{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if names[0] not in given:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    if not all(key in given for key in names):
        return {}
    rank, size, local_rank, local_size = (given[key] for key in names)
    is_here = size == local_size
    # Open MPI's number for it, or Slurm's.
    job = given.get("PMIX_NAMESPACE") or given.get("SLURM_JOB_ID", "")
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": "127.0.0.1" if is_here else _first_node(given.get("SLURM_JOB_NODELIST", "")),
        "MASTER_PORT": _choose_port(job) if job else str(USUAL_PORT),
    }


def _choose_port(job: str) -> str:
    """The same in all processes of a job, and hardly ever that of another job on the machine."""
    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def _first_node(nodes: str) -> str:
    """The first of `gpu[01-04,07],login`: gpu01, as `scontrol show hostnames` has it."""
    found = re.match(r"([^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", found[0]) if found else ""


def _count_tasks(node: str, counts: str) -> str:
    """The tasks on the node of that number, from e.g. `2(x3),1`."""
    each = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        each += [count] * int(times or 1)
    return each[int(node)] if node.isdigit() and int(node) < len(each) else ""
