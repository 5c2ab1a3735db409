"""Before an application starts: are its topics there; and what the broker's refusals mean."""

import logging
from collections.abc import Mapping
from typing import Any

from schemas import topics
from streams.processor import Processor
from streams.sink import NotDelivered
from tentalis.acls import Operation, Resource
from tentalis.config import Settings
from tentalis.refusal import Forbidden, forbidden, refused

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


def forbidden_of(failure: BaseException, settings: Settings) -> Forbidden | None:
    """What an error of a client means, if it is the broker's ACLs: Faust may have wrapped it."""
    from aiokafka import errors

    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, NotDelivered):
            error, topic = seen.args
            meaning = refused(settings, error, Operation.WRITE, topic)
            return meaning if isinstance(meaning, Forbidden) else None
        name = str(seen.args[0]) if seen.args else "(not named)"
        if isinstance(seen, errors.TopicAuthorizationFailedError):
            # Which operation, aiokafka does not say.
            return Forbidden(f"{_no(settings)} what it tries on topic {name}. {_WHAT_NEXT}")
        if isinstance(seen, errors.GroupAuthorizationFailedError):
            return forbidden(settings, [(Operation.READ, Resource.GROUP, name)])
        if isinstance(seen, errors.ClusterAuthorizationFailedError):
            return Forbidden(
                f"{_no(settings)} to write (Write on any topic would do for its producer id). {_WHAT_NEXT}"
            )
        seen = seen.__cause__ or seen.__context__
    return None


_WHAT_NEXT = "`tentalis topics acls` prints what each role needs"


def _no(settings: Settings) -> str:
    return f"the broker's ACLs do not allow {settings.security.principal}"
