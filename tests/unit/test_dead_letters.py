"""Dead letters outside the stream applications: every byte kept, limits kept."""

from typing import Any

import pytest

from schemas.codec import Codec, DecodeError
from schemas.records import Promotion
from tentalis.dlq.limits import DeadLimits, TooManyDead
from tentalis.dlq.owner import DeadLetters
from tentalis.kafka import Stored

TOPIC = "tentalis.policies.v1"


class Sent:
    """A publisher that remembers."""

    def __init__(self) -> None:
        self.letters: list[tuple[Any, ...]] = []
        self.confirmed = 0

    def send_bytes(self, topic: str, key: Any, value: Any, headers: Any, *, partition: int) -> None:
        self.letters.append((topic, key, value, headers, partition))

    def flush(self) -> None:
        self.confirmed = len(self.letters)


def stored(offset: int, value: bytes | None = b"x", key: bytes | None = b"k") -> Stored:
    text = None if key is None else key.decode("utf-8", "replace")
    return Stored(TOPIC, 2, offset, 1_700_000_000_123, text, value, (("mine", b"\xff"),), key)


def bad(offset: int, **more: Any) -> tuple[Stored, DecodeError]:
    error = DecodeError("no record", topic=TOPIC, partition=2, offset=offset, schema="none", stage="decode")
    return stored(offset, **more), error


def keeper(limits: DeadLimits | None = None) -> tuple[DeadLetters, Sent]:
    sent = Sent()
    return DeadLetters(sent, "group", limits), sent  # type: ignore[arg-type]


def test_key_value_and_headers_are_kept_and_confirmed() -> None:
    letters, sent = keeper()
    letters.keep([(stored(1), None), bad(2, key=b"\xff\xfe", value=b"\x00\xff"), bad(3, key=None, value=b"")])
    assert [letter[:3] for letter in sent.letters] == [
        (f"{TOPIC}.dlq", b"\xff\xfe", b"\x00\xff"),
        (f"{TOPIC}.dlq", None, b""),
    ]
    assert sent.confirmed == 2
    headers = dict(sent.letters[0][3])
    assert headers["mine"] == b"\xff"
    assert (headers["tentalis.dlq.original-offset"], headers["tentalis.dlq.consumer-group"]) == (b"2", b"group")
    assert headers["tentalis.dlq.error-class"] == b"schemas.codec.DecodeError", "as the stream applications say it"
    assert sent.letters[0][4] == 2


def test_past_the_limit_nothing_is_sent_and_the_reason_says_where() -> None:
    letters, sent = keeper(DeadLimits(run=3))
    letters.keep([bad(offset) for offset in range(3)])
    with pytest.raises(TooManyDead, match=r"4 records in a row.*policies.v1\[2\]@3 at stage decode: no record"):
        letters.keep([bad(3), (stored(4), None)])
    assert sent.confirmed == len(sent.letters) == 3


def test_a_record_under_another_key_is_none_of_its_topic() -> None:
    promotion = Promotion(policy="p", version=1, event_time=1, sha256="-", mode="always")
    wire = Codec().encode(TOPIC, promotion)
    assert stored(1, wire, promotion.key.encode()).decode_own(Codec()) == promotion
    with pytest.raises(DecodeError, match=r"policies.v1\[2\]@1: the Kafka key is 'other'"):
        stored(1, wire, b"other").decode_own(Codec())
