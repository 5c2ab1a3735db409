"""Adds the bridge to a gateway."""

from fastapi import FastAPI

from tentalis.gateway.app import Deps
from tentalis.gateway.bridge.log import KafkaLog
from tentalis.gateway.bridge.routes import router
from tentalis.gateway.bridge.service import Bridge


def install(app: FastAPI, deps: Deps) -> None:
    """See tentalis.gateway.app.Install."""
    settings, calls = deps.settings, deps.measures.calls
    if not settings.bridge:
        return
    horizon_ms, most_facts = int(settings.bridge_horizon_s * 1000), settings.bridge_facts
    log = KafkaLog(deps.kafka, deps.events, horizon_ms=horizon_ms, most_facts=most_facts)
    bridge = Bridge(
        log,
        gateway_id=settings.gateway_id,
        policy=settings.policies[0].name if settings.policies else "default",
        personal=settings.personal,
        horizon_ms=horizon_ms,
        most_facts=most_facts,
    )
    deps.leaving.append(bridge.events.end)
    app.include_router(
        router(
            bridge,
            deps.keys,
            body_bytes=settings.body_bytes,
            body_s=settings.body_s,
            count=lambda path, status: calls.labels(path, str(status)).inc(),
        )
    )
