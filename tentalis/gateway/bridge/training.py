"""What is training, and what is served, folded from runs, batches, policies and policy-acks. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

from schemas.records import BatchPlan, PolicyAck, PolicyUpdate, Promotion, Record, RunManifest, StepResult
from tentalis.pressure import Pressure

MOST_RUNS = 32
STANDING_MS = 15 * 60_000

RunState = Literal["training", "waiting", "standing", "stopped"]


class RunAnswer(BaseModel):
    """A run. `state`: training (a plan is being executed), waiting (for rollouts, or for its hours), standing (a plan
    has not become a step for long), stopped (another run of its policy went on, or its trainer is in no consumer
    group); null while the broker does not tell. `last_step` was trained and is on the log; `planned_step` is the newest
    with a plan. Ages in seconds."""

    run_id: str
    policy: str
    state: RunState | None
    last_step: int
    planned_step: int
    policy_version: int | None
    began_age_s: float
    last_step_age_s: float | None
    metrics: dict[str, float]


class ServedAnswer(BaseModel):
    """A policy: its newest version, the one that should be served, and the one that a server acknowledged last with the
    servers that did. `versions_behind`: newest minus served."""

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
    """A consumer group: `active` with members, `inactive` without. `lag`: records that it has not committed yet, of
    topics of which it has committed anything."""

    state: Literal["active", "inactive"]
    members: int
    lag: int | None


class TrainingStatus(BaseModel):
    """The real state. `ok`: the log is read to its end; `stale`: it cannot be read now, and this is what was known.
    `components` has the ancestors' names too: active, inactive, or unknown while the broker does not tell. `age_s`: how
    long ago the consumer groups were looked at."""

    status: Literal["ok", "stale"]
    components: dict[str, Literal["active", "inactive", "unknown"]]
    runs: list[RunAnswer]
    policies: list[ServedAnswer]
    consumer_groups: dict[str, GroupAnswer]
    age_s: float | None


@dataclass(slots=True)
class _Run:
    policy: str
    began: int
    planned: tuple[int, int] = (0, 0)  # step, attempt
    planned_at: int = 0
    last: StepResult | None = None

    @property
    def moved(self) -> int:
        return max(self.began, self.planned_at, 0 if self.last is None else self.last.event_time)


@dataclass(slots=True)
class _Policy:
    newest: int | None = None
    promoted: int | None = None
    served: PolicyAck | None = None
    by: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Training:
    """The fold; records of one topic in its order, topics as they come."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._policies: dict[str, _Policy] = {}
        self._pressure = Pressure()

    def apply(self, record: Record) -> None:
        """Takes in a record."""
        match record:
            case RunManifest():
                run = self._run(record.run_id, record.policy, record.event_time)
                run.began = min(run.began, record.event_time)
            case BatchPlan():
                run = self._run(record.run_id, record.policy, record.event_time)
                if (record.step, record.attempt) >= run.planned:
                    run.planned, run.planned_at = (record.step, record.attempt), record.event_time
            case StepResult():
                run = self._run(record.run_id, record.policy, record.event_time)
                if run.last is None or (record.step, record.attempt) >= (run.last.step, run.last.attempt):
                    run.last = record
            case PolicyUpdate():
                policy = self._policy(record.policy)
                policy.newest = max(record.version, policy.newest or 0)
            case Promotion():
                self._policy(record.policy).promoted = record.version
            case PolicyAck():
                self._acknowledged(record)
            case _:
                self._pressure.apply(record)

    def _run(self, run_id: str, policy: str, at: int) -> _Run:
        run = self._runs.setdefault(run_id, _Run(policy, at))
        if len(self._runs) > MOST_RUNS:
            others = (name for name in self._runs if name != run_id)
            del self._runs[min(others, key=lambda name: self._runs[name].moved)]
        return run

    def _policy(self, name: str) -> _Policy:
        return self._policies.setdefault(name, _Policy())

    def _acknowledged(self, ack: PolicyAck) -> None:
        policy = self._policy(ack.policy)
        if not ack.ok:
            policy.refused[ack.server_id] = ack.error or "no reason given"
            return
        policy.refused.pop(ack.server_id, None)
        policy.by[ack.server_id] = ack.version
        policy.served = ack

    def runs(self, now_ms: int, members: dict[str, int] | None) -> list[RunAnswer]:
        """The runs, the one that moved last first. `members`: of each policy's trainer group; None: not known."""
        newest = sorted(self._runs.items(), key=lambda item: -item[1].moved)
        return [self._answer(name, run, now_ms, members) for name, run in newest]

    def _answer(self, name: str, run: _Run, now_ms: int, members: dict[str, int] | None) -> RunAnswer:
        done = -1 if run.last is None else run.last.step
        # Of a policy one run is trained at a time: the one that moved last.
        current = all(other.moved <= run.moved for other in self._runs.values() if other.policy == run.policy)
        state: RunState | None
        if not current:
            state = "stopped"
        elif members is None:
            state = None
        elif not members.get(run.policy):
            state = "stopped"
        elif run.planned[0] <= done:
            state = "waiting"
        else:
            state = "training" if now_ms - run.planned_at < STANDING_MS else "standing"
        metrics = {} if run.last is None else run.last.metrics
        return RunAnswer(
            run_id=name,
            policy=run.policy,
            state=state,
            last_step=max(0, done),
            planned_step=run.planned[0],
            policy_version=None if run.last is None else run.last.policy_version,
            began_age_s=_age(now_ms, run.began),
            last_step_age_s=None if run.last is None else _age(now_ms, run.last.event_time),
            metrics=metrics,
        )

    def policies(self, now_ms: int) -> list[ServedAnswer]:
        """The policies, by name."""
        return [self._served(name, policy, now_ms) for name, policy in sorted(self._policies.items())]

    def _served(self, name: str, policy: _Policy, now_ms: int) -> ServedAnswer:
        served, pressed = policy.served, self._pressure.closed(name, now_ms)
        version = None if served is None else served.version
        return ServedAnswer(
            policy=name,
            newest_version=policy.newest,
            promoted_version=policy.promoted,
            served_version=version,
            served_by=sorted(server for server, has in policy.by.items() if has == version),
            served_age_s=None if served is None else _age(now_ms, served.event_time),
            versions_behind=None if policy.newest is None or version is None else max(0, policy.newest - version),
            refused_by=dict(sorted(policy.refused.items())),
            back_pressure=None if pressed is None else pressed.reason,
        )


def _age(now_ms: int, then_ms: int) -> float:
    return max(0, now_ms - then_ms) / 1000
