"""Mutated records for all input topics with all kinds of damage. The same seed gives the same records."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from schemas import topics
from schemas.records import (
    HintKind,
    Message,
    Opens,
    Outcome,
    OutcomeKind,
    Polarity,
    Record,
    Source,
    Status,
    Terms,
    Verifier,
)
from schemas.wire import avro
from schemas.wire.codec import SINGLE_OBJECT, Codec
from tentalis.kafka.partitioner import partition_of
from tests.support import join_support, sessions_support
from tests.support.stream_records import make_feedback, make_result, make_task

CODEC = Codec()
INPUTS = (topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.HALVES, topics.OUTCOMES, topics.SESSIONS)
"""The input topics of the stream applications."""


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """A record to write to a topic, and its kind of damage."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    damage: str


def varint(value: int) -> bytes:
    """A zigzag varint, as Avro writes ints, longs and lengths."""
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


HUGE = tuple(varint(n) for n in (2**20, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**40), -1, -2))
EXTREME: dict[type, tuple[Any, ...]] = {
    int: (0, 1, -1, 2, 255, 256, 2**31 - 1, -(2**31), 2**40, 2**53, 2**62, 2**63 - 1, -(2**63)),
    float: (0.0, -0.0, 1.0, -1.0, 1e-308, 1e308, float("inf"), float("-inf"), float("nan")),
    str: (
        "",
        " ",
        "\0",
        "x" * 3000,
        "\u202e",
        "a/b/c",
        "../..",
        "{",
        "[" * 3000,
        "1" * 5000,
        "\ud7ff😀",
        "%s{0}",
        "NaN",
    ),
    bytes: (b"", b"\0", b"\0" * 4, b"\xff" * 4, b"\0\0\xc0\x7f", b"x" * 4001, b"\xff\xff\xff\x7f" * 100),
    bool: (True, False),
}


@cache
def seeds() -> dict[str, tuple[Record, ...]]:
    """Valid records of each input topic, some of them about the same tasks."""
    tasks = [
        make_task("t1"),
        make_task("t2", n_samples=2, session_id="s", turn_index=1, user_id="u", metadata={"a": "b"}),
        make_task("t3", environment="math", verifier=Verifier(name="math", data='{"answer": "4"}')),
        make_task("t4", terms=Terms(rl=Source.USER, opd=Source.USER, opens=Opens.FIRST_FEEDBACK)),
    ]
    results = [make_result(task, index) for task in tasks for index in range(min(2, task.n_samples))]
    results.append(make_result(tasks[0], 1, text="", response=(), status=Status.FAILED, error="away"))
    complaints = [make_feedback(each, "That was too long: please answer in one sentence.") for each in results]
    graded = [make_feedback(each, score=0.5, polarity=Polarity.POSITIVE) for each in results]
    head, two = join_support.head("h1", deadline_ms=2_000), join_support.head("h2", n=2)
    samples = [join_support.sample(head), join_support.sample(two), join_support.sample(two, 1, result="r2")]
    halves: list[Record] = [
        *(join_support.open_(each, at=1_000) for each in (head, two)),
        *(join_support.score(each, reward) for each in samples for reward in (1.0, None)),
        *(join_support.hint(each, kind) for each in samples for kind in (HintKind.ACCEPTED, HintKind.NONE)),
        join_support.tick(),
        join_support.forget(session_id="session-h2"),
    ]
    outcomes = [
        Outcome(
            outcome_id=f"o{index}",
            outcome_key=f"{task.task_id}/0",
            event_time=1_700_000_000_000 + index,
            kind=OutcomeKind.RL,
            head=task.head,
            sample_index=0,
            worker_id="w1",
            reward=0.5,
            components={"a": 0.5},
        )
        for index, task in enumerate(tasks)
    ]
    talk = ("hello", "hi", "more", "so", "That's wrong.")
    turns = [
        *(sessions_support.turn(str(n), *talk[: 2 * n + 1], answer=talk[2 * n + 1 :][0]) for n in range(2)),
        sessions_support.turn("2", *talk, done=True),
        sessions_support.side("x"),
        sessions_support.end(),
        sessions_support.tick(),
        sessions_support.forget(session_id="another"),
    ]
    return {
        topics.TASKS: tuple(tasks),
        topics.RESULTS: tuple(results),
        topics.FEEDBACK: (*complaints, *graded),
        topics.HALVES: tuple(halves),
        topics.OUTCOMES: tuple(outcomes),
        topics.SESSIONS: tuple(turns),
    }


def _extreme(rng: random.Random, datum: Any) -> Any:
    """The datum with one nested value replaced by an extreme value of its type."""
    if isinstance(datum, dict) and datum:
        name = rng.choice(list(datum))
        return datum | {name: _extreme(rng, datum[name])}
    if isinstance(datum, (list, tuple)) and datum and rng.random() < 0.8:
        at = rng.randrange(len(datum))
        return [_extreme(rng, item) if i == at else item for i, item in enumerate(datum)]
    if isinstance(datum, (list, tuple)):
        return rng.choice([[], list(datum) * 50])
    choices = EXTREME.get(type(datum))
    return rng.choice(choices) if choices else datum


def _encoded(record: Record, datum: dict[str, Any]) -> bytes | None:
    """The bytes of a datum, None if Avro cannot write it."""
    schema = avro.current(type(record).__name__)
    try:
        return SINGLE_OBJECT + schema.fingerprint + avro.write(schema, datum)
    except (ValueError, TypeError, OverflowError, KeyError):
        return None


def _bytes_damaged(rng: random.Random, value: bytes, other: bytes) -> tuple[str, bytes]:
    at, end = sorted(rng.randrange(len(value) + 1) for _ in range(2))
    # Most damage is after the framing; otherwise only the framing would be tested.
    if rng.random() < 0.9:
        at, end = max(at, 10), max(end, 10)
    damage = rng.choice(["flip", "byte", "truncate", "append", "cut", "repeat", "splice", "length", "framing"])
    match damage:
        case "flip" | "byte":
            changed = bytearray(value)
            for _ in range(rng.randrange(1, 5)):
                place = rng.randrange(min(10, len(value) - 1), len(value))
                changed[place] = changed[place] ^ (1 << rng.randrange(8)) if damage == "flip" else rng.randrange(256)
            return damage, bytes(changed)
        case "truncate":
            return damage, value[:at]
        case "append":
            return damage, value + rng.randbytes(rng.randrange(1, 20))
        case "cut":
            return damage, value[:at] + value[end:]
        case "repeat":
            return damage, value[:at] + value[at:end] * rng.randrange(2, 5) + value[end:]
        case "splice":
            return damage, value[:at] + other[min(at, len(other)) :]
        case "length":
            return damage, value[:at] + rng.choice(HUGE) + value[at + rng.randrange(3) :]
        case _:
            magic = rng.choice([b"", b"\0", b"\xc3", b"\xc3\x01", b"\xff\xff", b"\0\0\0\0\1", other[:10], other[:2]])
            return damage, magic + (rng.randbytes(8) if rng.random() < 0.3 else b"") + value[rng.choice([0, 2, 10]) :]


@cache
def _bomb() -> bytes:
    """A task with a million identical messages: small on the wire, a gigabyte once decoded."""
    record = make_task("bomb", messages=(Message(role="a", content=""),))
    whole, one = CODEC.encode(topics.TASKS, record), b"\2\2a\0\0"
    at, count = whole.index(one), 1_000_000
    return whole[:at] + varint(count) + b"\2a\0" * count + whole[at + len(one) - 1 :]


def _key(rng: random.Random, key: bytes) -> bytes | None:
    return rng.choice([None, b"", b"\xff\xfe", b"another", key + b"\0", key.upper(), b"k" * 5000])


def fuzzed(seed: int, count: int, *, valid: float = 0.2) -> Iterator[Fuzzed]:
    """Yields `count` records over the input topics; a share of about `valid` is unchanged."""
    rng = random.Random(seed)
    everything = [CODEC.encode(topic, record) for topic, records in seeds().items() for record in records]
    partitions = topics.table().keyed_partitions
    for number in range(count):
        topic = rng.choice(INPUTS)
        record = rng.choice(seeds()[topic])
        key: bytes | None = record.key.encode()
        value: bytes | None = CODEC.encode(topic, record)
        assert value is not None
        damage, other = "none", rng.choice(everything)
        headers: list[tuple[str, bytes | None]] = [("ce_id", record.event_id.encode())]
        draw = rng.random()
        if number % 2_000 == 999:
            topic, key, value, damage = topics.TASKS, b"bomb", _bomb(), "bomb"
        elif draw > valid:
            if draw < valid + 0.3 * (1 - valid):
                datum = record.model_dump()
                for _ in range(rng.randrange(1, 3)):
                    datum = _extreme(rng, datum)
                damage, value = "extreme", _encoded(record, datum)
            elif draw < valid + 0.9 * (1 - valid):
                damage, value = _bytes_damaged(rng, value, other)
            else:
                damage, value = rng.choice(
                    [
                        ("tombstone", None),
                        ("empty", b""),
                        ("noise", rng.randbytes(rng.randrange(1, 200))),
                        ("key", value),
                        ("place", value),
                    ]
                )
            if damage == "key" or rng.random() < 0.05:
                key = _key(rng, record.key.encode())
                if key is None and topic == topics.OUTCOMES:
                    key = b""  # the broker rejects records without a key on a compacted topic
            if rng.random() < 0.1:
                name = rng.choice(["", "tentalis.dlq.original-offset", "ce_id", "traceparent", "tentalis.dlq.mark"])
                headers.append((name, rng.choice([None, b"", b"\xff" * 20, b"-1", b"x" * 2000])))
        anywhere = damage == "place" or not key
        place = rng.randrange(partitions) if anywhere else partition_of(key or b"", partitions)
        yield Fuzzed(topic, place, key, value, tuple(headers), damage)
