"""The settings of a stream application, and their translation for librdkafka and for Faust."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from schemas import topics
from tentalis.kafka.config import producer_config
from tentalis.service import variables
from tentalis.service.security import aiokafka
from tentalis.service.settings import DeadLetterThresholds, Security, Settings


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The settings of a stream application. Times in seconds, sizes in bytes.

    `instance` makes the worker a static member of its group (unique per worker): a worker that is killed and restarted
    under the same name gets its partitions back immediately; the partitions of one that does not return wait for the
    session timeout. `state` is the place of the table: in memory, or on disk under `state_dir` (rocksdb). With
    `accept_loss` the work of lost topics is given up, on record; without it the worker ends (ExitCode.PERMANENT)."""

    bootstrap: str
    state_dir: Path
    state: Literal["memory", "rocksdb"] = "memory"
    metrics_port: int | None = None
    metrics_host: str = variables.METRICS_HOST.default
    security: Security = field(default_factory=Security)
    instance: str | None = None
    max_batch_records: int = 1000
    max_batch_bytes: int = 8 * 2**20
    dead_letters: DeadLetterThresholds = field(default_factory=DeadLetterThresholds)
    record_limit: int = field(default_factory=lambda: topics.table().record_limit_bytes)
    session_timeout: float = 10.0
    heartbeat_interval: float = 3.0
    commit_interval: float = 1.0
    delivery_timeout: float = 60.0
    grace: float = 2.0
    stall_limit: float = 120.0
    accept_loss: bool = False

    @property
    def known(self) -> Settings:
        """Broker addresses and security, as librdkafka clients take them."""
        return Settings(bootstrap=self.bootstrap, security=self.security)


def producer_settings(settings: StreamSettings) -> dict[str, Any]:
    """librdkafka settings of the worker's producer."""
    return producer_config(settings.known) | {
        # A flush waits for two confirmations in a row.
        "linger.ms": 1,
        # Token ids and log-probs hardly compress; level 3 takes 1.5 times as long for the same size.
        "compression.level": 1,
        # A record that is not confirmed in time ends the worker, so no later record is sent. If librdkafka gave up a
        # record itself, or skipped one that the broker rejected, later records of the partition would be written
        # without it.
        "delivery.timeout.ms": 0,
        "enable.gapless.guarantee": True,
        "message.max.bytes": settings.record_limit + 2 * topics.OVERHEAD_BYTES,
    }


def faust_settings(app_id: str, settings: StreamSettings) -> dict[str, Any]:
    """Faust settings of the worker's consumer."""
    week = 7 * 24 * 3600.0
    request_limit = settings.record_limit + 2 * topics.OVERHEAD_BYTES
    return {
        "broker": ";".join(f"kafka://{server}" for server in settings.bootstrap.split(",")),
        "broker_client_id": app_id,
        "broker_credentials": credentials(settings.security),
        "consumer_group_instance_id": settings.instance,
        # Faust asserts that an assignment carries this worker's URL; a static member gets its predecessor's.
        **({} if settings.instance is None else {"canonical_url": f"http://{settings.instance}.{app_id}"}),
        "datadir": settings.state_dir / "faust" / app_id,
        "broker_commit_interval": settings.commit_interval,
        "broker_session_timeout": settings.session_timeout,
        "broker_heartbeat_interval": settings.heartbeat_interval,
        "broker_rebalance_timeout": 30.0,
        "broker_request_timeout": 30.0,
        # A partition that waits for a model server is not polled, and aiokafka would leave the group. The watchdog
        # detects missing progress instead.
        "broker_max_poll_interval": week,
        "broker_max_poll_records": settings.max_batch_records,
        "consumer_max_fetch_size": max(settings.max_batch_bytes, 2**20),
        "producer_max_request_size": request_limit,
        "producer_request_timeout": settings.delivery_timeout,
    }


def credentials(security: Security) -> Any:
    """Faust credentials with the settings of `aiokafka(security)`; None for plain text. Raises BadSecurity."""
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
    # Faust 0.15.3 reads the protocol of SSL credentials, but never sets it.
    made.protocol = AuthProtocol.SSL
    return made
