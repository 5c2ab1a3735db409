"""Reads the log of a run from the topics, for `check`."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import (
    AuditRecord,
    BatchPlan,
    Feedback,
    Forget,
    Hint,
    Open,
    Outcome,
    PolicyUpdate,
    Record,
    Result,
    Rollout,
    RunManifest,
    Score,
    StepResult,
    Task,
)
from schemas.wire.codec import DecodeError
from tentalis.kafka.audit_log import audit_records
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.loss_audit import TOPIC_LOST, AcceptedLoss, accepted_loss
from tentalis.kafka.moved_topics import moves
from tentalis.kafka.offsets import end_offsets
from tentalis.ops.verify.check import check
from tentalis.ops.verify.model import HOUR_MS, Log, LoggedRecord, ProblemKind, VerifyReport
from tentalis.policies.lineage import Lineage
from tentalis.service.settings import Settings

# From effect to cause. The end offsets are taken in this order, and the topics are then read up to them in reverse
# order. So the cause of each record that is read is read as well.
DOWNSTREAM_FIRST = (
    topics.POLICIES,
    topics.BATCHES,
    topics.RUNS,
    topics.ROLLOUTS,
    topics.OUTCOMES,
    topics.HALVES,
    topics.FEEDBACK,
    topics.RESULTS,
    topics.TASKS,
)
# Their owners run without a trainer too, and dead-letter what they cannot decode.
ALWAYS_OWNED = (topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.HALVES)
PAUSE_SECONDS = 3.0
TARGETS: dict[type[Record], str] = {
    Task: "tasks",
    Result: "results",
    Feedback: "feedback",
    Open: "opens",
    Score: "scores",
    Hint: "hints",
    Forget: "forgets",
    Outcome: "outcomes",
    Rollout: "rollouts",
    RunManifest: "manifests",
    BatchPlan: "plans",
    StepResult: "steps",
    PolicyUpdate: "updates",
}


class UnknownRun(Exception):
    """The log has no task of the run, nor of a run that it continues."""


def asked_by(run: str, manifests: Sequence[RunManifest]) -> frozenset[str]:
    """Returns the runs whose tasks became the run's rollouts.

    These are the run itself and, after a rollback, the runs that it continues and the run that it is a branch of.
    Raises UnknownRun for a counterfactual: it has no tasks, because it was trained on the rollouts of another run.
    """
    first = {manifest.run_id: manifest for manifest in reversed(manifests)}
    own = first.get(run)
    if own is None:
        return frozenset({run})
    parent = first.get(own.parent_run or "")
    if parent is not None and parent.policy != own.policy:
        raise UnknownRun(
            f"run {run} is a counterfactual of run {parent.run_id}: it was trained on the same rollouts, without "
            f"tasks. Use `tentalis verify {parent.run_id}` to check the origin of the rollouts, and "
            f"`tentalis replay {run} --verify-only` to check that each is present and unaltered"
        )
    lineage = Lineage(m for m in manifests if m.policy == own.policy)
    path = lineage.path(run)
    return frozenset({*path, *(stem for each in path if (stem := lineage.stem(each)) is not None)})


def placed_anew(losses: Sequence[AcceptedLoss], moved: Sequence[AuditRecord]) -> list[AcceptedLoss]:
    """Returns the losses by the partitions of today. Partitions from before a move of the topics have other records
    now, so that such a loss counts for the whole topic."""
    last = max((each.event_time for each in moved), default=0)
    return [replace(each, partition=None, first=0, end=None) if each.at < last else each for each in losses]


def _concerns(key: str | None, task_ids: set[str]) -> bool:
    """Returns True if a key such as task_id/0/late/x is of one of the tasks. Ids may contain slashes."""
    parts = (key or "").split("/")
    return any("/".join(parts[:n]) in task_ids for n in range(1, len(parts) + 1))


def _dead(settings: Settings, topic: str) -> dict[RecordPlace, bytes | None]:
    """Returns the value bytes of a topic's dead letters, by the place of the original record."""
    found: dict[RecordPlace, bytes | None] = {}
    try:
        for stored in read_to_end(settings, topics.dlq(topic)):
            headers = {name: value.decode("utf-8", "replace") for name, value in stored.headers}
            partition, offset = (headers.get(f"tentalis.dlq.original-{what}", "") for what in ("partition", "offset"))
            if partition.isdigit() and offset.isdigit():
                found[RecordPlace(topic, int(partition), int(offset))] = stored.value
    except NoSuchTopic:
        return {}
    return found


class _RunReader:
    def __init__(self, settings: Settings, run: str) -> None:
        self._settings, self._codec = settings, make_codec(settings)
        self.log = Log(run)
        self._tasks: set[str] = set()
        self._known_runs: set[str] = set()
        self._asked_by: frozenset[str] = frozenset()

    def read(self) -> Log:
        manifests = self._manifests()
        self._asked_by = asked_by(self.log.run, manifests)
        moved = moves(self._settings, self._codec, topics.HALVES)
        self.log.halves_moved = bool(moved)
        ends = {topic: end_offsets(self._settings, topic) for topic in DOWNSTREAM_FIRST}
        for topic in reversed(DOWNSTREAM_FIRST):
            dead = _dead(self._settings, topic) if topics.dlq(topic) in topics.table().topics else {}
            for stored in read_to_end(self._settings, topic, end=ends[topic]):
                self._take(stored, dead)
            if topic == topics.TASKS and not self.log.tasks:
                self._nothing(any(manifest.run_id == self.log.run for manifest in manifests))
        # Last, so that no loss is missing whose consequences were read.
        losses = [accepted_loss(each) for each in audit_records(self._settings, self._codec, TOPIC_LOST)]
        self.log.losses = placed_anew(losses, moved)
        return self.log

    def _manifests(self) -> list[RunManifest]:
        """Returns the manifests on the log that can be decoded; `read` reports the others later."""
        found = []
        for stored in read_to_end(self._settings, topics.RUNS):
            with suppress(DecodeError):
                record = None if stored.value is None else stored.decode(self._codec)
                if isinstance(record, RunManifest):
                    found.append(record)
        return found

    def _nothing(self, trained: bool) -> NoReturn:
        run, known = self.log.run, ", ".join(sorted(self._known_runs)) or "none"
        hint = (
            f" It was trained on rollouts of other runs: use `tentalis replay {run} --verify-only` to check that each "
            "rollout is present and unaltered."
        )
        raise UnknownRun(
            f"no task on {topics.TASKS} belongs to run {run}.{hint if trained else ''} Runs with tasks: {known}"
        )

    def _take(self, stored: Stored, dead: dict[RecordPlace, bytes | None]) -> None:
        place = stored.place
        kept = place in dead and dead[place] == stored.value
        if stored.topic == topics.HALVES:
            clock = self.log.clock
            clock[stored.partition] = max(clock.get(stored.partition, 0), stored.timestamp)
        if stored.value is None and stored.topic not in ALWAYS_OWNED:
            return  # a tombstone on a compacted topic: its record was deleted on purpose
        try:
            record = stored.decode(self._codec)
        except DecodeError as error:
            if stored.topic in ALWAYS_OWNED:
                self.log.undecodable.append((place, error.reason))
                if kept:
                    self.log.dead.add(place)
            else:
                self.log.unreadable.append((place, error.reason + (" (in the dead letters)" if kept else "")))
            return
        if self._keep(record, stored) and kept:
            self.log.dead.add(place)

    def _keep(self, record: Record, stored: Stored) -> bool:
        """Adds a record to the log if it belongs to the run; returns True if it does."""
        tasks = self._tasks
        match record:
            case Task():
                self._known_runs.add(record.run_id or "(none)")
                wanted = record.run_id in self._asked_by
                if wanted:
                    tasks.add(record.task_id)
            case Result() | Feedback() | Open() | Score() | Hint():
                wanted = record.key in tasks
            case Outcome() | Rollout():
                wanted = _concerns(record.key, tasks) or record.head.task_id in tasks
            case _:
                wanted = True
        target = TARGETS.get(type(record))
        if target is not None and wanted:
            place = stored.place
            getattr(self.log, target).append(LoggedRecord(record, *place, stored.timestamp))
        return wanted


def read(settings: Settings, run: str) -> Log:
    """Reads the log of a run. Raises UnknownRun, NoSuchTopic, TimeoutError."""
    return _RunReader(settings, run).read()


def verify(
    settings: Settings,
    run: str,
    *,
    wait: float = 0.0,
    allow_open: bool = False,
    feedback_horizon_ms: int = HOUR_MS,
) -> VerifyReport:
    """Reads and checks a run. The horizon is that of scoring and hinting. Raises the errors of `read`.

    While all problems but dead letters may resolve with time (open or missing records), it reads again for up to
    `wait` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        log = read(settings, run)
        log.feedback_horizon_ms = feedback_horizon_ms
        report = check(log, allow_open=allow_open)
        under_way = report.numbers["open_tasks"] + report.numbers["steps_under_way"] > 0
        # What is a dead letter stays one until an operator replays it.
        kinds = {problem.kind for problem in report.problems} - {ProblemKind.DEAD}
        left = deadline - time.monotonic()
        if left <= 0 or not kinds <= {ProblemKind.OPEN, ProblemKind.LOST} or not (kinds or under_way):
            return report
        time.sleep(min(PAUSE_SECONDS, left))
