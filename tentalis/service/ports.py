"""Opens the ports of a process's servers; a port that is taken is an error that names its holder."""

from __future__ import annotations

import errno
import socket


class PortTaken(Exception):
    """A server's port cannot be opened. The message names the address, the cause and the remedy."""


def listening_sockets(host: str, port: int, what: str) -> list[socket.socket]:
    """Returns a bound socket for each address of `host`, for a server named `what`.

    Raises PortTaken.
    """
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in _addresses(host, port, what):
            server = socket.socket(family, kind, protocol)
            found.append(server)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            server.bind(address)
    except OSError as error:
        for server in found:
            server.close()
        raise port_taken(host, port, what, error) from error
    return found


def _addresses(host: str, port: int, what: str) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortTaken(
            f"the {what} cannot listen on {host}: {error.strerror}. Give an address of this host"
        ) from error
    return list(dict.fromkeys(found))


def port_taken(host: str, port: int, what: str, error: OSError, option: str = "--port") -> PortTaken:
    """The error for a port that could not be opened."""
    if error.errno == errno.EADDRINUSE:
        why = f"the port is taken by {listener_of(port)}. Stop that process, or choose another port with {option}"
    else:
        why = f"{error.strerror or error}. Choose another address or port with {option}"
    return PortTaken(f"the {what} cannot listen on {host}:{port}: {why}")


def listener_of(port: int) -> str:
    """Returns a description of the process that listens on a port, for messages: `process PID (name)` if known."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return "another process (its id is not visible without more permissions)"
