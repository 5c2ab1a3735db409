"""What a run's manager knows and what follows from it. Pure: folded from the log, no clock, no Kafka.

The manager keeps no state of its own. Everything here comes from the topics, so one that was killed reads them again
and goes on where it was; and every record that it writes has a derived id, so a repeated one changes nothing.

Pacing is AReaL's capacity rule, issue while accepted + running < (served step + 1 + max staleness) * batch, counted for
the steps that have no plan yet: what a plan took is spent, and what has become too old for the next step is worth
nothing. So whatever came to nothing is replaced and the trainer never starves.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from schemas.ids import derived_id, parse_policy_name
from schemas.records import (
    BackPressure,
    BatchPlan,
    Feedback,
    Outcome,
    OutcomeKind,
    PolicyAck,
    Record,
    Result,
    RunManifest,
    Task,
)
from tentalis.lineage import Lineage, Node
from tentalis.pressure import Pressure
from tentalis.served import Served

# Metadata of a task: how many steps of its run were served when it was issued.
ROUND = "round"

_TRAINED_KINDS = (OutcomeKind.RL, OutcomeKind.OPD, OutcomeKind.BOTH)
_OWN_KEY_KINDS = (OutcomeKind.LATE, OutcomeKind.SUPERSEDED)


class BadManifest(Exception):
    """A run whose manifest does not say what its manager needs to know."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much of what a run wants: `steps` optimizer steps of `batch_rollouts` rollouts each."""

    steps: int
    batch_rollouts: int
    max_staleness: int

    @classmethod
    def of_config(cls, config: str, run_id: str) -> "Pace":
        """From the resolved trainer config that a manifest carries. Raises BadManifest."""
        values = yaml.safe_load(config)
        try:
            return cls(int(values["steps"]), int(values["batch_rollouts"]), int(values["max_staleness"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadManifest(
                f"the manifest of run {run_id} has no usable steps, batch_rollouts and max_staleness "
                f"in its config: {error!r}"
            ) from error


def task_id_of(run_id: str, index: int) -> str:
    """The id of a run's task number `index` (from 0)."""
    return derived_id("task", run_id, index)


def feedback_id_of(result_id: str) -> str:
    """The id of the simulated user's one feedback on a result."""
    return derived_id("feedback", "simulated-user", result_id)


def trains(outcome: Outcome) -> bool:
    """Whether the trainer can use what this sample became: its OPD part, or its RL part in a group of two or more."""
    if outcome.kind not in _TRAINED_KINDS or outcome.rollout_id is None or outcome.not_trainable is not None:
        return False
    return outcome.has_opd or (outcome.has_rl and (outcome.head.n_samples == 1 or outcome.n_closed > 1))


@dataclass(slots=True)
class _TaskState:
    n_samples: int
    round: int
    decided: set[int] = field(default_factory=set)

    @property
    def running(self) -> int:
        return self.n_samples - len(self.decided)


class RunState:
    """The fold over tasks, results, feedback, outcomes, batches, runs and policy-acks, for one run.

    `owes_feedback`: whether this run's users answer to results at all.
    """

    def __init__(self, run_id: str, *, owes_feedback: bool) -> None:
        self.run_id = run_id
        self.manifest: RunManifest | None = None
        self.pace: Pace | None = None
        self.planned = 0
        self._owes_feedback = owes_feedback
        self._served = Served()
        self._pressure = Pressure()
        self._others: dict[str, RunManifest] = {}
        self._tasks: dict[str, _TaskState] = {}
        self._early: dict[str, set[int]] = {}
        self._next_index = 0
        self._trainable: dict[str, int] = {}
        self._taken: set[str] = set()
        # Both by the id that the feedback on a result has.
        self._unanswered: dict[str, Result] = {}
        self._answered: set[str] = set()

    def apply(self, record: Record) -> bool:
        """Takes in one record, of whichever topic; topics may come in any order. Tells whether it moved this run."""
        match record:
            case Task():
                return record.run_id == self.run_id and self._task(record)
            case Outcome():
                return record.head.run_id == self.run_id and self._outcome(record)
            case Result():
                return self._owes_feedback and record.task.run_id == self.run_id and self._result(record)
            case Feedback():
                return self._feedback(record)
            case RunManifest():
                return self._relative(record) or (record.run_id == self.run_id and self._manifest(record))
            case BatchPlan():
                return self._plan(record)
            case PolicyAck():
                return self._served.apply(record)
            case BackPressure():
                return self._pressure.apply(record)
            case _:
                return False

    def _task(self, task: Task) -> bool:
        if task.task_id in self._tasks:
            return False
        known = self._early.pop(task.task_id, set())
        self._tasks[task.task_id] = _TaskState(task.n_samples, _round_of(task.metadata), known)
        while task_id_of(self.run_id, self._next_index) in self._tasks:
            self._next_index += 1
        return True

    def _outcome(self, outcome: Outcome) -> bool:
        if outcome.kind in _OWN_KEY_KINDS:
            return False
        task = self._tasks.get(outcome.head.task_id)
        decided = self._early.setdefault(outcome.head.task_id, set()) if task is None else task.decided
        if outcome.sample_index in decided:
            return False
        decided.add(outcome.sample_index)
        if trains(outcome) and outcome.rollout_id is not None:
            self._trainable[outcome.rollout_id] = _version_of(outcome)
        return True

    def _plan(self, plan: BatchPlan) -> bool:
        # The branches that rollbacks made of the run go on with it: their steps count from where they began.
        current = self._lineage.current(self.run_id)
        if plan.run_id != self.run_id and plan.run_id not in self._lineage.family(self.run_id):
            return False
        if plan.run_id != current:
            self._taken.update(row.rollout_id for row in plan.rows)
            return False
        before, self.planned = self.planned, max(self.planned, self._lineage.depth(Node(plan.run_id, plan.step)))
        self._taken.update(row.rollout_id for row in plan.rows)
        return self.planned > before

    def _result(self, result: Result) -> bool:
        feedback_id = feedback_id_of(result.result_id)
        if feedback_id in self._answered or feedback_id in self._unanswered:
            return False
        self._unanswered[feedback_id] = result
        return True

    def _feedback(self, feedback: Feedback) -> bool:
        result = feedback.result
        if result is None:
            # Perhaps one of ours whose result was too large to go with it: the id alone says so.
            self._answered.add(feedback.feedback_id)
            return self._unanswered.pop(feedback.feedback_id, None) is not None
        if result.task.run_id != self.run_id or feedback.feedback_id != feedback_id_of(result.result_id):
            return False
        self._answered.add(feedback.feedback_id)
        self._unanswered.pop(feedback.feedback_id, None)
        return True

    def _relative(self, manifest: RunManifest) -> bool:
        """Takes in another run; a branch of ours, after the run itself, plans its steps from where it began."""
        if manifest.run_id in self._others or manifest.run_id == self.run_id:
            return False
        self._others[manifest.run_id] = manifest
        if manifest.run_id != self._lineage.current(self.run_id):
            return False
        self.planned = self._lineage.depth(Node(manifest.run_id, 0))
        return True

    @property
    def _lineage(self) -> Lineage:
        own = self.manifest
        others = (other for other in self._others.values() if own is not None and other.policy == own.policy)
        return Lineage([*([] if own is None else [own]), *others])

    def _manifest(self, manifest: RunManifest) -> bool:
        # Another manifest of the same run (other ranks, other code) continues it: its config holds, the versions go on.
        if self.manifest is not None and manifest.first_version != self.manifest.first_version:
            raise BadManifest(
                f"run {self.run_id} has manifests that begin at version {self.manifest.first_version} "
                f"and at version {manifest.first_version}; they cannot be of one run"
            )
        self.manifest = manifest
        # A standing stack trains the run on without an end; the pace is that of whoever gave it one.
        if yaml.safe_load(manifest.config).get("steps") is not None:
            self.pace = Pace.of_config(manifest.config, self.run_id)
        return True

    # What follows from it.

    @property
    def next_index(self) -> int:
        """The number of the next task."""
        return self._next_index

    @property
    def running(self) -> int:
        """Samples of this run's tasks without an outcome yet."""
        return sum(task.running for task in self._tasks.values())

    @property
    def served_version(self) -> int | None:
        """The version of this run that is served, or None as long as none is."""
        if self.manifest is None:
            return None
        version = self._served.version(self.manifest.policy)
        return version if version is not None and version >= self.manifest.first_version else None

    @property
    def served_step(self) -> int | None:
        """How many steps of this run are served (0: the initial adapter), or None as long as nothing may be issued."""
        version = self.served_version
        node = None if version is None else self._lineage.node(version)
        return None if node is None else self._lineage.depth(node)

    @property
    def usable(self) -> int:
        """Rollouts that the trainer can still take: trainable, in no plan, recent enough for the next step."""
        if self.manifest is None or self.pace is None:
            return 0
        lineage, limit = self._lineage, self.pace.max_staleness
        begun = Node(lineage.current(self.run_id), 0)
        head = lineage.version(begun) + self.planned - lineage.depth(begun)
        counts = Counter(version for rollout, version in self._trainable.items() if rollout not in self._taken)
        return sum(count for version, count in counts.items() if lineage.staleness(head, version) <= limit)

    def pressed(self, now_ms: int) -> BackPressure | None:
        """What the trainer says if it would throw away what were sampled now, None if it would not."""
        return None if self.manifest is None else self._pressure.closed(self.manifest.policy, now_ms)

    def owed(self) -> list[Result]:
        """The results that have no feedback yet."""
        return list(self._unanswered.values())

    def to_issue(self, n_samples: int) -> int:
        """How many tasks of `n_samples` samples to issue now."""
        step, pace = self.served_step, self.pace
        if step is None or pace is None:
            return 0
        if step < pace.steps:
            unplanned = min(step + 1 + pace.max_staleness, pace.steps) - self.planned
            wanted = unplanned * pace.batch_rollouts - self.usable - self.running
        else:
            wanted = pace.batch_rollouts - sum(task.n_samples for task in self._last_round(pace))
        return max(0, -(-wanted // n_samples))

    @property
    def starved(self) -> bool:
        """Whether the trainer has all that pacing allows, nothing is on its way, and it still has not planned a step.

        It refused some of what looked trainable (too long, another digest). If that lasts, more is needed.
        """
        step, pace = self.served_step, self.pace
        if step is None or pace is None or step >= pace.steps:
            return False
        return self.running == 0 and self.planned <= step

    @property
    def finished(self) -> bool:
        """All steps are served, one round sampled by the last version is decided, and nobody waits for feedback."""
        step, pace = self.served_step, self.pace
        if step is None or pace is None or step < pace.steps or self._unanswered:
            return False
        return sum(task.n_samples for task in self._last_round(pace)) >= pace.batch_rollouts and self.running == 0

    def _last_round(self, pace: Pace) -> list[_TaskState]:
        return [task for task in self._tasks.values() if task.round >= pace.steps]


def _version_of(outcome: Outcome) -> int:
    """The version that sampled last, -1 if it was none of the policy's."""
    try:
        return parse_policy_name(outcome.policy_spans[-1].policy)[1] if outcome.policy_spans else -1
    except ValueError:
        return -1


def _round_of(metadata: Mapping[str, Any]) -> int:
    value = str(metadata.get(ROUND, "0"))
    return int(value) if value.isdigit() else 0
