"""Free loopback ports that stay usable across restarts of their listeners."""

from __future__ import annotations

import random
import socket
from collections.abc import Container
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LOWEST = 10_240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def port_is_free(port: int) -> bool:
    """Returns True if a server could listen on this loopback port now (connections in TIME_WAIT do not count)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(avoid: Container[int] = ()) -> int:
    """Chooses a free loopback port below the kernel's range of ports for outgoing connections.

    Inside that range, any client can take the port while its server restarts. A client that keeps reconnecting to a
    closed port of that range even ends up connected to itself, which prevents the server from listening.

    Raises:
        RuntimeError: no free port was found.
    """
    highest = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    if highest - _LOWEST < 1000:  # nearly all ports are for clients: there is no better choice
        highest = 65_536
    for _ in range(1000):
        port = random.randrange(_LOWEST, highest)
        if port not in avoid and port_is_free(port):
            return port
    raise RuntimeError(f"no free port between {_LOWEST} and {highest} on {LOOPBACK}")
