"""Runs the process of a gateway."""

import asyncio
import logging
import socket
import threading
from functools import partial
from pathlib import Path

import uvicorn

from tentalis.gateway.api.install import install as bridge
from tentalis.gateway.app import GatewayDependencies, RouteInstaller, build_app
from tentalis.gateway.backends.backend import BackendClients
from tentalis.gateway.backends.served import ServedView
from tentalis.gateway.http.keys import Keys
from tentalis.gateway.http.limits import stall_timeout_protocol
from tentalis.gateway.http.usage_store import FILE_NAME, UsageStore
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.recording.event_log import EventLog
from tentalis.gateway.recording.recorder import TurnRecorder
from tentalis.gateway.recording.spool import RecordSpool
from tentalis.gateway.settings import GatewaySettings
from tentalis.inference.episode_secret import shared_secret
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.topic_watch import ending_on_changes
from tentalis.service.health import served as answering
from tentalis.service.lifecycle import run_service
from tentalis.service.ports import listening_sockets
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

EXTENSIONS: tuple[RouteInstaller, ...] = (bridge,)
"""Functions that add further routes; see `tentalis.gateway.app.RouteInstaller`."""

# Seconds that an idle client connection is kept, and that closing may take after the last answer.
_KEEP_ALIVE_S, _CLOSING_S = 30, 2


def serve(
    settings: GatewaySettings,
    kafka: Settings,
    *,
    host: str,
    port: int,
    keys: Path | None,
    spool: Path,
    local: bool = False,
    metrics_port: int | None = None,
) -> None:
    """Serves on `host`:`port` until SIGTERM, then finishes running calls for up to `drain_s` seconds. `keys`: the API
    key file; None: no key is required. `spool`: the folder for turns that the broker does not take. `local`: only
    programs of this machine are answered, and no browser page of another site.

    Raises BadGateway, BadKeys, SpoolTaken, PortTaken, OSError.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise it logs a line per call
    run_service(
        "gateway",
        ending_on_changes(
            kafka,
            topology.named("gateway").used_topics,
            lambda stop: _run(stop, settings, kafka, host, port, keys, spool, local, metrics_port),
        ),
        grace_s=settings.drain_s + _CLOSING_S,
    )


def _run(
    stop: threading.Event,
    settings: GatewaySettings,
    kafka: Settings,
    host: str,
    port: int,
    keys: Path | None,
    spool: Path,
    local: bool,
    metrics_port: int | None,
) -> None:
    sockets = listening_sockets(host, port, "gateway")
    key_store = Keys(keys, partial(shared_secret, kafka))
    record_spool = RecordSpool(spool, settings.spool_bytes)
    secrets = {backend.name: backend.key() for backend in settings.backends}
    codec = make_codec(kafka, patience=0.0)
    event_log = EventLog(kafka, f"tentalis/gateway/{settings.gateway_id}", codec)
    served = ServedView()
    backends = BackendClients(
        settings.backends, {name: None if key is None else key.get_secret_value() for name, key in secrets.items()}
    )
    metrics = GatewayMetrics(lambda: len(record_spool), lambda: served.lag, backends.routers)
    deps = GatewayDependencies(
        settings=settings,
        kafka=kafka,
        codec=codec,
        keys=key_store,
        event_log=event_log,
        recorder=TurnRecorder(event_log, record_spool, settings.ack_s, metrics.recorded),
        served=served,
        backends=backends,
        usage_store=UsageStore(spool / FILE_NAME),
        metrics=metrics,
        local=local,
    )
    served_thread = threading.Thread(
        target=deps.served.follow, args=(kafka, make_codec(kafka), stop), name="served", daemon=True
    )
    served_thread.start()
    app = build_app(deps, EXTENSIONS)
    try:
        with answering(app.state.health, metrics_port):
            asyncio.run(_serve(app, deps, host, port, sockets, stop))
    finally:
        stop.set()
        served_thread.join(1.0)
        event_log.close()
        record_spool.close()


async def _serve(
    app: object,
    deps: GatewayDependencies,
    host: str,
    port: int,
    sockets: list[socket.socket],
    stop: threading.Event,
) -> None:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=host,
        port=port,
        http=stall_timeout_protocol(deps.settings.header_s, deps.settings.stall_s),
        ws="none",
        log_level="info",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=deps.settings.drain_s,
    )
    server, loop = uvicorn.Server(config), asyncio.get_running_loop()

    def shut_down() -> None:
        for callback in deps.on_shutdown:
            callback()
        server.should_exit = True

    def wait_for_stop() -> None:
        stop.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(shut_down)

    threading.Thread(target=wait_for_stop, name="stop", daemon=True).start()
    log.info("listening on http://%s:%d", host, port)
    await server.serve(sockets)
