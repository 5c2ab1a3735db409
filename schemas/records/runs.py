"""Training runs: RunManifest, and a BatchPlan and a StepResult for each step."""

from typing import Annotated

from pydantic import Field

from schemas.records.base import Finite, Int, Millis, Name, Record, RecordPart


class Position(RecordPart):
    """The next offset to read of a partition."""

    topic: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]


class RunManifest(Record):
    """All inputs of a run's bytes besides its plans. Immutable under its digest."""

    run_id: Name
    digest: Name
    event_time: Millis
    policy: Name
    first_version: Annotated[Int, Field(ge=0)]
    config: str
    base_model: str
    base_sha256: Name
    tokenizer_sha256: Name
    adapter_seed: int
    adapter_initialiser: Name
    initial_adapter_sha256: Name
    parent_run: str | None = None
    parent_step: Int | None = None
    versions: dict[str, str] = {}
    threads: Annotated[Int, Field(ge=1)]
    instruction_set: str
    device: Name
    world_size: Annotated[Int, Field(ge=1)]
    start: tuple[Position, ...] = ()
    environment: dict[str, str] = {}

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.digest}"


class PlanRow(RecordPart):
    """A rollout of a batch: its position on the log, the parts that train, its rank and its micro-batch."""

    rollout_id: Name
    digest: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]
    n_tokens: Annotated[Int, Field(ge=1)]
    rl: bool
    opd: bool
    rank: Annotated[Int, Field(ge=0)]
    micro_batch: Annotated[Int, Field(ge=0)]


class Drop(RecordPart):
    """Rollouts that a plan leaves out: a range of offsets, their number, and the reason."""

    partition: Annotated[Int, Field(ge=0)]
    first_offset: Annotated[int, Field(ge=0)]
    last_offset: Annotated[int, Field(ge=0)]
    count: Annotated[Int, Field(ge=1)]
    reason: Name


class BatchPlan(Record):
    """The plan of one training step, published before the step."""

    ID_FIELD = "plan_id"
    run_id: Name
    step: Annotated[Int, Field(ge=1)]
    attempt: Annotated[Int, Field(ge=1)]
    plan_id: Name
    event_time: Millis
    manifest_digest: Name
    policy: Name
    topic: Name
    rows: tuple[PlanRow, ...]
    drops: tuple[Drop, ...] = ()
    low_water: tuple[Position, ...] = ()
    world_size: Annotated[Int, Field(ge=1)]
    seed: int
    owner: Name
    baseline: Finite | None = None

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.step}/{self.attempt}/plan"


class StepResult(Record):
    """The result of a training step: metrics, times and the adapter's hash. Step 0 is the initial adapter."""

    run_id: Name
    step: Annotated[Int, Field(ge=0)]
    attempt: Annotated[Int, Field(ge=0)]
    plan_id: str | None
    event_time: Millis
    policy: Name
    policy_version: Annotated[Int, Field(ge=0)]
    adapter_sha256: Name
    metrics: dict[str, Finite] = {}
    seconds: dict[str, Finite] = {}
    owner: Name

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.step}/{self.attempt}/result"
