"""Adds the bridge to a gateway."""

from fastapi import FastAPI

from tentalis.gateway.api.log import KafkaLog
from tentalis.gateway.api.routes import router
from tentalis.gateway.api.service import Bridge
from tentalis.gateway.app import GatewayDependencies


def install(app: FastAPI, deps: GatewayDependencies) -> None:
    """See tentalis.gateway.app.RouteInstaller."""
    settings, call_counter = deps.settings, deps.metrics.calls
    if not settings.bridge:
        return
    horizon_ms, max_records = int(settings.bridge_horizon_s * 1000), settings.bridge_facts
    record_log = KafkaLog(deps.kafka, deps.event_log, horizon_ms=horizon_ms, max_records=max_records)
    bridge = Bridge(
        record_log,
        gateway_id=settings.gateway_id,
        policy=settings.policies[0].name if settings.policies else "default",
        policy_owners=settings.policy_owners,
        horizon_ms=horizon_ms,
        max_records=max_records,
        limits=settings.limits,
    )
    deps.earlier_turns.source = bridge
    deps.on_shutdown.append(bridge.events.close)
    app.include_router(
        router(
            bridge,
            deps.keys,
            body_bytes=settings.body_bytes,
            body_s=settings.body_s,
            usage=app.state.usage,
            count=lambda path, status: call_counter.labels(path, str(status)).inc(),
        )
    )
