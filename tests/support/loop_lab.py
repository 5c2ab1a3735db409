"""Worker, manager and policies in threads against a real broker, with names that no other test has."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from schemas import topics
from schemas.records import Record
from schemas.wire.codec import DecodeError
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import ensure_topics


class Lab:
    """A broker with the topics, and one set of names."""

    def __init__(self, bootstrap: str, unique: str) -> None:
        self.settings = Settings(bootstrap=bootstrap)
        self.name = unique
        ensure_topics(self.settings)
        self.codec = make_codec(self.settings)
        self.publisher = Publisher(self.settings, "test", self.codec)

    def put(self, topic: str, *records: Record) -> None:
        for record in records:
            self.publisher.send(topic, record)
        self.publisher.flush()

    def records(self, topic: str, mine: Callable[[Any], bool]) -> list[Any]:
        """The decodable records of a topic that are this test's."""
        expected = topics.table().records_of(topic)
        decoded = []
        for stored in read_to_end(self.settings, topic):
            try:
                record = self.codec.decode(
                    stored.value,
                    topic=topic,
                    partition=stored.partition,
                    offset=stored.offset,
                    expected=expected,
                )
            except DecodeError:  # other tests put garbage on the same topics
                continue
            if mine(record):
                decoded.append(record)
        return decoded


@contextmanager
def running(body: Callable[[threading.Event], Coroutine[Any, Any, None]]) -> Iterator[Callable[[], None]]:
    """`body` on an event loop in a thread; yields a function that ends it and raises what it raised."""
    stop = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(body(stop))
        except Exception as error:  # noqa: BLE001 - raised again by `end`
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)

    def end() -> None:
        stop.set()
        thread.join(30)
        assert not thread.is_alive(), "it did not stop"
        if raised:
            raise raised.pop()

    thread.start()
    try:
        yield end
    finally:
        end()
