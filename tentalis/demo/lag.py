"""How far the consumer groups are behind, and waiting until they have caught up."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from schemas import topics
from tentalis.config import Settings

log = logging.getLogger(__name__)

EVERY_S = 5.0

Groups = Mapping[str, Sequence[str]]


def groups_of(environment: str, policy: str) -> Groups:
    """The consumer groups of the stack, in the order in which records pass through them, and what each reads."""
    return {
        "tentalis-sessions": (topics.SESSIONS,),
        f"tentalis-worker-{environment}": (topics.TASKS,),
        "tentalis-scoring": (topics.TASKS, topics.RESULTS, topics.FEEDBACK),
        "tentalis-hinting": (topics.RESULTS, topics.FEEDBACK),
        "tentalis-join": (topics.HALVES,),
        "tentalis-aggregation": (topics.OUTCOMES, topics.FEEDBACK),
        f"tentalis-trainer-{policy}": (topics.ROLLOUTS,),
    }


class LagProbe:
    """Looks every EVERY_S seconds on a thread of its own; `lags` is what it saw last (group -> records behind)."""

    def __init__(self, settings: Settings, groups: Groups) -> None:
        self.lags: dict[str, int] = {}
        self._settings = settings
        self._groups = groups
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stops looking; what is under way ends by itself."""
        self._stop.set()

    def _run(self) -> None:
        from confluent_kafka import KafkaException

        while not self._stop.is_set():
            try:
                self.lags = consumer_lags(self._settings, self._groups)
            except KafkaException as error:  # the broker is being restarted: the view shows that, not this
                log.debug("no consumer lag: %s", error)
            self._stop.wait(EVERY_S)


def consumer_lags(settings: Settings, groups: Groups) -> dict[str, int]:
    """Records behind, per group that has committed anything. Raises KafkaException if the broker does not answer."""
    from tentalis.kafka import committed_offsets, end_offsets

    ends = {topic: end_offsets(settings, topic) for topic in {topic for names in groups.values() for topic in names}}
    lags = {}
    for group, names in groups.items():
        committed = committed_offsets(settings, group, names)
        if committed:
            lags[group] = sum(
                max(0, ends[topic][partition] - offset) for (topic, partition), offset in committed.items()
            )
    return lags


def drain(settings: Settings, groups: Groups, stop: threading.Event, timeout: float) -> bool:
    """Waits, group after group, until each has committed what its topics held when the one before had caught up.

    What is under way when nothing new is asked for any more has then reached the end of the pipeline. Returns whether
    it did within `timeout` seconds and before `stop`.
    """
    from confluent_kafka import KafkaException

    from tentalis.kafka import committed_offsets, end_offsets

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
