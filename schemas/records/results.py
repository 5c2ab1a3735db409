"""Result, an answer to one sample of a task, and Feedback on results."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from schemas.ids import derived_id, sha256_hex
from schemas.records.base import (
    Finite,
    Float32s,
    Int,
    Int32s,
    Mask,
    Millis,
    Name,
    Record,
    RecordPart,
    Unit,
    check_finite,
)
from schemas.records.tasks import Sampling, Source, Task


class Status(StrEnum):
    """Success or failure of an answer. infra: the infrastructure failed, which says nothing about the policy: such an
    answer has no reward, and is not in the statistics of its group."""

    UNKNOWN = "unknown"
    OK = "ok"
    FAILED = "failed"
    INFRA = "infra"


class Ending(StrEnum):
    """The ending of an episode; none: the answer is not an episode.

    done: the environment ended it. truncated: the tokens of a turn or the context were used up. turn_limit: the turns
    were. timed_out: the time was. refused: the server refused a request. failed: it ended without an answer. infra: the
    infrastructure failed.
    """

    UNKNOWN = "unknown"
    NONE = "none"
    DONE = "done"
    TRUNCATED = "truncated"
    TURN_LIMIT = "turn_limit"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    FAILED = "failed"
    INFRA = "infra"


class LogprobsMode(StrEnum):
    """The distribution that the log-probs belong to: the sampled one (processed), or the model's own (raw)."""

    UNKNOWN = "unknown"
    PROCESSED = "processed"
    RAW = "raw"
    NONE = "none"


class RecordedBy(StrEnum):
    """The process that recorded the tokens of an answer and the policy versions that sampled them.

    worker, gateway: this process asked the model server and recorded what it returned. client: a program posted the
    answer to a gateway, and nobody has checked its tokens and versions. unknown: the record does not say, as records
    from before this field.
    """

    UNKNOWN = "unknown"
    CLIENT = "client"
    GATEWAY = "gateway"
    WORKER = "worker"


class PolicySpan(RecordPart):
    """`policy` sampled the tokens from index `start` on."""

    start: Annotated[Int, Field(ge=0)]
    policy: Name


class ToolCall(RecordPart):
    """A tool call in an answer; `arguments` are JSON."""

    name: Name
    arguments: str = "{}"
    result: str | None = None


class TurnSpan(RecordPart):
    """Response tokens [start, end) that the policy sampled in one turn of an episode."""

    start: Annotated[Int, Field(ge=0)]
    end: Annotated[Int, Field(ge=0)]
    finish_reason: str = ""


class StepReward(RecordPart):
    """Reward parts that the environment gave for response tokens [start, end)."""

    start: Annotated[Int, Field(ge=0)]
    end: Annotated[Int, Field(ge=0)]
    parts: dict[str, Finite] = {}


class Attachment(RecordPart):
    """A file that an episode left, of `bytes` in size, with this sha256 (hex), stored at `url`. One that is larger than
    the worker's limit is not stored: it has no URL and no sha256."""

    name: Name
    media_type: Name
    sha256: str
    bytes: Annotated[int, Field(ge=0)]
    url: str | None = None


class Result(Record):
    """An answer to one sample of a task, together with the task.

    For r response tokens: loss_mask uint8[r], 1 where the policy chose the token and 0 where the environment did; empty
    if the policy chose all. sampler_logprobs float32[r], 0 outside the mask.
    """

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
    elapsed_s: Annotated[float, AfterValidator(check_finite), Field(ge=0.0)] = 0.0
    loss_mask: Mask = b""
    ending: Ending = Ending.NONE
    turns: tuple[TurnSpan, ...] = ()
    step_rewards: tuple[StepReward, ...] = ()
    rewards: dict[str, Finite] = {}
    wall: str = ""
    rendered_turns: tuple[Int, ...] = ()
    attempts: Annotated[Int, Field(ge=0)] = 0
    attachments: tuple[Attachment, ...] = ()
    recorded_by: RecordedBy = RecordedBy.UNKNOWN

    @model_validator(mode="after")
    def _check_lengths(self) -> "Result":
        if self.sample_index >= self.task.n_samples:
            raise ValueError(
                f"sample_index {self.sample_index} is out of range: the task has {self.task.n_samples} samples"
            )
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

    @model_validator(mode="after")
    def _check_spans(self) -> "Result":
        n = len(self.response_token_ids) // 4
        if self.loss_mask and len(self.loss_mask) != n:
            raise ValueError(f"{len(self.loss_mask)} mask bytes for {n} response tokens")
        if set(self.loss_mask) - {0, 1}:
            raise ValueError("the mask of the response has values other than 0 and 1")
        for name, spans in (("turn", self.turns), ("step", self.step_rewards)):
            for span in spans:
                if not span.start <= span.end <= n:
                    raise ValueError(f"a {name} has the tokens [{span.start}, {span.end}) of {n} response tokens")
        return self

    @property
    def key(self) -> str:
        return self.task.task_id

    @property
    def response_mask(self) -> bytes:
        """uint8[r], 1 for each response token that the policy chose."""
        return self.loss_mask or b"\1" * (len(self.response_token_ids) // 4)

    @property
    def response_digest(self) -> str:
        """sha256 (hex) of the response tokens, or of the text if there are no tokens."""
        return response_digest(self.response_token_ids, self.text)


def response_digest(response_token_ids: bytes, text: str) -> str:
    """sha256 (hex) of the response tokens, or of the text if there are no tokens."""
    return sha256_hex(response_token_ids or text.encode())


def result_id(
    task_id: str, sample_index: int, spans: tuple[PolicySpan, ...], response_token_ids: bytes, text: str
) -> str:
    """The id of a result: equal for the same answer to the same sample by the same policy versions, else different."""
    return derived_id(
        "result",
        task_id,
        sample_index,
        [[span.start, span.policy] for span in spans],
        response_digest(response_token_ids, text),
    )


class Polarity(StrEnum):
    """The verdict of feedback without a score."""

    UNKNOWN = "unknown"
    POSITIVE = "positive"
    NEGATIVE = "negative"
    NONE = "none"


class Feedback(Record):
    """A person's or a program's verdict on a result, or on a whole task."""

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
    def _check_result(self) -> "Feedback":
        if self.source in (Source.UNKNOWN, Source.RESULT):
            raise ValueError(f"feedback cannot come from the source {self.source.value!r}")
        if self.result is not None and self.result.task.task_id != self.task_id:
            raise ValueError(f"feedback on task {self.task_id} carries a result of task {self.result.task.task_id}")
        if self.result is not None and self.sample_index not in (None, self.result.sample_index):
            raise ValueError(
                f"feedback on sample {self.sample_index} carries a result of sample {self.result.sample_index}"
            )
        return self

    @property
    def key(self) -> str:
        return self.task_id
