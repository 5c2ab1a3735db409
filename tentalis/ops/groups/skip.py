"""Moves a consumer group past records that its process cannot process.

In: the group's positions. Out: a letter of the stage `skip` for each skipped record, and the group's committed offset
where nothing before the records is left to process. The process passes over a record with such a letter, wherever it
begins to read. Begin reading with `plan_skip`.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from schemas import topics
from schemas.digest import digest_holds
from schemas.records import Rollout
from schemas.wire.codec import Codec, DecodeError
from tentalis.dlq.context import SKIPPED, context_headers
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.acls import Operation
from tentalis.kafka.config import client_config
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.errors import refused
from tentalis.kafka.groups import describe_groups
from tentalis.kafka.offsets import commit_offsets, committed_offsets, end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tentalis.service.version import app_version

Positions = Mapping[tuple[str, int], int]
"""A group's next offset by topic and partition."""

ERROR_CLASS = "OperatorSkip"
FLUSH_RECORDS = 1000
IDLE = ("empty", "dead")
WAIT_S = 20.0
"""Longer than the session timeout: a static member that has ended stays in its group for that time."""


class GroupActive(Exception):
    """The group has members, so its position must not be moved."""


@dataclass(frozen=True, slots=True)
class PartitionSkip:
    """The skipped records of a partition: those in [first, until) without a skip letter, all of them with `good`, else
    those with a problem. `reason`: the first one's problem. `commit`: the group's new position; None if records before
    the skipped ones are still to be processed."""

    topic: str
    partition: int
    position: int
    first: int
    until: int
    records: int
    reason: str
    commit: int | None
    good: bool = False


def group_positions(settings: Settings, group: str, names: Iterable[str]) -> Positions:
    """Returns the committed offsets of a group; 0 for a partition without one. Raises NoSuchTopic, KafkaException."""
    names = tuple(names)
    starts = {(topic, p): 0 for topic in names for p in end_offsets(settings, topic)}
    return starts | committed_offsets(settings, group, names)


def problem_of(stored: Stored, codec: Codec) -> str | None:
    """Returns the reason why a record cannot be decoded, None if it can."""
    if stored.value is None:
        compacted = "compact" in topics.table()[stored.topic].config.get("cleanup.policy", "")
        return None if compacted else "it has no value"
    try:
        record = stored.decode_own(codec)
    except DecodeError as error:
        return error.reason
    if isinstance(record, Rollout) and not digest_holds(record):
        return "its content does not match its digest"
    return None


def plan_skip(settings: Settings, codec: Codec, positions: Positions, to: int | None = None) -> list[PartitionSkip]:
    """Plans the skip of each partition that has something to skip. Changes nothing.

    `to`: every record before this offset; None: see `next_bad`. Raises the errors of `read_to_end` and
    `WrittenLetters.look_up`."""
    letters = WrittenLetters(settings)
    planned = []
    ends = {topic: end_offsets(settings, topic) for topic, _ in positions}
    for (topic, partition), position in sorted(positions.items()):
        # Past the end of the partition, later records would be skipped unseen.
        last = ends[topic][partition] if to is None else min(to, ends[topic][partition])
        found = read_to_end(settings, topic, start={partition: position}, end={partition: last})
        examined = ((each.offset, _letter_of(letters, each), problem_of(each, codec)) for each in found)
        place = topic, partition, position
        skip = next_bad(*place, examined) if to is None else all_before(*place, examined, last)
        if skip is not None:
            planned.append(skip)
    return planned


class Letter(Enum):
    """The letter that a record has: of the process that read it, or of an earlier skip."""

    NONE = "none"
    WRITTEN = "written"
    SKIP = "skip"


Examined = Iterable[tuple[int, Letter, str | None]]
"""The records of a partition in log order: the offset, the letter, the problem or None."""


def _letter_of(letters: WrittenLetters, stored: Stored) -> Letter:
    if letters.skipped(stored):
        return Letter.SKIP
    return Letter.WRITTEN if letters.has(stored) else Letter.NONE


def all_before(topic: str, partition: int, position: int, records: Examined, to: int) -> PartitionSkip | None:
    """The skip of every record before the offset `to`; None if the group is past it. Pure."""
    if to <= position:
        return None
    count, reason = 0, ""
    for _, letter, problem in records:
        count += letter is not Letter.SKIP
        reason = reason or problem or ""
    return PartitionSkip(topic, partition, position, position, to, count, reason, to, good=True)


def next_bad(topic: str, partition: int, position: int, records: Examined) -> PartitionSkip | None:
    """The skip of the bad records from the position on, up to the next good one behind a bad one without a letter; None
    if there is nothing to do. Pure.

    Bad records with a letter are behind the place where the process stopped. They are skipped too, because it reads
    and counts them again. The skip may have no record, only a new offset: an interrupted one has written its letters
    and not moved the offset.
    """
    first, until, count, reason = position, position, 0, ""
    done, good_before, met_new = position, False, False
    for offset, letter, problem in records:
        if problem is None and letter is not Letter.SKIP:
            if met_new:
                break
            good_before = True
            continue
        if letter is not Letter.SKIP:
            first, reason = (first, reason) if count else (offset, problem or "")
            count, until = count + 1, offset + 1
            met_new = met_new or letter is Letter.NONE
        done = done if good_before else offset + 1
    if count == 0 and done == position:
        return None
    return PartitionSkip(
        topic, partition, position, first, until if count else done, count, reason, done if done > position else None
    )


def carry_out(settings: Settings, codec: Codec, group: str, planned: Sequence[PartitionSkip], reason: str) -> None:
    """Writes the letters of a plan, then moves the group's committed offsets. A repetition after an interruption writes
    no letter twice. Raises GroupActive before anything is written or, if a member has joined since, before the offsets
    are moved; DeliveryFailed, Forbidden, KafkaException."""
    wait_until_idle(settings, group)
    letters, publisher = WrittenLetters(settings), Publisher(settings, "tentalis-groups", codec)
    for skip in planned:
        start, end = {skip.partition: skip.first}, {skip.partition: skip.until}
        for number, stored in enumerate(read_to_end(settings, skip.topic, start=start, end=end), 1):
            problem = problem_of(stored, codec)
            if (skip.good or problem is not None) and not letters.skipped(stored):
                send_skip_letter(publisher, group, stored, reason, problem)
            if number % FLUSH_RECORDS == 0:
                publisher.flush()
        publisher.flush()
    _commit(settings, group, planned)


def send_skip_letter(publisher: Publisher, group: str, stored: Stored, reason: str, problem: str | None) -> None:
    """Queues the letter of a skipped record: its bytes and headers, and the context of the skip."""
    headers = context_headers(
        topic=stored.topic,
        partition=stored.partition,
        offset=stored.offset,
        timestamp=stored.timestamp,
        group=group,
        error_class=ERROR_CLASS,
        error=reason if problem is None else f"{reason}: {problem}",
        stage=SKIPPED,
        attempts=1,
        version=app_version(),
        failed_at=time.time(),
    )
    letter = [*stored.headers, *headers]
    publisher.send_bytes(topics.dlq(stored.topic), stored.raw_key, stored.value, letter, partition=stored.partition)


def wait_until_idle(settings: Settings, group: str, seconds: float = WAIT_S) -> None:
    """Returns when the group has no member. Raises GroupActive if it still has one after `seconds`."""
    client = AdminClient(client_config(settings))
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = describe_groups(client, [group])[group]
        except KafkaException as error:
            raise refused(settings, error.args[0], Operation.DESCRIBE, "", group) from error
        if found.state in IDLE:
            return
        if time.monotonic() > deadline:
            members = ", ".join(sorted(f"{member.client_id} on {member.host}" for member in found.members))
            raise GroupActive(
                f"the group {group} is in use ({found.state}: {members or 'no member yet'}). Stop its process, then "
                "run this again. Nothing was changed"
            )
        time.sleep(0.5)


def _commit(settings: Settings, group: str, skips: Sequence[PartitionSkip]) -> None:
    offsets = {(skip.topic, skip.partition): skip.commit for skip in skips if skip.commit is not None}
    if not offsets:
        return
    try:
        commit_offsets(settings, group, offsets)
    except KafkaException as error:
        if error.args[0].code() not in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS):
            raise
        raise GroupActive(
            f"the letters are written, but a process has joined the group {group}: its offsets were not moved. Stop "
            "the process, then run this again"
        ) from error
