"""Runs the process of a pool of environments."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

import uvicorn

from tentalis.agents.environments import Environment
from tentalis.agents.environments.stoppable import StuckThread
from tentalis.agents.pool.app import build_app
from tentalis.agents.pool.leases import LeasePool, PoolLimits
from tentalis.service.lifecycle import run_service
from tentalis.service.ports import listening_sockets

log = logging.getLogger(__name__)

_KEEP_ALIVE_S, _CLOSING_S, _GRACE_S = 30, 5, 40.0
"""Seconds that an idle connection is kept, that answers may take after SIGTERM, and that all leases may take to end."""


def serve(
    make: Callable[[], Environment], environment: str, *, host: str, port: int, key: str | None, limits: PoolLimits
) -> None:
    """Serves on `host`:`port` until SIGTERM, then ends all leases. `make` makes the environment of an episode, whose
    name is `environment`. `key`: see `build_app`.

    Raises PortTaken, and StuckThread if a call could not be stopped: a successor removes what it left.
    """

    def body(stop: threading.Event) -> None:
        sockets = listening_sockets(host, port, "pool of environments")
        log.info("listening on http://%s:%d, environment %s, %d places", host, port, environment, limits.places)
        asyncio.run(_serve(LeasePool(make, limits), environment, key, sockets, stop))

    run_service("env-pool", body, grace_s=_GRACE_S)


async def _serve(
    pool: LeasePool, environment: str, key: str | None, sockets: list[socket.socket], stop: threading.Event
) -> None:
    config = uvicorn.Config(
        build_app(pool, environment, key),
        ws="none",
        log_level="info",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSING_S,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets))
    loop = asyncio.get_running_loop()

    def wait_for_stop() -> None:
        stop.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(pool.must_end.set)

    threading.Thread(target=wait_for_stop, name="stop", daemon=True).start()
    ending = asyncio.create_task(pool.must_end.wait())
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    await pool.close_all()  # so that running calls end, which the server waits for
    server.should_exit = True
    await serving
    if pool.stuck is not None:
        raise StuckThread(pool.stuck)
