"""The order of a flush, what happens to a batch that fails, and the queues of partitions."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import pytest

from schemas.wire.codec import SchemasUnavailable
from streams.runtime import queues as queues_module
from streams.runtime.delivery import Backoff, BatchRunner
from streams.runtime.dlq import Produce, check
from streams.runtime.processor import Change, DamagedState, Dead, Effects, LogRecord, OutputRecord, Retryable, stamped
from streams.runtime.queues import PartitionQueues, QueuedBatch, QueueStuck
from streams.runtime.state import Ends, StateStore, WrittenByAnother
from tentalis.dlq.limits import DeadLetterLimits, TooManyDead
from tentalis.service.lifecycle import Unmendable


def record(offset: int, value: bytes = b"v", key: str | None = "k", topic: str = "in") -> LogRecord:
    return LogRecord(topic, 3, offset, 1000 + offset, key, value, (("h", b"\x00"),))


class Script:
    """A processor whose answers a test writes."""

    app_id = "app"
    topics = ("in",)
    table: str | None = "state"

    def __init__(self, answer: Callable[[Sequence[LogRecord]], Effects]) -> None:
        self.answer = answer
        self.calls: list[list[int]] = []
        self.restored: list[dict[str, bytes]] = []
        self.revoked = 0

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        assert partition == 3
        self.restored.append(dict(entries))

    def revoke(self, partition: int) -> None:
        self.revoked += 1

    async def process(self, partition: int, records: Sequence[LogRecord]) -> Effects:
        self.calls.append([r.offset for r in records])
        return self.answer(records)

    def ticks(self, partitions: Sequence[int]) -> Sequence[OutputRecord]:
        return ()


class FakeSink:
    """Remembers what was sent, call by call, and where it lies; fails at the call it is told to."""

    def __init__(self, store: StateStore, fail_at: int | None = None) -> None:
        self.sent: list[list[Produce]] = []
        self.end = 0
        self.table_at_send: list[dict[str, bytes]] = []
        self._store = store
        self._fail_at = fail_at

    async def send(self, records: Sequence[Produce]) -> int:
        if len(self.sent) == self._fail_at:
            raise ConnectionError("not confirmed")
        await asyncio.sleep(0)
        self.sent.append(list(records))
        self.table_at_send.append(dict(self._store.entries(3)))
        self.end += len(records)
        return self.end - 1


def runner(script: Script, fail_at: int | None = None, **options: object) -> tuple[BatchRunner, FakeSink, StateStore]:
    store = StateStore()
    sink = FakeSink(store, fail_at)
    made = BatchRunner(
        script,
        sink,
        store=store,
        changelog="app-state-changelog" if script.table else None,
        limits=DeadLetterLimits(run=5),
        record_limit=10_000,
        version="1",
        backoff=Backoff(0.001, 0.002),
        clock=lambda: 0.0,
        **options,  # type: ignore[arg-type]
    )
    return made, sink, store


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await work

    asyncio.run(main())


WAVES: list[list[Change]] = [[("a", stamped(7, b"1"))], [("b", stamped(7, b"2")), ("gone", None)]]


def test_outputs_and_dead_letters_then_changes_in_order_then_the_table() -> None:
    dead = Dead(record(6), "decode", "bad", "ValueError")
    script = Script(lambda records: Effects([OutputRecord("out", "k", b"o")], WAVES, [dead]))
    made, sink, store = runner(script)
    store.load(3, {"gone": stamped(2, b"x")})
    run(made.run(3, [record(5), record(6), record(7)]))
    assert [[p.topic for p in call] for call in sink.sent] == [
        ["out", "in.dlq"],
        ["app-state-changelog"] * 3,
    ]
    assert all(set(table) == {"gone"} for table in sink.table_at_send)
    assert dict(store.entries(3)) == {"a": stamped(7, b"1"), "b": stamped(7, b"2")}
    assert [p.partition for call in sink.sent[1:] for p in call] == [3, 3, 3]
    tombstone = sink.sent[1][2]
    assert (tombstone.value, tombstone.headers) == (None, (("offset", b"5"),))
    assert (made.counts.records, made.counts.outputs, made.counts.changes, made.counts.dead) == (3, 1, 3, 1)


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_failed_send_raises_and_leaves_the_table(fail_at: int) -> None:
    made, sink, store = runner(Script(lambda records: Effects([OutputRecord("out", "k", b"o")], WAVES)), fail_at)
    with pytest.raises(ConnectionError):
        run(made.run(3, [record(5)]))
    assert len(sink.sent) == fail_at
    assert dict(store.entries(3)) == {}
    assert made.counts.records == 0


def test_records_of_another_on_the_changelog_end_the_worker_with_the_batch_confirmed() -> None:
    made, sink, store = runner(Script(lambda records: Effects(changes=WAVES)))
    sink.end = 40
    made.ends.begin(3, 40)
    run(made.run(3, [record(5)]))
    sink.end += 1  # a predecessor woke up
    with pytest.raises(WrittenByAnother, match=r"app-state-changelog\[3\] ended at offset 43; 3 records .* ends at 47"):
        run(made.run(3, [record(6)]))
    assert set(store.entries(3)) == {"a", "b"}


def test_another_that_writes_between_the_records_of_one_batch_is_noticed_too() -> None:
    ends = Ends()
    ends.begin(3, 10)
    with pytest.raises(WrittenByAnother):
        ends.wrote("log", 3, count=2, last=12)


def test_retryable_waits_with_the_confirmed_state_and_dead_letters_nothing() -> None:
    tries = 0

    def answer(records: Sequence[LogRecord]) -> Effects:
        nonlocal tries
        tries += 1
        if tries < 4:
            assert made.waiting == set()
            raise Retryable("away") if tries < 3 else SchemasUnavailable("away too")
        return Effects([OutputRecord("out", "k", b"o")])

    script = Script(answer)
    made, sink, store = runner(script)
    store.load(3, {"a": stamped(1, b"")})
    run(made.run(3, [record(5), record(6)]))
    assert script.calls == [[5, 6]] * 4
    assert script.restored == [{"a": stamped(1, b"")}] * 3
    assert made.counts.retries == 3
    assert made.waiting == set()
    assert [len(call) for call in sink.sent] == [1]


def test_a_batch_that_fails_is_tried_one_by_one_in_order() -> None:
    def answer(records: Sequence[LogRecord]) -> Effects:
        if any(r.offset == 6 for r in records):
            raise KeyError("no")
        return Effects([OutputRecord("out", "k", str(records[0].offset).encode())])

    script = Script(answer)
    made, sink, _ = runner(script)
    run(made.run(3, [record(5), record(6, b"\xff\x00"), record(7)]))
    assert script.calls == [[5, 6, 7], [5], [6], [7]]
    assert script.revoked == len(script.restored) == 2
    (first,), (letter,), (last,) = sink.sent
    assert (first.value, last.value) == (b"5", b"7")
    headers = dict(letter.headers)
    assert (letter.topic, letter.key, letter.value, letter.partition) == ("in.dlq", b"k", b"\xff\x00", 3)
    assert headers["h"] == b"\x00"
    assert headers["tentalis.dlq.error-stage"] == b"process"
    assert headers["tentalis.dlq.error-class"] == b"KeyError"
    assert headers["tentalis.dlq.attempts"] == b"2"


class Distrusting(StateStore):
    """Remembers of which partitions it was told that they are damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.distrusted: list[int] = []

    def distrust(self, partition: int) -> None:
        self.distrusted.append(partition)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("later", [False, True])
def test_damaged_state_is_no_fault_of_the_records(count: int, later: bool) -> None:
    """`later`: it is met when the batch is taken apart, because something else failed first."""

    def answer(records: Sequence[LogRecord]) -> Effects:
        if later and len(script.calls) == 1 and count > 1:
            raise KeyError("no")
        raise DamagedState("the half half/3/5 is missing")

    script = Script(answer)
    made, sink, _ = runner(script)
    store = made.store = Distrusting()
    with pytest.raises(DamagedState, match="half/3/5"):
        run(made.run(3, [record(5 + number) for number in range(count)]))
    assert sink.sent == [] and made.counts.dead == 0
    assert store.distrusted == [3]


def test_an_output_over_the_limit_is_refused_before_anything_is_sent() -> None:
    script = Script(
        lambda records: Effects([OutputRecord("out", "k", b"fine"), OutputRecord("out", "k", bytes(10_000))])
    )
    made, sink, _ = runner(script)
    run(made.run(3, [record(5)]))
    ((letter,),) = sink.sent
    headers = dict(letter.headers)
    assert headers["tentalis.dlq.error-stage"] == b"produce"
    assert b"the limit is 10,000 bytes" in headers["tentalis.dlq.error-message"]


def test_a_state_value_without_its_offset_is_refused() -> None:
    made, sink, _ = runner(Script(lambda records: Effects(changes=[[("a", b"short")]])))
    run(made.run(3, [record(5)]))
    assert [p.topic for call in sink.sent for p in call] == ["in.dlq"]


def test_past_the_limit_of_dead_letters_nothing_of_the_batch_is_sent() -> None:
    script = Script(lambda records: Effects(dead=[Dead(r, "decode", "bad", "ValueError") for r in records]))
    made, sink, _ = runner(script)
    run(made.run(3, [record(n, key=f"k{n}") for n in range(5)]))
    with pytest.raises(TooManyDead, match=r"6 records in a row.*in\[3\]@5 at stage decode: ValueError: bad"):
        run(made.run(3, [record(5, key="k5")]))
    assert len(sink.sent) == 1


class OnLog:
    """The letters that are on the log already, read when a partition is first asked for."""

    def __init__(self, written: Collection[int] = (), skipped: Collection[int] = ()) -> None:
        self._written, self._skipped = written, skipped
        self.reads = 0

    def covers(self, record: LogRecord) -> bool:
        return self.reads > 0

    def look_up(self, record: LogRecord) -> None:
        self.reads += 1

    def has(self, record: LogRecord) -> bool:
        return record.offset in self._written

    def has_skips(self, topic: str, partition: int) -> bool:
        return bool(self._skipped)

    def skipped(self, record: LogRecord) -> bool:
        return record.offset in self._skipped


def all_dead(records: Sequence[LogRecord]) -> Effects:
    return Effects(dead=[Dead(r, "decode", "bad", "ValueError") for r in records])


def test_a_letter_that_is_on_the_log_is_not_written_again_and_still_counts() -> None:
    on_log = OnLog(written=range(3))
    made, sink, _ = runner(Script(all_dead), letters=on_log)
    run(made.run(3, [record(n, key=f"k{n}") for n in range(4)]))
    assert [[dict(p.headers)["tentalis.dlq.original-offset"] for p in call] for call in sink.sent] == [[b"3"]]
    assert (on_log.reads, made.counts.dead) == (1, 1)
    with pytest.raises(TooManyDead, match="6 records in a row"):
        run(made.run(3, [record(4, key="k4"), record(5, key="k5")]))


def test_records_that_an_operator_skipped_are_passed_over() -> None:
    script = Script(lambda records: Effects(outputs=[OutputRecord("out", "k", r.value) for r in records]))
    made, sink, _ = runner(script, letters=OnLog(written=range(1, 9), skipped=range(1, 9)))
    run(made.run(3, [record(n) for n in range(4)]))
    assert script.calls == [[0]]
    run(made.run(3, [record(n) for n in range(4, 9)]))
    assert script.calls == [[0]] and made.counts.records == 9 and len(sink.sent) == 1


def test_queues_keep_order_within_a_partition_and_run_concurrently() -> None:
    async def main() -> None:
        log: list[tuple[str, int, int]] = []
        both = asyncio.Barrier(2)

        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            log.append(("begin", partition, records[0].offset))
            if records[0].offset == 0:
                await both.wait()
            await asyncio.sleep(0)
            log.append(("end", partition, records[0].offset))

        done: list[tuple[int, int, bool]] = []
        queues = PartitionQueues(work, set, lambda error: pytest.fail(str(error)))
        for offset in range(3):
            for partition in (0, 1):
                job = QueuedBatch([record(offset)], lambda ok, p=partition, o=offset: done.append((p, o, ok)))  # type: ignore[misc]
                queues.submit(partition, job)
        while len(done) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for partition in (0, 1):
            mine = [(what, offset) for what, p, offset in log if p == partition]
            assert mine == [(what, offset) for offset in range(3) for what in ("begin", "end")]
            assert [(o, ok) for p, o, ok in done if p == partition] == [(o, True) for o in range(3)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "traced"),
    [
        (WrittenByAnother("t[0] ended at offset 3"), False),
        (TooManyDead("100 records in a row failed"), False),
        (Unmendable("the topic has its producers' times"), False),
        (KeyError("t1"), True),
    ],
)
def test_a_queue_logs_a_traceback_only_for_unforeseen_errors(
    error: Exception, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            raise error

        failed: list[Exception] = []
        queues = PartitionQueues(work, set, failed.append)
        queues.submit(0, QueuedBatch([record(0)]))
        while not failed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert failed == [error]

    asyncio.run(main())
    (line,) = caplog.records
    assert line.getMessage() == f"partition 0: a batch could not be completed: {error!r}"
    assert bool(line.exc_info) is traced


def test_batches_that_wait_in_a_queue_are_merged_within_bounds_and_by_topic() -> None:
    async def main() -> None:
        ran: list[list[int]] = []

        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            ran.append([one.offset for one in records])
            await asyncio.sleep(0)

        done: list[int] = []
        queues = PartitionQueues(work, set, lambda error: pytest.fail(str(error)), most_records=3, most_bytes=100)
        waiting = [record(offset) for offset in range(5)]
        waiting += [waiting[0]._replace(offset=5, value=bytes(99)), waiting[0]._replace(topic="another", offset=6)]
        for one in waiting:
            queues.submit(0, QueuedBatch([one], lambda ok, offset=one.offset: done.append(offset)))  # type: ignore[misc]
        queues.submit(0, QueuedBatch((), lambda ok: done.append(7)))
        while len(done) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert ran == [[0, 1, 2], [3, 4], [5], [6], []]
        assert done == list(range(8))

    asyncio.run(main())


def test_batches_grow_with_what_waits_also_where_topics_take_turns() -> None:
    """Kafka gives records of several topics no order among each other."""

    async def main() -> None:
        ran: list[list[tuple[str, int]]] = []

        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            ran.append([(one.topic, one.offset) for one in records])
            await asyncio.sleep(0)

        done: list[int] = []
        queues = PartitionQueues(work, set, lambda error: pytest.fail(str(error)), most_records=3, most_bytes=1000)
        for offset in range(4):
            for topic in ("a", "b"):
                one = record(offset)._replace(topic=topic)
                queues.submit(0, QueuedBatch([one], lambda ok, offset=offset: done.append(offset)))  # type: ignore[misc]
        while len(done) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert ran == [
            [("a", 0), ("a", 1), ("a", 2)],
            [("b", 0), ("b", 1), ("b", 2)],
            [("a", 3)],
            [("b", 3)],
        ]
        assert done == [0, 1, 2, 0, 1, 2, 3, 3]

    asyncio.run(main())


def test_nothing_runs_after_a_batch_that_failed() -> None:
    async def main() -> None:
        failures: list[Exception] = []
        ran: list[int] = []

        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            ran.append(records[0].offset)
            await asyncio.sleep(0)
            raise ConnectionError("not confirmed")

        done: list[bool] = []
        queues = PartitionQueues(work, set, failures.append)
        for offset in range(3):
            queues.submit(0, QueuedBatch([record(offset)], done.append))
        while not failures:  # noqa: ASYNC110
            await asyncio.sleep(0)
        queues.submit(0, QueuedBatch([record(3)], done.append))
        assert (ran, done) == ([0], [False] * 4)
        assert [type(error) for error in failures] == [ConnectionError]

    asyncio.run(main())


def test_quiesce_lets_the_running_finish_and_gives_up_the_rest() -> None:
    async def main() -> None:
        done: dict[int, list[bool]] = {0: [], 1: [], 2: []}

        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            await asyncio.sleep(0.02 if partition == 0 else 3600)

        # 0 finishes in time, 1 only waits and is given up at once, 2 is cancelled after the grace period.
        queues = PartitionQueues(work, lambda: {1}, lambda error: pytest.fail(str(error)))
        for partition in done:
            for offset in range(2):
                queues.submit(partition, QueuedBatch([record(offset)], done[partition].append))
        await asyncio.sleep(0)
        await queues.quiesce(0.5)
        assert sorted(done[0]) == [False, True]
        assert done[1] == done[2] == [False, False]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_queue_that_does_not_end_is_not_waited_for_and_nothing_runs_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues_module, "CANCEL_S", 0.01)

    async def main() -> None:
        ran: list[int] = []
        over, failures, done = asyncio.Event(), list[Exception](), list[bool]()

        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            ran.append(records[0].offset)
            while not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()

        queues = PartitionQueues(work, set, failures.append)
        queues.submit(0, QueuedBatch([record(5)], done.append))
        await asyncio.sleep(0)
        giving_up = asyncio.create_task(queues.quiesce(0.01))
        try:
            ended, _ = await asyncio.wait({giving_up}, timeout=60)
            assert ended and [type(error) for error in failures] == [QueueStuck]
            assert "queue-0 did not end" in str(failures[0])
            queues.submit(0, QueuedBatch([record(6)], done.append))
            assert (ran, done) == ([5], [False])
        finally:
            over.set()
            await asyncio.gather(*queues._tasks.values())

    asyncio.run(main())


def test_a_batch_submitted_while_its_queue_is_abandoned_does_not_run_before_later_ones() -> None:
    """Those records belong to an assignment that is over; in the next one they may lie ahead of where it begins."""

    async def main() -> None:
        ran: list[int] = []
        stuck, over, done = asyncio.Event(), asyncio.Event(), list[bool]()

        async def work(partition: int, records: Sequence[LogRecord]) -> None:
            ran.extend(record.offset for record in records)
            stuck.set()
            await over.wait()

        queues = PartitionQueues(work, set, lambda error: pytest.fail(str(error)))
        queues.submit(0, QueuedBatch([record(5)], done.append))
        await stuck.wait()
        giving_up = asyncio.create_task(queues.quiesce(0.01))
        await asyncio.sleep(0)
        queues.submit(0, QueuedBatch([record(6)], done.append))
        await giving_up
        over.set()
        queues.submit(0, QueuedBatch([record(0)], done.append))
        await asyncio.gather(*queues._tasks.values())
        assert (ran, done) == ([5, 0], [False, False, True])

    asyncio.run(main())


class Clockwork(Script):
    """A processor that also has something to do when time alone goes on."""

    def __init__(self, effects: Effects | Retryable) -> None:
        super().__init__(lambda records: Effects())
        self.effects = effects

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        return True

    async def expire(self, partition: int) -> Effects:
        if isinstance(self.effects, Retryable):
            raise self.effects
        return self.effects


def test_what_is_due_is_flushed_like_a_batch_and_its_deletions_beat_what_they_delete() -> None:
    waited = record(2, topic="feedback")
    dead = Dead(waited, "process", "no_result", "NoResult")
    made, sink, store = runner(Clockwork(Effects([], [[("gone", None)]], [dead])))
    store.load(3, {"gone": stamped(2, b"x")})
    run(made.run(3, ()))
    letter, tombstone = (call[0] for call in sink.sent)
    assert (letter.topic, letter.value, letter.partition) == ("feedback.dlq", b"v", 3)
    assert tombstone.headers == (("offset", b"2"),)
    assert dict(store.entries(3)) == {} and made.counts.dead == 1


def test_what_is_due_and_cannot_be_done_now_leaves_the_confirmed_state() -> None:
    script = Clockwork(Retryable("the log is away"))
    made, sink, store = runner(script)
    store.load(3, {"a": stamped(1, b"")})
    run(made.run(3, ()))
    assert not sink.sent and script.restored == [{"a": stamped(1, b"")}]


def test_a_dead_letter_of_an_earlier_record_says_nothing_about_the_batch() -> None:
    limits = DeadLetterLimits(run=1)
    earlier = [Dead(record(offset, topic="feedback"), "process", "no_result", "NoResult") for offset in range(9)]
    for _ in range(5):
        check(limits, [record(offset) for offset in range(9)], earlier)
