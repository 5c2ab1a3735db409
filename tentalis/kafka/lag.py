"""Consumer lag of the stack's consumer groups, and waiting until they have caught up."""

import logging
import threading
import time
from collections.abc import Container, Mapping, Sequence

from tentalis.kafka import topology
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

EVERY_S = 5.0
ASK_S = 2.0
"""Seconds that `LagProbe.ask` waits for a reading."""

Groups = Mapping[str, Sequence[str]]


def groups_of(environment: str, policy: str, names: Container[str] | None = None) -> Groups:
    """Returns the consumer groups of the pipeline with their input topics, in the order of `topology.pipeline`.

    `names`: only the groups of these applications.
    """
    return {
        each.consumer_group(environment=environment, policy=policy): each.consumes
        for each in topology.pipeline()
        if names is None or each.name in names
    }


class LagProbe:
    """Reads the lag on its own thread: at intervals, or `on_request` when somebody asks for it, since each reading is
    dozens of requests to the broker.

    `lags` has the latest: group -> records behind. `reachable`: the broker answered the latest query.
    """

    def __init__(
        self, settings: Settings, groups: Groups, every_s: float = EVERY_S, *, on_request: bool = False
    ) -> None:
        self.lags: dict[str, int] = {}
        self.reachable = False
        self._every_s = every_s
        self._settings = settings
        self._groups = groups
        self._on_request = on_request
        self._asked = threading.Event()
        self._read = threading.Condition()
        self._read_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to stop after its current reading."""
        self._stop.set()
        self._asked.set()

    def ask(self) -> None:
        """Asks for a reading, if the latest is older than the interval, and waits for it for up to ASK_S seconds.
        Returns at once before `start` and after `stop`."""
        asked_at = time.monotonic()

        def fresh() -> bool:
            return self._read_at is not None and self._read_at > asked_at - self._every_s

        with self._read:
            if fresh() or not self._thread.is_alive() or self._stop.is_set():
                return
            self._asked.set()
            self._read.wait_for(fresh, ASK_S)

    def _run(self) -> None:
        from confluent_kafka import KafkaException

        from tentalis.kafka.errors import Forbidden, NoSuchTopic, Unreachable

        while not self._stop.is_set():
            if self._on_request:
                self._asked.wait()
                if self._stop.is_set():
                    return
            try:
                self.lags = consumer_lags(self._settings, self._groups)
                self.reachable = True
            except (Forbidden, NoSuchTopic) as error:
                self.lags, self.reachable = {}, True
                log.warning("no consumer lag: %s", error)
            except (
                KafkaException,
                Unreachable,
                TimeoutError,
            ) as error:  # the broker restarts, which the view shows elsewhere
                self.reachable = False
                log.debug("no consumer lag: %s", error)
            with self._read:
                self._asked.clear()
                self._read_at = time.monotonic()
                self._read.notify_all()
            if not self._on_request:
                self._stop.wait(self._every_s)


def consumer_lags(settings: Settings, groups: Groups) -> dict[str, int]:
    """Returns the lag in records of every group with commits. Of a partition without a commit, all records count.

    Transaction markers after the last record are no lag. Raises KafkaException or TimeoutError if the broker does not
    answer.
    """
    from tentalis.kafka.offsets import committed_offsets, offset_ranges, without_markers

    topic_names = {topic for names in groups.values() for topic in names}
    ranges = {(topic, p): found for topic in topic_names for p, found in offset_ranges(settings, topic).items()}
    lags = {}
    for group, names in groups.items():
        committed = committed_offsets(settings, group, names)
        if committed:
            own = {place: found for place, found in ranges.items() if place[0] in names}
            positions = {place: committed.get(place, start) for place, (start, _) in own.items()}
            behind = {place: position for place, position in positions.items() if own[place][1] > position}
            unread = without_markers(settings, behind)
            lags[group] = sum(own[place][1] - position for place, position in unread.items())
    return lags


def drain(settings: Settings, groups: Groups, stop: threading.Event, timeout: float) -> bool:
    """Waits, group after group, until each has committed the end offsets of its topics as of the previous group's end.

    Records in flight have then passed the whole pipeline, provided that no new tasks are sent. Returns False after
    `timeout` seconds or at `stop`.
    """
    from confluent_kafka import KafkaException

    from tentalis.kafka.offsets import committed_offsets, end_offsets

    deadline = time.monotonic() + timeout
    for group, names in groups.items():
        ends: dict[tuple[str, int], int] | None = None
        while True:
            try:
                if ends is None:
                    ends = {(name, p): end for name in names for p, end in end_offsets(settings, name).items() if end}
                committed = committed_offsets(settings, group, names)
                if all(committed.get(place, 0) >= end for place, end in ends.items()):
                    break
            except KafkaException as error:
                log.info("the broker does not answer yet: %s", error)
            if stop.wait(0.2) or time.monotonic() > deadline:
                return False
    return True
