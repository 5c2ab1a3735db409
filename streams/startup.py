"""Before an application starts: are its topics there, with the partitions that it needs."""

import logging
from collections.abc import Mapping
from typing import Any

from schemas import topics
from streams.processor import Processor

TOPICS_TIMEOUT_S = 20.0


class TopicsWrong(Exception):
    """A topic that the application needs is missing or has the wrong number of partitions."""


def check_topics(processor: Processor, connection: Mapping[str, Any]) -> dict[str, int]:
    """Whether every topic is there that the application reads, and those that must lie beside them.

    Faust would wait without a word for a topic that is missing, and an application with state whose topics have
    different partition counts would be given partitions whose state lies elsewhere.

    Args:
        connection: librdkafka's settings of how to reach the brokers.
    Returns:
        How many partitions each topic has that it reads.
    Raises:
        TopicsWrong: naming every topic that is missing or different.
        KafkaException: the broker does not answer.
    """
    from confluent_kafka.admin import AdminClient

    admin = AdminClient(dict(connection), logger=logging.getLogger("librdkafka"))
    found = {name: len(topic.partitions) for name, topic in admin.list_topics(timeout=TOPICS_TIMEOUT_S).topics.items()}
    wanted = [*processor.topics, *map(topics.dlq, processor.topics)]
    if processor.table is not None:
        wanted.append(topics.changelog(processor.app_id, processor.table))
    problems = [f"{name} is missing" for name in wanted if name not in found]
    if not problems:
        for topic in processor.topics:
            beside = [topics.dlq(topic)] if processor.table is None else wanted
            problems += [
                f"{name} has {found[name]} partitions, {topic} has {found[topic]}"
                for name in beside
                if found[name] != found[topic]
            ]
    if problems:
        raise TopicsWrong("; ".join(problems) + ". `tentalis topics apply` creates what is missing")
    return {name: found[name] for name in processor.topics}
