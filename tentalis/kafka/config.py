"""The configuration of every Kafka client."""

from typing import Any

from schemas import topics
from tentalis.service.logs import client_logger
from tentalis.service.security import librdkafka
from tentalis.service.settings import Settings


def client_config(settings: Settings) -> dict[str, Any]:
    """The librdkafka settings that all clients share: brokers and authentication.

    Contains secrets: do not log.
    """
    return {
        "bootstrap.servers": settings.require_bootstrap(),
        "allow.auto.create.topics": False,
        "socket.keepalive.enable": True,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        "log_level": 3,
        "logger": client_logger(),
        **librdkafka(settings.security),
    }


def producer_config(settings: Settings, *, transactional_id: str | None = None) -> dict[str, Any]:
    """Settings of a producer: idempotent, acks=all, and murmur2, because librdkafka's default CRC32 silently breaks
    co-partitioning with the JVM and aiokafka.
    """
    config = client_config(settings) | {
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "linger.ms": 5,
        "compression.type": "zstd",
        "delivery.timeout.ms": 120_000,
        "message.max.bytes": topics.table().record_limit_bytes + 2 * topics.OVERHEAD_BYTES,
        "queue.buffering.max.kbytes": 262_144,
    }
    if transactional_id is not None:
        config |= {"transactional.id": transactional_id, "transaction.timeout.ms": 60_000}
    return config


def consumer_config(settings: Settings, group: str, *, instance: str | None = None) -> dict[str, Any]:
    """Settings of a consumer: commits only on request; a missing offset is an error or the beginning, never the end."""
    limit = topics.table().record_limit_bytes
    config = client_config(settings) | {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "check.crcs": True,
        "enable.partition.eof": False,
        "session.timeout.ms": 10_000,
        "max.poll.interval.ms": 3_600_000,
        "fetch.message.max.bytes": limit + 2 * topics.OVERHEAD_BYTES,
        "fetch.max.bytes": 4 * limit,
        "queued.max.messages.kbytes": 131_072,
        "topic.metadata.refresh.interval.ms": 30_000,
    }
    return config | ({"group.instance.id": instance} if instance else {})
