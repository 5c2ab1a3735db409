"""Both wire formats: what is written comes back, and bytes that are no record say why and where."""

import threading
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import Any

import pytest
from confluent_kafka.schema_registry import record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from schemas import topics
from schemas.records import RECORDS, Record, Score, Tick
from schemas.wire import avro
from schemas.wire.codec import CONFLUENT, SINGLE_OBJECT, Codec, DecodeError, SchemasUnavailable
from schemas.wire.registry import ConfluentRegistry, SchemaRefused, as_sent
from tentalis.cli.shared.record_json import from_plain, to_plain
from tests.support.kafka_fixture import eventually
from tests.support.schema_registry import SchemaRegistry, schema_registry
from tests.support.verify_run import consistent

INT, LONG = st.integers(0, 2**31 - 1), st.integers(0, 2**62)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
SAME_LENGTH = 3


@pytest.fixture
def http_registry() -> Iterator[SchemaRegistry]:
    with schema_registry() as registry:
        yield registry


@cache
def _registry() -> ConfluentRegistry:
    registry = ConfluentRegistry("mock://")
    registry.register_all()
    return registry


def codecs() -> dict[str, Codec]:
    return {"single-object": Codec(), "confluent": Codec(_registry())}


def tensor(width: int) -> st.SearchStrategy[bytes]:
    """One length for all token fields, because records hold theirs together."""
    return st.binary(min_size=width * SAME_LENGTH, max_size=width * SAME_LENGTH)


def values_of(annotation: Any, name: str) -> st.SearchStrategy[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        for item in metadata:
            if isinstance(item, FieldInfo) and isinstance(item.json_schema_extra, dict):
                match item.json_schema_extra.get("logicalType"):
                    case "int32-le" | "float32-le":
                        return tensor(4)
                    case "uint8-mask":
                        return tensor(1)
                if item.json_schema_extra.get("avro") == "int":
                    return INT
        return values_of(base, name)
    if origin in (typing.Union, types.UnionType):
        branches = [values_of(arg, name) for arg in typing.get_args(annotation) if arg is not type(None)]
        return st.none() | st.one_of(branches)
    if origin is tuple:
        return st.lists(values_of(typing.get_args(annotation)[0], name), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, values_of(typing.get_args(annotation)[1], name), max_size=2)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return records_of(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(list(annotation))
    return {
        str: TEXT,
        int: LONG,
        float: st.floats(0.0, 1.0),
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
    }[annotation]


@cache
def records_of(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Records of a type that pass its own checks."""
    hints = typing.get_type_hints(model, include_extras=True)
    fields = {name: values_of(hints[name], name) for name in model.model_fields}

    def built(values: dict[str, Any]) -> Any:
        try:
            return model.model_validate(values)
        except ValidationError:
            return None

    return st.fixed_dictionaries(fields).map(plausible(model)).map(built).filter(lambda record: record is not None)


def plausible(model: type[BaseModel]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Brings drawn values closer to what the record's cross-field checks ask for, so that few are thrown away."""

    def adjust(values: dict[str, Any]) -> dict[str, Any]:
        values = dict(values)
        match model.__name__:
            case "Terms":
                values["rl"], values["opd"] = values["rl"] or "user", "user"
                values["opens"] = "at_once"
                values["deadline_ms"] += 1
                values["opd_window_ms"] += 1
            case "Sampling":
                values["top_p"], values["max_tokens"] = values["top_p"] or 1.0, max(1, values["max_tokens"])
            case "Task":
                values["messages"] = values["messages"] or ({"role": "user", "content": ""},)
                values["n_samples"] = values["n_samples"] % 256 + 1
            case "Result":
                values["sample_index"] = values["sample_index"] % values["task"].n_samples
                tokens = len(values["response_token_ids"]) // 4
                values["policy_spans"] = [
                    span.model_copy(update={"start": span.start % (tokens + 1)}) for span in values["policy_spans"]
                ]
                values["loss_mask"] = bytes(byte % 2 for byte in values["loss_mask"])
                for spans in ("turns", "step_rewards"):
                    values[spans] = [
                        span.model_copy(update={"start": span.start % (tokens + 1), "end": tokens})
                        for span in values[spans]
                    ]
            case "Sample":
                values["sample_index"] = values["sample_index"] % values["head"].n_samples
            case "Feedback":
                values["source"] = "user"
                if values["result"] is not None:
                    values["task_id"] = values["result"].task.task_id
                    values["sample_index"] = values["result"].sample_index
            case "Hint":
                values["topk"] = 1
                if values["kind"].value == "accepted":
                    values["teacher_logprobs"] = values["teacher_logprobs"] or b"\0" * 4 * SAME_LENGTH
            case "MetaSignal":
                values["window_ms"] += 1
        for name in (
            "n_samples",
            "n_requested",
            "n_tokens",
            "count",
            "attempt",
            "world_size",
            "threads",
            "rank",
            "step",
        ):
            if name in values and values[name] == 0:
                values[name] = 1
        return values

    return adjust


@pytest.mark.parametrize("name", RECORDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_record_survives_both_wire_formats_and_json(name: str, data: st.DataObject) -> None:
    record: Record = data.draw(records_of(RECORDS[name]))
    topic = next(topic.name for topic in topics.table().topics.values() if name in topic.records)
    for kind, codec in codecs().items():
        wire = codec.encode(topic, record)
        assert wire.startswith(SINGLE_OBJECT if kind == "single-object" else CONFLUENT)
        assert codec.decode(wire, topic=topic, partition=0, offset=0) == record
    assert from_plain(RECORDS[name], to_plain(record)) == record


def test_readers_with_a_registry_accept_both_formats() -> None:
    tick = Tick(event_time=1, partition=2)
    both = codecs()
    wire = both["single-object"].encode(topics.HALVES, tick)
    assert both["confluent"].decode(wire, topic=topics.HALVES, partition=0, offset=0) == tick


def test_the_header_has_the_fingerprint_of_the_writers_schema() -> None:
    wire = Codec().encode(topics.HALVES, Tick(event_time=1, partition=2))
    assert wire[:2].hex() == "c301"
    assert wire[2:10] == avro.current("Tick").fingerprint


def test_a_writer_schema_that_is_not_shipped_is_looked_up_and_resolved() -> None:
    text = avro.current("Tick").text.replace(
        '"fields": [', '"fields": [{"name": "future", "type": "string", "default": "", "doc": "new"},', 1
    )
    future = avro.AvroSchema.parse(text)
    body = avro.write(future, {"future": "x", "event_time": 5, "partition": 6})
    codec = Codec(lookup={future.fingerprint: future}.get)
    wire = SINGLE_OBJECT + future.fingerprint + body
    assert codec.decode(wire, topic=topics.HALVES, partition=0, offset=0) == Tick(event_time=5, partition=6)


def good(record: Record | None = None) -> bytes:
    return Codec().encode(topics.HALVES, record or consistent().scores[0].record)


def nan_score() -> bytes:
    score = consistent().scores[0].record
    datum = score.model_dump() | {"reward": float("nan")}
    schema = avro.current("Score")
    return SINGLE_OBJECT + schema.fingerprint + avro.write(schema, datum)


BAD: dict[str, tuple[Callable[[], bytes | None], str, str, str]] = {
    "bad magic": (lambda: b"\xde\xad\xbe\xef", "bad magic dead", "none", "decode"),
    "no bytes": (lambda: b"", r"bad magic \(no bytes\)", "none", "decode"),
    "half a header": (lambda: good()[:6], "unknown schema", good()[2:6].hex(), "decode"),
    "truncated": (lambda: good()[:-40], "not readable as Avro", "Score", "decode"),
    "left over": (lambda: good() + b"!!", "2 bytes are left over", "Score", "decode"),
    "unknown schema": (lambda: SINGLE_OBJECT + b"\1" * 8 + b"x", "unknown schema", "01" * 8, "decode"),
    "another topic's record": (
        lambda: Codec().encode(topics.TASKS, consistent().tasks[0].record),
        "holds a Task where Forget, Hint, Open, Score, Tick is expected",
        "Task",
        "decode",
    ),
    "not a number": (nan_score, "reward: .*finite", "Score", "validate"),
    "tombstone": (lambda: None, "a tombstone", "none", "decode"),
    "no registry": (
        lambda: CONFLUENT + b"\0\0\0\7x",
        "either not a record, or one in Confluent framing, for which SCHEMA_REGISTRY_URL must be set",
        "id 7",
        "decode",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bytes_say_what_where_and_which_schema(name: str) -> None:
    make, reason, schema, stage = BAD[name]
    expected = topics.table().records_of(topics.HALVES)
    with pytest.raises(DecodeError, match=reason) as caught:
        Codec().decode(make(), topic=topics.HALVES, partition=5, offset=77, expected=expected)
    error = caught.value
    assert (error.topic, error.partition, error.offset) == (topics.HALVES, 5, 77)
    assert (error.schema, error.stage) == (schema, stage)
    for part in (topics.HALVES, "[5]@77", schema, stage):
        assert part in str(error)


def decoded(codec: Codec, value: bytes) -> Record:
    return codec.decode(value, topic=topics.HALVES, partition=0, offset=1)


UNKNOWN_ID = CONFLUENT + b"\0\0\xff\xff"
TICK = Tick(event_time=1, partition=2)


@pytest.mark.parametrize("name", RECORDS)
def test_the_bytes_are_those_of_confluents_own_serializer(name: str) -> None:
    """With what it knows of the registry, and with the client's defaults otherwise."""
    conf = {"auto.register.schemas": False, "subject.name.strategy": record_subject_name_strategy}
    own = AvroSerializer(_registry()._client, as_sent(avro.current(name)), conf=conf)
    codec, place = Codec(_registry()), SerializationContext("any", MessageField.VALUE)

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(records_of(RECORDS[name]))
    def check(record: Record) -> None:
        assert codec.encode("any", record) == own(record.model_dump(), place)

    check()


def test_a_schema_is_looked_up_once(http_registry: SchemaRegistry) -> None:
    ConfluentRegistry(http_registry.url).register_all()
    codec, asked = Codec(ConfluentRegistry(http_registry.url)), len(http_registry.calls)
    assert len({codec.encode(topics.HALVES, TICK) for _ in range(3)}) == 1
    assert len(http_registry.calls) == asked + 1


def test_an_id_that_the_registry_does_not_know_is_named(http_registry: SchemaRegistry) -> None:
    with pytest.raises(DecodeError, match="as Confluent framing its schema is unknown to the registry") as caught:
        decoded(Codec(ConfluentRegistry(http_registry.url)), UNKNOWN_ID)
    assert caught.value.schema == "id 65535"


def test_an_id_of_a_schema_that_is_no_record_of_avro_is_a_bad_record(http_registry: SchemaRegistry) -> None:
    http_registry.texts += ['syntax = "proto3";', '"string"', "[" * 100_000]
    for number in range(1, 4):
        with pytest.raises(DecodeError, match="unknown to the registry"):
            decoded(Codec(ConfluentRegistry(http_registry.url)), CONFLUENT + number.to_bytes(4, "big") + b"x")


@pytest.mark.parametrize("status", [404, 401, 429, 500, 503])
def test_a_registry_that_fails_dead_letters_no_record(http_registry: SchemaRegistry, status: int) -> None:
    good = ConfluentRegistry(http_registry.url)
    good.register_all()
    wire = Codec(good).encode(topics.HALVES, TICK)
    wrong_path = status == 404  # a 404 that is not the registry's own
    http_registry.failing = None if wrong_path else status
    codec = Codec(ConfluentRegistry(http_registry.url + ("/proxy" if wrong_path else "")))
    with pytest.raises(SchemasUnavailable, match=str(status)):
        decoded(codec, wire)
    with pytest.raises(SchemasUnavailable, match=str(status)):
        codec.encode(topics.HALVES, TICK)


def test_an_unreachable_registry_dead_letters_no_record_and_its_error_hides_the_password() -> None:
    codec = Codec(ConfluentRegistry("http://user:secret@127.0.0.1:1"))
    for ask in (lambda: decoded(codec, UNKNOWN_ID), lambda: codec.encode(topics.HALVES, TICK)):
        with pytest.raises(SchemasUnavailable, match=r"127\.0\.0\.1 failed") as caught:
            ask()
        assert "secret" not in str(caught.value)


def test_a_patient_codec_asks_again(http_registry: SchemaRegistry) -> None:
    ConfluentRegistry(http_registry.url).register_all()
    wire = Codec(ConfluentRegistry(http_registry.url)).encode(topics.HALVES, TICK)
    http_registry.failing = 503
    asked = len(http_registry.calls)

    def recover() -> None:
        eventually(lambda: len(http_registry.calls) >= asked + 2)
        http_registry.failing = None

    thread = threading.Thread(target=recover)
    thread.start()
    assert decoded(Codec(ConfluentRegistry(http_registry.url), patience=30.0), wire) == TICK
    thread.join()


def test_a_registry_that_does_not_know_our_schemas_says_how_to_teach_it(http_registry: SchemaRegistry) -> None:
    with pytest.raises(SchemasUnavailable, match=r"tentalis\.Tick.*`tentalis schemas register`"):
        Codec(ConfluentRegistry(http_registry.url)).encode(topics.HALVES, TICK)


def test_a_registry_refuses_what_cannot_read_its_earlier_versions(http_registry: SchemaRegistry) -> None:
    registry = ConfluentRegistry(http_registry.url)
    assert registry.register_all() == registry.register_all()
    wider = avro.current("Tick").text.replace(
        '"fields": [', '"fields": [{"name": "new", "type": "string", "doc": "no default"},', 1
    )
    with pytest.raises(SchemaRefused, match=r"tentalis\.Tick.*new"):
        registry.register(avro.AvroSchema.parse(wider))
    assert list(registry.versions("Tick")) == [1]
    assert registry.versions("Nothing") == {}


def test_a_record_with_nan_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Score.model_validate(consistent().scores[0].record.model_dump() | {"reward": float("nan")})
