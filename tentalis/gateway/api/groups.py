"""Members and lag of the consumer groups, as reported by the broker."""

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tentalis.gateway.api.training import GroupAnswer
from tentalis.kafka import topology
from tentalis.kafka.config import client_config
from tentalis.kafka.errors import Forbidden, NoSuchTopic, Unreachable
from tentalis.kafka.groups import describe_groups, group_names
from tentalis.kafka.lag import consumer_lags
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

REFRESH_S = 5.0
TRAINER = f"{topology.named('trainer').group}-"
EARLIER_COMPONENTS = {"prm_evaluator": "scoring", "combined_rollout_builder": "join"}
"""Component names of earlier systems, with the application that does their work."""
TRAINING_LOOP = "training_loop"


def read_by(group: str) -> tuple[str, ...]:
    """The topics that a consumer group reads; empty for a group outside the training loop."""
    application = topology.application_of(group)
    return () if application is None else application.consumes


def components() -> dict[str, str]:
    """The consumer group of each component of the training status: those of earlier systems, then the stream
    applications."""
    own = {each.name: each.consumer_group() for each in topology.streams()}
    return {name: own[application] for name, application in EARLIER_COMPONENTS.items()} | own


def halted(groups: Mapping[str, GroupAnswer]) -> list[str]:
    """The stream applications whose consumer group exists and has no members: they have worked before, and no process
    does their work now. `groups`: by name."""
    own = {each.name: each.consumer_group() for each in topology.streams()}
    return [name for name, group in own.items() if group in groups and groups[group].state == "inactive"]


class ConsumerGroupView:
    """Queries the broker on demand, at most every REFRESH_S seconds, on a separate thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._admin: AdminClient | None = None
        self._thread = ThreadPoolExecutor(1, "bridge-groups")
        self._refreshing: asyncio.Future[None] | None = None
        self._groups: dict[str, GroupAnswer] | None = None
        self._refresh_at, self._refreshed_at = 0.0, 0.0

    async def latest(self) -> tuple[Mapping[str, GroupAnswer] | None, float]:
        """Returns the groups and the age of that information (s); None before the broker's first answer. May take
        seconds."""
        if self._refreshing is None and time.monotonic() > self._refresh_at:
            self._refreshing = asyncio.get_running_loop().run_in_executor(self._thread, self._refresh)
        if self._refreshing is not None:
            try:
                await asyncio.shield(self._refreshing)
            finally:
                self._refreshing = None
        return self._groups, time.monotonic() - self._refreshed_at

    def close(self) -> None:
        """Stops after the running query."""
        self._thread.shutdown(cancel_futures=True)

    def _refresh(self) -> None:
        try:
            self._groups, self._refreshed_at = self._describe_groups(), time.monotonic()
        except (KafkaException, TimeoutError, Forbidden, Unreachable, NoSuchTopic) as error:
            log.warning("the consumer groups cannot be listed: %s", error)
        self._refresh_at = time.monotonic() + REFRESH_S

    def _describe_groups(self) -> dict[str, GroupAnswer]:
        if self._admin is None:
            self._admin = AdminClient(client_config(self._settings))
        names = [name for name in group_names(self._admin) if read_by(name)]
        members = {name: len(group.members) for name, group in describe_groups(self._admin, names).items()}
        lags = consumer_lags(self._settings, {name: read_by(name) for name in names})
        return {
            name: GroupAnswer(state="active" if count else "inactive", members=count, lag=lags.get(name))
            for name, count in sorted(members.items())
        }
