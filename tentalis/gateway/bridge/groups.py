"""Which consumer groups have members, and how far they are behind, as the broker tells."""

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from schemas import topics
from tentalis.config import Settings
from tentalis.demo.lag import consumer_lags
from tentalis.gateway.bridge.training import GroupAnswer
from tentalis.kafka import NoSuchTopic, client_config
from tentalis.refusal import Forbidden, Unreachable

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
TIMEOUT_S = 5.0
TRAINER = "tentalis-trainer-"
READ_BY = {
    "tentalis-sessions": (topics.SESSIONS,),
    "tentalis-scoring": (topics.TASKS, topics.RESULTS, topics.FEEDBACK),
    "tentalis-hinting": (topics.RESULTS, topics.FEEDBACK),
    "tentalis-join": (topics.HALVES,),
    "tentalis-aggregation": (topics.OUTCOMES, topics.FEEDBACK),
}
READ_BY_PREFIX = {"tentalis-worker-": (topics.TASKS,), TRAINER: (topics.ROLLOUTS,)}
# The ancestors' names for what does the same.
COMPONENTS = {
    "prm_evaluator": "tentalis-scoring",
    "combined_rollout_builder": "tentalis-join",
    "sessions": "tentalis-sessions",
    "scoring": "tentalis-scoring",
    "hinting": "tentalis-hinting",
    "join": "tentalis-join",
    "aggregation": "tentalis-aggregation",
}
TRAINING_LOOP = "training_loop"


def read_by(group: str) -> tuple[str, ...]:
    """The topics that a group of ours reads, none for a group that is no part of the loop."""
    for prefix, names in READ_BY_PREFIX.items():
        if group.startswith(prefix):
            return names
    return READ_BY.get(group, ())


class Groups:
    """Asks the broker when it is asked itself, at most every LOOK_AGAIN_S seconds, on a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._admin: AdminClient | None = None
        self._thread = ThreadPoolExecutor(1, "bridge-groups")
        self._looking: asyncio.Future[None] | None = None
        self._seen: dict[str, GroupAnswer] | None = None
        self._next, self._at = 0.0, 0.0

    async def look(self) -> tuple[Mapping[str, GroupAnswer] | None, float]:
        """The groups and how long ago they were looked at (s); None if the broker never told. May take seconds."""
        if self._looking is None and time.monotonic() > self._next:
            self._looking = asyncio.get_running_loop().run_in_executor(self._thread, self._look)
        if self._looking is not None:
            try:
                await asyncio.shield(self._looking)
            finally:
                self._looking = None
        return self._seen, time.monotonic() - self._at

    def close(self) -> None:
        """Ends, after what is under way."""
        self._thread.shutdown(cancel_futures=True)

    def _look(self) -> None:
        try:
            self._seen, self._at = self._ask(), time.monotonic()
        except (KafkaException, TimeoutError, Forbidden, Unreachable, NoSuchTopic) as error:
            log.warning("the broker does not tell of consumer groups: %s", error)
        self._next = time.monotonic() + LOOK_AGAIN_S

    def _ask(self) -> dict[str, GroupAnswer]:
        if self._admin is None:
            self._admin = AdminClient(client_config(self._settings))
        listed = self._admin.list_consumer_groups(request_timeout=TIMEOUT_S).result(2 * TIMEOUT_S)
        if listed.errors:
            # A KafkaError cannot be caught by what waits for this thread: it would end the thread and answer nobody.
            raise KafkaException(listed.errors[0])
        names = [group.group_id for group in listed.valid if read_by(group.group_id)]
        if not names:
            return {}
        described = self._admin.describe_consumer_groups(names, request_timeout=TIMEOUT_S)
        members = {name: len(future.result(2 * TIMEOUT_S).members) for name, future in described.items()}
        lags = consumer_lags(self._settings, {name: read_by(name) for name in names})
        return {
            name: GroupAnswer(state="active" if count else "inactive", members=count, lag=lags.get(name))
            for name, count in sorted(members.items())
        }
