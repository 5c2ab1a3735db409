"""Who is meant, what is left of a rollout, and what of them lies where. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas import topics
from schemas.ids import derived_id
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

# In this order: what a task is about tells whose the records are that name no more than its id.
COUNTED = (
    topics.TASKS,
    topics.RESULTS,
    topics.FEEDBACK,
    topics.HALVES,
    topics.OUTCOMES,
    topics.SESSIONS,
)


class NoSuchRequest(ValueError):
    """A request that names nobody."""


def request_of(
    session_id: str | None, user_id: str | None, before: int | None, policy: str | None, *, now: int
) -> Forget:
    """The request as a record. Times in ms. Raises NoSuchRequest."""
    request = Forget(
        forget_id=derived_id("forget", session_id, user_id, before, policy, now),
        event_time=now,
        session_id=session_id,
        user_id=user_id,
        before=before,
        policy=policy,
    )
    if not request.asks:
        raise NoSuchRequest("say who or what is to be forgotten: --session, --user or --before")
    if "" in (session_id, user_id, policy):
        raise NoSuchRequest("an empty id names nobody")
    if before is not None and before > now:
        raise NoSuchRequest("--before lies in the future: what comes until then cannot be forgotten yet")
    return request


def husk(rollout: Rollout) -> Rollout:
    """What is left of a rollout: that it was there, under this key and digest, and where it came from.

    Everything else is named nowhere here, so that a field added later does not stay by oversight: no tokens,
    log-probs, hints, rewards and statistics; no session, no user; no sampling settings (they hold stop strings).
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
    """A fold over the rollouts topic: the husks that are still owed, by partition and key.

    A husk is owed where the last record of a key has content that the request concerns: also when a husk lies before
    it (a worker that was killed wrote its output once more).
    """

    request: Forget
    owed: dict[tuple[int, str], Rollout] = field(default_factory=dict)
    matched: set[str] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)

    def take(self, partition: int, rollout: Rollout) -> None:
        """The next record."""
        place = partition, rollout.rollout_id
        if rollout.forgotten:
            self.owed.pop(place, None)
        elif self.request.concerns(rollout.head, rollout.event_time):
            # Of two records under one key the first is genuine: a husk must not vouch for a forgery.
            self.owed.setdefault(place, husk(rollout))
            self.matched.add(rollout.rollout_id)
            self.tasks.add(rollout.head.task_id)


@dataclass(slots=True)
class Count:
    """Records that a request concerns on one topic, and the append time of the newest (ms)."""

    records: int = 0
    newest: int = 0


@dataclass(slots=True)
class Census:
    """What else holds something of those who leave, topic by topic in the order of COUNTED."""

    request: Forget
    counts: dict[str, Count] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)

    def take(self, topic: str, record: Record, appended: int) -> None:
        """The next record of a topic; `appended` in ms."""
        if self._concerned(record, appended):
            self._add(topic, appended)

    def letter(self, topic: str, key: str | None, appended: int) -> None:
        """The next dead letter: it need not be readable, so its key has to say whose it is."""
        parts = (key or "").split("/")  # of task_id/0/late/x; ids may have slashes in them
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
    """By when (ms) a topic's own retention has removed what was appended at `newest`; None if it keeps it for ever.

    A segment goes as a whole, `retention.ms` after its newest record, and takes records for up to `segment.ms`.
    """
    retention = int(config.get("retention.ms", -1))
    if "delete" not in config.get("cleanup.policy", "delete") or retention < 0:
        return None
    return newest + retention + int(config.get("segment.ms", 0))


def compacted_by(newest: int, config: Mapping[str, str]) -> int | None:
    """By when (ms) compaction has removed what a record written at `newest` replaces; None if nothing promises it."""
    lag = int(config.get("max.compaction.lag.ms", 2**63 - 1))
    return None if lag >= 2**62 else newest + lag
