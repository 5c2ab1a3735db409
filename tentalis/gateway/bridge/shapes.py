"""What the bridge takes and what it answers, as its OpenAPI page shows it.

Field names are the ancestors' where they had one; what they had no word for has ours. Fields that nobody names are
ignored, as theirs were.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.records import MAX_SAMPLES, Opens, Sampling, Source

MOST_TRACES = 100
MOST_MESSAGES = 4096
# Visible ASCII without a slash: an id stands in a URL, in a log line and in front of "/sample_index".
Id = Annotated[str, Field(pattern=r"^[!-.0-~]{1,200}$")]
SessionId = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
Short = Annotated[str, Field(max_length=200)]
Index = Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
Turn = Annotated[int, Field(ge=0, lt=2**31)]
Score = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0, le=1e9)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(ge=-3e38, le=0.0)]
Recorded = Literal["published", "not_recorded"]
Answering = Literal["manager", "user", "environment", "operator"]


class Shape(BaseModel):
    """A body."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Said(Shape):
    """A message in OpenAI's form: text, a list of parts, or null."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[str | dict[str, Any]] | None = None


class SamplingBody(Shape):
    """How to sample, or how was sampled."""

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Sampling().temperature
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Sampling().top_p
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = Sampling().top_k
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Sampling().max_tokens
    stop: Annotated[list[str], Field(max_length=16)] = []
    constrained: bool = False


class SampledToken(Shape):
    """A token of a response and the log-prob with which it was sampled."""

    id: TokenId
    logprob: LogProb


class VerifierBody(Shape):
    """What judges a result: its name in the environment, and its data as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    data: str = "{}"


class TermsBody(Shape):
    """Which halves the task waits for, and whom each answers to; null: there is no such half, but not of both. What
    opens with the first feedback cannot have its reward answer to the result."""

    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "anyOf": [
                    {"required": ["rl", "opd"], "properties": {"rl": {"type": "null"}, "opd": {"type": "null"}}},
                    {
                        "required": ["rl", "opens"],
                        "properties": {"rl": {"const": "result"}, "opens": {"const": "first_feedback"}},
                    },
                ]
            }
        }
    )

    rl: Literal["result"] | Answering | None = Source.MANAGER.value
    opd: Answering | None = Source.MANAGER.value
    opens: Literal["at_once", "first_feedback"] = Opens.AT_ONCE.value
    deadline_ms: Annotated[int, Field(gt=0, le=30 * 86_400_000)] = 3_600_000
    opd_window_ms: Annotated[int, Field(gt=0, le=30 * 86_400_000)] = 30_000


def _left_out(schema: dict[str, Any]) -> None:
    del schema["default"]


class TaskBody(Shape):
    """POST /tasks/assign: the ancestors' TaskEvent, and what it had no words for. The prompt is the last user message;
    `messages` go before it."""

    task_id: Id = Field(
        default="",
        description="Drawn if it is not given: then a retry makes another task.",
        json_schema_extra=_left_out,
    )
    manager_id: Short = ""
    task_type: Short = Field("coding", description="The environment, if there is one of that name, else chat.")
    prompt: Annotated[str, Field(min_length=1)]
    metadata: dict[str, Any] = {}
    created_at: datetime | None = None
    messages: Annotated[list[Said], Field(max_length=MOST_MESSAGES)] = []
    policy: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default="", description="The bridge's default.", json_schema_extra=_left_out
    )
    n_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling: SamplingBody = SamplingBody()
    verifier: VerifierBody | None = None
    terms: TermsBody | None = Field(
        None, description="By default: both halves answer to the manager, or with a verifier the reward to the result."
    )
    target_worker: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class ResultBody(Shape):
    """POST /tasks/result: the ancestors' ResultEvent, and token ids where there are any."""

    task_id: Id
    worker_id: Annotated[str, Field(min_length=1, max_length=200)]
    prompt: str = ""
    result: str
    status: Literal["success", "failed"] = "success"
    steps: Annotated[list[str], Field(max_length=MOST_MESSAGES)] = []
    elapsed_seconds: Seconds = 0.0
    model_version: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    task_type: Short = Field("coding", description="Read where the task is not on the log.")
    created_at: datetime | None = None
    sample_index: Index = 0
    prompt_token_ids: list[TokenId] = []
    response_tokens: list[SampledToken] = []
    sampling: SamplingBody | None = Field(None, description="As it was really sampled; by default the task's.")
    finish_reason: Short = ""


class FeedbackBody(Shape):
    """POST /feedback: the ancestors' FeedbackEvent."""

    task_id: Id
    manager_id: Short = ""
    worker_id: Short = ""
    score: Score
    textual_feedback: str = ""
    created_at: datetime | None = None
    feedback_id: Id = Field(
        default="", description="Derived from the rest if it is not given.", json_schema_extra=_left_out
    )
    sample_index: Index | None = None
    source: Answering = Source.MANAGER.value


class UserFeedbackBody(Shape):
    """POST /v1/feedback: thumbs, a grade or a comment on a turn. Name the turn in exactly one way."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["task_id"]},
                {"required": ["completion_id"]},
                {"required": ["session_id", "turn_index"]},
            ],
            "anyOf": [{"required": ["thumb"]}, {"required": ["score"]}, {"required": ["comment"]}],
        }
    )

    task_id: Id = Field(default="", json_schema_extra=_left_out)
    completion_id: Id = Field(
        default="", description="The id of the completion that the gateway returned.", json_schema_extra=_left_out
    )
    session_id: SessionId = Field(default="", json_schema_extra=_left_out)
    turn_index: Turn = Field(default=-1, json_schema_extra=_left_out)
    sample_index: Index | None = None
    thumb: Annotated[str, Field(pattern="^(up|down)$")] = Field(default="", json_schema_extra=_left_out)
    score: Score = Field(default=-1.0, json_schema_extra=_left_out)
    comment: Annotated[str, Field(min_length=1)] = Field(default="", json_schema_extra=_left_out)
    feedback_id: Id = Field(
        default="", description="Derived from the rest if it is not given.", json_schema_extra=_left_out
    )

    @model_validator(mode="after")
    def _names_one_turn_and_says_something(self) -> Self:
        given = self.model_fields_set
        ways = ("task_id" in given, "completion_id" in given, {"session_id", "turn_index"} <= given)
        if sum(ways) != 1:
            raise ValueError(
                "name the turn by task_id, by completion_id, or by session_id and turn_index: by one of them"
            )
        if not given & {"thumb", "score", "comment"}:
            raise ValueError("say something: thumb (up or down), score, or comment")
        return self


class SessionBody(Shape):
    """POST /sessions/log: the ancestors' SessionEvent, one turn that was answered elsewhere."""

    session_id: SessionId
    worker_id: Short = ""
    model: Short = ""
    messages: Annotated[list[Said], Field(max_length=MOST_MESSAGES)] = []
    response: str = ""
    token_logprobs: list[LogProb] = Field([], description="Of the response tokens; of use with their ids only.")
    created_at: datetime | None = None
    session_event_id: Id = Field(
        default="", description="Derived from the rest if it is not given.", json_schema_extra=_left_out
    )
    turn_type: Literal["main", "side"] = "main"
    done: bool = False
    policy: Short = ""
    prompt_token_ids: list[TokenId] = []
    response_token_ids: list[TokenId] = []
    sampling: SamplingBody | None = None
    finish_reason: Short = ""
    elapsed_seconds: Seconds = 0.0


class Trace(Shape):
    """What a program recorded of one call (`tentalis.traces`)."""

    kind: Literal["trace"]
    trace_id: Id
    recorded_at: Annotated[int, Field(ge=0, lt=2**53)] = Field(description="ms since the epoch")
    task: Short
    model: Short
    prompt: str | list[Said]
    response: str
    worker_id: Short = ""
    metadata: dict[str, Any] = {}
    judgement: dict[str, Any] = {}
    done: bool = True
    prompt_token_ids: list[TokenId] = []
    response_token_ids: list[TokenId] = []
    sampler_logprobs: list[LogProb] = []
    sampling: SamplingBody | None = None
    elapsed_seconds: Seconds = 0.0


class TraceFeedback(Shape):
    """What somebody says of a trace."""

    kind: Literal["feedback"]
    feedback_id: Id
    trace_id: Id
    recorded_at: Annotated[int, Field(ge=0, lt=2**53)]
    text: str
    polarity: Literal[-1, 0, 1]


class TracesBody(Shape):
    """POST /v1/traces: what a spool holds, in its order. Each item is checked by itself."""

    items: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_TRACES)] = Field(
        description="Objects of the shapes Trace and TraceFeedback."
    )


# --- answers ----------------------------------------------------------------------------------------------------------


class Error(BaseModel):
    """Every refusal: why, and what to do."""

    error: str


class Assigned(BaseModel):
    """The task is on the log."""

    task_id: str
    topic: str
    status: Literal["published"] = "published"


class ResultTaken(BaseModel):
    """The result is on the log."""

    task_id: str
    topic: str
    status: Recorded = "published"
    result_id: str


class FeedbackTaken(BaseModel):
    """The feedback is on the log."""

    task_id: str
    status: Recorded = "published"
    feedback_id: str


class SessionLogged(BaseModel):
    """The turn is on the log."""

    session_id: str
    status: Recorded = "published"
    session_event_id: str


class TraceTaken(BaseModel):
    """What became of an item."""

    id: str
    status: Literal["published", "not_recorded", "refused"]
    error: str = ""


class TracesTaken(BaseModel):
    """What became of the items, in their order."""

    items: list[TraceTaken]


class ResultAnswer(BaseModel):
    """A result as the ancestors' ResultEvent has it, and more."""

    task_id: str
    worker_id: str
    prompt: str
    result: str
    status: Literal["success", "failed"]
    steps: list[str]
    elapsed_seconds: float
    model_version: str | None
    created_at: datetime
    result_id: str
    sample_index: int
    finish_reason: str
    error: str | None


class OutcomeAnswer(BaseModel):
    """What became of a sample: rl, opd, both, empty, expired, failed."""

    sample_index: int
    kind: str
    reward: float | None
    components: dict[str, float]


class TaskStatus(BaseModel):
    """`completed` when every sample has a result: `result` is the first one's, `results` has all. `known`: whether the
    task or a result of it is within the bridge's horizon."""

    task_id: str
    status: Literal["pending", "completed"]
    known: bool
    result: ResultAnswer | None = None
    results: list[ResultAnswer] = []
    outcomes: list[OutcomeAnswer] = []


class HealthAnswer(BaseModel):
    """`degraded`: the log cannot be read or written now; `reason` says why."""

    status: Literal["ok", "degraded"]
    reason: str = ""
    facts: int
