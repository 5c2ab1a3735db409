"""A small record must not become a large one in memory, nor a large text in the logs."""

import pytest

from schemas import topics
from schemas.records import Message, Task
from schemas.wire.codec import MOST_ITEMS, REASON_CHARS, DecodeError
from streams.runtime.processor import ERROR_CHARS, Dead
from tests.support.stream_records import CODEC, make_task, raw


def decode(value: bytes) -> object:
    return CODEC.decode(value, topic=topics.TASKS, partition=0, offset=0)


def varint(value: int) -> bytes:
    """A zigzag varint."""
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def with_messages(item: bytes, count: int) -> bytes:
    """A task with `count` messages of these bytes, encoded by hand."""
    one = CODEC.encode(topics.TASKS, make_task(messages=(Message(role="a", content=""),)))
    array = varint(1) + varint(1) + b"a" + varint(0) + b"\0"
    at = one.index(array)
    return one[:at] + varint(count) + item * count + b"\0" + one[at + len(array) :]


def test_many_items_are_refused_before_they_are_made() -> None:
    with pytest.raises(DecodeError, match=r"messages, byte .*: more than 100,000 items"):
        decode(with_messages(b"\x02a\0", MOST_ITEMS + 1))
    task = decode(with_messages(b"\x02a\0", MOST_ITEMS))
    assert isinstance(task, Task) and len(task.messages) == MOST_ITEMS


def test_many_problems_are_told_in_few_words() -> None:
    with pytest.raises(DecodeError) as caught:
        decode(with_messages(b"\0\0", 20_000))
    assert caught.value.stage == "validate"
    assert "messages.4.role" in str(caught.value) and " more (schema: Task" in str(caught.value)
    assert len(str(caught.value)) < REASON_CHARS


def test_an_error_that_quotes_the_record_is_cut() -> None:
    found = Dead.of(raw(topics.TASKS, b""), "process", ValueError("x" * 10**7))
    assert len(found.error) == ERROR_CHARS + 3
    error = DecodeError("x" * 10**7, topic="t", partition=0, offset=0, schema="s", stage="decode")
    assert len(error.reason) == REASON_CHARS + 3 and len(str(error)) < 2 * REASON_CHARS
