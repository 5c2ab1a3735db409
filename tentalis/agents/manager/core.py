"""The state of a run's manager, and its decisions. Pure: folded from the log, without a clock and without Kafka.

The manager stores no state. A manager that was killed reads the topics again and continues where it was. Every record
that it writes has a derived id, so writing one again changes nothing.

Pacing is AReaL's capacity rule, counted over the steps without a plan: issue a task while
accepted + running < (served step + 1 + max staleness) * batch. Rollouts that a plan took, or that are too old for the
next step, do not count, nor those that no part of the loss reads: groups of equal rewards if the run samples
dynamically (DAPO, arXiv 2503.14476), hints if `opd_weight` is 0, answers without a hint if no other weight is above 0.
So each rollout that cannot be trained is replaced, and the trainer does not starve.

If the guard tries the versions of a run, a candidate counts as served for the next round: its tasks are issued while it
is tried, once, and its workers hold the answers back (tentalis/policies/candidates.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from schemas.group_statistics import EQUAL_STD, mean_and_std
from schemas.ids import derived_id, parse_policy_name
from schemas.records import (
    BackPressure,
    BatchPlan,
    Feedback,
    Outcome,
    OutcomeKind,
    PolicyAck,
    PolicyUpdate,
    Promotion,
    Record,
    Result,
    RunManifest,
    Source,
    Task,
    Terms,
)
from tentalis.agents.manager.curriculum import PROMPT, Choice, Curriculum
from tentalis.policies.backpressure import Backpressure
from tentalis.policies.candidates import Candidates, issued_for
from tentalis.policies.guard import GuardMode
from tentalis.policies.lineage import Lineage, Node
from tentalis.policies.served import ServedVersions

# Metadata key of a task: the number of steps of its run that the version has for which it was issued.
ROUND = "round"

# The trainer's default, for manifests that do not have the setting.
MAX_EQUAL_BATCHES = 10

_TRAINED_KINDS = (OutcomeKind.RL, OutcomeKind.OPD, OutcomeKind.BOTH)
_OWN_KEY_KINDS = (OutcomeKind.LATE, OutcomeKind.SUPERSEDED)


class BadManifest(Exception):
    """A run whose manifests contradict each other or lack a value that the manager needs."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The demand of a run: `steps` optimizer steps of `batch_rollouts` rollouts each.

    Attributes:
        drops_equal: the trainer leaves out the RL part of groups whose rewards are all equal.
        max_equal_batches: batches with nothing to learn that one version may sample before the run is given up.
        distils: the trainer reads hints and the teacher's log-probs.
        distils_alone: it reads nothing else.
        guarded: the guard tries each version before it is served, and the trainer waits for its decision; with a
            greater `max_staleness` than 1 it publishes further versions meanwhile.
    """

    steps: int
    batch_rollouts: int
    max_staleness: int
    drops_equal: bool = False
    max_equal_batches: int = MAX_EQUAL_BATCHES
    distils: bool = True
    distils_alone: bool = False
    guarded: bool = False

    @classmethod
    def of_config(cls, config: str, run_id: str) -> "Pace":
        """Reads the pace from the resolved trainer config in a manifest. Raises BadManifest."""
        values = yaml.safe_load(config)
        try:
            max_staleness = int(values["max_staleness"])
            loss = values.get("loss") or {}
            dynamic = loss.get("dynamic_sampling")
            distils = float(loss.get("opd_weight", 1.0)) > 0
            rewarded = float(loss.get("rl_weight", 1.0)) > 0 or float((loss.get("pair") or {}).get("weight", 0.0)) > 0
            return cls(
                int(values["steps"]),
                int(values["batch_rollouts"]),
                max_staleness,
                loss.get("kind") == "dapo" if dynamic is None else bool(dynamic),
                int(loss.get("max_equal_batches", MAX_EQUAL_BATCHES)),
                distils,
                distils and not rewarded,
                values.get("promotion") == GuardMode.GUARDED and max_staleness <= 1,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadManifest(
                f"the manifest of run {run_id} has no usable steps, batch_rollouts and max_staleness "
                f"in its config: {error!r}"
            ) from error


def task_id_of(run_id: str, index: int) -> str:
    """Returns the id of a run's task number `index` (from 0)."""
    return derived_id("task", run_id, index)


def feedback_id_of(result_id: str) -> str:
    """Returns the id of the simulated user's only feedback on a result."""
    return derived_id("feedback", "simulated-user", result_id)


def trains(outcome: Outcome) -> bool:
    """Returns True if the trainer can use the sample: its OPD part, or its RL part in a group of two or more."""
    if outcome.kind not in _TRAINED_KINDS or outcome.rollout_id is None or outcome.not_trainable is not None:
        return False
    return outcome.has_opd or _has_rl(outcome)


def _has_rl(outcome: Outcome) -> bool:
    return outcome.has_rl and (outcome.head.n_samples == 1 or outcome.n_closed > 1)


@dataclass(slots=True)
class _TaskState:
    """A task of the run. `version`: the one that it was issued for, if it names one. `prompt`: its prompt's number;
    `index`: its own number; both only for the curriculum. `decided`: its samples with an outcome; `answered_by`: the
    versions that sampled them; `rewards`: those of its RL halves."""

    n_samples: int
    round: int
    version: int | None = None
    prompt: int | None = None
    index: int | None = None
    decided: set[int] = field(default_factory=set)
    answered_by: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def running(self) -> int:
        return self.n_samples - len(self.decided)

    @property
    def answered_by_others(self) -> int:
        """Number of samples that another version answered than the one that the task was issued for."""
        return 0 if self.version is None else sum(each not in (-1, self.version) for each in self.answered_by)

    @property
    def equal(self) -> bool:
        """True if all samples of a group are decided, and those with a reward have the same one."""
        return (
            self.n_samples > 1 and not self.running and bool(self.rewards) and mean_and_std(self.rewards)[1] < EQUAL_STD
        )


@dataclass(frozen=True, slots=True)
class _Trainable:
    """A rollout on which the trainer can train: its RL part, its OPD part or both. `version`: the one that sampled
    last."""

    version: int
    task_id: str
    has_rl: bool
    has_opd: bool


class ManagerState:
    """The fold over tasks, results, feedback, outcomes, batches, runs, policies and policy-acks, for one run.

    Args:
        owes_feedback: True if this run's users give feedback on results.
        curriculum: chooses the prompts; None: they are asked in turn.
        for_candidates: True if workers can hold back the answers to the run's tasks, so that tasks may be issued for a
            candidate.
    """

    def __init__(
        self,
        run_id: str,
        *,
        owes_feedback: bool,
        curriculum: Curriculum | None = None,
        for_candidates: bool = True,
    ) -> None:
        self.run_id = run_id
        self.curriculum = curriculum
        self.manifest: RunManifest | None = None
        self.pace: Pace | None = None
        self.planned = 0
        self._owes_feedback = owes_feedback
        self._for_candidates = for_candidates
        self._served = ServedVersions()
        self._candidates = Candidates()
        self._pressure = Backpressure()
        self._others: dict[str, RunManifest] = {}
        self._tasks: dict[str, _TaskState] = {}
        self._early: dict[str, _TaskState] = {}
        self._next_index = 0
        self._trainable: dict[str, _Trainable] = {}
        # Answers with neither a reward nor a hint, by the version that sampled them.
        self._empty: Counter[int] = Counter()
        self._taken: set[str] = set()
        # Both by the id of the feedback on a result.
        self._unanswered: dict[str, Result] = {}
        self._answered: set[str] = set()

    def apply(self, record: Record) -> bool:
        """Applies one record of any topic; topics may come in any order. Returns True if it changed this run."""
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
            case PolicyUpdate() | Promotion():
                return self._candidates.apply(record)
            case PolicyAck():
                decided = self._candidates.apply(record)
                return self._served.apply(record) or decided
            case BackPressure():
                return self._pressure.apply(record)
            case _:
                return False

    def _task(self, task: Task) -> bool:
        if task.task_id in self._tasks:
            return False
        known = self._early.pop(task.task_id, _TaskState(0, 0))
        self._tasks[task.task_id] = _TaskState(
            task.n_samples,
            _number(task.metadata, ROUND) or 0,
            _version_issued_for(task),
            _number(task.metadata, PROMPT),
            decided=known.decided,
            answered_by=known.answered_by,
            rewards=known.rewards,
        )
        while (numbered := self._tasks.get(task_id_of(self.run_id, self._next_index))) is not None:
            self._asked(numbered, self._next_index)
            self._next_index += 1
        return True

    def _asked(self, task: _TaskState, index: int) -> None:
        """Tells the curriculum which prompt task number `index` asks. Without the curriculum, prompts 0, 1, 2 and so on
        are asked in turn."""
        if self.curriculum is None:
            return
        prompt = index if task.prompt is None else task.prompt
        if prompt >= self.curriculum.count:
            return
        task.prompt, task.index = prompt, index
        self.curriculum.asked(prompt, index)
        self._close(task)

    def _close(self, task: _TaskState) -> None:
        """Tells the curriculum the rewards of a task, if all its samples are decided and its number is known."""
        if self.curriculum is None or task.running or task.prompt is None or task.index is None:
            return
        self.curriculum.closed(task.prompt, task.index, task.rewards, equal=task.equal)

    def _outcome(self, outcome: Outcome) -> bool:
        if outcome.kind in _OWN_KEY_KINDS:
            return False
        task_id = outcome.head.task_id
        task = self._tasks.get(task_id) or self._early.setdefault(task_id, _TaskState(0, 0))
        if outcome.sample_index in task.decided:
            return False
        task.decided.add(outcome.sample_index)
        task.answered_by.append(_version_of(outcome))
        if outcome.has_rl and outcome.reward is not None:
            task.rewards.append(outcome.reward)
        self._close(task)
        if outcome.kind is OutcomeKind.EMPTY:
            self._empty[_version_of(outcome)] += 1
        if trains(outcome) and outcome.rollout_id is not None and outcome.rollout_id not in self._taken:
            self._trainable[outcome.rollout_id] = _Trainable(
                _version_of(outcome), task_id, _has_rl(outcome), outcome.has_opd
            )
        return True

    def _plan(self, plan: BatchPlan) -> bool:
        # A branch that a rollback made continues the run: its steps count from the branch point.
        current = self._lineage.current(self.run_id)
        if plan.run_id != self.run_id and plan.run_id not in self._lineage.family(self.run_id):
            return False
        for row in plan.rows:
            self._taken.add(row.rollout_id)
            self._trainable.pop(row.rollout_id, None)
        if plan.run_id != current:
            return False
        before, self.planned = self.planned, max(self.planned, self._steps(Node(plan.run_id, plan.step)))
        return self.planned > before

    def _result(self, result: Result) -> bool:
        terms = result.task.terms
        if {terms.rl, terms.opd} <= {None, Source.RESULT}:
            return False  # nothing of the sample comes from feedback
        feedback_id = feedback_id_of(result.result_id)
        if feedback_id in self._answered or feedback_id in self._unanswered:
            return False
        self._unanswered[feedback_id] = result
        return True

    def _feedback(self, feedback: Feedback) -> bool:
        result = feedback.result
        if result is None:
            # This may be our own feedback without its result, which was too large: only the id identifies it.
            self._answered.add(feedback.feedback_id)
            return self._unanswered.pop(feedback.feedback_id, None) is not None
        if result.task.run_id != self.run_id or feedback.feedback_id != feedback_id_of(result.result_id):
            return False
        self._answered.add(feedback.feedback_id)
        self._unanswered.pop(feedback.feedback_id, None)
        return True

    def _relative(self, manifest: RunManifest) -> bool:
        """Applies the manifest of another run. A branch of this run, if read after it, moves `planned` to its start."""
        if manifest.run_id in self._others or manifest.run_id == self.run_id:
            return False
        self._others[manifest.run_id] = manifest
        if manifest.run_id != self._lineage.current(self.run_id):
            return False
        self.planned = self._steps(Node(manifest.run_id, 0))
        return True

    def _steps(self, node: Node) -> int:
        """Number of steps of this run and its branches that a node's weights include."""
        return self._lineage.own_steps(self.run_id, node)

    @property
    def _lineage(self) -> Lineage:
        own = self.manifest
        others = (other for other in self._others.values() if own is not None and other.policy == own.policy)
        return Lineage([*([] if own is None else [own]), *others])

    def _manifest(self, manifest: RunManifest) -> bool:
        # Another manifest of the same run (other ranks, other code) continues it with its config and the same versions.
        if self.manifest is not None and manifest.first_version != self.manifest.first_version:
            raise BadManifest(
                f"run {self.run_id} has manifests that begin at version {self.manifest.first_version} "
                f"and at version {manifest.first_version}; the manifests of one run must begin at the same version"
            )
        self.manifest = manifest
        # A stack that runs without an end has no `steps`; then the earlier manifest with `steps` sets the pace.
        if yaml.safe_load(manifest.config).get("steps") is not None:
            self.pace = Pace.of_config(manifest.config, self.run_id)
        return True

    # Queries.

    @property
    def next_index(self) -> int:
        """Number of the next task."""
        return self._next_index

    @property
    def running(self) -> int:
        """Number of samples of this run's tasks that have no outcome yet."""
        return sum(task.running for task in self._tasks.values())

    @property
    def served_version(self) -> int | None:
        """The served version of this run, or None while none is served."""
        if self.manifest is None:
            return None
        version = self._served.version(self.manifest.policy)
        return version if version is not None and version >= self.manifest.first_version else None

    @property
    def served_step(self) -> int | None:
        """Number of served steps of this run (0: the initial adapter), or None while no task may be issued."""
        version = self.served_version
        return None if version is None else self.step_of(version)

    def step_of(self, version: int) -> int | None:
        """Number of steps of a version, counted as `served_step`; None for one before the first run."""
        node = self._lineage.node(version)
        return None if node is None else self._steps(node)

    @property
    def issue_version(self) -> int | None:
        """The version for which tasks are issued now: the candidate that the guard tries, else the served version."""
        served = self.served_version
        if served is None or self.manifest is None or self.pace is None:
            return served
        if not (self.pace.guarded and self._for_candidates):
            return served
        candidate = self._candidates.version(self.manifest.policy)
        return served if candidate is None or candidate < served else candidate

    @property
    def missing(self) -> str | None:
        """The thing that the run lacks, so that no task may be issued; None if it lacks nothing."""
        if self.manifest is None:
            return "its manifest"
        if self.pace is None:
            return "a number of steps, which sets the pace of the tasks: start its trainer with `steps`"
        return "its first served version" if self.served_step is None else None

    @property
    def usable(self) -> int:
        """Number of rollouts that the trainer can still use: trainable, in no plan, recent enough for the next step."""
        return sum(not self._drops(each) for each in self._recent())

    @property
    def hopeless(self) -> str | None:
        """The reason to give the run up, or None: the served version has sampled many batches with nothing to learn,
        because rewards are equal in every group, no answer has a hint, or no answer has anything."""
        if self.pace is None:
            return None
        most = self.pace.max_equal_batches * self.pace.batch_rollouts * (1 + self.pace.max_staleness)
        empty = sum(self._empty[version] for version in self._recent_of(self._empty))
        if empty >= most and not self.usable:
            return self._waits_with(empty) + (
                "have neither a reward nor a hint, while no other can be used. `tentalis logs scoring hinting` has the "
                "reasons"
            )
        if not (self.pace.drops_equal or self.pace.distils_alone):
            return None
        dropped = sum(map(self._drops, self._recent()))
        if dropped < most:
            return None
        if self.pace.distils_alone:
            return self._waits_with(dropped) + (
                "have no hint, which alone trains them (loss.rl_weight is 0). Give hints to more answers, or train on "
                "rewards too"
            )
        return self._waits_with(dropped) + (
            "are in groups whose rewards are all equal: from these nothing can be learned. Give partial credit, other "
            "prompts, more samples for a prompt or a higher temperature"
        )

    def _waits_with(self, answers: int) -> str:
        return f"run {self.run_id} waits for step {self.planned + 1}, and {answers} answers of its newest version "

    def _recent(self) -> list[_Trainable]:
        """Returns the rollouts that are in no plan and recent enough for the next step."""
        found = self._trainable.values()
        recent = self._recent_of({each.version for each in found})
        return [each for each in found if each.version in recent]

    def _recent_of(self, versions: Iterable[int]) -> set[int]:
        """Returns the versions that are recent enough for the next step."""
        if self.manifest is None or self.pace is None:
            return set()
        lineage, limit = self._lineage, self.pace.max_staleness
        begun = Node(lineage.current(self.run_id), 0)
        head = lineage.version(begun) + self.planned - self._steps(begun)
        return {version for version in versions if lineage.staleness(head, version) <= limit}

    def _drops(self, rollout: _Trainable) -> bool:
        """True if no part of the loss reads a rollout, so that the trainer drops it. As `offer_of` of the trainer."""
        if self.pace is None or (rollout.has_opd and self.pace.distils):
            return False
        if not rollout.has_rl or self.pace.distils_alone:
            return True
        if not self.pace.drops_equal:
            return False
        task = self._tasks.get(rollout.task_id)
        return task is not None and task.equal

    def pressed(self, now_ms: int) -> BackPressure | None:
        """Returns the trainer's backpressure if it would discard samples made now, else None."""
        if self.manifest is None:
            return None
        ahead = self.issue_version != self.served_version
        return self._pressure.closed(self.manifest.policy, now_ms, for_candidate=ahead)

    def terms(self, given: Terms) -> Terms:
        """Returns the terms of the next task: without a hint if the trainer does not read it."""
        reads = self.pace is None or self.pace.distils or given.rl is None
        return given if reads else given.model_copy(update={"opd": None})

    def owed(self) -> list[Result]:
        """Returns the results that have no feedback yet."""
        return list(self._unanswered.values())

    def to_issue(self, n_samples: int) -> int:
        """Returns the number of tasks of `n_samples` samples to issue now."""
        version, pace = self.issue_version, self.pace
        step = None if version is None else self.step_of(version)
        if version is None or step is None or pace is None:
            return 0
        if step < pace.steps:
            due = (min(step + 1 + pace.max_staleness, pace.steps) - self.planned) * pace.batch_rollouts
            wanted = due - self.usable - self.running
        else:
            due, wanted = pace.batch_rollouts, self._last_samples_left(pace, version)
        if version != self.served_version:
            # Answers that expire or are given up while the guard waits are replaced after its decision.
            issued = sum(task.n_samples for task in self._tasks.values() if task.version == version)
            wanted = min(wanted, due - issued)
        return max(0, -(-wanted // n_samples))

    def choose(self, n_samples: int) -> Choice | None:
        """Returns the curriculum's prompt for the next task of `n_samples` samples, None without a curriculum.

        A prompt rests for the tasks of all batches that may be sampled at once: a batch does not ask it twice.
        """
        if self.curriculum is None:
            return None
        pace = self.pace
        samples = 0 if pace is None else pace.batch_rollouts * (1 + pace.max_staleness)
        return self.curriculum.choose(self._next_index, max(1, samples // n_samples))

    @property
    def starved(self) -> bool:
        """True if the trainer has all rollouts that pacing allows, none is under way, and the next step has no plan.

        Then the trainer has rejected rollouts that looked trainable (too long, another digest). If that lasts, it needs
        more.
        """
        step, pace = self.served_step, self.pace
        if step is None or pace is None or step >= pace.steps:
            return False
        return self.running == 0 and self.planned <= step

    @property
    def finished(self) -> bool:
        """True if all steps are served, one round sampled by the last version is decided, and no feedback is owed."""
        version, step, pace = self.served_version, self.served_step, self.pace
        if version is None or step is None or pace is None or step < pace.steps or self._unanswered:
            return False
        return self._last_samples_left(pace, version) <= 0 and self.running == 0

    def _last_samples_left(self, pace: Pace, version: int) -> int:
        """Samples of the round after the last step that are not asked yet. Tasks for a refused candidate do not count.
        What other versions answered, as after a long trial, is asked again, once: an assignment may go on doing so."""
        asked = [task for task in self._tasks.values() if task.round >= pace.steps and task.version in (None, version)]
        others = sum(task.answered_by_others for task in asked)
        return pace.batch_rollouts + min(others, pace.batch_rollouts) - sum(task.n_samples for task in asked)


def _version_of(outcome: Outcome) -> int:
    """Returns the version that sampled last, or -1 if the sampler was not a version of the policy."""
    try:
        return parse_policy_name(outcome.policy_spans[-1].policy)[1] if outcome.policy_spans else -1
    except ValueError:
        return -1


def _version_issued_for(task: Task) -> int | None:
    """Returns the version that a task was issued for, None if it names none or no version."""
    try:
        return issued_for(task)
    except ValueError:
        return None


def _number(metadata: Mapping[str, Any], key: str) -> int | None:
    value = str(metadata.get(key, ""))
    return int(value) if value.isdigit() else None
