"""What the log knows of a run: its manifests, plans, results, and the versions of its policy."""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import BatchPlan, Pin, PolicyUpdate, Promotion, Record, RunManifest, StepResult
from tentalis.config import Settings
from tentalis.kafka import Stored, read_to_end
from tentalis.lineage import Lineage, Node

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunLog:
    """One run, and what matters of its policy's other runs.

    `plans` and `results` are by step and attempt, in log order; `manifests` by digest, the oldest first. `unreadable`:
    what lies on the control topics and is no record, with its place and the reason. `other_runs`: ids. `relatives`: the
    manifests of all runs of the policy. `promotions`: as far as compaction left them, in log order, with their offsets;
    `published_at`: offset by version, on the same topic. `pinned`: versions.
    """

    run_id: str
    policy: str
    manifests: dict[str, RunManifest] = field(default_factory=dict)
    plans: dict[tuple[int, int], BatchPlan] = field(default_factory=dict)
    results: dict[tuple[int, int], StepResult] = field(default_factory=dict)
    updates: dict[int, PolicyUpdate] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    other_runs: frozenset[str] = frozenset()
    relatives: tuple[RunManifest, ...] = ()
    promotions: list[tuple[Promotion, int]] = field(default_factory=list)
    published_at: dict[int, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    highest_version: int = -1
    read_to: int = field(default=-1, compare=False)

    def take(self, record: Record, offset: int) -> None:
        """A record of tentalis.policies.v1, in log order; one that was taken before changes nothing."""
        if offset <= self.read_to:
            return
        self.read_to = offset
        match record:
            case PolicyUpdate(policy=self.policy):
                self.highest_version = max(self.highest_version, record.version)
                self.updates[record.version] = record
                self.published_at[record.version] = offset
            case Promotion(policy=self.policy):
                self.promotions.append((record, offset))
            case Pin(policy=self.policy):
                (self.pinned.add if record.pinned else self.pinned.discard)(record.version)
            case _:
                return

    def let_go(self, before: int) -> None:
        """Drops plans and results of steps before this one, which a trainer that is past them holds for nothing."""
        self.plans = {key: plan for key, plan in self.plans.items() if key[0] >= before}
        self.results = {key: result for key, result in self.results.items() if key[0] >= before}

    @property
    def promoted(self) -> int | None:
        """The version that should be served."""
        return self.promotions[-1][0].version if self.promotions else None

    @property
    def lineage(self) -> Lineage:
        """Of all runs of the policy."""
        return Lineage(self.relatives)

    @property
    def head(self) -> Node:
        """What the run has trained last."""
        return Node(self.run_id, max(0, self.last_step))

    def latest_plan(self, step: int) -> BatchPlan | None:
        """The plan of the step's last attempt."""
        attempts = [attempt for s, attempt in self.plans if s == step]
        return self.plans[step, max(attempts)] if attempts else None

    def winner(self, step: int) -> StepResult | None:
        """The result of the attempt that won: the last one written."""
        found = [result for (s, _), result in self.results.items() if s == step]
        return found[-1] if found else None

    @property
    def last_step(self) -> int:
        """The last step with a result, -1 if there is none."""
        return max((step for step, _ in self.results), default=-1)

    @property
    def first(self) -> RunManifest | None:
        """The run's first manifest: its start positions and first version hold for all that follow."""
        return next(iter(self.manifests.values()), None)


def read_run(settings: Settings, codec: Codec, run_id: str, policy: str | None = None) -> RunLog:
    """Reads the run's records. `policy` None: that of the run's manifest ("" if the log knows no such run)."""
    manifests: list[RunManifest] = []
    others: list[RunManifest] = []
    unreadable: list[str] = []
    for _, record in _records(settings, codec, topics.RUNS, unreadable):
        if isinstance(record, RunManifest):
            (manifests if record.run_id == run_id else others).append(record)
    if policy is None:
        policy = manifests[0].policy if manifests else ""
    run = RunLog(run_id, policy, {manifest.digest: manifest for manifest in manifests}, unreadable=unreadable)
    run.other_runs = frozenset(manifest.run_id for manifest in others)
    run.relatives = tuple(manifest for manifest in (*manifests, *others) if manifest.policy == policy)
    for manifest in run.relatives:
        run.highest_version = max(run.highest_version, manifest.first_version)
    for _, record in _records(settings, codec, topics.BATCHES, unreadable):
        if isinstance(record, StepResult) and record.policy == policy:
            run.highest_version = max(run.highest_version, record.policy_version)
        if isinstance(record, BatchPlan) and record.run_id == run_id:
            run.plans[record.step, record.attempt] = record
        elif isinstance(record, StepResult) and record.run_id == run_id:
            run.results.pop((record.step, record.attempt), None)
            run.results[record.step, record.attempt] = record
    for stored, record in _records(settings, codec, topics.POLICIES, unreadable):
        run.take(record, stored.offset)
    return run


def trained_by(settings: Settings, codec: Codec, runs: Collection[str]) -> dict[str, str]:
    """Key and digest of every rollout in a plan of these runs that was trained."""
    plans: dict[tuple[str, int, int], BatchPlan] = {}
    winners: dict[tuple[str, int], int] = {}
    for _, record in _records(settings, codec, topics.BATCHES, []):
        if isinstance(record, BatchPlan) and record.run_id in runs:
            plans[record.run_id, record.step, record.attempt] = record
        elif isinstance(record, StepResult) and record.run_id in runs:
            winners[record.run_id, record.step] = record.attempt
    trained = (plans.get((run, step, attempt)) for (run, step), attempt in winners.items())
    return {row.rollout_id: row.digest for plan in trained if plan is not None for row in plan.rows}


def decoded(stored: Stored, codec: Codec, unreadable: list[str] | None = None) -> Record | None:
    """The record, or None (and a warning, and a line in `unreadable`) for one that is none: dead-lettering it is
    another's business."""
    if stored.value is None:
        return None
    try:
        return stored.decode_own(codec)
    except DecodeError as error:
        log.warning("passed over: %s", error)
        if unreadable is not None:
            unreadable.append(str(error))
        return None


def _records(settings: Settings, codec: Codec, topic: str, unreadable: list[str]) -> Iterator[tuple[Stored, Record]]:
    for stored in read_to_end(settings, topic):
        record = decoded(stored, codec, unreadable)
        if record is not None:
            yield stored, record
