"""The rules of erasure: which records a request concerns, and what a redacted rollout keeps. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas import topics
from schemas.ids import derived_id, original_name
from schemas.records import (
    Feedback,
    Forget,
    Hint,
    Open,
    Outcome,
    Record,
    Result,
    Rollout,
    Score,
    SessionEvent,
    Task,
)

# Read in this order: tasks come first, because some records name only the id of their task.
COUNTED = (
    topics.TASKS,
    topics.RESULTS,
    topics.FEEDBACK,
    topics.HALVES,
    topics.OUTCOMES,
    topics.SESSIONS,
)


class NoSuchRequest(ValueError):
    """A request that names no one, or that cannot be carried out."""


def request_of(
    session_id: str | None, user_id: str | None, before: int | None, policy: str | None, *, now: int
) -> Forget:
    """Returns the request as a record. Times are in ms. Raises NoSuchRequest."""
    request = Forget(
        forget_id=derived_id("forget", session_id, user_id, before, policy, now),
        event_time=now,
        session_id=session_id,
        user_id=user_id,
        before=before,
        policy=policy,
    )
    if not request.asks:
        raise NoSuchRequest("nothing to forget is given: set --session, --user or --before")
    if "" in (session_id, user_id, policy):
        raise NoSuchRequest("--session, --user or --policy is empty: give it a value or omit it")
    if before is not None and before > now:
        raise NoSuchRequest("--before is in the future: records that do not exist yet cannot be forgotten")
    return request


def redacted_rollout(rollout: Rollout) -> Rollout:
    """Returns the redacted rollout: it keeps its key, its digest and its origin.

    It has no tokens, log-probs, hints, rewards and statistics; no session and no user; no sampling settings (they have
    stop strings). The function lists the fields to keep, so that a field added later is not kept by oversight.
    """
    head = rollout.head
    return Rollout(
        rollout_id=rollout.rollout_id,
        rollout_event_id=rollout.rollout_event_id,
        event_time=rollout.event_time,
        head=type(head)(
            task_id=head.task_id,
            policy=head.policy,
            environment=head.environment,
            n_samples=head.n_samples,
            terms=head.terms,
            manager_id=head.manager_id,
            run_id=head.run_id,
        ),
        sample_index=rollout.sample_index,
        result_id=rollout.result_id,
        worker_id=rollout.worker_id,
        n_requested=rollout.n_requested,
        provenance=rollout.provenance,
        digest=rollout.digest,
        forgotten=True,
    )


@dataclass(slots=True)
class Sweep:
    """A fold over the rollouts topic: the redacted rollouts that are still to be written, by partition and key.

    A key needs one if its last record has content that the request concerns. That includes a key with an earlier
    redacted rollout, because a worker that was killed may have written its output again.
    """

    request: Forget
    owed: dict[tuple[int, str], Rollout] = field(default_factory=dict)
    matched: set[str] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)

    def take(self, partition: int, rollout: Rollout) -> None:
        """Applies the next record."""
        place = partition, rollout.rollout_id
        if rollout.forgotten:
            self.owed.pop(place, None)
        elif self._concerns(rollout):
            # Of two records under one key the first is genuine: a redacted rollout must not confirm a forged one.
            self.owed.setdefault(place, redacted_rollout(rollout))
            self.matched.add(rollout.rollout_id)
            self.tasks.add(rollout.head.task_id)

    def _concerns(self, rollout: Rollout) -> bool:
        """Returns True also for a copy with other rewards, which is under the name of a counterfactual's policy, if the
        request names the policy that answered."""
        head = rollout.head
        names = {head.policy, original_name(head.policy)}
        heads = (head.model_copy(update={"policy": name}) for name in names)
        return any(self.request.concerns(each, rollout.event_time) for each in heads)


@dataclass(slots=True)
class Count:
    """The number of records that a request concerns on one topic, and the append time of the newest (ms)."""

    records: int = 0
    newest: int = 0


@dataclass(slots=True)
class Census:
    """Counts the records that a request concerns on the other topics. Takes the topics in the order of COUNTED."""

    request: Forget
    counts: dict[str, Count] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)

    def take(self, topic: str, record: Record, appended: int) -> None:
        """Applies the next record of a topic; `appended` in ms."""
        if self._concerned(record, appended):
            self._add(topic, appended)

    def letter(self, topic: str, key: str | None, appended: int) -> None:
        """Applies the next dead letter. It may be undecodable, so only its key decides."""
        parts = (key or "").split("/")  # of task_id/0/late/x; ids may contain slashes
        beginnings = {"/".join(parts[:n]) for n in range(1, len(parts) + 1)}
        if beginnings & self.tasks or key in self.sessions:
            self._add(topic, appended)

    def _add(self, topic: str, appended: int) -> None:
        count = self.counts.setdefault(topic, Count())
        count.records += 1
        count.newest = max(count.newest, appended)

    def _concerned(self, record: Record, appended: int) -> bool:
        request = self.request
        match record:
            case Task():
                found = request.concerns(record.head, appended)
            case Result():
                found = request.concerns(record.task.head, record.opened_at)
            case Feedback() if record.result is not None:
                found = request.concerns(record.result.task.head, record.result.opened_at)
            case Feedback():
                return record.task_id in self.tasks
            case Open():
                found = request.concerns(record.head, record.opened_at)
            case Score() | Hint():
                found = request.concerns(record.sample.head, record.opened_at)
            case Outcome():
                found = request.concerns(record.head, record.event_time)
            case SessionEvent():
                asked = request.session_id in (None, record.session_id) and request.user_id in (None, record.user_id)
                mine = record.session_id in self.sessions or (request.asks and asked)
                return mine and (request.before is None or record.event_time < request.before)
            case _:
                return False
        if found:
            self.tasks.add(record.head.task_id if isinstance(record, Outcome) else record.key)
            if isinstance(record, Task) and record.session_id is not None:
                self.sessions.add(record.session_id)
        return found


def gone_at(newest: int, config: Mapping[str, str]) -> int | None:
    """Returns the time (ms) by which retention has removed a record appended at `newest`; None if it is kept for ever.

    Kafka deletes a whole segment `retention.ms` after its newest record, and a segment is open for up to `segment.ms`.
    """
    retention = int(config.get("retention.ms", -1))
    if "delete" not in config.get("cleanup.policy", "delete") or retention < 0:
        return None
    return newest + retention + int(config.get("segment.ms", 0))


def compacted_by(newest: int, config: Mapping[str, str]) -> int | None:
    """Returns the time (ms) by which compaction has removed what a record written at `newest` replaces.

    None if the topic's configuration guarantees no such time.
    """
    lag = int(config.get("max.compaction.lag.ms", 2**63 - 1))
    return None if lag >= 2**62 else newest + lag
