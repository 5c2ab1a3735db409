"""The output of the join: an Outcome for each sample, and a Rollout for each sample to train on."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from schemas.records.base import Finite, Float32s, Int, Int32s, Mask, Millis, Name, Record, RecordPart, Reward
from schemas.records.halves import TokenSpan
from schemas.records.results import LogprobsMode, PolicySpan, RecordedBy
from schemas.records.tasks import Sampling, TaskHead

GIVEN_UP = "given up: "
"""Beginning of `not_trainable` in the outcome of a sample that was given up (`--accept-loss`): a topic that it needs
was lost. Its kind is expired."""


class OutcomeKind(StrEnum):
    """The result of joining one sample.

    rl, opd, both: a rollout with a reward, a hint, or both. empty: halves came, but nothing to train on. expired: no
    half came before the deadline. failed: the answer failed. infra: the infrastructure failed: no reward, and
    nothing to train on. A superseded result and a late half have their own outcomes.
    """

    UNKNOWN = "unknown"
    RL = "rl"
    OPD = "opd"
    BOTH = "both"
    EMPTY = "empty"
    EXPIRED = "expired"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    LATE = "late"
    INFRA = "infra"


class Outcome(Record):
    """The outcome of one sample. `outcome_key` is task_id/sample_index, plus /late/<half event id> for a late half or
    /superseded/<result_id> for a superseded result."""

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

    @property
    def given_up(self) -> bool:
        """True if an operator accepted the loss of the sample's records."""
        return self.not_trainable is not None and self.not_trainable.startswith(GIVEN_UP)


class Provenance(RecordPart):
    """Position on the log of a half of a rollout."""

    half: Name
    half_id: Name
    topic: Name
    partition: Annotated[Int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]


class Rollout(Record):
    """One sample to train on; complete, so that the trainer looks nothing up.

    For n tokens: token_ids int32[n], loss_mask uint8[n], sampler_logprobs float32[n] (0 outside the mask),
    teacher_logprobs float32[n] or null, topk_ids int32 and topk_logprobs float32 [hints, n, topk].
    """

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
    recorded_by: RecordedBy = RecordedBy.UNKNOWN

    @property
    def key(self) -> str:
        return self.rollout_id

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.token_ids) // 4

    @property
    def policy_version(self) -> str:
        """The last policy version that sampled. Plans and reports group by it."""
        return self.policy_spans[-1].policy if self.policy_spans else ""
