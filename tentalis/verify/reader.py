"""Reads from the topics what `check` needs of a run."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from schemas import topics
from schemas.codec import DecodeError
from schemas.place import Place
from schemas.records import (
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
from tentalis.config import Settings
from tentalis.kafka import NoSuchTopic, Stored, end_offsets, make_codec, read_to_end
from tentalis.lineage import Lineage
from tentalis.verify.check import check
from tentalis.verify.model import HOUR_MS, Kind, Log, Report, Seen

# From the result of the work back to its cause. Ends are taken in this order and the topics then read the other way
# round up to them: whatever is read has its cause among what is read.
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
# Their owners dead-letter what they cannot read, whether a trainer runs or not.
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
    """No task on the log belongs to the run, nor to what it goes on from."""


def asked_by(run: str, manifests: Sequence[RunManifest]) -> frozenset[str]:
    """The runs whose tasks became the run's rollouts: the run, and after a rollback those that it goes on from and that
    it is the branch of. Raises UnknownRun for a counterfactual, which has no tasks: it was trained again on what
    another run was trained on."""
    first = {manifest.run_id: manifest for manifest in reversed(manifests)}
    own = first.get(run)
    if own is None:
        return frozenset({run})
    parent = first.get(own.parent_run or "")
    if parent is not None and parent.policy != own.policy:
        raise UnknownRun(
            f"run {run} is a counterfactual of run {parent.run_id}: the same rollouts under other settings, with no "
            f"tasks of its own. `tentalis verify {parent.run_id}` checks where they come from, "
            f"`tentalis replay {run} --verify-only` that each is there and unaltered"
        )
    lineage = Lineage(m for m in manifests if m.policy == own.policy)
    path = lineage.path(run)
    return frozenset({*path, *(stem for each in path if (stem := lineage.stem(each)) is not None)})


def _concerns(key: str | None, task_ids: set[str]) -> bool:
    """Whether a key such as task_id/0/late/x is of one of the tasks; ids may have slashes in them."""
    parts = (key or "").split("/")
    return any("/".join(parts[:n]) in task_ids for n in range(1, len(parts) + 1))


def _dead(settings: Settings, topic: str) -> dict[Place, bytes | None]:
    """Value bytes of the dead letters of a topic, by the place where they lay."""
    found: dict[Place, bytes | None] = {}
    try:
        for stored in read_to_end(settings, topics.dlq(topic)):
            headers = {name: value.decode("utf-8", "replace") for name, value in stored.headers}
            partition, offset = (headers.get(f"tentalis.dlq.original-{what}", "") for what in ("partition", "offset"))
            if partition.isdigit() and offset.isdigit():
                found[Place(topic, int(partition), int(offset))] = stored.value
    except NoSuchTopic:
        return {}
    return found


class _Reader:
    def __init__(self, settings: Settings, run: str) -> None:
        self._settings, self._codec = settings, make_codec(settings)
        self.log = Log(run)
        self._tasks: set[str] = set()
        self._known_runs: set[str] = set()
        self._asked_by: frozenset[str] = frozenset()

    def read(self) -> Log:
        manifests = self._manifests()
        self._asked_by = asked_by(self.log.run, manifests)
        ends = {topic: end_offsets(self._settings, topic) for topic in DOWNSTREAM_FIRST}
        for topic in reversed(DOWNSTREAM_FIRST):
            dead = _dead(self._settings, topic) if topics.dlq(topic) in topics.table().topics else {}
            for stored in read_to_end(self._settings, topic, end=ends[topic]):
                self._take(stored, dead)
            if topic == topics.TASKS and not self.log.tasks:
                self._nothing(any(manifest.run_id == self.log.run for manifest in manifests))
        return self.log

    def _manifests(self) -> list[RunManifest]:
        """Those on the log, as far as they can be read: what cannot is reported when the topic's turn comes."""
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
            f" It was trained on what other runs asked for: `tentalis replay {run} --verify-only` checks that each "
            "rollout is there and unaltered."
        )
        raise UnknownRun(
            f"no task on {topics.TASKS} belongs to run {run}.{hint if trained else ''} Runs with tasks: {known}"
        )

    def _take(self, stored: Stored, dead: dict[Place, bytes | None]) -> None:
        place = stored.place
        kept = place in dead and dead[place] == stored.value
        if stored.topic == topics.HALVES:
            clock = self.log.clock
            clock[stored.partition] = max(clock.get(stored.partition, 0), stored.timestamp)
        if stored.value is None and stored.topic not in ALWAYS_OWNED:
            return  # a tombstone on a compacted topic: its record was taken away on purpose
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
        """Puts a record where it belongs, if it concerns the run."""
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
            getattr(self.log, target).append(Seen(record, *place, stored.timestamp))
        return wanted


def read(settings: Settings, run: str) -> Log:
    """Everything that concerns a run. Raises UnknownRun, NoSuchTopic, TimeoutError."""
    return _Reader(settings, run).read()


def verify(
    settings: Settings,
    run: str,
    *,
    wait: float = 0.0,
    allow_open: bool = False,
    feedback_horizon_ms: int = HOUR_MS,
) -> Report:
    """Reads and checks a run; the horizon is that of scoring and hinting. Raises as `read` does.

    While the only problems are such as time may mend (open, or not there yet), it reads again for up to `wait` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        log = read(settings, run)
        log.feedback_horizon_ms = feedback_horizon_ms
        report = check(log, allow_open=allow_open)
        under_way = report.numbers["open_tasks"] + report.numbers["steps_under_way"] > 0
        mending = {problem.kind for problem in report.problems} <= {Kind.OPEN, Kind.LOST}
        left = deadline - time.monotonic()
        if left <= 0 or not mending or not (report.problems or under_way):
            return report
        time.sleep(min(PAUSE_SECONDS, left))
