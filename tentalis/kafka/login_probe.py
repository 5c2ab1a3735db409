"""Asks a port whether it is a Kafka listener that requires a login, in Kafka's own protocol.

librdkafka reports such a listener only as a timeout: the broker answers ApiVersions and closes the connection at the
next request.
"""

from __future__ import annotations

import socket
import struct

_API_VERSIONS, _METADATA = 18, 3
_CLIENT_ID = b"tentalis-probe"
_PATIENCE_S = 3.0


def requires_login(host: str, port: int) -> bool:
    """True if a Kafka broker listens in plain text and closes connections without a login. Raises OSError."""
    with socket.create_connection((host, port), _PATIENCE_S) as connection:
        if not _answers(connection, _API_VERSIONS, 0, b""):
            return False
        return not _answers(connection, _METADATA, 1, struct.pack(">i", 0))


def _answers(connection: socket.socket, api: int, version: int, body: bytes) -> bool:
    """Sends a request; True if a response to it comes."""
    correlation = api
    header = struct.pack(">hhih", api, version, correlation, len(_CLIENT_ID)) + _CLIENT_ID
    try:
        connection.sendall(struct.pack(">i", len(header) + len(body)) + header + body)
        answer = b""
        while len(answer) < 8 and (part := connection.recv(8 - len(answer))):
            answer += part
        if len(answer) < 8:
            return False
        size, found = struct.unpack(">ii", answer)
        left = size - 4
        while left > 0 and (part := connection.recv(min(left, 65536))):
            left -= len(part)
    except OSError:
        return False
    return bool(found == correlation)
