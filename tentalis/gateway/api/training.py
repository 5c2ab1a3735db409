"""State of the training runs and of the served policies, folded from runs, batches, policies and policy-acks. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

from schemas.records import BatchPlan, PolicyAck, PolicyUpdate, Promotion, Record, RunManifest, StepResult
from tentalis.policies.backpressure import Backpressure

MAX_RUNS = 32
STALLED_MS = 15 * 60_000

TrainingRunState = Literal["training", "waiting", "standing", "stopped"]


class RunAnswer(BaseModel):
    """A training run. `state`: training (a plan is being executed), waiting (for rollouts, or for its training hours),
    standing (a plan has not become a step for 15 minutes), stopped (a newer run of its policy is active, or its
    consumer group has no members); null while the consumer groups are unknown. `last_step`: the newest trained step on
    the log; `planned_step`: the newest step with a plan. Ages in seconds."""

    run_id: str
    policy: str
    state: TrainingRunState | None
    last_step: int
    planned_step: int
    policy_version: int | None
    began_age_s: float
    last_step_age_s: float | None
    metrics: dict[str, float]


class ServedAnswer(BaseModel):
    """A policy: its newest version, the promoted version, and the version that a server acknowledged last, with the
    servers that acknowledged it. `versions_behind`: newest minus served."""

    policy: str
    newest_version: int | None
    promoted_version: int | None
    served_version: int | None
    served_by: list[str]
    served_age_s: float | None
    versions_behind: int | None
    refused_by: dict[str, str]
    back_pressure: str | None


class GroupAnswer(BaseModel):
    """A consumer group: `active` with members, `inactive` without. `lag`: uncommitted records of the topics in which
    the group has committed an offset."""

    state: Literal["active", "inactive"]
    members: int
    lag: int | None


class TrainingStatus(BaseModel):
    """The state of training. `status`: `ok` if the log is fully read; `stale` if it cannot be read now, so the answer
    may be old. `components`: active, inactive, or unknown while the consumer groups are unknown; includes the names of
    earlier systems. `age_s`: age of the consumer group information."""

    status: Literal["ok", "stale"]
    components: dict[str, Literal["active", "inactive", "unknown"]]
    runs: list[RunAnswer]
    policies: list[ServedAnswer]
    consumer_groups: dict[str, GroupAnswer]
    age_s: float | None


@dataclass(slots=True)
class _Run:
    policy: str
    began_at: int
    planned: tuple[int, int] = (0, 0)  # step, attempt
    planned_at: int = 0
    last_result: StepResult | None = None

    @property
    def last_activity(self) -> int:
        return max(self.began_at, self.planned_at, 0 if self.last_result is None else self.last_result.event_time)


@dataclass(slots=True)
class _Policy:
    newest: int | None = None
    promoted: int | None = None
    last_ack: PolicyAck | None = None
    version_by_server: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


class TrainingView:
    """Folds the records. Records of one topic must come in order; topics may interleave."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._policies: dict[str, _Policy] = {}
        self._backpressure = Backpressure()

    def apply(self, record: Record) -> None:
        """Applies a record."""
        match record:
            case RunManifest():
                run = self._run(record.run_id, record.policy, record.event_time)
                run.began_at = min(run.began_at, record.event_time)
            case BatchPlan():
                run = self._run(record.run_id, record.policy, record.event_time)
                if (record.step, record.attempt) >= run.planned:
                    run.planned, run.planned_at = (record.step, record.attempt), record.event_time
            case StepResult():
                run = self._run(record.run_id, record.policy, record.event_time)
                if run.last_result is None or (record.step, record.attempt) >= (
                    run.last_result.step,
                    run.last_result.attempt,
                ):
                    run.last_result = record
            case PolicyUpdate():
                policy = self._policy(record.policy)
                policy.newest = max(record.version, policy.newest or 0)
            case Promotion():
                self._policy(record.policy).promoted = record.version
            case PolicyAck():
                self._apply_ack(record)
            case _:
                self._backpressure.apply(record)

    def _run(self, run_id: str, policy: str, time: int) -> _Run:
        run = self._runs.setdefault(run_id, _Run(policy, time))
        if len(self._runs) > MAX_RUNS:
            others = (name for name in self._runs if name != run_id)
            del self._runs[min(others, key=lambda name: self._runs[name].last_activity)]
        return run

    def _policy(self, name: str) -> _Policy:
        return self._policies.setdefault(name, _Policy())

    def _apply_ack(self, ack: PolicyAck) -> None:
        policy = self._policy(ack.policy)
        if not ack.ok:
            policy.refusals[ack.server_id] = ack.error or "no reason given"
            return
        policy.refusals.pop(ack.server_id, None)
        policy.version_by_server[ack.server_id] = ack.version
        policy.last_ack = ack

    def runs(self, now_ms: int, members: dict[str, int] | None) -> list[RunAnswer]:
        """The runs, most recently active first. `members`: size of each policy's trainer group; None if unknown."""
        newest = sorted(self._runs.items(), key=lambda item: -item[1].last_activity)
        return [self._answer(name, run, now_ms, members) for name, run in newest]

    def _answer(self, name: str, run: _Run, now_ms: int, members: dict[str, int] | None) -> RunAnswer:
        last_step = -1 if run.last_result is None else run.last_result.step
        # One run of a policy trains at a time: the most recently active one.
        current = all(
            other.last_activity <= run.last_activity for other in self._runs.values() if other.policy == run.policy
        )
        state: TrainingRunState | None
        if not current:
            state = "stopped"
        elif members is None:
            state = None
        elif not members.get(run.policy):
            state = "stopped"
        elif run.planned[0] <= last_step:
            state = "waiting"
        else:
            state = "training" if now_ms - run.planned_at < STALLED_MS else "standing"
        metrics = {} if run.last_result is None else run.last_result.metrics
        return RunAnswer(
            run_id=name,
            policy=run.policy,
            state=state,
            last_step=max(0, last_step),
            planned_step=run.planned[0],
            policy_version=None if run.last_result is None else run.last_result.policy_version,
            began_age_s=_age(now_ms, run.began_at),
            last_step_age_s=None if run.last_result is None else _age(now_ms, run.last_result.event_time),
            metrics=metrics,
        )

    def policies(self, now_ms: int) -> list[ServedAnswer]:
        """The policies, by name."""
        return [self._served(name, policy, now_ms) for name, policy in sorted(self._policies.items())]

    def _served(self, name: str, policy: _Policy, now_ms: int) -> ServedAnswer:
        last_ack, backpressure = policy.last_ack, self._backpressure.closed(name, now_ms)
        version = None if last_ack is None else last_ack.version
        return ServedAnswer(
            policy=name,
            newest_version=policy.newest,
            promoted_version=policy.promoted,
            served_version=version,
            served_by=sorted(
                server for server, served_version in policy.version_by_server.items() if served_version == version
            ),
            served_age_s=None if last_ack is None else _age(now_ms, last_ack.event_time),
            versions_behind=None if policy.newest is None or version is None else max(0, policy.newest - version),
            refused_by=dict(sorted(policy.refusals.items())),
            back_pressure=None if backpressure is None else backpressure.reason,
        )


def _age(now_ms: int, then_ms: int) -> float:
    return max(0, now_ms - then_ms) / 1000
