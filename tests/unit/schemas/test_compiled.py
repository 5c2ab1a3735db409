"""The generated functions beside fastavro and pydantic: the same bytes, the same records, and nothing accepted that
those two would refuse."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.records import RECORDS, Record, Score
from schemas.wire import avro
from schemas.wire.codec import SINGLE_OBJECT, Codec, DecodeError
from schemas.wire.compiled import LONGEST_RUN, MOST_RUNS, START_BYTES, Runs, Unsure, compiled, varint
from tests.support.verify_run import consistent
from tests.unit.schemas.test_wire import records_of

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
STRANGE: dict[type, list[Any]] = {
    str: ["", "x", "\N{SNOWMAN}"],
    bytes: [b"", b"abc", b"\0" * 4, b"\0" * 12],
    int: [-1, 0, 1, 255, 256, 257, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**62],
    float: [math.nan, math.inf, -math.inf, -0.0, -1.0, 1.0, math.nextafter(1.0, 2.0), math.nextafter(-1.0, -2.0), 7.5],
}


def slowly(name: str, body: bytes) -> Record | None:
    """Returns the record that fastavro and pydantic read from a body, None if they refuse it."""
    schema = avro.current(name)
    try:
        return RECORDS[name].model_validate(avro.read(schema, schema, body))
    except Exception:  # noqa: BLE001
        return None


def quickly(name: str, body: bytes) -> Record | None:
    try:
        return compiled(name).decode(body)
    except Unsure:
        return None


def like(a: Any, b: Any) -> bool:
    """Equal, of the same types, with NaN equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(like(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(like, a, b))
    if hasattr(a, "__pydantic_fields_set__"):
        return a.__pydantic_fields_set__ == b.__pydantic_fields_set__ and like(a.__dict__, b.__dict__)
    return (
        bool(a == b and math.copysign(1, a) == math.copysign(1, b))
        if isinstance(a, float) and a == a
        else (a == b or (a != a and b != b))
    )


def strange(data: st.DataObject, value: Any) -> Any:
    """A datum with one of its values replaced by an odd one of the same Avro type."""
    if isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        return value | {key: strange(data, value[key])}
    if isinstance(value, list | tuple) and value:
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], strange(data, value[place]), *value[place + 1 :]]
    return data.draw(st.sampled_from(STRANGE[type(value)])) if type(value) in STRANGE else value


@pytest.mark.parametrize("name", RECORDS)
def test_the_same_bytes_and_the_same_record(name: str) -> None:
    @QUICK
    @given(records_of(RECORDS[name]))
    def check(record: Record) -> None:
        body = avro.write(avro.current(name), record.model_dump())
        assert compiled(name).encode(record, b"prefix") == b"prefix" + body
        found = compiled(name).decode(body)
        assert like(found, slowly(name, body))
        assert like(compiled(name).decode(body), found)  # its runs are known now
        assert found.model_copy() == found == record
        assert found.model_dump_json() == record.model_dump_json()

    check()


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_accepted_is_valid(name: str) -> None:
    """Values at and past every bound, and contradictions between fields."""

    @QUICK
    @given(records_of(RECORDS[name]), st.data())
    def check(record: Record, data: st.DataObject) -> None:
        datum = strange(data, strange(data, record.model_dump()))
        try:
            body = avro.write(avro.current(name), datum)
        except Exception:  # noqa: BLE001
            return  # no Avro writes it
        found, expected = quickly(name, body), slowly(name, body)
        assert like(found, expected)

    check()


@pytest.mark.parametrize("name", RECORDS)
def test_damaged_bytes_are_not_taken_for_a_record(name: str) -> None:
    @QUICK
    @given(records_of(RECORDS[name]), st.data())
    def check(record: Record, data: st.DataObject) -> None:
        body = bytearray(compiled(name).encode(record, b""))
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(body) - 1))
            body[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
            if not body:
                break
        found = quickly(name, bytes(body))
        assert found is None or like(found, slowly(name, bytes(body)))

    check()


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_long_is_written_as_avro_does(value: int) -> None:
    assert varint(value) == avro.write(avro.AvroSchema.parse(LONG), {"v": value})


@given(st.lists(st.integers(128, 255), max_size=11), st.integers(0, 127))
def test_a_long_of_more_than_64_bits_is_not_taken(continued: list[int], last: int) -> None:
    body = bytes([*continued, last, 0])
    found = quickly("Tick", body)
    assert found is None or like(found, slowly("Tick", body))
    assert found is None or abs(found.event_time) <= 2**63  # type: ignore[attr-defined]


LONG = '{"type": "record", "name": "V", "fields": [{"name": "v", "type": "long"}]}'


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_integer_past_64_bits_is_not_written(value: int) -> None:
    with pytest.raises(OverflowError):
        varint(value)


def test_a_refusal_is_in_the_words_of_pydantic() -> None:
    """The codec says why, as if there were nothing generated."""
    codec, schema = Codec(), avro.current("Tick")
    body = avro.write(schema, {"event_time": 1, "partition": -1})
    with pytest.raises(DecodeError, match="greater than or equal to 0") as refused:
        codec.decode(SINGLE_OBJECT + schema.fingerprint + body, topic="t", partition=0, offset=0)
    assert refused.value.stage == "validate"
    with pytest.raises(ValidationError):
        RECORDS["Tick"].model_validate({"event_time": 1, "partition": -1})


def test_runs_of_fields_that_are_known_are_few_short_and_counted() -> None:
    runs = Runs()
    for number in range(3 * MOST_RUNS):
        runs.learn(number.to_bytes(START_BYTES, "big"), (number,), 0)
    assert len(runs) <= MOST_RUNS
    runs.learn(b"x" * (LONGEST_RUN + 1), (), 0)
    assert b"x" * START_BYTES not in runs

    many = consistent().scores[0].record
    assert isinstance(many, Score)
    sampling = many.sample.sampling.model_copy(update={"stop": ("",) * 300})
    many = many.model_copy(update={"sample": many.sample.model_copy(update={"sampling": sampling})})
    body = avro.write(avro.current("Score"), many.model_dump())
    assert compiled("Score").decode(body) == compiled("Score").decode(body) == many
