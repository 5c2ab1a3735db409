"""Request and response bodies of the bridge, as its OpenAPI page shows them.

Field names are those of earlier systems where they had one. Unknown fields are ignored, as in those systems.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from schemas.bounds import MAX_TEMPERATURE, MIN_LOGPROB, MIN_TEMPERATURE, trainable_temperature
from schemas.records import MAX_SAMPLES, Opens, Sampling, Source

MAX_TRACES = 100
MAX_MESSAGES = 4096
MAX_FEEDBACK_CHARS = 20_000
# Visible ASCII without a slash: an id is used in URLs, in log lines and before "/sample_index".
RecordId = Annotated[str, Field(pattern=r"^[!-.0-~]{1,200}$")]
SessionId = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
ShortText = Annotated[str, Field(max_length=200)]
SampleIndex = Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
TurnIndex = Annotated[int, Field(ge=0, lt=2**31)]
Score = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0, le=1e9)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LogProb = Annotated[float, Field(ge=MIN_LOGPROB, le=0.0)]


def _check_temperature(value: float) -> float:
    if value and not trainable_temperature(value):
        raise ValueError(f"must be 0 (greedy, not trained on) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
    return value


def _temperature_schema(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"const": 0}, {"minimum": MIN_TEMPERATURE}]


Temperature = Annotated[
    float,
    Field(ge=0.0, le=MAX_TEMPERATURE, json_schema_extra=_temperature_schema),
    AfterValidator(_check_temperature),
]
RecordStatus = Literal["published", "not_recorded"]
FeedbackSource = Literal["manager", "user", "environment", "operator"]


class BridgeModel(BaseModel):
    """Base of the request bodies."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class MessageBody(BridgeModel):
    """A message in OpenAI's form: text, a list of parts, or null."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[str | dict[str, Any]] | None = None


class TaskSamplingBody(BridgeModel):
    """Sampling parameters, requested or used."""

    temperature: Temperature = Sampling().temperature
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Sampling().top_p
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = Sampling().top_k
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Sampling().max_tokens
    stop: Annotated[list[str], Field(max_length=16)] = []
    constrained: bool = False


class SampledToken(BridgeModel):
    """A response token and its log-prob when it was sampled."""

    id: TokenId
    logprob: LogProb


class VerifierBody(BridgeModel):
    """The verifier of a result: its name in the environment, and its data as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    data: str = "{}"


class TermsBody(BridgeModel):
    """The halves that the task waits for, and the source of each; null: the task has no such half. At most one may be
    null. `rl: result` cannot be combined with `opens: first_feedback`."""

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

    rl: Literal["result"] | FeedbackSource | None = Source.MANAGER.value
    opd: FeedbackSource | None = Source.MANAGER.value
    opens: Literal["at_once", "first_feedback"] = Opens.AT_ONCE.value
    deadline_ms: Annotated[int, Field(gt=0, le=30 * 86_400_000)] = 3_600_000
    opd_window_ms: Annotated[int, Field(gt=0, le=30 * 86_400_000)] = 30_000


def _omit_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class TaskBody(BridgeModel):
    """POST /tasks/assign: the TaskEvent of earlier systems, with additional fields. The prompt is the last user
    message; `messages` precede it."""

    task_id: RecordId = Field(
        default="",
        description="Random if left out without an Idempotency-Key: then a retry makes another task.",
        json_schema_extra=_omit_default,
    )
    manager_id: ShortText = ""
    task_type: ShortText = Field("coding", description="The environment of that name if there is one, else chat.")
    prompt: Annotated[str, Field(min_length=1)]
    metadata: dict[str, Any] = {}
    created_at: datetime | None = None
    messages: Annotated[list[MessageBody], Field(max_length=MAX_MESSAGES)] = []
    policy: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default="", description="The bridge's default.", json_schema_extra=_omit_default
    )
    n_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling: TaskSamplingBody = TaskSamplingBody()
    verifier: VerifierBody | None = None
    terms: TermsBody | None = Field(
        None, description="By default the manager is the source of both halves; with a verifier, `rl` is `result`."
    )
    target_worker: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class ResultBody(BridgeModel):
    """POST /tasks/result: the ResultEvent of earlier systems, with optional token ids."""

    task_id: RecordId
    worker_id: Annotated[str, Field(min_length=1, max_length=200)]
    prompt: str = ""
    result: str
    status: Literal["success", "failed"] = "success"
    steps: Annotated[list[str], Field(max_length=MAX_MESSAGES)] = []
    elapsed_seconds: Seconds = 0.0
    model_version: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    task_type: ShortText = Field("coding", description="Used if the task is not on the log.")
    created_at: datetime | None = None
    sample_index: SampleIndex = 0
    prompt_token_ids: list[TokenId] = []
    response_tokens: list[SampledToken] = []
    sampling: TaskSamplingBody | None = Field(None, description="The parameters really used; by default the task's.")
    finish_reason: ShortText = ""


class FeedbackBody(BridgeModel):
    """POST /feedback: the FeedbackEvent of earlier systems."""

    task_id: RecordId
    manager_id: ShortText = ""
    worker_id: ShortText = ""
    score: Score
    textual_feedback: Annotated[str, Field(max_length=MAX_FEEDBACK_CHARS)] = ""
    created_at: datetime | None = None
    feedback_id: RecordId = Field(
        default="", description="Derived from the rest if it is not given.", json_schema_extra=_omit_default
    )
    sample_index: SampleIndex | None = None
    source: FeedbackSource = Source.MANAGER.value


class UserFeedbackBody(BridgeModel):
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

    task_id: RecordId = Field(default="", json_schema_extra=_omit_default)
    completion_id: RecordId = Field(
        default="", description="The id of the completion that the gateway returned.", json_schema_extra=_omit_default
    )
    session_id: SessionId = Field(default="", json_schema_extra=_omit_default)
    turn_index: TurnIndex = Field(default=-1, json_schema_extra=_omit_default)
    sample_index: SampleIndex | None = None
    thumb: Annotated[str, Field(pattern="^(up|down)$")] = Field(default="", json_schema_extra=_omit_default)
    score: Score = Field(default=-1.0, json_schema_extra=_omit_default)
    comment: Annotated[str, Field(min_length=1, max_length=MAX_FEEDBACK_CHARS)] = Field(
        default="", json_schema_extra=_omit_default
    )
    feedback_id: RecordId = Field(
        default="", description="Derived from the rest if it is not given.", json_schema_extra=_omit_default
    )

    @model_validator(mode="after")
    def _check_turn_and_content(self) -> Self:
        fields_set = self.model_fields_set
        ways = ("task_id" in fields_set, "completion_id" in fields_set, {"session_id", "turn_index"} <= fields_set)
        if sum(ways) != 1:
            raise ValueError(
                "name the turn in exactly one way: by task_id, by completion_id, or by session_id and turn_index"
            )
        if not fields_set & {"thumb", "score", "comment"}:
            raise ValueError("give a thumb (up or down), a score, or a comment")
        return self


class SessionBody(BridgeModel):
    """POST /sessions/log: the SessionEvent of earlier systems, one turn that was answered elsewhere."""

    session_id: SessionId
    worker_id: ShortText = ""
    model: ShortText = ""
    messages: Annotated[list[MessageBody], Field(max_length=MAX_MESSAGES)] = []
    response: str = ""
    token_logprobs: list[LogProb] = Field([], description="Of the response tokens; only used together with their ids.")
    created_at: datetime | None = None
    session_event_id: RecordId = Field(
        default="", description="Derived from the rest if it is not given.", json_schema_extra=_omit_default
    )
    turn_type: Literal["main", "side"] = "main"
    done: bool = False
    policy: ShortText = ""
    prompt_token_ids: list[TokenId] = []
    response_token_ids: list[TokenId] = []
    sampling: TaskSamplingBody | None = None
    finish_reason: ShortText = ""
    elapsed_seconds: Seconds = 0.0


class Trace(BridgeModel):
    """One call recorded by a program (`tentalis.traces`)."""

    kind: Literal["trace"]
    trace_id: RecordId
    recorded_at: Annotated[int, Field(ge=0, lt=2**53)] = Field(description="ms since the epoch")
    task: ShortText
    model: ShortText
    prompt: str | list[MessageBody]
    response: str
    worker_id: ShortText = ""
    metadata: dict[str, Any] = {}
    judgement: dict[str, Any] = {}
    done: bool = True
    prompt_token_ids: list[TokenId] = []
    response_token_ids: list[TokenId] = []
    sampler_logprobs: list[LogProb] = []
    sampling: TaskSamplingBody | None = None
    elapsed_seconds: Seconds = 0.0


class TraceFeedback(BridgeModel):
    """Feedback on a trace."""

    kind: Literal["feedback"]
    feedback_id: RecordId
    trace_id: RecordId
    recorded_at: Annotated[int, Field(ge=0, lt=2**53)]
    text: Annotated[str, Field(max_length=MAX_FEEDBACK_CHARS)]
    polarity: Literal[-1, 0, 1]


class TracesBody(BridgeModel):
    """POST /v1/traces: the items of a spool, in order. Each item is checked separately."""

    items: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_TRACES)] = Field(
        description="Objects of the shapes Trace and TraceFeedback."
    )


# --- answers ----------------------------------------------------------------------------------------------------------


class Error(BaseModel):
    """The body of every error: the reason, and the action to take."""

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
    status: RecordStatus = "published"
    result_id: str


class FeedbackTaken(BaseModel):
    """The feedback is on the log."""

    task_id: str
    status: RecordStatus = "published"
    feedback_id: str


class SessionLogged(BaseModel):
    """The turn is on the log."""

    session_id: str
    status: RecordStatus = "published"
    session_event_id: str


class TraceTaken(BaseModel):
    """The result of one item."""

    id: str
    status: Literal["published", "not_recorded", "refused"]
    error: str = ""


class TracesTaken(BaseModel):
    """The results of the items, in order."""

    items: list[TraceTaken]


class ResultAnswer(BaseModel):
    """A result with the fields of the ResultEvent of earlier systems, and more."""

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
    """The outcome of a sample. `kind`: rl, opd, both, empty, expired, failed."""

    sample_index: int
    kind: str
    reward: float | None
    components: dict[str, float]


class HintSource(BaseModel):
    """The words that a hint was made from. `source`: next_state (the next message of a conversation), user, manager,
    operator or environment; `author`: the role of the speaker, or the person or program that gave the feedback."""

    source: str
    author: str
    text: str


class HintAnswer(BaseModel):
    """The result of hinting for a sample. `kind`: accepted or rejected. `made_by`: the rule or judge that made it;
    `said`: the words it was made from, null for the lesson of a whole session and for feedback beyond the horizon."""

    sample_index: int
    kind: str
    hints: list[str]
    made_by: str
    feedback_id: str | None
    said: HintSource | None


class TaskStatus(BaseModel):
    """The status of a task: `completed` once every sample has a result. `result`: that of the first sample; `results`:
    all. `known`: true if the task or a result of it is within the bridge's horizon."""

    task_id: str
    status: Literal["pending", "completed"]
    known: bool
    result: ResultAnswer | None = None
    results: list[ResultAnswer] = []
    outcomes: list[OutcomeAnswer] = []
    hints: list[HintAnswer] = []


class HealthAnswer(BaseModel):
    """The bridge's health. `degraded`: the log cannot be read or written now, or a stream application has worked before
    and has no running process now (`halted` names it); `reason` holds the cause."""

    status: Literal["ok", "degraded"]
    reason: str = ""
    halted: list[str] = []
    facts: int
