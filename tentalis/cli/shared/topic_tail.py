"""Reads a topic for `tentalis consume`: start positions, the end of the topic, and records as JSON objects."""

from __future__ import annotations

import base64
import re
from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaError, TopicPartition

from schemas import topics
from schemas.wire.codec import Codec, DecodeError
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.record_json import to_plain
from tentalis.kafka.acls import CONSUMERS, Operation
from tentalis.kafka.config import consumer_config
from tentalis.kafka.consumer import Stored
from tentalis.kafka.errors import DENIED, NoSuchTopic, passes, refused
from tentalis.kafka.positions import Start, begin_offset
from tentalis.kafka.topic_client import known_offset, offset_of_time
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.text.timestamps import FORMS, parse_moment

DLQ_HEADER = "tentalis.dlq."


def parse_start(text: str, now: int, option: str = "--from") -> Start:
    """Parses `earliest`, `latest`, an offset, `-N` (the last N of each partition) or a time (see `timestamps.py`).

    Raises CommandError, which names the option, for anything else.
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
        return Start(at_ms=max(0, parse_moment(text, now)))  # -1 means the end of the partition in Kafka
    except ValueError as error:
        raise CommandError(
            f"{option} {text}: give earliest, latest, an offset, -N for the last N of each partition, or a time: "
            f"{FORMS}",
            ExitCode.USAGE,
        ) from error


def _assignment(
    settings: Settings, consumer: Consumer, topic: str, start: Start, end: Start | None, *, stop_at_end: bool
) -> tuple[list[TopicPartition], dict[int, int]]:
    """Returns the places to begin at, and the offsets to stop at, by partition: empty without `end` and
    `stop_at_end`."""
    metadata = consumer.list_topics(topic, timeout=15).topics[topic]
    if metadata.error is not None and metadata.error.code() in DENIED:
        raise refused(settings, metadata.error, Operation.READ, topic)
    if metadata.error is not None:
        raise NoSuchTopic(f"the broker has no topic {topic}; `tentalis topics list` lists its topics")
    places, stops = [], {}
    for p in sorted(metadata.partitions):
        low, high = map(known_offset, consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=15))

        def at_time(position: Start, partition: int = p) -> int | None:
            if position.at_ms is None:
                return None
            asked = [TopicPartition(topic, partition, position.at_ms)]
            found = offset_of_time(consumer.offsets_for_times(asked, timeout=15)[0].offset)
            return OFFSET_END if found is None else found

        places.append(TopicPartition(topic, p, begin_offset(start, low, high, at_time(start))))
        if end is not None:
            # An offset that is not written yet is waited for.
            stops[p] = begin_offset(end, low, high, at_time(end)) if end.offset is None else end.offset
        if stop_at_end:
            # The client tells the end only when a fetch finds nothing new: never where it is written all the time.
            stops[p] = min(stops.get(p, high), high)
    return places, stops


def tail(
    settings: Settings, topic: str, start: Start, *, stop_at_end: bool, end: Start | None = None
) -> Generator[Stored, None, None]:
    """Yields the records of all partitions from `start` on, up to `end` (exclusive) if it is given; with
    `stop_at_end`, at most up to the end that each partition has now.

    Raises NoSuchTopic, Forbidden, KafkaException.
    """
    consumer = Consumer(consumer_config(settings, CONSUMERS) | {"enable.partition.eof": True, "fetch.wait.max.ms": 100})
    try:
        places, stops = _assignment(settings, consumer, topic, start, end, stop_at_end=stop_at_end)
        places = [place for place in places if place.offset < stops.get(place.partition, place.offset + 1)]
        left = {place.partition for place in places}
        consumer.assign(places)
        while left or not stops:
            for message in consumer.consume(500, 0.2):
                error, p = message.error(), int(message.partition())
                if error is None:
                    stop = stops.get(p)
                    if stop is None or message.offset() < stop:
                        yield Stored.of(message)
                    if stop is not None and message.offset() + 1 >= stop:
                        left.discard(p)
                elif error.code() == KafkaError._PARTITION_EOF:
                    # Offsets before `end` may hold no record: markers of transactions, compacted records.
                    if stop_at_end or message.offset() >= stops.get(p, message.offset() + 1):
                        left.discard(p)
                elif not passes(error):
                    raise refused(settings, error, Operation.READ, topic, CONSUMERS)
    finally:
        consumer.close()


def _time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_object(stored: Stored, codec: Codec) -> dict[str, Any]:
    """Returns one record as a JSON object.

    A decoded record has `type` and `value`; undecodable bytes have `error` and `value_base64`. On topics without Avro
    records (changelogs, dead letters) there is only `value_base64`; dead letters add `dlq`, their headers. Tombstones
    have `tombstone`.
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
    if stored.topic == topics.TOPIC_IDS:
        return found | {"type": "topic ids", "value": stored.value.decode("utf-8", "replace")}
    if known is None or not known.records:
        return found | {"value_base64": base64.b64encode(stored.value).decode()}
    try:
        record = stored.decode(codec)
    except DecodeError as error:
        return found | {"error": str(error), "value_base64": base64.b64encode(stored.value).decode()}
    return found | {"type": type(record).__name__, "value": to_plain(record)}
