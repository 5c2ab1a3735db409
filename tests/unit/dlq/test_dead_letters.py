"""Dead letters outside the stream applications: every byte kept, limits kept."""

from collections.abc import Container
from typing import Any

import pytest

from schemas.records import Promotion
from schemas.wire.codec import Codec, DecodeError
from tentalis.dlq.limits import DeadLetterLimits, TooManyDead
from tentalis.dlq.owner import DeadLetterWriter
from tentalis.kafka.consumer import Stored
from tentalis.service.settings import DeadLetterThresholds, Settings
from tentalis.service.variable import BadVariable

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


class OnLog:
    """The letters that are on the log already."""

    def __init__(self, written: Container[int] = (), skipped: Container[int] = ()) -> None:
        self._written, self._skipped = written, skipped

    def has(self, record: Stored) -> bool:
        return record.offset in self._written

    def skipped(self, record: Stored) -> bool:
        return record.offset in self._skipped


def keeper(limits: DeadLetterLimits | None = None, on_log: OnLog | None = None) -> tuple[DeadLetterWriter, Sent]:
    sent = Sent()
    return DeadLetterWriter(sent, "group", on_log or OnLog(), limits or DeadLetterLimits()), sent  # type: ignore[arg-type]


def test_key_value_and_headers_are_kept_and_confirmed() -> None:
    letters, sent = keeper()
    letters.write([(stored(1), None), bad(2, key=b"\xff\xfe", value=b"\x00\xff"), bad(3, key=None, value=b"")])
    assert [letter[:3] for letter in sent.letters] == [
        (f"{TOPIC}.dlq", b"\xff\xfe", b"\x00\xff"),
        (f"{TOPIC}.dlq", None, b""),
    ]
    assert sent.confirmed == 2
    headers = dict(sent.letters[0][3])
    assert headers["mine"] == b"\xff"
    assert (headers["tentalis.dlq.original-offset"], headers["tentalis.dlq.consumer-group"]) == (b"2", b"group")
    assert headers["tentalis.dlq.error-class"] == b"DecodeError", "as the stream applications say it"
    assert sent.letters[0][4] == 2


def test_past_the_limit_nothing_is_sent_and_the_reason_says_where() -> None:
    letters, sent = keeper(DeadLetterLimits(run=3))
    letters.write([bad(offset) for offset in range(3)])
    with pytest.raises(TooManyDead, match=r"4 records in a row.*policies.v1\[2\]@3 at stage decode: no record"):
        letters.write([bad(3), (stored(4), None)])
    assert sent.confirmed == len(sent.letters) == 3


def test_a_record_that_has_a_letter_is_counted_and_not_written_again() -> None:
    """So a restart neither repeats the letters nor empties a topic full of garbage, a hundred records at a time."""
    letters, sent = keeper(DeadLetterLimits(run=3), OnLog(written=range(3)))
    assert letters.write([bad(0), bad(1), bad(2)]) == 0 and not sent.letters
    with pytest.raises(TooManyDead, match="4 records in a row"):
        letters.write([bad(3)])
    letters, sent = keeper(DeadLetterLimits(run=3), OnLog(written=range(2)))
    assert letters.write([bad(0), bad(1), bad(2)]) == 1
    assert [letter[2:] for letter in sent.letters] == [(b"x", sent.letters[0][3], 2)]


def test_a_record_that_an_operator_skipped_is_not_counted() -> None:
    letters, sent = keeper(DeadLetterLimits(run=3), OnLog(written=range(900), skipped=range(900)))
    assert letters.write([bad(offset) for offset in range(903)]) == 3
    assert sent.confirmed == 3


def test_the_message_names_the_way_on() -> None:
    limits = DeadLetterLimits.of(DeadLetterThresholds(run=0), "tentalis-trainer-p")
    letters, _ = keeper(limits)
    with pytest.raises(TooManyDead, match="run `tentalis groups skip tentalis-trainer-p --until-good`"):
        letters.write([bad(0)])


def test_the_limits_come_from_the_environment() -> None:
    assert DeadLetterThresholds.from_env({"TENTALIS_DEAD_RUN": ""}) == DeadLetterThresholds(
        run=100, ratio=0.5, window=1000
    )
    names = {"TENTALIS_DEAD_RUN": "5", "TENTALIS_DEAD_RATIO": "0.25", "TENTALIS_DEAD_WINDOW": "10"}
    assert Settings.from_env(names).dead_letters == DeadLetterThresholds(run=5, ratio=0.25, window=10)
    for name, value in (("RUN", "many"), ("RUN", "0.5"), ("RUN", "-1"), ("RATIO", "-1"), ("WINDOW", "0")):
        with pytest.raises(BadVariable, match=f"TENTALIS_DEAD_{name}={value}: "):
            Settings.from_env({f"TENTALIS_DEAD_{name}": value})


def test_a_record_under_another_key_is_none_of_its_topic() -> None:
    promotion = Promotion(policy="p", version=1, event_time=1, sha256="-", mode="always")
    wire = Codec().encode(TOPIC, promotion)
    assert stored(1, wire, promotion.key.encode()).decode_own(Codec()) == promotion
    with pytest.raises(DecodeError, match=r"policies.v1\[2\]@1: the Kafka key is 'other'"):
        stored(1, wire, b"other").decode_own(Codec())
