"""The readable part of a body that is not a record."""

import random

from schemas import topics
from schemas.wire import avro
from schemas.wire.partial import read_partial
from tests.support.stream_records import CODEC, make_feedback, make_result, make_task


def body_of(record: object) -> tuple[avro.AvroSchema, bytes]:
    schema = avro.current(type(record).__name__)
    return schema, CODEC.encode(topics.TASKS, record)[10:]  # type: ignore[arg-type]


def test_a_whole_body_is_read_as_fastavro_reads_it() -> None:
    for record in (make_task(metadata={"a": "b"}), make_result(), make_feedback(text="too long")):
        schema, body = body_of(record)
        assert read_partial(schema, body) == (avro.read(schema, schema, body), "")


def test_a_truncated_body_shows_what_is_there_and_where_it_ends() -> None:
    schema, body = body_of(make_result())
    whole = avro.read(schema, schema, body)
    found, ended = read_partial(schema, body[:120])
    assert ended.startswith("task.") and "byte 1" in ended and "are left" in ended
    assert {name: found[name] for name in ("result_id", "event_time")} == {
        name: whole[name] for name in ("result_id", "event_time")
    }
    assert found["task"]["task_id"] == "t1"
    assert read_partial(schema, body + b"ab")[1].startswith("2 bytes are left over")


def test_lengths_that_cannot_be_are_not_believed() -> None:
    schema, body = body_of(make_task())
    huge = b"\x80\x80\x80\x80\x80\x40"  # 2**40
    assert "1,099,511,627,776 bytes where" in read_partial(schema, huge + body)[1]
    assert "more than 64 bits" in read_partial(schema, b"\xff" * 100)[1]
    assert "-5 bytes" in read_partial(schema, b"\x09")[1]


def test_whatever_the_bytes_it_ends_with_a_reason() -> None:
    rng = random.Random(2)
    schema, body = body_of(make_result())
    for _ in range(300):
        mutated = bytearray(body)
        for _ in range(rng.randrange(1, 6)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        found, ended = read_partial(schema, bytes(mutated))
        assert isinstance(found, dict) and isinstance(ended, str)
