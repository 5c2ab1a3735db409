"""The records of all topics: the pydantic twins of the `.avsc` files in `schemas/`.

A twin has the name, fields, order, types and defaults of its file; a test compares them. Records are immutable and
reject unknown fields and values out of range, when they are made and when they are read. Import them from here; begin
with `tasks.py` and `results.py`.
"""

from schemas.records.base import Finite, Float32s, Int, Int32s, Mask, Millis, Name, Record, RecordPart, Reward, Unit
from schemas.records.halves import (
    Forget,
    Hint,
    HintKind,
    Open,
    Sample,
    Score,
    Tick,
    TokenSpan,
    not_trainable_by_ratio,
    sample_of,
    topk_problem,
)
from schemas.records.policies import BackPressure, Canary, Pin, PolicyAck, PolicyUpdate, Promotion
from schemas.records.results import (
    Feedback,
    LogprobsMode,
    Polarity,
    PolicySpan,
    Result,
    Status,
    ToolCall,
    response_digest,
    result_id,
)
from schemas.records.rollouts import GIVEN_UP, Outcome, OutcomeKind, Provenance, Rollout
from schemas.records.runs import BatchPlan, Drop, PlanRow, Position, RunManifest, StepResult
from schemas.records.sessions import SessionEvent, SessionEventKind
from schemas.records.signals import AuditRecord, EvalResult, MetaSignal, Skill
from schemas.records.tasks import MAX_SAMPLES, Message, Opens, Sampling, Source, Task, TaskHead, Terms, Verifier

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

__all__ = [
    "GIVEN_UP",
    "MAX_SAMPLES",
    "RECORDS",
    "AuditRecord",
    "BackPressure",
    "BatchPlan",
    "Canary",
    "Drop",
    "EvalResult",
    "Feedback",
    "Finite",
    "Float32s",
    "Forget",
    "Hint",
    "HintKind",
    "Int",
    "Int32s",
    "LogprobsMode",
    "Mask",
    "Message",
    "MetaSignal",
    "Millis",
    "Name",
    "Open",
    "Opens",
    "Outcome",
    "OutcomeKind",
    "Pin",
    "PlanRow",
    "Polarity",
    "PolicyAck",
    "PolicySpan",
    "PolicyUpdate",
    "Position",
    "Promotion",
    "Provenance",
    "Record",
    "RecordPart",
    "Result",
    "Reward",
    "Rollout",
    "RunManifest",
    "Sample",
    "Sampling",
    "Score",
    "SessionEvent",
    "SessionEventKind",
    "Skill",
    "Source",
    "Status",
    "StepResult",
    "Task",
    "TaskHead",
    "Terms",
    "Tick",
    "TokenSpan",
    "ToolCall",
    "Unit",
    "Verifier",
    "not_trainable_by_ratio",
    "response_digest",
    "result_id",
    "sample_of",
    "topk_problem",
]
