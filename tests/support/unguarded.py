"""Takes a guard of `streams` away in this process, or brings about what it guards against.

For the tests that show each defect of docs/decisions/0002-streams-on-faust.md: where a guard is an override, it is
deleted and Faust's own function runs; else what Faust does is written here, with the place in its source."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mode
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError
from faust.exceptions import ValueDecodeError

from streams.runtime import health, worker
from streams.runtime.dlq import Produce
from streams.runtime.faust import guards as faust_guards
from streams.runtime.faust.delivery import BatchConsumer, BatchSchema
from streams.runtime.faust.guards import GuardedApp, SafeRecovery
from streams.runtime.sink import KafkaSink, RecordNotDelivered
from tentalis.local.ports import free_port

log = logging.getLogger(__name__)


def recovery_order() -> None:
    """The seek comes after the partitions were resumed, and after something was delivered (`on_recovery_completed`)."""
    recover, seek = SafeRecovery._recover, BatchConsumer.perform_seek

    async def no_seek(self: BatchConsumer) -> None:
        """Comes later."""

    async def recover_then_seek(self: SafeRecovery) -> None:
        await recover(self)
        while not self.app.consumer.uncommitted():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await seek(self.app.consumer)

    BatchConsumer.perform_seek, SafeRecovery._recover = no_seek, recover_then_seek


def acknowledgement() -> None:
    """`Consumer.ack` counts whatever leaves a stream, `Consumer._new_offset` commits past the rest."""
    del BatchConsumer.ack
    del BatchConsumer._new_offset


def decoding() -> None:
    """Records are decoded while they are delivered: `ConductorCompiler` acknowledges them and throws into the agent."""

    def loads_value(self: BatchSchema, app: Any, message: Any, **kwargs: Any) -> Any:
        for record in message.value.records:
            if record.value.startswith(b"bad"):
                raise ValueDecodeError("no number in it")
        return message.value

    BatchSchema.loads_value = loads_value


def confirmations() -> None:
    """A record that cannot be sent is a line in the log (`Topic._on_published`), and the producer continues."""
    send, config = KafkaSink.send, worker.producer_settings

    def with_gaps(settings: worker.StreamSettings) -> dict[str, Any]:
        return config(settings) | {"enable.gapless.guarantee": False}

    async def warn(self: KafkaSink, records: Sequence[Produce]) -> int:
        try:
            return await send(self, records)
        except RecordNotDelivered as error:
            log.warning("not sent: %s", error)
            return -1

    KafkaSink.send = warn
    worker.producer_settings = with_gaps


def supervisor() -> None:
    """An agent that raised is started again and goes on with the next event (the setting `agent_supervisor`)."""
    faust_guards.CrashingSupervisor = mode.OneForOneSupervisor


def web() -> None:
    """The web server runs (the setting `web_enabled`); on a free port, for two of these tests run at a time."""
    make = GuardedApp.__init__

    def make_with_web(self: GuardedApp, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs | {"web_enabled": True, "web_port": free_port()})

    GuardedApp.__init__ = make_with_web


def failed_commit() -> None:
    """A commit that failed counts as done (`Consumer._commit_offsets`)."""
    del BatchConsumer._commit_offsets


def watchdog() -> None:
    """Faust writes into the log that it stands still, and stands still (`AIOKafkaConsumerThread.verify_event_path`)."""
    health.Watchdog.start = lambda self: None


def an_agent_that_raises() -> None:
    """A record that begins with `explode` makes the agent raise."""
    submit = worker._Worker._submit

    def explode(self: worker._Worker, event: Any) -> None:
        if any(record.value.startswith(b"explode") for record in event.value.records):
            raise RuntimeError("the agent does not like this batch")
        submit(self, event)

    worker._Worker._submit = explode


def a_commit_that_fails() -> None:
    """The first commit is refused as it is while a group rebalances; Faust's thread answers it with False."""
    commit, calls = AIOKafkaConsumer.commit, itertools.count()

    async def refuse(self: AIOKafkaConsumer, offsets: Any = None) -> None:
        if next(calls) == 0:
            log.warning("the first commit fails")
            raise CommitFailedError("Commit cannot be completed since the group has already rebalanced")
        await commit(self, offsets)

    AIOKafkaConsumer.commit = refuse


def a_fetcher_that_stalls() -> None:
    """It answers with nothing, and hears of nothing new."""

    async def nothing(self: BatchConsumer, active: Any, **wait: float) -> Mapping[Any, Any]:
        await asyncio.sleep(wait["timeout"])
        return {}

    BatchConsumer._getmany, BatchConsumer.highwater = nothing, lambda self, tp: None


GUARDS: Mapping[str, Callable[[], None]] = {
    guard.__name__: guard
    for guard in (recovery_order, acknowledgement, decoding, confirmations, supervisor, web, failed_commit, watchdog)
}
FAULTS: Mapping[str, Callable[[], None]] = {
    fault.__name__: fault for fault in (an_agent_that_raises, a_commit_that_fails, a_fetcher_that_stalls)
}
