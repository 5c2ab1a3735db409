"""Records for the tests of the stream applications, and the log records that carry them."""

from collections.abc import Sequence
from typing import Any

from schemas import topics
from schemas.records import (
    Feedback,
    LogprobsMode,
    Message,
    Polarity,
    PolicySpan,
    Record,
    Result,
    Source,
    Status,
    Task,
    Terms,
    Verifier,
    result_id,
)
from schemas.tensors import float32_bytes, int32_bytes
from schemas.wire.codec import Codec
from streams.runtime.processor import LogRecord, OutputRecord

CODEC = Codec()
QUESTION = "Why do cats purr?"
GOOD = "Cats purr when they are content, and sometimes to soothe themselves."
TERMS = Terms(rl=Source.RESULT, opd=Source.USER)


def make_task(task_id: str = "t1", **fields: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": task_id,
        "event_time": 1_000,
        "policy": "assistant",
        "environment": "chat",
        "messages": (Message(role="system", content="Be kind."), Message(role="user", content=QUESTION)),
        "n_samples": 8,
        "verifier": Verifier(name="taste"),
        "terms": TERMS,
        "manager_id": "m1",
        "run_id": "run",
    }
    return Task(**(values | fields))


def make_result(
    task: Task | None = None,
    sample: int = 0,
    text: str = GOOD,
    prompt: Sequence[int] = (1, 2, 3),
    response: Sequence[int] = (10, 11, 12, 13),
    **fields: Any,
) -> Result:
    task = task or make_task()
    spans = (PolicySpan(start=0, policy="assistant@v1"),)
    tokens = int32_bytes(response)
    values: dict[str, Any] = {
        "result_id": result_id(task.task_id, sample, spans, tokens, text),
        "event_time": 2_000,
        "opened_at": 1_500,
        "task": task,
        "sample_index": sample,
        "worker_id": "w1",
        "status": Status.OK,
        "text": text,
        "prompt_token_ids": int32_bytes(prompt),
        "response_token_ids": tokens,
        "sampler_logprobs": float32_bytes([-0.5] * len(response)),
        "logprobs_mode": LogprobsMode.PROCESSED,
        "policy_spans": spans,
        "finish_reason": "stop",
    }
    return Result(**(values | fields))


def make_feedback(result: Result | None = None, text: str = "", **fields: Any) -> Feedback:
    result = result or make_result()
    values: dict[str, Any] = {
        "feedback_id": f"f-{result.result_id}",
        "event_time": 3_000,
        "task_id": result.task.task_id,
        "sample_index": result.sample_index,
        "source": Source.USER,
        "polarity": Polarity.NEGATIVE if text else Polarity.NONE,
        "text": text,
        "result": result,
    }
    return Feedback(**(values | fields))


def bare_feedback(text: str = "", **fields: Any) -> Feedback:
    """Feedback that names its task and no more."""
    return unchecked(make_feedback(text=text, **fields), result=None, sample_index=None)  # type: ignore[no-any-return]


def on_log(
    topic: str, record: Record, offset: int = 0, timestamp: int = 5_000, key: str | None = None, partition: int = 3
) -> LogRecord:
    return LogRecord(topic, partition, offset, timestamp, key or record.key, CODEC.encode(topic, record))


def raw(topic: str, value: bytes, offset: int = 0, key: str = "t1", tombstone: bool = False) -> LogRecord:
    return LogRecord(topic, 3, offset, 5_000, key, value, (), tombstone)


def read(output: OutputRecord) -> Any:
    """The record of an output, decoded."""
    expected = topics.table().records_of(output.topic)
    return CODEC.decode(output.value, topic=output.topic, partition=0, offset=0, expected=expected)


def malformed(topic: str, record: Record) -> dict[str, LogRecord]:
    """One log record for each way of not being a record of a topic, from a valid one."""
    good = CODEC.encode(topic, record)
    other = topics.TASKS if topic != topics.TASKS else topics.FEEDBACK
    alien: Record = make_task() if topic != topics.TASKS else make_feedback()
    return {
        "bad magic": raw(topic, b"\xff\xff" + good, key=record.key),
        "empty": raw(topic, b"", key=record.key),
        "text": raw(topic, b"hello", key=record.key),
        "truncated": raw(topic, good[:-7], key=record.key),
        "bytes left over": raw(topic, good + b"\0", key=record.key),
        "wrong schema": raw(topic, CODEC.encode(other, alien), key=record.key),
        "unknown schema": raw(topic, b"\xc3\x01" + b"\1" * 8 + good[10:], key=record.key),
        "no registry": raw(topic, b"\0\0\0\0\7" + good[10:], key=record.key),
        "tombstone": raw(topic, b"", key=record.key, tombstone=True),
        "another key": raw(topic, good, key="somebody else"),
    }


def unchecked(record: Record, **fields: Any) -> Any:
    """A record with values that its own validation would refuse, as a foreign producer may write it."""
    return record.model_copy(update=fields)
