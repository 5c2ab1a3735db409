"""The settings of a stream application, and what they are for librdkafka and for Faust."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from schemas import topics
from tentalis.config import Security, Settings
from tentalis.kafka import producer_config
from tentalis.security import aiokafka


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How to run a stream application. Times in seconds, sizes in bytes.

    `instance` makes the worker a static member of its group (unique per worker): one that is killed and started again
    under the same name gets its partitions back at once, while the partitions of one that stays away wait for the
    session timeout. `state` is where the table lies: in memory, or on disk under `state_dir` (rocksdb)."""

    bootstrap: str
    state_dir: Path
    state: Literal["memory", "rocksdb"] = "memory"
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    security: Security = field(default_factory=Security)
    instance: str | None = None
    max_batch_records: int = 1000
    max_batch_bytes: int = 8 * 2**20
    dead_run: int = 100
    dead_ratio: float = 0.5
    dead_window: int = 1000
    record_limit: int = field(default_factory=lambda: topics.table().record_limit_bytes)
    session_timeout: float = 10.0
    heartbeat_interval: float = 3.0
    commit_interval: float = 1.0
    delivery_timeout: float = 60.0
    grace: float = 2.0
    stall_limit: float = 120.0

    @property
    def known(self) -> Settings:
        """Where the brokers are and how to speak to them, as clients on librdkafka take it."""
        return Settings(bootstrap=self.bootstrap, security=self.security)


def producer_settings(settings: StreamSettings) -> dict[str, Any]:
    """librdkafka's, of the one producer."""
    return producer_config(settings.known) | {
        # A flush waits for two confirmations in a row.
        "linger.ms": 1,
        # Token ids and log-probs hardly get smaller; level 3 takes half as long again for the same size.
        "compression.level": 1,
        # What is not confirmed in time ends the worker, and with it everything behind: a record given up by itself, or
        # refused by the broker, would let what follows it on its partition be written without it.
        "delivery.timeout.ms": 0,
        "enable.gapless.guarantee": True,
        "message.max.bytes": settings.record_limit + 2 * topics.OVERHEAD_BYTES,
    }


def faust_settings(app_id: str, settings: StreamSettings) -> dict[str, Any]:
    """Faust's, of its consumer."""
    week = 7 * 24 * 3600.0
    request_limit = settings.record_limit + 2 * topics.OVERHEAD_BYTES
    return {
        "broker": ";".join(f"kafka://{server}" for server in settings.bootstrap.split(",")),
        "broker_client_id": app_id,
        "broker_credentials": credentials(settings.security),
        "consumer_group_instance_id": settings.instance,
        # Faust asserts that an assignment carries this worker's URL; a static member is handed its predecessor's.
        **({} if settings.instance is None else {"canonical_url": f"http://{settings.instance}.{app_id}"}),
        "datadir": settings.state_dir / "faust" / app_id,
        "broker_commit_interval": settings.commit_interval,
        "broker_session_timeout": settings.session_timeout,
        "broker_heartbeat_interval": settings.heartbeat_interval,
        "broker_rebalance_timeout": 30.0,
        "broker_request_timeout": 30.0,
        # A partition that waits for a model server is not polled, and aiokafka would leave the group. The watchdog
        # judges progress; this only must not.
        "broker_max_poll_interval": week,
        "broker_max_poll_records": settings.max_batch_records,
        "consumer_max_fetch_size": max(settings.max_batch_bytes, 2**20),
        "producer_max_request_size": request_limit,
        "producer_request_timeout": settings.delivery_timeout,
    }


def credentials(security: Security) -> Any:
    """Faust's credentials that give aiokafka what `aiokafka(security)` holds; None for plain text. Raises
    BadSecurity."""
    import faust
    from faust.types.auth import AuthProtocol

    wanted = aiokafka(security)
    context = wanted.get("ssl_context")
    if security.sasl:
        return faust.SASLCredentials(
            username=wanted["sasl_plain_username"],
            password=wanted["sasl_plain_password"],
            ssl_context=context,
            mechanism=wanted["sasl_mechanism"],
        )
    if context is None:
        return None
    made = faust.SSLCredentials(context=context)
    # Faust 0.15.3 reads the protocol of these, and never sets it.
    made.protocol = AuthProtocol.SSL
    return made
