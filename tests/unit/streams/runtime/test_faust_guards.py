"""The guards against Faust's defects: for which source they were written, and what they do without a broker."""

import asyncio
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import client as aiokafka_client
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import UnknownError
from aiokafka.structs import BrokerMetadata
from faust.types import TP

from streams.runtime.faust.delivery import (
    FETCH_MS,
    IDLE_AFTER,
    IDLE_FETCH_MS,
    Batch,
    BatchConsumer,
    DeliveryLimits,
    GroupLost,
    GuardedConsumerThread,
    InFlight,
    NoAnswer,
    NotAppendTime,
    log_record,
    pace_refreshes,
    split,
    wait_longer_when_idle,
)
from streams.runtime.faust.guards import (
    FAUST_VERSION,
    GuardedApp,
    SafeRecovery,
    WrongFaust,
    check_faust,
    patched_digests,
)
from streams.runtime.processor import LogRecord
from streams.runtime.settings import StreamSettings
from streams.runtime.worker import _Worker
from tentalis.kafka.moved_topics import APPEND_TIME

DIGESTS: dict[str, str] = {
    "Consumer._drain_messages": "44a2500309e83c630493f6828af50166",
    "Consumer._new_offset": "1d2c7ea89a7ad4f1a216c1d51936e569",
    "Consumer.ack": "5fcf41cf45153475de3790dc56fec1b8",
    "Consumer.wait_empty": "e4662fe24f094819add590b2d75f2338",
    "Consumer._commit_livelock_detector": "af196ff46fd42a142bce035850023eec",
    "Recovery._restart_recovery": "6bd8a8558a2dffe4c60b8150f23d721b",
    "Recovery._slurp_changelogs": "7825c7e50f766d5ab0fd246b63420ea0",
    "Recovery._publish_stats": "48939a846a9af3a67d132c3b099300cf",
    "Recovery.on_recovery_completed": "6ef567acf072e46da3fccbccc6d66237",
    "TableManager.recovery": "f0bf5de78b4c3d235c3554010480f407",
    "TableManager.on_start": "365dd25fbc0e068499c89e526516c638",
    "Producer._settings_extra": "a4c7bc41b63822236e4c9be1c49437d0",
    "Consumer._commit_offsets": "1a6979904118844111259d182ca1c6e9",
    "Consumer.perform_seek": "0e8c130ff4b0afd82c0be9c5fd831316",
    "AIOKafkaConsumerThread._create_worker_consumer": "c2701bfc3e6f6cad95c2be36d6a255a8",
    "AIOKafkaConsumerThread._fetch_records": "39a2c6c79fc1455a199629912b533458",
    "AIOKafkaConsumerThread._commit": "932852ce7a23f658804273d0296de6af",
    "ThreadDelegateConsumer.threadsafe_partitions_assigned": "50fac26841ad9934012c4b70eb3ce367",
    "Consumer._filter_committable_offsets": "dc5e9baf5d994485473ce80aed1873b9",
    "Consumer._should_commit": "5ce941793947ad42b5c4298765d32f8f",
    "Recovery.on_rebalance": "aa4d997a1795ceae3880f98311b46935",
    "App._on_partitions_revoked": "d5c895bbe57dc73ae4d7f762f6fdc9fd",
    "App._on_partitions_assigned": "de932b7927db85b3d5e88971c3c7d2d7",
    "App._stop_consumer": "55854a5de12c3f5296b4acf16ddfe359",
    "App._new_transport": "42db531312dd776fc3937154a32f19ee",
    "Stream._py_aiter": "3a48ee257a65435b482d51edb74f2993",
    "Agent._execute_actor": "c750b828d2bda93ef38a5e89888b6f4d",
    "Service._crash": "7bc0c709a151d55690d981a28036ae0a",
    "Fetcher._proc_fetch_request": "59bf948fff47eed580671971252454da",
    "Fetcher._get_actions_per_node": "1dab2cf937d165d0eeacc8da8ed2b0eb",
    "Schema.compile": "d46eec5ce3195b2c6752cb860a10946c",
    "GroupCoordinator.reset_generation": "537aa37c531b4de9c2e24601634cc4b0",
    "GroupCoordinator._push_error_to_user": "743ff515bd7e2e380444beb26c502e74",
    "GroupCoordinator._coordination_routine": "75273e127d4a4f5d0d59d76874ad8344",
    "AIOKafkaClient._md_synchronizer": "e0421bffa9a7735a6dbb78b5fcb34628",
    "AIOKafkaClient._metadata_update": "06dc51ed3e0d38b8d64100fd59012f39",
    "Fetcher._fetch_requests_routine": "2a8ec5932644c9b04ff222ee7f27c9b0",
}


def test_the_source_that_is_replaced_or_relied_on_is_what_it_was() -> None:
    """A difference means: read the new source, decide whether the guard still guards, then change the digest here."""
    assert patched_digests() == DIGESTS


def test_another_faust_is_refused() -> None:
    check_faust(FAUST_VERSION)
    with pytest.raises(WrongFaust, match=r"0\.15\.4 is installed.*written for 0\.15\.3"):
        check_faust("0.15.4")


class Coordinator:
    """The parts that aiokafka's coordinator needs to report an error, without a broker."""

    group_id = "group"
    _push_error_to_user = GroupCoordinator._push_error_to_user

    def __init__(self) -> None:
        self._subscription = SimpleNamespace(abort_waiters=lambda error: None)
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._coordination_task = asyncio.ensure_future(self._coordinate())

    async def _coordinate(self) -> None:
        await self._ended


class Guarded(GuardedConsumerThread):
    """Only what the guards of the coordinator need."""

    def __init__(self, failures: list[Exception]) -> None:
        self.parent_loop = asyncio.get_running_loop()
        self.app = SimpleNamespace(owner=SimpleNamespace(failed=failures.append))


def test_an_error_of_the_coordinator_that_nobody_polls_for_ends_the_worker() -> None:
    async def scenario() -> list[Exception]:
        failures: list[Exception] = []
        coordinator = Coordinator()
        Guarded(failures)._end_when_lost(coordinator)
        pushed = asyncio.ensure_future(coordinator._push_error_to_user(UnknownError()))
        await asyncio.sleep(0.01)
        assert not pushed.done(), "aiokafka waits for somebody who polls"
        assert len(failures) == 1
        coordinator._ended.set_exception(UnknownError())
        await asyncio.wait([coordinator._coordination_task])
        await asyncio.sleep(0.01)
        assert len(failures) == 2
        coordinator._closing.set_result(None)
        await pushed
        return failures

    failures = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert all(isinstance(failure, GroupLost) and "UnknownError" in str(failure) for failure in failures)


def test_the_broker_holds_the_fetches_of_an_idle_consumer_longer() -> None:
    class Fetcher:
        """Answers fetches, and notes how long the broker may hold the next one."""

        _fetch_max_wait_ms = FETCH_MS

        async def _proc_fetch_request(self, assignment: Any, node_id: Any, request: bool) -> bool:
            return request

    async def scenario() -> list[int]:
        fetcher = Fetcher()
        wait_longer_when_idle(fetcher)
        waits = []
        for found in (*[False] * (IDLE_AFTER + 1), True, False):
            assert await fetcher._proc_fetch_request(None, 0, found) is found
            waits.append(fetcher._fetch_max_wait_ms)
        return waits

    waits = asyncio.run(scenario())
    assert waits == [FETCH_MS] * (IDLE_AFTER - 1) + [IDLE_FETCH_MS] * 2 + [FETCH_MS] * 2


class Crashing(GuardedApp):
    """Only what a crash needs."""

    def __init__(self, owner: Any) -> None:
        self._crashed, self._children, self.owner = asyncio.Event(), [], owner


def test_a_crash_in_the_consumers_thread_wakes_the_worker(tmp_path: Path) -> None:
    async def scenario() -> BaseException | None:
        processor: Any = SimpleNamespace(app_id="app", topics=("in",), table=None)
        worker = _Worker(processor, StreamSettings("127.0.0.1:1", tmp_path), {})
        worker._loop, worker._app = asyncio.get_running_loop(), Crashing(worker)
        ended = asyncio.ensure_future(worker._faust_crash())
        await asyncio.sleep(0.01)
        assert not ended.done()
        thread = threading.Thread(target=worker._app._crash, args=(UnknownError(),))
        thread.start()
        await asyncio.wait_for(ended, 10)
        thread.join()
        return worker._failure

    assert isinstance(asyncio.run(scenario()), UnknownError)


class Recovering(SafeRecovery):
    """Only what the end of a recovery needs; the broker never says what was committed."""

    def __init__(self) -> None:
        async def done(*_: Any) -> None: ...

        consumer = SimpleNamespace(perform_seek=asyncio.Event().wait, _get_stream_partitions=lambda: {TP("t", 3)})
        self.app = SimpleNamespace(
            epoch=0,
            consumer=consumer,
            conf=SimpleNamespace(broker_request_timeout=0.01),
            on_rebalance_complete=SimpleNamespace(send=done),
            owner=SimpleNamespace(recover=done),
        )
        self.tables = SimpleNamespace(changelog_topics=())


def test_a_worker_that_is_not_told_where_to_go_on_says_so() -> None:
    async def scenario() -> None:
        await Recovering()._recover()

    with pytest.raises(NoAnswer, match=r"no answer within 0\.01 s .* partitions \[3\]"):
        asyncio.run(scenario())


class Bookkeeping(BatchConsumer):
    """Only what acknowledging needs."""

    def __init__(self) -> None:
        self._unacked_messages: set[Any] = set()
        self._in_flight = defaultdict(InFlight)
        self._passed: dict[Any, int] = {}
        self._acked: dict[Any, list[int]] = {}
        self._read_offset: dict[Any, int | None] = {}
        self._room = asyncio.Event()
        self._polling = asyncio.Lock()
        self._empty_polls = 0
        self.flow_active, self.suspend_flow = True, asyncio.Event()
        self.app = SimpleNamespace(
            consumer_generation_id=2, delivery_limits=DeliveryLimits(10, 1000), partition_counts={"t": 1}
        )
        self.fetched: dict[Any, list[Any]] = {}
        self.taken_over: list[Any] = []
        self.ends: dict[Any, int | None] = {}
        self.positions: dict[Any, int] = {}
        assignment = SimpleNamespace(state_value=self._state)
        kafka = SimpleNamespace(_subscription=SimpleNamespace(subscription=SimpleNamespace(assignment=assignment)))
        self._thread = SimpleNamespace(_ensure_consumer=lambda: kafka)

    def _state(self, tp: Any) -> Any:
        at = self.positions.get(TP(*tp))
        return SimpleNamespace(has_valid_position=at is not None, position=at)

    def _get_active_partitions(self) -> set[TP]:
        return {TP(*tp) for tp in self.ends}

    def highwater(self, tp: TP) -> int | None:
        return self.ends[tp]

    async def _getmany(self, active: set[TP], **wait: float) -> dict[Any, list[Any]]:
        return self.fetched

    async def callback(self, message: Any) -> None:
        self.taken_over.append(message)

    async def wait_first(self, delivered: Any, suspended: Any) -> None:
        suspended.close()
        await delivered


@dataclass(eq=False)
class Message:
    value: Batch
    generation_id: int
    tp: tuple[str, int] = ("t", 0)
    acked: bool = False


def message(next_offset: int, done: bool, generation: int = 2) -> Message:
    return Message(Batch([], next_offset, 0, done), generation)


def test_only_what_is_done_may_be_committed() -> None:
    consumer = Bookkeeping()
    assert consumer._new_offset(("t", 0)) is None
    assert consumer.ack(message(10, done=True))
    assert consumer._new_offset(("t", 0)) == 10
    # Given up (the agent failed, or the partition goes): upstream would commit it.
    assert not consumer.ack(message(20, done=False))
    # Of an earlier generation: the partition may belong to another worker by now.
    assert not consumer.ack(message(30, done=True, generation=1))
    assert consumer._new_offset(("t", 0)) == 10


def test_a_partition_lags_as_far_as_the_last_fetch_or_the_broker_knows() -> None:
    consumer = Bookkeeping()
    consumer.ends = {TP("t", 0): 10, TP("t", 1): None, TP("t", 2): None}
    consumer.ack(message(10, done=True))
    assert consumer.lag({}) == {("t", 0): 0}
    # A fetcher that stands still knows the end of before, or none at all.
    assert consumer.lag({("t", 0): 15, ("t", 1): 4}) == {("t", 0): 5, ("t", 1): 4}
    assert consumer.lag({("t", 0): 9, ("t", 1): 0}) == {("t", 0): 0, ("t", 1): 0}


def test_what_is_passed_over_is_no_lag_and_what_was_taken_is() -> None:
    """Offsets of transactions' markers, and of records that retention removed, never come."""
    consumer, place = Bookkeeping(), TP("t", 0)
    consumer.ends, consumer.positions = {place: 7}, {place: 5}
    read = SimpleNamespace(
        topic="t", partition=0, offset=4, timestamp=0, timestamp_type=1, key=None, value=b"", headers=()
    )
    consumer.fetched = {place: [read]}

    async def scenario() -> None:
        await consumer._poll({place}, 0.1)
        consumer.fetched, consumer.positions = {}, {place: 7}
        await consumer._poll({place}, 0.1)
        assert consumer.taken() == {place}
        assert consumer.lag({}) == {place: 7}, "it is read, and not done"
        (taken,) = consumer.taken_over
        taken.value.done = True
        consumer.ack(taken)
        assert consumer.taken() == set()
        assert consumer.lag({}) == {place: 2}
        await consumer._poll({place}, 0.1)
        assert consumer.lag({}) == {place: 0}

    asyncio.run(scenario())


def test_what_was_given_up_is_not_passed_over() -> None:
    consumer, place = Bookkeeping(), TP("t", 0)
    consumer.ends, consumer.positions = {place: 5}, {place: 5}
    given_up = message(5, done=False)
    given_up.value = Batch([LogRecord("t", 0, 4, 0, None, b"")], 5, 0)
    consumer._in_flight[place].add(given_up.value)
    consumer.ack(given_up)
    asyncio.run(consumer._poll({place}, 0.1))
    assert consumer.lag({}) == {place: 5}


def test_no_more_is_taken_than_one_batch_beside_the_one_at_work() -> None:
    limits, taken = DeliveryLimits(max_batch_records=2, max_batch_bytes=100), InFlight()
    records = [LogRecord("t", 0, n, 0, "k", b"") for n in range(2)]
    one, large = Batch(records[:1], 1, 10), Batch(records[:1], 1, 95)
    taken.add(one)
    taken.add(one)
    assert taken.within(limits)
    taken.add(one)
    assert not taken.within(limits)
    taken.add(one, -1)
    assert taken.within(limits)
    taken.add(large)
    taken.add(one, -1)
    assert not taken.within(limits)


def test_batches_are_cut_by_records_and_bytes_and_keep_the_order() -> None:
    records = [LogRecord("t", 0, n, 0, "k", bytes(size)) for n, size in enumerate([10, 10, 10, 500, 10, 90, 10])]
    batches = split(records, DeliveryLimits(max_batch_records=2, max_batch_bytes=100))
    assert [[r.offset for r in batch] for batch in batches] == [[0, 1], [2], [3], [4, 5], [6]]


def test_a_record_keeps_bytes_that_are_no_text_and_null_values() -> None:
    raw = SimpleNamespace(
        topic="t",
        partition=1,
        offset=2,
        timestamp=3,
        timestamp_type=1,
        key=b"\xff",
        value=None,
        headers=(("a", b"\x00"),),
    )
    assert log_record(raw, 4) == LogRecord("t", 1, 2, 3, "\udcff", b"", (("a", b"\x00"),), True, 4)


@pytest.mark.parametrize("kind", [0, None])
def test_a_record_with_its_producers_time_is_refused(kind: int | None) -> None:
    """CreateTime, and a record from before there were timestamps."""
    fields = {"topic": "t", "partition": 1, "offset": 2, "key": b"k", "value": b"v"}
    raw = SimpleNamespace(**fields, timestamp=3, timestamp_type=kind, headers=((APPEND_TIME, b"4"),))
    with pytest.raises(NotAppendTime, match=r"^t\[1\]@2 has the time of its producer's clock .*topics apply"):
        log_record(raw, 4)
    raw.headers = ((APPEND_TIME, b"3"),)
    assert log_record(raw, 4).timestamp == 3, "unread when its topic was moved: its time is that of its append before"


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_metadata_of_a_broker_that_is_away_is_asked_for_at_intervals(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetcher asks again at once, for as long as a partition has no leader."""
    tried = 0

    async def refused(*_: Any, **__: Any) -> None:
        nonlocal tried
        tried += 1
        raise ConnectionRefusedError

    async def fetch() -> None:
        client = AIOKafkaConsumer(retry_backoff_ms=50)._client
        client.cluster._brokers[1] = BrokerMetadata(1, "nowhere", 9092, None)
        if guarded:
            pace_refreshes(client)
        refreshing = asyncio.create_task(client._md_synchronizer())
        ends = asyncio.get_running_loop().time() + 0.5
        while asyncio.get_running_loop().time() < ends:
            await client.force_metadata_update()
            await asyncio.sleep(0)
        refreshing.cancel()

    monkeypatch.setattr(aiokafka_client, "create_conn", refused)
    asyncio.run(fetch())
    # One at once, one after each interval, and one that was under way at the end.
    assert (tried <= 12) == guarded
