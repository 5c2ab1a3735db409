"""The join's state, folded again from the halves log, is the state that it had."""

import asyncio

import pytest

from schemas import topics
from streams.apps.join.processor import JoinProcessor
from streams.runtime import rebuild
from streams.runtime.processor import LogRecord
from streams.runtime.rebuild import CannotRebuildState, StateRebuild, fold_again, state_digest
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.identity import OffsetRange, TopicIdentity
from tentalis.service.settings import Settings
from tests.support.join_support import CODEC, LIMITS, PARTITION, drive, needed
from tests.unit.streams.apps.test_join_golden import golden_log


def test_the_state_of_a_long_log_is_rebuilt_to_the_byte() -> None:
    log, processor = golden_log(), JoinProcessor(CODEC, LIMITS)
    state: dict[str, bytes] = {}
    processor.restore(PARTITION, state)
    for at in range(0, len(log), 13):
        for wave in drive(processor.process(PARTITION, log[at : at + 13])).changes:
            for key, value in wave:
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
    digests = {
        state_digest(needed(asyncio.run(fold_again(JoinProcessor(CODEC, LIMITS), PARTITION, iter(log), batch))))
        for batch in (1000, 7)
    }
    assert digests == {state_digest(needed(state))}
    assert len(needed(state)) > 20


class Skipped:
    """The letters of records that an operator skipped, as `tentalis.dlq.written.WrittenLetters` answers."""

    def __init__(self, offsets: set[int]) -> None:
        self._offsets = offsets

    def covers(self, record: LogRecord) -> bool:
        return True

    def look_up(self, record: LogRecord) -> object:
        raise AssertionError("covered")

    def has(self, record: LogRecord) -> bool:
        return self.skipped(record)

    def has_skips(self, topic: str, partition: int) -> bool:
        return True

    def skipped(self, record: LogRecord) -> bool:
        return record.offset in self._offsets


def test_records_that_an_operator_skipped_do_not_come_back() -> None:
    log = golden_log()
    skipped = {record.offset for record in log[::5]}
    live = [record for record in log if record.offset not in skipped]  # what the join has folded

    def rebuilt(records: list[LogRecord], letters: Skipped | None) -> str:
        state = asyncio.run(fold_again(JoinProcessor(CODEC, LIMITS), PARTITION, iter(records), letters=letters))
        return state_digest(needed(state))

    assert rebuilt(log, Skipped(skipped)) == rebuilt(live, None) != rebuilt(log, None)


def test_a_rebuild_asks_for_the_letters_of_its_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    log, asked = golden_log(), list[object]()

    def fold(*_: object, letters: object = None) -> object:
        asked.append(letters)

        async def nothing() -> dict[str, bytes]:
            return {}

        return nothing()

    monkeypatch.setattr(rebuild, "fold_again", fold)
    monkeypatch.setattr(rebuild, "messages_to_end", lambda *_, **__: iter(()))
    work = rebuild.StateRebuild(Settings(bootstrap="localhost:1"), JoinProcessor(CODEC, LIMITS))
    asyncio.run(work.partition(PARTITION, OffsetRange(0, len(log))))
    assert isinstance(asked[0], WrittenLetters)


def test_without_a_committed_offset_there_is_no_state_to_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    work = StateRebuild(Settings(bootstrap="127.0.0.1:1"), JoinProcessor(CODEC, LIMITS))
    there = {name: TopicIdentity("id", 1) for name in (topics.HALVES, topics.changelog("tentalis-join", "state"))}
    monkeypatch.setattr(work._client, "identities", lambda _: there)
    monkeypatch.setattr(work._client, "ranges", lambda places: {place: OffsetRange(0, 9) for place in places})
    monkeypatch.setattr(rebuild, "committed_notes", lambda *_: {})
    with pytest.raises(CannotRebuildState, match="tentalis-join has never committed an offset"):
        work.spans()
