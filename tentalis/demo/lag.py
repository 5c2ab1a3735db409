"""How far each consumer group is behind: committed offsets against the ends of the topics, looked up now and then."""

import logging
import threading

from tentalis.config import Settings

log = logging.getLogger(__name__)

EVERY_S = 5.0
PREFIX = "tentalis-"


class LagProbe:
    """Looks every EVERY_S seconds on a thread of its own; `lags` is what it saw last (group -> records behind)."""

    def __init__(self, settings: Settings, hidden: tuple[str, ...] = ()) -> None:
        self.lags: dict[str, int] = {}
        self._settings = settings
        self._hidden = hidden
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
                self.lags = consumer_lags(self._settings, self._hidden)
            except KafkaException as error:  # the broker is being restarted: the view shows that, not this
                log.debug("no consumer lag: %s", error)
            self._stop.wait(EVERY_S)


def consumer_lags(settings: Settings, hidden: tuple[str, ...] = ()) -> dict[str, int]:
    """Records behind, per group of ours that has committed anything; groups that begin with one of `hidden` left out.

    Raises KafkaException if the broker does not answer.
    """
    from confluent_kafka import ConsumerGroupTopicPartitions
    from confluent_kafka.admin import AdminClient, OffsetSpec

    from tentalis.kafka import client_config

    admin = AdminClient(client_config(settings))
    groups = admin.list_consumer_groups(request_timeout=10).result(10).valid
    lags = {}
    for name in sorted(group.group_id for group in groups):
        if not name.startswith(PREFIX) or name.startswith(hidden):
            continue
        answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(name)], request_timeout=10)
        committed = [place for place in answer[name].result(10).topic_partitions if place.offset >= 0]
        if not committed:
            continue
        ends = admin.list_offsets({place: OffsetSpec.latest() for place in committed}, request_timeout=10)
        behind = {(place.topic, place.partition): result.result(10).offset for place, result in ends.items()}
        lags[name] = sum(max(0, behind[place.topic, place.partition] - place.offset) for place in committed)
    return lags
