"""The network between machines: by which interface of this one its ranks reach the others."""

import os
import re
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

ADDRESS_OF = 0x8915  # SIOCGIFADDR, which Python has no name for


def use_interface() -> None:
    """Gloo's own choice is the one that this machine's name leads to: often its loopback."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_to(host, int(port))):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_to(host: str, port: int) -> str | None:
    """None: nobody knows."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            own = probe.getsockname()[0].partition("%")[0]
        if own.startswith("127.") and not host.startswith(("127.", "localhost")):
            return None  # this machine's own name, as its /etc/hosts has it: others can't use that
        return _by_address().get(own)
    return None


def _by_address() -> dict[str, str]:
    """This machine's interfaces."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode())
                told = fcntl.ioctl(probe, ADDRESS_OF, asked)
                found[socket.inet_ntoa(told[20:24])] = name
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, name = line.split()
        parts = ":".join(re.findall("....", digits))
        found[socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, parts))] = name
    return found
