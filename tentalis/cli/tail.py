"""Reading a topic for a person: where to start, when to stop, and one record as one line."""

from __future__ import annotations

import base64
import re
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from schemas import topics
from schemas.codec import Codec, DecodeError
from tentalis.acls import CONSUMERS, Operation
from tentalis.cli.common import USAGE, CommandError
from tentalis.cli.values import to_plain
from tentalis.config import Settings
from tentalis.kafka import NoSuchTopic, Stored, consumer_config, passes
from tentalis.moments import FORMS, parse_moment
from tentalis.refusal import DENIED, refused

DLQ_HEADER = "tentalis.dlq."


@dataclass(frozen=True, slots=True)
class Start:
    """Where to begin in every partition; exactly one of these, or the beginning."""

    offset: int | None = None
    back: int | None = None
    at_ms: int | None = None


def parse_start(text: str, now: int) -> Start:
    """`earliest`, `latest`, an offset, `-N` (the last N of each partition) or a time (see tentalis.moments).

    Raises CommandError for anything else.
    """
    if text == "earliest":
        return Start()
    if text == "latest":
        return Start(back=0)
    if re.fullmatch(r"\d+", text):
        return Start(offset=int(text))
    if re.fullmatch(r"-\d+", text):
        return Start(back=-int(text))
    try:
        return Start(at_ms=max(0, parse_moment(text, now)))  # -1 would be the end for Kafka
    except ValueError as error:
        raise CommandError(
            f"--from {text}: give earliest, latest, an offset, -N for the last N of each partition, or a time: {FORMS}",
            USAGE,
        ) from error


def begin_offset(start: Start, low: int, high: int, at_time: int | None) -> int:
    """The first offset to read of a partition that holds [low, high); `at_time` is the broker's answer for a time."""
    if start.offset is not None:
        return min(max(start.offset, low), high)
    if start.back is not None:
        return max(low, high - start.back)
    if start.at_ms is not None:
        return high if at_time is None or at_time < 0 else at_time
    return low


def _assignment(settings: Settings, consumer: Consumer, topic: str, start: Start) -> list[TopicPartition]:
    metadata = consumer.list_topics(topic, timeout=15).topics[topic]
    if metadata.error is not None and metadata.error.code() in DENIED:
        raise refused(settings, metadata.error, Operation.READ, topic)
    if metadata.error is not None:
        raise NoSuchTopic(f"the broker has no topic {topic}; `tentalis topics list` shows those it has")
    places = []
    for p in sorted(metadata.partitions):
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=15)
        at_time = None
        if start.at_ms is not None:
            at_time = consumer.offsets_for_times([TopicPartition(topic, p, start.at_ms)], timeout=15)[0].offset
        places.append(TopicPartition(topic, p, begin_offset(start, low, high, at_time)))
    return places


def tail(settings: Settings, topic: str, start: Start, *, stop_at_end: bool) -> Generator[Stored, None, None]:
    """Records of all partitions from `start` on; with `stop_at_end` until each partition's end was seen.

    Raises NoSuchTopic, Forbidden, KafkaException.
    """
    consumer = Consumer(consumer_config(settings, CONSUMERS) | {"enable.partition.eof": True, "fetch.wait.max.ms": 100})
    try:
        places = _assignment(settings, consumer, topic, start)
        left = {place.partition for place in places}
        consumer.assign(places)
        while left or not stop_at_end:
            for message in consumer.consume(500, 0.2):
                error = message.error()
                if error is None:
                    yield Stored.of(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(int(message.partition()))
                elif not passes(error):
                    raise refused(settings, error, Operation.READ, topic, CONSUMERS)
    finally:
        consumer.close()


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_object(stored: Stored, codec: Codec) -> dict[str, Any]:
    """One record as a JSON object.

    `type` and `value` for a record of ours; `error` and `value_base64` for bytes that are none; `value_base64` alone on
    topics that hold no records of ours (changelogs, dead letters; those with their `dlq` headers); `tombstone`.
    """
    headers = {name: value.decode("utf-8", "replace") for name, value in stored.headers}
    found: dict[str, Any] = {
        "topic": stored.topic,
        "partition": stored.partition,
        "offset": stored.offset,
        "timestamp": _time(stored.timestamp),
        "key": stored.key,
        "headers": {name: value for name, value in headers.items() if not name.startswith(DLQ_HEADER)},
    }
    dead = {name.removeprefix(DLQ_HEADER): value for name, value in headers.items() if name.startswith(DLQ_HEADER)}
    if dead:
        found["dlq"] = dead
    if stored.value is None:
        return found | {"tombstone": True}
    known = topics.table().topics.get(stored.topic)
    if stored.topic == topics.SCHEMAS:
        return found | {"type": "schema", "value": stored.value.decode("utf-8", "replace")}
    if known is None or not known.records:
        return found | {"value_base64": base64.b64encode(stored.value).decode()}
    try:
        record = stored.decode(codec)
    except DecodeError as error:
        return found | {"error": str(error), "value_base64": base64.b64encode(stored.value).decode()}
    return found | {"type": type(record).__name__, "value": to_plain(record)}
