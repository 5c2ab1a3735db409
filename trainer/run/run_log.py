"""The records of a run on the log: its manifests, plans, results, and the versions of its policy."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from schemas import topics
from schemas.records import BatchPlan, Pin, PolicyUpdate, Promotion, Record, RunManifest, StepResult
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.skipped import SKIPPED
from tentalis.policies.assignments import Assignments
from tentalis.policies.lineage import Lineage, Node
from tentalis.service.settings import Settings


@dataclass(slots=True)
class RunLog:
    """One run, and the relevant records of its policy's other runs.

    `plans` and `results` are by step and attempt, in log order; `manifests` by digest, the oldest first. `unreadable`:
    invalid records on the control topics, with place and reason. `other_runs`: ids. `relatives`: the manifests of all
    runs of the policy. `promotions`: those that compaction has left, in log order, with their offsets; `published_at`:
    offset by version, on the same topic. `pinned`: versions.
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
    assignments: Assignments = field(default_factory=Assignments, compare=False)
    highest_version: int = -1
    read_to: int = field(default=-1, compare=False)

    def add_record(self, record: Record, offset: int) -> None:
        """Adds a record of tentalis.policies.v1, in log order; a record that was already added changes nothing."""
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
                self.assignments.apply(record)

    @property
    def protected(self) -> set[int]:
        """The versions that are pinned or assigned: they are not pruned."""
        return self.pinned | self.assignments.versions(self.policy)

    def drop_before(self, step: int) -> None:
        """Drops plans and results of steps before this one: a trainer past them does not need them."""
        self.plans = {key: plan for key, plan in self.plans.items() if key[0] >= step}
        self.results = {key: result for key, result in self.results.items() if key[0] >= step}

    @property
    def promoted_version(self) -> int | None:
        """The version that should be served."""
        return self.promotions[-1][0].version if self.promotions else None

    @property
    def lineage(self) -> Lineage:
        """The lineage of all runs of the policy."""
        return Lineage(self.relatives)

    @property
    def last_node(self) -> Node:
        """The last step that the run has trained."""
        return Node(self.run_id, max(0, self.last_step))

    def latest_plan(self, step: int) -> BatchPlan | None:
        """The plan of the step's last attempt."""
        attempts = [attempt for plan_step, attempt in self.plans if plan_step == step]
        return self.plans[step, max(attempts)] if attempts else None

    def winning_result(self, step: int) -> StepResult | None:
        """Returns the result of the attempt that won: the last one written."""
        results = [result for (result_step, _), result in self.results.items() if result_step == step]
        return results[-1] if results else None

    @property
    def last_step(self) -> int:
        """The last step with a result, -1 if there is none."""
        return max((step for step, _ in self.results), default=-1)

    @property
    def first_manifest(self) -> RunManifest | None:
        """The run's first manifest: its start positions and first version hold for all later ones."""
        return next(iter(self.manifests.values()), None)


def read_run(settings: Settings, codec: Codec, run_id: str, policy: str | None = None) -> RunLog:
    """Reads the run's records. `policy` None: that of the run's manifest ("" if the log has no such run)."""
    manifests: list[RunManifest] = []
    others: list[RunManifest] = []
    unreadable: list[str] = []
    for _, record in _read_records(settings, codec, topics.RUNS, unreadable):
        if isinstance(record, RunManifest):
            (manifests if record.run_id == run_id else others).append(record)
    if policy is None:
        policy = manifests[0].policy if manifests else ""
    run = RunLog(run_id, policy, {manifest.digest: manifest for manifest in manifests}, unreadable=unreadable)
    run.other_runs = frozenset(manifest.run_id for manifest in others)
    run.relatives = tuple(manifest for manifest in (*manifests, *others) if manifest.policy == policy)
    for manifest in run.relatives:
        run.highest_version = max(run.highest_version, manifest.first_version)
    for _, record in _read_records(settings, codec, topics.BATCHES, unreadable):
        if isinstance(record, StepResult) and record.policy == policy:
            run.highest_version = max(run.highest_version, record.policy_version)
        if isinstance(record, BatchPlan) and record.run_id == run_id:
            run.plans[record.step, record.attempt] = record
        elif isinstance(record, StepResult) and record.run_id == run_id:
            run.results.pop((record.step, record.attempt), None)
            run.results[record.step, record.attempt] = record
    for stored, record in _read_records(settings, codec, topics.POLICIES, unreadable):
        run.add_record(record, stored.offset)
    return run


def plans_trained_by(settings: Settings, codec: Codec, runs: Collection[str]) -> list[BatchPlan]:
    """Returns the trained plans of these runs."""
    plans: dict[tuple[str, int, int], BatchPlan] = {}
    winners: dict[tuple[str, int], int] = {}
    for _, record in _read_records(settings, codec, topics.BATCHES, []):
        if isinstance(record, BatchPlan) and record.run_id in runs:
            plans[record.run_id, record.step, record.attempt] = record
        elif isinstance(record, StepResult) and record.run_id in runs:
            winners[record.run_id, record.step] = record.attempt
    trained = (plans.get((run, step, attempt)) for (run, step), attempt in winners.items())
    return [plan for plan in trained if plan is not None]


def decode_record(stored: Stored, codec: Codec, unreadable: list[str] | None = None) -> Record | None:
    """Decodes a record. An invalid one is logged, added to `unreadable`, and returned as None; another process
    dead-letters it."""
    if stored.value is None:
        return None
    try:
        return stored.decode_own(codec)
    except DecodeError as error:
        SKIPPED.add(error)
        if unreadable is not None:
            unreadable.append(str(error))
        return None


def _read_records(
    settings: Settings, codec: Codec, topic: str, unreadable: list[str]
) -> Iterator[tuple[Stored, Record]]:
    for stored in read_to_end(settings, topic):
        record = decode_record(stored, codec, unreadable)
        if record is not None:
            yield stored, record
