"""Which rank this process is, as its environment says."""

import os
import sys
from typing import NamedTuple

from dpframe.errors import UserError

HERE = "127.0.0.1"  # where the ranks of our own launch meet: other machines can't reach it


class Rank(NamedTuple):
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def are_several() -> bool:
    """Whether this process is one of several, e.g. of torchrun's."""
    return is_rank() and os.environ["WORLD_SIZE"] not in ("", "0", "1")


def this_rank() -> Rank:
    """What torchrun and our own launch put into the environment, checked."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    variables = {name: os.environ.get(name, "") for name in names}
    variables["LOCAL_RANK"] = variables["LOCAL_RANK"] or variables["RANK"]
    variables["LOCAL_WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] or variables["WORLD_SIZE"]
    shown = " ".join(f"{name}={value or '(unset)'}" for name, value in variables.items())
    if not all(value.isdigit() for value in variables.values()):
        raise UserError(
            f"strategy=ddp was not launched and finds {shown}; start this program by torchrun "
            "--nproc-per-node=N, or use the command, dpframe … strategy=ddp"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"the environment has {shown} but no {name}; use torchrun, or unset it")
    this = Rank(*(int(variables[name]) for name in names))
    if not (this.rank < this.world_size and this.local_rank < this.local_world_size):
        raise UserError(f"the environment contradicts itself: {shown}; unset it or use torchrun")
    return this


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun would give a rank; the store is the parent's, at any free port."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "ROLE_WORLD_SIZE": count,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    words = {"MASTER_ADDR": HERE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if sys.platform == "linux":  # gloo and NCCL would listen where others can reach this machine
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            words[name] = os.environ.get(name, "lo")
    return {name: str(number) for name, number in numbers.items()} | words
