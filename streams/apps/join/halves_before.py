"""The open tasks that a state rebuilt from the log would lack: halves of them lay before the first one on the log.

`lacking` decides and is pure; `tasks_lacking` reads the topics. A log begins above offset 0 after retention or
`tentalis topics trim`. Tasks whose deadline has passed are no loss: the join has closed them.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from schemas import topics
from schemas.ids import derived_id
from schemas.records import AuditRecord, Feedback, Open, Opens, Record, Task
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka import topology
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.identity import OffsetRange
from tentalis.kafka.loss_audit import TOPIC_LOST
from tentalis.kafka.skipped import SKIPPED
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

APP_ID = topology.named("join").app_id


@dataclass(slots=True)
class HalvesThere:
    """The part of one halves partition that is still on the log, up to the committed offset.

    Attributes:
        begin: the first offset that is there.
        since: append time (ms) of the first record; None without a record.
        until: greatest append time.
        opened: the tasks whose Open is there.
    """

    begin: int
    since: int | None = None
    until: int = 0
    opened: set[str] = field(default_factory=set)

    def add(self, record: Record | None, timestamp: int) -> None:
        """Takes the next record, in log order; None for one that cannot be decoded."""
        self.since = timestamp if self.since is None else self.since
        self.until = max(self.until, timestamp)
        if isinstance(record, Open):
            self.opened.add(record.head.task_id)


@dataclass(frozen=True, slots=True)
class TasksLacking:
    """The open tasks with halves before the log of one partition, and the time (ms) before which they were written."""

    partition: int
    begin: int
    before: int
    task_ids: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.task_ids):,} in partition {self.partition}, which begins at {self.begin}"

    def audit(self) -> AuditRecord:
        """Returns the record of giving the halves up."""
        proof = f"its log begins at {self.begin}, and the state was rebuilt from it"
        return AuditRecord(
            audit_id=derived_id("topic-lost", APP_ID, topics.HALVES, self.partition, proof),
            event_time=self.before,
            component=APP_ID,
            topic=topics.HALVES,
            partition=self.partition,
            offset=self.begin,
            record_type=TOPIC_LOST,
            record_id=f"{topics.HALVES}[{self.partition}] lost its beginning: {proof}",
            sha256=hashlib.sha256(b"").hexdigest(),
        )


def lacking(
    there: HalvesThere, tasks: Iterable[tuple[Task, int]], graded: Mapping[str, int], finished: Collection[str]
) -> list[str]:
    """Returns the ids of the tasks of a partition that were open and had halves before its first record.

    Args:
        tasks: each with its append time (ms).
        graded: by task, the append time of the first feedback.
        finished: the keys of the outcomes on the log.
    """
    found = set()
    for task, written in tasks:
        opened = written if task.terms.opens is Opens.AT_ONCE else graded.get(task.task_id)
        if opened is None or task.task_id in there.opened or (there.since is not None and opened >= there.since):
            continue
        due = opened + task.terms.deadline_ms > there.until
        if due and any(f"{task.task_id}/{sample}" not in finished for sample in range(task.n_samples)):
            found.add(task.task_id)
    return sorted(found)


def tasks_lacking(settings: Settings, codec: Codec, spans: Mapping[int, OffsetRange]) -> list[TasksLacking]:
    """Reads which open tasks a rebuilt state would lack; reads nothing if each partition has its first record.

    Raises Forbidden, KafkaException, NoSuchTopic, TimeoutError.
    """
    there = {partition: HalvesThere(span.begin) for partition, span in spans.items() if span.begin > 0}
    if not there:
        return []
    ends = {partition: spans[partition].end for partition in there}
    for stored in read_to_end(settings, topics.HALVES, end=ends):
        there[stored.partition].add(_decoded(stored, codec), stored.timestamp)
    tasks: dict[int, list[tuple[Task, int]]] = {partition: [] for partition in there}
    for stored in read_to_end(settings, topics.TASKS):
        if stored.partition in there and isinstance(task := _decoded(stored, codec), Task):
            tasks[stored.partition].append((task, stored.timestamp))
    graded: dict[str, int] = {}
    for stored in read_to_end(settings, topics.FEEDBACK):
        if stored.partition in there and isinstance(feedback := _decoded(stored, codec), Feedback):
            graded.setdefault(feedback.task_id, stored.timestamp)
    finished = {stored.key or "" for stored in read_to_end(settings, topics.OUTCOMES)}
    found = []
    for partition, halves in sorted(there.items()):
        if task_ids := lacking(halves, tasks[partition], graded, finished):
            before = now_ms() if halves.since is None else halves.since
            found.append(TasksLacking(partition, halves.begin, before, tuple(task_ids)))
    return found


def _decoded(stored: Stored, codec: Codec) -> Record | None:
    try:
        return None if stored.value is None else stored.decode(codec)
    except DecodeError as error:
        SKIPPED.add(error)  # it was dead-lettered by the application that reads it
        return None
