"""Watches the topics of a running process: one that was lost, or that got more partitions, ends the process."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping

from confluent_kafka import KafkaException

from schemas import topics
from tentalis.kafka.errors import Forbidden
from tentalis.kafka.identity import PartitionsChanged, TopicIdentity, TopicLost, changes_while_running
from tentalis.kafka.topic_client import TopicClient
from tentalis.kafka.topic_id_log import WAYS_ON, check_recorded
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

LOOK_S = 20.0
LOOKS_BEFORE_GONE = 2
"""A topic is gone if so many looks in a row do not find it: a broker that has just started may not know it yet."""
GROWN = (
    "the new partitions are not read, and keys hash to other partitions now. Stop the stack and move all keyed topics "
    "with `tentalis topics repartition` (docs/operations/repartition.md)"
)


def check_changes(before: Mapping[str, TopicIdentity], now: Mapping[str, TopicIdentity], ways_on: str) -> None:
    """Compares topics with what they were. Raises TopicLost, PartitionsChanged."""
    lost, resized = changes_while_running(before, now)
    if lost is not None:
        raise TopicLost(f"{lost}. {ways_on}")
    if resized is not None:
        raise PartitionsChanged(f"{resized}: {GROWN}")


def check_even(found: Mapping[str, TopicIdentity]) -> None:
    """Compares the keyed topics with each other. Raises PartitionsChanged if their partition counts differ: a key would
    lie on partitions of different numbers."""
    keyed = {name: found[name].partitions for name in topics.table().co_partitioned if name in found}
    if len({*keyed.values()}) > 1:
        few, many = min(keyed, key=keyed.__getitem__), max(keyed, key=keyed.__getitem__)
        raise PartitionsChanged(f"{many} has {keyed[many]} partitions, and {few} has {keyed[few]}: {GROWN}")


class TopicWatch:
    """Checks topics periodically on a separate thread, for changes that must end the process.

    Args:
        names: the topics. They are compared with the state that the first look finds, and the keyed ones among them
            then with each other.
        ways_on: the remedy for a lost topic, for the error message.
        on_change: called on the watching thread when a change is found.
    """

    def __init__(
        self, settings: Settings, names: Collection[str], ways_on: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._settings, self._names, self._ways_on, self._on_change = settings, names, ways_on, on_change
        self._before: dict[str, TopicIdentity] | None = None
        self._missed = 0
        self._seen: Exception | None = None
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="topic-watch", daemon=True).start()

    def check(self) -> None:
        """Raises the TopicLost or PartitionsChanged that was found, or the error that ended the watching thread. A
        broker that is unavailable is not such an error."""
        if self._seen is not None:
            raise self._seen

    def close(self) -> None:
        """Ends the watching thread after its current look."""
        self._over.set()

    def _watch(self) -> None:
        try:
            client = TopicClient(self._settings)
            while True:
                try:
                    self._look(client)
                except (KafkaException, Forbidden, TimeoutError) as error:
                    log.warning("the ids of the topics are not available: %s", error)
                if self._over.wait(LOOK_S):
                    return
        except Exception as error:  # noqa: BLE001 - `check` raises it
            self._seen = error
            self._on_change()

    def _look(self, client: TopicClient) -> None:
        found = client.identities(self._names)
        if self._before is None:
            check_even(found)
            self._before = found
            return
        self._missed = self._missed + 1 if self._before.keys() - found.keys() else 0
        if self._missed in range(1, LOOKS_BEFORE_GONE):
            return
        check_changes(self._before, found, self._ways_on)


def ending_on_changes(
    settings: Settings, names: Collection[str], body: Callable[[threading.Event], None]
) -> Callable[[threading.Event], None]:
    """Returns a body for `run_service` that compares the topics with their recorded ids first, and also ends when one
    of them is lost or resized: it then raises TopicLost or PartitionsChanged. Without a record it raises NoTopicIds."""

    def run(stop: threading.Event) -> None:
        check_recorded(settings, names)
        either = threading.Event()
        watch = TopicWatch(settings, names, WAYS_ON, either.set)

        def forward() -> None:
            stop.wait()
            either.set()

        threading.Thread(target=forward, name="stop-or-change", daemon=True).start()
        try:
            body(either)
        finally:
            watch.close()
        watch.check()

    return run
