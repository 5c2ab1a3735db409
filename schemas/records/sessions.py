"""SessionEvent: the calls and ends of the conversations that a gateway records."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from schemas.records.base import Float32s, Int, Int32s, Millis, Name, Record, check_finite
from schemas.records.results import LogprobsMode, RecordedBy, Status, ToolCall
from schemas.records.tasks import Message, Sampling

EPISODE_TURN = "episode"
"""The type of a turn of an episode that a program plays through a gateway. A worker joins such turns into a result; no
application makes a task of one."""


class SessionEventKind(StrEnum):
    """A turn of a session, or its end."""

    UNKNOWN = "unknown"
    TURN = "turn"
    END = "end"


class SessionEvent(Record):
    """A call that the gateway answered in a conversation, or the end of a conversation. `turn_index` is not read: the
    application `sessions` counts the turns itself."""

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
    elapsed_s: Annotated[float, AfterValidator(check_finite), Field(ge=0.0)] = 0.0
    gateway_id: str = ""
    recorded_by: RecordedBy = RecordedBy.UNKNOWN

    @model_validator(mode="after")
    def _check_lengths(self) -> "SessionEvent":
        if self.sampler_logprobs and len(self.sampler_logprobs) != len(self.response_token_ids):
            raise ValueError(
                f"{len(self.sampler_logprobs) // 4} log-probs for {len(self.response_token_ids) // 4} response tokens"
            )
        return self

    @property
    def key(self) -> str:
        return self.session_id
