"""The process of a gateway."""

import asyncio
import logging
import threading
from pathlib import Path

import uvicorn

from tentalis.config import Settings
from tentalis.gateway.app import Deps, Install, build_app
from tentalis.gateway.backends import Backends
from tentalis.gateway.bridge.install import install as bridge
from tentalis.gateway.connections import impatient
from tentalis.gateway.eventlog import EventLog
from tentalis.gateway.keys import Keys
from tentalis.gateway.measures import Measures
from tentalis.gateway.recorder import Recorder
from tentalis.gateway.served import ServedView
from tentalis.gateway.settings import GatewaySettings
from tentalis.gateway.spool import Spool
from tentalis.health import served as answering
from tentalis.kafka import make_codec
from tentalis.service import run_service

EXTENSIONS: tuple[Install, ...] = (bridge,)
"""What adds further routes; see `tentalis.gateway.app.Install`."""

# Of a client that keeps its connection open, in seconds; and for what is to be closed once all is answered.
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
    """Answers on `host`:`port` until SIGTERM, and for up to `drain_s` what is under way then. `keys`: the file of API
    keys, None: nobody is asked for one. `spool`: the folder for turns that the broker does not take. `local`: only this
    machine's own programs are answered, and no page of another site in a browser.

    Raises BadGateway, BadKeys, SpoolTaken, PortTaken, OSError.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per call says nothing here
    run_service(
        "gateway",
        lambda stop: _run(stop, settings, kafka, host, port, keys, spool, local, metrics_port),
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
    checked, disk = Keys(keys), Spool(spool, settings.spool_bytes)
    secrets = {backend.name: backend.key() for backend in settings.backends}
    codec = make_codec(kafka, patience=0.0)
    events = EventLog(kafka, f"tentalis/gateway/{settings.gateway_id}", codec)
    measures = Measures(lambda: len(disk))
    deps = Deps(
        settings=settings,
        kafka=kafka,
        codec=codec,
        keys=checked,
        events=events,
        recorder=Recorder(events, disk, settings.ack_s, measures.recorded),
        served=ServedView(),
        backends=Backends(
            settings.backends, {name: None if key is None else key.get_secret_value() for name, key in secrets.items()}
        ),
        measures=measures,
        local=local,
    )
    follower = threading.Thread(
        target=deps.served.follow, args=(kafka, make_codec(kafka), stop), name="served", daemon=True
    )
    follower.start()
    app = build_app(deps, EXTENSIONS)
    try:
        with answering(app.state.health, metrics_port):
            asyncio.run(_serve(app, deps, host, port, stop))
    finally:
        stop.set()
        follower.join(1.0)
        events.close()
        disk.close()


async def _serve(app: object, deps: Deps, host: str, port: int, stop: threading.Event) -> None:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=host,
        port=port,
        http=impatient(deps.settings.header_s, deps.settings.stall_s),
        ws="none",
        log_level="info",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=deps.settings.drain_s,
    )
    server, loop = uvicorn.Server(config), asyncio.get_running_loop()

    def leave() -> None:
        for each in deps.leaving:
            each()
        server.should_exit = True

    def until_told() -> None:
        stop.wait()
        if not loop.is_closed():
            loop.call_soon_threadsafe(leave)

    threading.Thread(target=until_told, name="stop", daemon=True).start()
    await server.serve()
