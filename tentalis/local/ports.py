"""Free loopback ports that stay usable across restarts of what listens on them."""

from __future__ import annotations

import random
import socket
from collections.abc import Container
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LOWEST = 10_240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now (connections in TIME_WAIT do not count)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(avoid: Container[int] = ()) -> int:
    """Choose a free loopback port below the range from which the kernel takes ports for outgoing connections.

    A port inside that range can be taken by any client while its server restarts, and a client that keeps reconnecting
    to a closed port of that range ends up connected to itself, which then keeps the server from listening.

    Raises:
        RuntimeError: no free port was found.
    """
    highest = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    if highest - _LOWEST < 1000:  # a host that gives nearly all ports to clients leaves no better choice
        highest = 65_536
    for _ in range(1000):
        port = random.randrange(_LOWEST, highest)
        if port not in avoid and port_is_free(port):
            return port
    raise RuntimeError(f"no free port between {_LOWEST} and {highest} on {LOOPBACK}")


def listener_of(port: int) -> str:
    """Who listens on a port, for messages: `PID (name)`, or a plain statement that it cannot be told."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return "another process (which one cannot be told without more rights)"
