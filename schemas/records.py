"""The pydantic twins of the `.avsc` files beside this module: same names, fields, order, types and defaults.

A test holds the two equal. Records are immutable and refuse unknown fields; ranges that the design gives are checked
here, so that a record that cannot be right is refused where it is made and dead-lettered where it is read.
"""

import math
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from schemas.ids import derived_id, sha256_hex


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _int32(data: bytes) -> bytes:
    if len(data) % 4:
        raise ValueError(f"must hold little-endian int32 values, but has {len(data)} bytes, not a multiple of 4")
    return data


def _float32(data: bytes) -> bytes:
    if len(data) % 4:
        raise ValueError(f"must hold little-endian float32 values, but has {len(data)} bytes, not a multiple of 4")
    return data


# The largest group, for everyone alike: what is accepted must be answerable.
MAX_SAMPLES = 256

Millis = Annotated[int, Field(json_schema_extra={"logicalType": "timestamp-millis"})]
Int = Annotated[int, Field(ge=-(2**31), lt=2**31, json_schema_extra={"avro": "int"})]
Int32s = Annotated[bytes, AfterValidator(_int32), Field(json_schema_extra={"logicalType": "int32-le"})]
Float32s = Annotated[bytes, AfterValidator(_float32), Field(json_schema_extra={"logicalType": "float32-le"})]
Mask = Annotated[bytes, Field(json_schema_extra={"logicalType": "uint8-mask"})]
Finite = Annotated[float, AfterValidator(_finite)]
Reward = Annotated[float, AfterValidator(_finite), Field(ge=-1.0, le=1.0)]
Unit = Annotated[float, AfterValidator(_finite), Field(ge=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]


class Part(BaseModel):
    """A record nested in others; never on a topic by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Record(Part):
    """A record with a topic of its own. `key` is the Kafka key, `event_id` identifies the event whatever copies
    exist.
    """

    ID_FIELD: ClassVar[str] = ""

    @property
    def key(self) -> str:
        raise NotImplementedError

    @property
    def event_id(self) -> str:
        return str(getattr(self, self.ID_FIELD)) if self.ID_FIELD else self.key


# --- what tasks are made of -------------------------------------------------------------------------------------------


class Message(Part):
    role: Name
    content: str


class Sampling(Part):
    temperature: Annotated[float, AfterValidator(_finite), Field(ge=0.0)] = 1.0
    top_p: Annotated[float, AfterValidator(_finite), Field(gt=0.0, le=1.0)] = 1.0
    top_k: Int = 0
    max_tokens: Annotated[Int, Field(ge=1)] = 256
    stop: tuple[str, ...] = ()
    constrained: bool = False


class Verifier(Part):
    name: Name
    data: str = "{}"


class Source(StrEnum):
    UNKNOWN = "unknown"
    RESULT = "result"
    MANAGER = "manager"
    USER = "user"
    NEXT_STATE = "next_state"
    ENVIRONMENT = "environment"
    OPERATOR = "operator"


class Opens(StrEnum):
    UNKNOWN = "unknown"
    AT_ONCE = "at_once"
    FIRST_FEEDBACK = "first_feedback"


class Terms(Part):
    rl: Source | None = Source.RESULT
    opd: Source | None = None
    opens: Opens = Opens.AT_ONCE
    deadline_ms: Annotated[int, Field(gt=0)] = 3_600_000
    opd_window_ms: Annotated[int, Field(gt=0)] = 30_000

    @model_validator(mode="after")
    def _waits_for_something(self) -> "Terms":
        if self.rl is None and self.opd is None:
            raise ValueError("terms must wait for at least one half: rl, opd or both")
        if self.opd is Source.RESULT:
            raise ValueError("the OPD half answers to a feedback source, not to the result itself")
        if self.opens is Opens.FIRST_FEEDBACK and self.rl is Source.RESULT:
            raise ValueError("a task that opens with the first feedback cannot have its reward answer to the result")
        return self


class TaskHead(Part):
    """The part of a task that its halves, outcomes and rollouts keep."""

    task_id: Name
    policy: Name
    environment: Name
    n_samples: Annotated[Int, Field(ge=1, le=MAX_SAMPLES)] = 1
    terms: Terms
    manager_id: str = ""
    run_id: str | None = None
    session_id: str | None = None
    turn_index: Int | None = None
    user_id: str | None = None


class Task(Record):
    ID_FIELD = "task_id"
    task_id: Name
    event_time: Millis
    policy: Name
    environment: Name
    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    n_samples: Annotated[Int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling: Sampling = Sampling()
    verifier: Verifier | None = None
    terms: Terms = Terms()
    manager_id: str = ""
    target_worker: str | None = None
    run_id: str | None = None
    session_id: str | None = None
    turn_index: Int | None = None
    user_id: str | None = None
    metadata: dict[str, str] = {}

    @property
    def key(self) -> str:
        return self.task_id

    @property
    def answered(self) -> bool:
        """Whether it is a turn of a conversation: somebody has answered it already, and what came next is awaited."""
        return Source.NEXT_STATE in (self.terms.rl, self.terms.opd)

    @property
    def head(self) -> TaskHead:
        return TaskHead(
            task_id=self.task_id,
            policy=self.policy,
            environment=self.environment,
            n_samples=self.n_samples,
            terms=self.terms,
            manager_id=self.manager_id,
            run_id=self.run_id,
            session_id=self.session_id,
            turn_index=self.turn_index,
            user_id=self.user_id,
        )


# --- results and feedback ---------------------------------------------------------------------------------------------


class Status(StrEnum):
    UNKNOWN = "unknown"
    OK = "ok"
    FAILED = "failed"


class LogprobsMode(StrEnum):
    UNKNOWN = "unknown"
    PROCESSED = "processed"
    RAW = "raw"
    NONE = "none"


class PolicySpan(Part):
    start: Annotated[Int, Field(ge=0)]
    policy: Name


class ToolCall(Part):
    name: Name
    arguments: str = "{}"
    result: str | None = None


class Result(Record):
    ID_FIELD = "result_id"
    result_id: Name
    event_time: Millis
    opened_at: Millis
    task: Task
    sample_index: Annotated[Int, Field(ge=0)]
    worker_id: Name
    status: Status
    error: str | None = None
    text: str = ""
    steps: tuple[str, ...] = ()
    prompt_token_ids: Int32s = b""
    response_token_ids: Int32s = b""
    sampler_logprobs: Float32s = b""
    logprobs_mode: LogprobsMode = LogprobsMode.NONE
    sampling: Sampling = Sampling()
    policy_spans: tuple[PolicySpan, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    server_id: str = ""
    elapsed_s: Annotated[float, AfterValidator(_finite), Field(ge=0.0)] = 0.0

    @model_validator(mode="after")
    def _aligned(self) -> "Result":
        if self.sample_index >= self.task.n_samples:
            raise ValueError(f"sample_index {self.sample_index} of a task with {self.task.n_samples} samples")
        if self.sampler_logprobs and len(self.sampler_logprobs) != len(self.response_token_ids):
            raise ValueError(
                f"{len(self.sampler_logprobs) // 4} log-probs for {len(self.response_token_ids) // 4} response tokens"
            )
        beyond = [span.start for span in self.policy_spans if span.start > len(self.response_token_ids) // 4]
        if beyond:
            raise ValueError(
                f"a policy span starts at token {beyond[0]} of {len(self.response_token_ids) // 4} response tokens"
            )
        return self

    @property
    def key(self) -> str:
        return self.task.task_id

    @property
    def response_digest(self) -> str:
        """sha256 of the response tokens, or of the text where there are none."""
        return response_digest(self.response_token_ids, self.text)


def response_digest(response_token_ids: bytes, text: str) -> str:
    """sha256 (hex) of the response tokens, or of the text where there are none."""
    return sha256_hex(response_token_ids or text.encode())


def result_id(
    task_id: str, sample_index: int, spans: tuple[PolicySpan, ...], response_token_ids: bytes, text: str
) -> str:
    """The same answer twice has one id; another answer, or the same one by another policy version, has another."""
    return derived_id(
        "result",
        task_id,
        sample_index,
        [[span.start, span.policy] for span in spans],
        response_digest(response_token_ids, text),
    )


class Polarity(StrEnum):
    UNKNOWN = "unknown"
    POSITIVE = "positive"
    NEGATIVE = "negative"
    NONE = "none"


class Feedback(Record):
    ID_FIELD = "feedback_id"
    feedback_id: Name
    event_time: Millis
    task_id: Name
    sample_index: Annotated[Int, Field(ge=0)] | None = None
    source: Source
    author: str = ""
    score: Unit | None = None
    polarity: Polarity = Polarity.NONE
    text: str = ""
    result: Result | None = None

    @model_validator(mode="after")
    def _speaks_of_its_result(self) -> "Feedback":
        if self.source in (Source.UNKNOWN, Source.RESULT):
            raise ValueError(f"feedback cannot come from the source {self.source.value!r}")
        if self.result is not None and self.result.task.task_id != self.task_id:
            raise ValueError(f"feedback on task {self.task_id} carries a result of task {self.result.task.task_id}")
        if self.result is not None and self.sample_index not in (None, self.result.sample_index):
            raise ValueError(f"feedback on sample {self.sample_index} carries sample {self.result.sample_index}")
        return self

    @property
    def key(self) -> str:
        return self.task_id


# --- the halves log ---------------------------------------------------------------------------------------------------


class Sample(Part):
    """What a half carries so that it can become a rollout by itself. Token fields are flat: prompt and response in one
    sequence of n tokens; loss_mask is 1 where the policy chose the token; sampler_logprobs is 0 where the mask is."""

    head: TaskHead
    sample_index: Annotated[Int, Field(ge=0)]
    result_id: Name
    response_digest: Name
    worker_id: str = ""
    status: Status = Status.OK
    token_ids: Int32s = b""
    loss_mask: Mask = b""
    sampler_logprobs: Float32s = b""
    logprobs_mode: LogprobsMode = LogprobsMode.NONE
    sampling: Sampling = Sampling()
    policy_spans: tuple[PolicySpan, ...] = ()

    @model_validator(mode="after")
    def _aligned(self) -> "Sample":
        n = len(self.token_ids) // 4
        if len(self.loss_mask) != n or len(self.sampler_logprobs) != 4 * n:
            raise ValueError(
                f"{n} tokens, {len(self.loss_mask)} mask bytes and {len(self.sampler_logprobs) // 4} log-probs; "
                "they must be equally many"
            )
        if self.sample_index >= self.head.n_samples:
            raise ValueError(f"sample_index {self.sample_index} of a task with {self.head.n_samples} samples")
        return self

    def without_tokens(self) -> "Sample":
        """The same sample for a half that says nothing: identity kept, payload left out."""
        return self.model_copy(update={"token_ids": b"", "loss_mask": b"", "sampler_logprobs": b""})


class Open(Record):
    ID_FIELD = "open_id"
    open_id: Name
    event_time: Millis
    opened_at: Millis
    head: TaskHead
    task_at: Millis | None = None

    @property
    def key(self) -> str:
        return self.head.task_id


class TokenSpan(Part):
    start: Annotated[Int, Field(ge=0)]
    end: Annotated[Int, Field(ge=0)]


class Score(Record):
    ID_FIELD = "score_id"
    score_id: Name
    event_time: Millis
    opened_at: Millis
    sample: Sample
    source: Source
    reward: Reward | None = None
    components: dict[str, Finite] = {}
    step_scores: Float32s = b""
    step_spans: tuple[TokenSpan, ...] = ()
    votes: tuple[str, ...] = ()
    scorer: Name
    feedback_id: str | None = None
    task_at: Millis | None = None

    @property
    def key(self) -> str:
        return self.sample.head.task_id


class HintKind(StrEnum):
    UNKNOWN = "unknown"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    NONE = "none"


class Hint(Record):
    ID_FIELD = "hint_id"
    hint_id: Name
    event_time: Millis
    opened_at: Millis
    sample: Sample
    source: Source
    kind: HintKind
    hints: tuple[str, ...] = ()
    teacher_policy: str | None = None
    teacher_logprobs: Float32s | None = None
    hinter: Name
    feedback_id: str | None = None
    topk: Annotated[Int, Field(ge=0)] = 0
    topk_ids: Int32s = b""
    topk_logprobs: Float32s = b""
    task_at: Millis | None = None

    @model_validator(mode="after")
    def _teacher_scores_the_students_tokens(self) -> "Hint":
        if self.kind is HintKind.ACCEPTED and self.teacher_logprobs is None:
            raise ValueError("an accepted hint carries the teacher's log-probs")
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != len(self.sample.token_ids):
            raise ValueError(
                f"{len(self.teacher_logprobs) // 4} teacher log-probs for {len(self.sample.token_ids) // 4} tokens"
            )
        problem = topk_problem(len(self.sample.token_ids) // 4, self.topk, self.topk_ids, self.topk_logprobs)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def key(self) -> str:
        return self.sample.head.task_id


def topk_problem(n_tokens: int, k: int, ids: bytes, logprobs: bytes) -> str | None:
    """Why a teacher's likeliest tokens do not fit n tokens: they are [hints, n, k], one hint or more, or nothing."""
    if len(ids) != len(logprobs):
        return f"{len(ids) // 4} likeliest tokens with {len(logprobs) // 4} log-probs"
    if len(ids) % (4 * n_tokens * k or 1) or (k == 0) != (not ids):
        return f"{len(ids) // 4} likeliest tokens are not {k} for each of {n_tokens} tokens and each hint"
    return None


class Tick(Record):
    event_time: Millis
    partition: Annotated[Int, Field(ge=0)]

    @property
    def key(self) -> str:
        return f"tick/{self.partition}"


class Forget(Record):
    ID_FIELD = "forget_id"
    forget_id: Name
    event_time: Millis
    session_id: str | None = None
    user_id: str | None = None
    before: Millis | None = None
    policy: str | None = None

    @property
    def key(self) -> str:
        return self.forget_id

    @property
    def asks(self) -> bool:
        """Whether it names anybody, or a time: a policy alone only narrows, and an empty request concerns nothing."""
        return self.session_id is not None or self.user_id is not None or self.before is not None

    def concerns(self, head: TaskHead, at: int) -> bool:
        """Whether a task, or what came of it at `at` (ms), is to be forgotten: everything that is given must hold."""
        return (
            self.asks
            and self.session_id in (None, head.session_id)
            and self.user_id in (None, head.user_id)
            and self.policy in (None, head.policy)
            and (self.before is None or at < self.before)
        )


# --- what the join emits ----------------------------------------------------------------------------------------------


class OutcomeKind(StrEnum):
    UNKNOWN = "unknown"
    RL = "rl"
    OPD = "opd"
    BOTH = "both"
    EMPTY = "empty"
    EXPIRED = "expired"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    LATE = "late"


class Outcome(Record):
    """`outcome_key` is task_id/sample_index, with /late/<half event id> or /superseded/<result_id> for those."""

    ID_FIELD = "outcome_id"
    outcome_id: Name
    outcome_key: Name
    event_time: Millis
    kind: OutcomeKind
    head: TaskHead
    sample_index: Annotated[Int, Field(ge=0)]
    result_id: str | None = None
    worker_id: str = ""
    policy_spans: tuple[PolicySpan, ...] = ()
    reward: Reward | None = None
    components: dict[str, Finite] = {}
    has_rl: bool = False
    has_opd: bool = False
    rollout_id: str | None = None
    rollout_digest: str | None = None
    not_trainable: str | None = None
    half_id: str | None = None
    n_closed: Annotated[Int, Field(ge=0)] = 0

    @property
    def key(self) -> str:
        return self.outcome_key


class Provenance(Part):
    half: Name
    half_id: Name
    topic: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]


class Rollout(Record):
    """Everything the trainer needs and nothing to look up. n tokens: token_ids int32[n], loss_mask uint8[n],
    sampler_logprobs float32[n] (0 outside the mask), teacher_logprobs float32[n] or null."""

    ID_FIELD = "rollout_event_id"
    rollout_id: Name
    rollout_event_id: Name
    event_time: Millis
    head: TaskHead
    sample_index: Annotated[Int, Field(ge=0)]
    result_id: Name
    worker_id: str = ""
    token_ids: Int32s = b""
    loss_mask: Mask = b""
    sampler_logprobs: Float32s = b""
    logprobs_mode: LogprobsMode = LogprobsMode.NONE
    sampling: Sampling = Sampling()
    policy_spans: tuple[PolicySpan, ...] = ()
    reward: Reward | None = None
    components: dict[str, Finite] = {}
    n_requested: Annotated[Int, Field(ge=1)] = 1
    n_closed: Annotated[Int, Field(ge=0)] = 0
    group_mean: Finite | None = None
    group_std: Finite | None = None
    has_rl: bool = False
    has_opd: bool = False
    step_scores: Float32s = b""
    step_spans: tuple[TokenSpan, ...] = ()
    hints: tuple[str, ...] = ()
    teacher_policy: str | None = None
    teacher_logprobs: Float32s | None = None
    provenance: tuple[Provenance, ...] = ()
    digest: Name
    forgotten: bool = False
    n_rewarded: Annotated[Int, Field(ge=0)] | None = None
    topk: Annotated[Int, Field(ge=0)] = 0
    topk_ids: Int32s = b""
    topk_logprobs: Float32s = b""

    @property
    def key(self) -> str:
        return self.rollout_id

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def policy_version(self) -> str:
        """The last policy version that sampled; the plan and the pages group by it."""
        return self.policy_spans[-1].policy if self.policy_spans else ""


# --- runs, plans, policies --------------------------------------------------------------------------------------------


class Position(Part):
    topic: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]


class RunManifest(Record):
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

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.digest}"


class PlanRow(Part):
    rollout_id: Name
    digest: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]
    n_tokens: Annotated[Int, Field(ge=1)]
    rl: bool
    opd: bool
    rank: Annotated[Int, Field(ge=0)]
    micro_batch: Annotated[Int, Field(ge=0)]


class Drop(Part):
    partition: Annotated[Int, Field(ge=0)]
    first_offset: Annotated[int, Field(ge=0)]
    last_offset: Annotated[int, Field(ge=0)]
    count: Annotated[Int, Field(ge=1)]
    reason: Name


class BatchPlan(Record):
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

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.step}/{self.attempt}/plan"


class StepResult(Record):
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


class Canary(Part):
    """A short token sequence (int32[n]) and the trainer's log-probs of it (float32[n], the first is 0)."""

    token_ids: Int32s
    logprobs: Float32s


class PolicyUpdate(Record):
    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    run_id: Name
    step: Annotated[Int, Field(ge=0)]
    sha256: Name
    location: Name
    base_model: str
    base_sha256: Name
    rank: Annotated[Int, Field(ge=1)]
    canary: Canary

    @property
    def name(self) -> str:
        return f"{self.policy}@v{self.version}"

    @property
    def key(self) -> str:
        return self.name


class Promotion(Record):
    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    sha256: Name
    mode: Name
    by: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.policy}@v{self.version}"

    @property
    def key(self) -> str:
        return self.policy


class PolicyAck(Record):
    server_id: Name
    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    sha256: Name
    ok: bool
    error: str | None = None
    canary_max_diff: float | None = None
    load_seconds: Finite = 0.0

    @property
    def name(self) -> str:
        return f"{self.policy}@v{self.version}"

    @property
    def key(self) -> str:
        return f"{self.server_id}/{self.policy}"


class Pin(Record):
    """Keeps an adapter and its checkpoint from being pruned, until the same key says otherwise."""

    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    pinned: bool
    by: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.policy}@v{self.version}"

    @property
    def key(self) -> str:
        return f"{self.name}/pin"


class BackPressure(Record):
    """Whether more rollouts of a policy would only be thrown away. It holds until `expires_at`, or until the next one:
    a trainer that is gone keeps nobody waiting."""

    policy: Name
    run_id: Name
    event_time: Millis
    closed: bool
    waiting: Annotated[int, Field(ge=0)]
    ahead: Annotated[Int, Field(ge=0)]
    max_staleness: Annotated[Int, Field(ge=0)]
    expires_at: Millis
    reason: str = ""

    @property
    def key(self) -> str:
        return f"{self.policy}/back-pressure"


# --- the other topics -------------------------------------------------------------------------------------------------


class SessionEventKind(StrEnum):
    UNKNOWN = "unknown"
    TURN = "turn"
    END = "end"


class SessionEvent(Record):
    """What a gateway says of a call once it is over. `turn_index` is not read: who links the turns counts them."""

    ID_FIELD = "session_event_id"
    session_event_id: Name
    event_time: Millis
    session_id: Name
    turn_index: Annotated[Int, Field(ge=0)] = 0
    turn_type: str = "main"
    worker_id: str = ""
    model: str = ""
    messages: tuple[Message, ...] = ()
    response: str = ""
    prompt_token_ids: Int32s = b""
    response_token_ids: Int32s = b""
    sampler_logprobs: Float32s = b""
    done: bool = False
    kind: SessionEventKind = SessionEventKind.TURN
    decided_by: str = ""
    user_id: str | None = None
    policy: str = ""
    request: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs_mode: LogprobsMode = LogprobsMode.NONE
    sampling: Sampling = Sampling()
    finish_reason: str = ""
    status: Status = Status.OK
    not_trainable: str = ""
    elapsed_s: Annotated[float, AfterValidator(_finite), Field(ge=0.0)] = 0.0
    gateway_id: str = ""

    @model_validator(mode="after")
    def _aligned(self) -> "SessionEvent":
        if self.sampler_logprobs and len(self.sampler_logprobs) != len(self.response_token_ids):
            raise ValueError(
                f"{len(self.sampler_logprobs) // 4} log-probs for {len(self.response_token_ids) // 4} response tokens"
            )
        return self

    @property
    def key(self) -> str:
        return self.session_id


class Skill(Record):
    ID_FIELD = "skill_id"
    skill_id: Name
    event_time: Millis
    name: Name
    text: Name
    category: str = "general"
    source_task_id: str | None = None
    source_score: Unit | None = None

    @property
    def key(self) -> str:
        return self.skill_id


class MetaSignal(Record):
    """One window of event time for a manager, worker and environment, from one partition of outcomes or of feedback:
    merge those of a window.

    `count` is the number of known rewards (mean and variance are over them), `feedback_count` that of graded feedback.
    """

    manager_id: str
    worker_id: str
    partition: Annotated[Int, Field(ge=0)]
    event_time: Millis
    window_start: Millis
    window_ms: Annotated[int, Field(gt=0)]
    count: Annotated[int, Field(ge=0)]
    mean_reward: Finite | None = None
    reward_variance: Finite | None = None
    outcomes: dict[str, int] = {}
    feedback_count: Annotated[int, Field(ge=0)] = 0
    mean_feedback_score: Finite | None = None
    environment: str = ""
    feedback_variance: Finite | None = None

    @property
    def key(self) -> str:
        counted = "feedback" if self.feedback_count and not self.outcomes else "outcomes"
        return f"{self.manager_id}/{self.worker_id}/{self.environment}/{self.window_start}/{self.partition}/{counted}"


class EvalResult(Record):
    ID_FIELD = "eval_id"
    eval_id: Name
    event_time: Millis
    experiment: Name
    scenario: Name
    worker_id: str = ""
    policy: str = ""
    passed: bool | None = None
    metrics: dict[str, Finite] = {}
    details: str = ""

    @property
    def key(self) -> str:
        return self.eval_id


class AuditRecord(Record):
    ID_FIELD = "audit_id"
    audit_id: Name
    event_time: Millis
    component: Name
    topic: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]
    record_type: Name
    record_id: Name
    sha256: Name

    @property
    def key(self) -> str:
        return self.audit_id


RECORDS: dict[str, type[Record]] = {
    record.__name__: record
    for record in (
        Task,
        Result,
        Feedback,
        Open,
        Score,
        Hint,
        Tick,
        Forget,
        Outcome,
        Rollout,
        RunManifest,
        BatchPlan,
        StepResult,
        PolicyUpdate,
        Promotion,
        PolicyAck,
        Pin,
        BackPressure,
        SessionEvent,
        Skill,
        MetaSignal,
        EvalResult,
        AuditRecord,
    )
}


def sample_of(result: Result) -> Sample:
    """The flat token form of a result: prompt and response in one sequence, mask and log-probs aligned to it.

    A result without log-probs keeps its tokens, with zero log-probs and the mode it declares; `not_trainable_by_ratio`
    then says why it cannot be trained on.
    """
    n_prompt = len(result.prompt_token_ids) // 4
    n_response = len(result.response_token_ids) // 4
    return Sample(
        head=result.task.head,
        sample_index=result.sample_index,
        result_id=result.result_id,
        response_digest=result.response_digest,
        worker_id=result.worker_id,
        status=result.status,
        token_ids=result.prompt_token_ids + result.response_token_ids,
        loss_mask=b"\0" * n_prompt + b"\1" * n_response,
        sampler_logprobs=b"\0" * (4 * n_prompt) + (result.sampler_logprobs or b"\0" * (4 * n_response)),
        logprobs_mode=result.logprobs_mode,
        sampling=result.sampling,
        policy_spans=tuple(PolicySpan(start=span.start + n_prompt, policy=span.policy) for span in result.policy_spans),
    )


def not_trainable_by_ratio(sample: Sample) -> str | None:
    """Why the importance ratio pi/mu of this sample has no meaning, or None if it has.

    Greedy, truncated (top-p, top-k) or grammar-constrained sampling and log-probs of another distribution than the one
    that sampled make mu unknown.
    """
    sampling = sample.sampling
    if sample.status is not Status.OK:
        return f"status {sample.status.value}"
    if not sample.token_ids or not any(sample.loss_mask):
        return "no response tokens"
    if sample.logprobs_mode is not LogprobsMode.PROCESSED:
        return f"log-probs mode {sample.logprobs_mode.value}"
    if sampling.temperature == 0.0:
        return "greedy sampling"
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        return "truncated sampling"
    if sampling.constrained:
        return "constrained sampling"
    return None
