"""The server of a store on which processes of several machines meet."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from tentalis.service.ports import port_taken

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"


def serve_store(port: int, what: str, option: str, timeout: timedelta) -> TCPStore:
    """Opens a store on every address of this machine. `what` and `option` name it and its port in errors; `timeout`: of
    its operations. Raises PortTaken."""
    from torch._C._distributed_c10d import TCPStore

    dual = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        )
    except OSError as error:
        raise port_taken("", port, what, error, option) from error
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=server.detach(),
    )
