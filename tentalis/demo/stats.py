"""Computes the statistics of a run from its records. Pure: uses only the log's timestamps, no Kafka."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from schemas.group_statistics import EQUAL_STD, mean_and_std
from schemas.ids import parse_policy_name
from schemas.records import (
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
    Status,
    StepResult,
    Task,
)
from tentalis.policies.guard import ROLLBACK
from tentalis.policies.lineage import Lineage, Node

RATE_WINDOW_MS = 60_000
PHASES = ("sampling", "judging", "planning", "training", "publishing", "serving")
"""Answers; rewards, hints and the join; the wait for the plan of a batch; the step; the adapter's files; its trial,
promotion and swap. A round that is sampled during the trial of its version counts as sampling from the swap on."""
_OWN_KEY_KINDS = (OutcomeKind.LATE, OutcomeKind.SUPERSEDED)


@dataclass(frozen=True, slots=True)
class VersionScore:
    """Rewards of one policy version. `stderr` is over the means of its tasks: samples of one task are not independent.

    `stderr` is None for fewer than two tasks; words and topic are None if the scenario does not record them.
    """

    version: int
    mean: float
    n: int
    stderr: float | None
    mean_words: float | None
    on_topic_share: float | None


@dataclass(slots=True)
class _Version:
    rewards: dict[str, list[float]] = field(default_factory=dict)
    words: list[float] = field(default_factory=list)
    on_topic: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Round:
    """Times of one round, in ms since the epoch, from the broker's record timestamps."""

    first_task: int | None = None
    last_result: int | None = None
    last_outcome: int | None = None
    planned: int | None = None
    stepped: int | None = None
    published: int | None = None
    served: int | None = None

    def judged(self, at: int) -> None:
        """Applies the time of an outcome."""
        self.last_outcome = max(at, self.last_outcome or at)

    def phases(self, before: "_Round | None") -> dict[str, float]:
        """Returns the seconds of each phase whose start and end are known. `before`: the round before."""
        served = None if before is None else before.served
        begun = self.first_task if self.first_task is None or served is None else max(self.first_task, served)
        ends = {
            "sampling": (begun, self.last_result),
            "judging": (self.last_result, self.last_outcome),
            "planning": (self.last_outcome, self.planned),
            "training": (self.planned, self.stepped),
            "publishing": (self.stepped, self.published),
            "serving": (self.published, self.served),
        }
        return {
            name: max(0, end - start) / 1000
            for name, (start, end) in ends.items()
            if start is not None and end is not None
        }


class RunStats:
    """Statistics of one run over all topics of the loop. Records may come twice, and topics in any order.

    Branches continue the run after a rollback: steps count from the run's initial adapter.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.policy: str | None = None
        self.first_version: int | None = None
        self.config: str | None = None
        self.begun: int | None = None  # of the run's first manifest, in ms since the epoch
        self.tasks = 0
        self.samples = 0
        self.results = 0
        self.failed_results = 0
        self.feedback = 0
        self.complaints = 0
        self.tokens = 0
        self.outcomes: Counter[str] = Counter()
        self.published: int | None = None
        self.promoted: int | None = None
        self.acknowledged: int | None = None
        self.refused: dict[int, str] = {}
        self.rollbacks: dict[int, str] = {}
        self.locations: dict[int, str] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self._lineage = Lineage(())
        self._manifests: list[RunManifest] = []
        self._seen: set[tuple[str, str]] = set()
        self._early: list[tuple[Record, int]] = []
        self._versions: dict[int, _Version] = {}
        self._rounds: dict[int, _Round] = {}
        self._round_of_task: dict[str, int] = {}
        self._judged_early: dict[str, int] = {}  # ms of the last outcome, by tasks that have not come yet
        self._sampled: list[tuple[int, int, int]] = []  # start, end (ms), tokens
        self._asked: list[int] = []  # ms

    def apply(self, record: Record, timestamp: int) -> None:
        """Applies a record with its time on the log, in ms."""
        match record:
            case RunManifest() if record.run_id == self.run_id or record.parent_run is not None:
                self._manifest(record)
            case Task() if record.run_id == self.run_id and self._new("task", record.task_id):
                self._task(record, timestamp)
            case Result() if record.task.run_id == self.run_id and self._new("result", record.result_id):
                self._result(record, timestamp)
            case Feedback() if _run_of(record) == self.run_id and self._new("feedback", record.feedback_id):
                self.feedback += 1
                self.complaints += bool(record.text)
            case Outcome() if record.head.run_id == self.run_id and self._new("outcome", record.outcome_key):
                self._outcome(record, timestamp)
            case BatchPlan() if (step := self._step(record.run_id, record.step)) is not None:
                self._round(step - 1).planned = timestamp
            case StepResult() if (step := self._step(record.run_id, record.step)) is not None:
                self.metrics[step] = dict(record.metrics)
                self._round(step - 1).stepped = timestamp
            case PolicyUpdate() | Promotion() | PolicyAck():
                self._policy(record, timestamp)
            case _:
                return

    def _new(self, kind: str, name: str) -> bool:
        if (kind, name) in self._seen:
            return False
        self._seen.add((kind, name))
        return True

    def _step(self, run_id: str, step: int) -> int | None:
        """Returns the number of the run's steps up to this one of a branch, None for a run that is not its branch."""
        if run_id != self.run_id and self._lineage.stem(run_id) != self.run_id:
            return None
        return self._lineage.own_steps(self.run_id, Node(run_id, step))

    @property
    def newest_branch(self) -> str:
        """The id of the run's youngest branch after rollbacks, the run's own without one."""
        return self._lineage.current(self.run_id)

    def step_of(self, version: int) -> int | None:
        """Returns the number of steps of the run that a version has; None if it does not belong to the run."""
        node = self._lineage.node(version)
        return None if node is None else self._step(node.run, node.step)

    def _manifest(self, manifest: RunManifest) -> None:
        self._manifests.append(manifest)
        if manifest.run_id == self.run_id:
            self.policy, self.first_version, self.config = manifest.policy, manifest.first_version, manifest.config
            self.begun = min(manifest.event_time, self.begun or manifest.event_time)
        self._lineage = Lineage(each for each in self._manifests if each.policy == self.policy)
        if manifest.run_id != self.run_id:
            return
        early, self._early = self._early, []
        for record, timestamp in early:
            self._policy(record, timestamp)

    def _task(self, task: Task, timestamp: int) -> None:
        self.tasks += 1
        self.samples += task.n_samples
        self._asked.append(timestamp)
        number = task.metadata.get("round", "")
        if number.isdigit():
            self._round_of_task[task.task_id] = int(number)
            begun = self._round(int(number))
            begun.first_task = min(timestamp, begun.first_task or timestamp)
            if (judged := self._judged_early.pop(task.task_id, None)) is not None:
                begun.judged(judged)

    def _result(self, result: Result, timestamp: int) -> None:
        self.results += 1
        self.failed_results += result.status is Status.FAILED
        tokens = len(result.response_token_ids) // 4
        self.tokens += tokens
        self._sampled.append((timestamp - round(1000 * result.elapsed_s), timestamp, tokens))
        if (number := self._round_of(result)) is not None:
            of = self._round(number)
            of.last_result = max(timestamp, of.last_result or timestamp)

    def _round_of(self, answer: Result | Outcome) -> int | None:
        """Returns the number of the round that an answer belongs to: that of its task; if a refused candidate was to
        answer it, that of the version that did."""
        if isinstance(answer, Result):
            found = answer.task.metadata.get("round", "")
            number = int(found) if found.isdigit() else None
        else:
            number = self._round_of_task.get(answer.head.task_id)
        version = _version_of(answer)
        step = None if version is None else self.step_of(version)
        return number if number is None or step is None else min(number, step)

    def _outcome(self, outcome: Outcome, timestamp: int) -> None:
        self.outcomes[outcome.kind.value] += 1
        if outcome.kind in _OWN_KEY_KINDS:
            return
        task_id = outcome.head.task_id
        if (number := self._round_of(outcome)) is not None:
            self._round(number).judged(timestamp)
        else:
            self._judged_early[task_id] = max(timestamp, self._judged_early.get(task_id, timestamp))
        version = _version_of(outcome)
        if version is None or outcome.reward is None:
            return
        earned = self._versions.setdefault(version, _Version())
        earned.rewards.setdefault(outcome.head.task_id, []).append(outcome.reward)
        if "words" in outcome.components:
            earned.words.append(outcome.components["words"])
        if "on_topic" in outcome.components:
            earned.on_topic.append(outcome.components["on_topic"])

    def _policy(self, record: PolicyUpdate | Promotion | PolicyAck | Record, timestamp: int) -> None:
        if self.policy is None or self.first_version is None:
            self._early.append((record, timestamp))
            return
        assert isinstance(record, PolicyUpdate | Promotion | PolicyAck)
        if record.policy != self.policy or record.version < self.first_version:
            return
        # Step k publishes the version that was trained on round k - 1.
        step = self.step_of(record.version)
        number = -1 if step is None else step - 1
        if isinstance(record, PolicyUpdate):
            self.published = max(record.version, self.published or record.version)
            self.locations[record.version] = record.location
            if number >= 0:
                self._round(number).published = timestamp
        elif isinstance(record, Promotion):
            self.promoted = record.version
            if record.mode == ROLLBACK:
                self.rollbacks[record.event_time] = record.reason
        elif record.ok:
            self.acknowledged = record.version
            if number >= 0 and self._round(number).served is None:
                self._round(number).served = timestamp
        else:
            self.refused[record.version] = record.error or "no reason given"

    def _round(self, number: int) -> _Round:
        return self._rounds.setdefault(number, _Round())

    # Results.

    def tokens_per_second(self) -> float:
        """Returns the response tokens per second over the last minute of sampling, 0 without samples.

        The samples are those that ended in the minute before the newest end. Time counts from their earliest start.
        """
        newest = max((ended for _, ended, _ in self._sampled), default=0)
        recent = [each for each in self._sampled if each[1] > newest - RATE_WINDOW_MS]
        if not recent:
            return 0.0
        span = max(1000, newest - min(begun for begun, _, _ in recent))
        return 1000 * sum(tokens for _, _, tokens in recent) / span

    def seconds_per_step(self) -> float | None:
        """Returns the median time between two versions that were served one after the other, None before the second."""
        served = sorted(of.served for of in self._rounds.values() if of.served is not None)
        return median(b - a for a, b in pairwise(served)) / 1000 if len(served) > 1 else None

    def start_seconds(self, begun: int) -> float | None:
        """Returns the seconds from `begun` (ms since the epoch) until the first task or the start of the first answer
        after it, None before that."""
        later = (at for at in (*self._asked, *(start for start, _, _ in self._sampled)) if at >= begun)
        first = min(later, default=None)
        return None if first is None else (first - begun) / 1000

    def setbacks(self, since: int) -> list[str]:
        """Returns the reasons of the rollbacks, by event time, after `since` (ms since the epoch) and after the adapter
        of the newest step was served for the first time: the run has not come further."""
        served = [of.served for _, of in sorted(self._rounds.items()) if of.served is not None]
        after = max([since, *served[-1:]])
        return [reason for at, reason in sorted(self.rollbacks.items()) if at > after]

    def scores(self) -> list[VersionScore]:
        """Returns the score of each version, ordered by version."""
        return [_score(number, earned) for number, earned in sorted(self._versions.items())]

    def task_means(self, versions: Sequence[int]) -> list[float]:
        """Returns the mean reward of each task that these versions answered."""
        return [
            sum(rewards) / len(rewards)
            for version in versions
            for _, rewards in sorted(self._versions[version].rewards.items())
        ]

    def rewards(self, versions: Sequence[int]) -> list[float]:
        """Returns all rewards of these versions."""
        return [reward for version in versions for each in self._versions[version].rewards.values() for reward in each]

    def equal_answers(self, version: int, group: int) -> int:
        """Returns the number of answers of a version in groups of `group` answers that all have the same reward."""
        groups = self._versions[version].rewards.values() if version in self._versions else ()
        return sum(len(each) for each in groups if len(each) == group and mean_and_std(each)[1] < EQUAL_STD)

    def planned_steps(self) -> list[int]:
        """Returns the steps whose batch has been planned, in their order."""
        return sorted(number + 1 for number, of in self._rounds.items() if of.planned is not None)

    def whole_steps(self, since: int) -> list[int]:
        """Returns the planned steps of which all records came after a time (ms since the epoch), if no older record was
        applied: those that follow another planned step, and the first step of a run that began after it."""
        planned = self.planned_steps()
        first = 1 if self.begun is not None and self.begun >= since else None
        return [step for step in planned if step == first or step - 1 in planned]

    def seconds_by_phase(self, steps: Sequence[int] | None = None) -> dict[str, float]:
        """Returns the median seconds of each phase over the rounds in which it was seen, or over those of some steps. A
        run that was interrupted has the pause in one of them."""
        seen: dict[str, list[float]] = {}
        for number in list(self._rounds) if steps is None else [step - 1 for step in steps]:
            for name, seconds in self._round(number).phases(self._rounds.get(number - 1)).items():
                seen.setdefault(name, []).append(seconds)
        return {name: median(seen[name]) for name in PHASES if name in seen}


def _run_of(feedback: Feedback) -> str | None:
    return None if feedback.result is None else feedback.result.task.run_id


def _version_of(answer: Result | Outcome) -> int | None:
    try:
        return parse_policy_name(answer.policy_spans[-1].policy)[1] if answer.policy_spans else None
    except ValueError:
        return None


def _score(version: int, earned: _Version) -> VersionScore:
    rewards = [reward for each in earned.rewards.values() for reward in each]
    means = [sum(each) / len(each) for each in earned.rewards.values()]
    return VersionScore(
        version,
        _mean(rewards),
        len(rewards),
        _stderr(means),
        _mean(earned.words) if earned.words else None,
        _mean(earned.on_topic) if earned.on_topic else None,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _stderr(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
