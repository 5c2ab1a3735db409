"""Checks, before an application starts, that its topics exist with the partitions that it needs."""

import time
from collections.abc import Mapping
from typing import Any

from schemas import topics
from streams.runtime.processor import Processor
from tentalis.kafka.topic_client import RETRY_S, TOPIC_PATIENCE_S

TOPICS_TIMEOUT_S = 20.0


class TopicsWrong(Exception):
    """A topic that the application needs is missing or has the wrong number of partitions."""


def check_topics(processor: Processor, connection: Mapping[str, Any]) -> dict[str, int]:
    """Checks that all topics of the application exist: its inputs, their dead-letter topics and its changelog.

    Faust would wait silently for a missing topic, and an application with state whose topics have different partition
    counts would be assigned partitions whose state is elsewhere. A topic that was just created is not at once in the
    metadata of every broker, so missing topics are asked for again for TOPIC_PATIENCE_S seconds.

    Args:
        connection: librdkafka settings for the connection to the brokers.
    Returns:
        The partition count of each input topic.
    Raises:
        TopicsWrong: names every topic that is missing or different.
        KafkaException: the broker does not answer.
    """
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(dict(connection))
    wanted = [*processor.topics, *map(topics.dlq, processor.topics)]
    if processor.table is not None:
        wanted.append(topics.changelog(processor.app_id, processor.table))
    deadline = time.monotonic() + TOPIC_PATIENCE_S
    while not (found := _partition_counts(admin)).keys() >= set(wanted) and time.monotonic() < deadline:
        time.sleep(RETRY_S)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    if not problems:
        for topic in processor.topics:
            beside = [topics.dlq(topic)] if processor.table is None else wanted
            problems += [
                f"{name} has {found[name]} partitions, but {topic} has {found[topic]}"
                for name in beside
                if found[name] != found[topic]
            ]
    if problems:
        raise TopicsWrong(
            "; ".join(problems) + ". `tentalis topics apply` creates what is missing; `tentalis topics repartition` "
            "gives all keyed topics one number of partitions"
        )
    return {name: found[name] for name in processor.topics}


def _partition_counts(admin: Any) -> dict[str, int]:
    found = admin.list_topics(timeout=TOPICS_TIMEOUT_S).topics
    return {name: len(topic.partitions) for name, topic in found.items()}
