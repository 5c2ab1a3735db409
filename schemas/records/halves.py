"""The records of the halves log: Open, Score (the RL half), Hint (the OPD half), and the control records Tick and
Forget, which the log of session events has too.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from schemas.records.base import Finite, Float32s, Int, Int32s, Mask, Millis, Name, Record, RecordPart, Reward
from schemas.records.results import LogprobsMode, PolicySpan, RecordedBy, Result, Status
from schemas.records.tasks import Sampling, Source, TaskHead


class Sample(RecordPart):
    """A result as its halves carry it, complete enough for a half to become a rollout alone.

    Token fields are flat: prompt and response are one sequence of n tokens. token_ids is int32[n]; loss_mask uint8[n],
    1 for each token that the policy chose; sampler_logprobs float32[n], 0 outside the mask.
    """

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
    recorded_by: RecordedBy = RecordedBy.UNKNOWN

    @model_validator(mode="after")
    def _check_lengths(self) -> "Sample":
        n = len(self.token_ids) // 4
        if len(self.loss_mask) != n or len(self.sampler_logprobs) != 4 * n:
            raise ValueError(
                f"{n} tokens, {len(self.loss_mask)} mask bytes and {len(self.sampler_logprobs) // 4} log-probs; "
                "the numbers must be equal"
            )
        if self.sample_index >= self.head.n_samples:
            raise ValueError(
                f"sample_index {self.sample_index} is out of range: the task has {self.head.n_samples} samples"
            )
        return self

    def without_tokens(self) -> "Sample":
        """The same sample without its token data, for a half without reward or hint."""
        return self.model_copy(update={"token_ids": b"", "loss_mask": b"", "sampler_logprobs": b""})


def sample_of(result: Result) -> Sample:
    """Returns a result in flat token form: prompt and response are one sequence, with aligned mask and log-probs.

    A result without log-probs keeps its tokens and its mode, with zero log-probs; `not_trainable_by_ratio` then returns
    the reason why it cannot be trained on.
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
        loss_mask=b"\0" * n_prompt + result.response_mask,
        sampler_logprobs=b"\0" * (4 * n_prompt) + (result.sampler_logprobs or b"\0" * (4 * n_response)),
        logprobs_mode=result.logprobs_mode,
        sampling=result.sampling,
        policy_spans=tuple(PolicySpan(start=span.start + n_prompt, policy=span.policy) for span in result.policy_spans),
        recorded_by=result.recorded_by,
    )


def not_trainable_by_ratio(sample: Sample) -> str | None:
    """Returns the reason why the importance ratio pi/mu of this sample is undefined, or None if it is defined.

    mu is unknown after greedy, truncated (top-p, top-k) or grammar-constrained sampling, and if the log-probs are not
    those of the distribution that was sampled from.
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


class Open(Record):
    """Opens a task on the halves log; written by scoring."""

    ID_FIELD = "open_id"
    open_id: Name
    event_time: Millis
    opened_at: Millis
    head: TaskHead
    task_at: Millis | None = None

    @property
    def key(self) -> str:
        return self.head.task_id


class TokenSpan(RecordPart):
    """Tokens [start, end) of the record's sequence."""

    start: Annotated[Int, Field(ge=0)]
    end: Annotated[Int, Field(ge=0)]


EXPLICIT = "explicit"
"""The component of a Score whose reward is an explicit grade alone: a thumb or a score of a person or an operator."""


class Score(Record):
    """The RL half: a reward and its components. Also written when the reward is unknown.

    step_scores is float32[number of step_spans].
    """

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
    """The result of hinting."""

    UNKNOWN = "unknown"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    NONE = "none"


class Hint(Record):
    """The OPD half: hints, and the teacher's log-probs of the sample's n tokens. Also written when there is no hint.

    teacher_logprobs is float32[n]; topk_ids is int32 and topk_logprobs float32, both [hints, n, topk].
    """

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
    def _check_teacher(self) -> "Hint":
        if self.kind is HintKind.ACCEPTED and self.teacher_logprobs is None:
            raise ValueError("an accepted hint must have the teacher's log-probs")
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
    """Returns the problem with a teacher's top-K tokens, or None. They must be [hints >= 1, n_tokens, k], or empty."""
    if len(ids) != len(logprobs):
        return f"{len(ids) // 4} top-K token ids with {len(logprobs) // 4} log-probs; the numbers must be equal"
    if len(ids) % (4 * n_tokens * k or 1) or (k == 0) != (not ids):
        return f"{len(ids) // 4} top-K token ids; expected {k} for each of {n_tokens} tokens, times the number of hints"
    return None


class Tick(Record):
    """A clock record for one partition: its append time advances the stream time of a partition that gets no other
    records."""

    event_time: Millis
    partition: Annotated[Int, Field(ge=0)]

    @property
    def key(self) -> str:
        return f"tick/{self.partition}"


class Forget(Record):
    """An erasure request: applications drop the matching live state, and process no matching record from then on."""

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
        """True if the request names a session, a user or a time. A policy alone only narrows a request."""
        return self.session_id is not None or self.user_id is not None or self.before is not None

    def concerns(self, head: TaskHead, at: int) -> bool:
        """Returns true if all fields that are set match a task, or a record of it, from the time `at` (ms)."""
        return (
            self.asks
            and self.session_id in (None, head.session_id)
            and self.user_id in (None, head.user_id)
            and self.policy in (None, head.policy)
            and (self.before is None or at < self.before)
        )
