"""The contract: .avsc files equal their twins, topics agree with each other, digests are what they were."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import schemas
from schemas import digest, records, topics
from schemas.digest import ADDED_FIELDS, DIGEST_FIELDS, digest_holds, rollout_digest, with_digest
from schemas.records import (
    RECORDS,
    LogprobsMode,
    PolicySpan,
    Provenance,
    Record,
    Rollout,
    Sampling,
    TaskHead,
    Terms,
    TokenSpan,
)
from schemas.tensors import float32_bytes, int32_bytes, uint8_bytes
from schemas.wire import avro
from schemas.wire.avro import AvroSchema
from tests.support.avro_of import avro_record

FOLDER = Path(schemas.__path__[0])
LOGICAL = {"timestamp-millis": "long", "int32-le": "bytes", "float32-le": "bytes", "uint8-mask": "bytes"}


def raw(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.avsc").read_text(encoding="utf-8"))


def without_docs(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: without_docs(value) for key, value in schema.items() if key != "doc"}
    return [without_docs(item) for item in schema] if isinstance(schema, list) else schema


def named_types(schema: Any) -> Iterator[Any]:
    """Every record and enum defined in a schema, the schema itself included."""
    if isinstance(schema, list):
        for item in schema:
            yield from named_types(item)
    elif isinstance(schema, dict):
        if schema.get("type") in ("record", "enum"):
            yield schema
        for field in schema.get("fields", ()):
            yield from named_types(field["type"])
        for inner in ("items", "values", "type"):
            if isinstance(schema.get(inner), dict | list):
                yield from named_types(schema[inner])


def test_every_record_has_a_file_and_every_file_a_record() -> None:
    assert {path.stem for path in FOLDER.glob("*.avsc")} == set(RECORDS)


def test_the_package_exports_everything_that_its_modules_define() -> None:
    exported = set(records.__all__)
    for path in (FOLDER / "records").glob("[a-z]*.py"):
        module = importlib.import_module(f"schemas.records.{path.stem}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and not name.startswith("check_"):
                assert name in exported and getattr(records, name) is value, f"{module.__name__}.{name}"
    models = {value for value in vars(records).values() if isinstance(value, type) and issubclass(value, Record)}
    assert models - {Record} == set(RECORDS.values())


@pytest.mark.parametrize("name", RECORDS)
def test_the_twin_and_the_file_are_the_same_schema(name: str) -> None:
    assert without_docs(raw(name)) == avro_record(RECORDS[name])


@pytest.mark.parametrize("name", RECORDS)
def test_everything_is_documented_and_enums_have_an_unknown(name: str) -> None:
    for named in named_types(raw(name)):
        if named["type"] == "enum":
            assert named["default"] == "unknown" == named["symbols"][0]
            continue
        assert named["namespace"] == "tentalis"
        assert named["doc"].strip(), named["name"]
        for field in named["fields"]:
            assert field["doc"].strip(), f"{named['name']}.{field['name']}"


def test_a_named_type_is_the_same_in_every_file() -> None:
    def expanded(schema: Any, known: dict[str, Any]) -> Any:
        """References by name put in place, so that the place of the definition does not matter."""
        if isinstance(schema, str):
            return known.get(schema, schema)
        if isinstance(schema, list):
            return [expanded(item, known) for item in schema]
        if isinstance(schema, dict):
            found = {
                key: expanded(value, known) for key, value in schema.items() if key not in ("name", "doc", "default")
            }
            found |= {key: schema[key] for key in ("name", "doc", "default") if key in schema}
            if schema.get("type") in ("record", "enum"):
                known[f"{schema['namespace']}.{schema['name']}"] = found
            return found
        return schema

    definitions: dict[str, Any] = {}
    for name in RECORDS:
        known: dict[str, Any] = {}
        expanded(raw(name), known)
        for full_name, definition in known.items():
            assert definitions.setdefault(full_name, definition) == definition, f"{full_name} differs in {name}.avsc"
    assert len(definitions) > len(RECORDS)


def test_logical_types_are_known_and_on_the_right_base() -> None:
    def check(schema: Any) -> None:
        if isinstance(schema, list):
            for item in schema:
                check(item)
        elif isinstance(schema, dict):
            if "logicalType" in schema:
                assert LOGICAL[schema["logicalType"]] == schema["type"]
            for value in schema.values():
                check(value)

    for name in RECORDS:
        check(raw(name))


def test_the_fingerprint_is_crc_64_avro_little_endian() -> None:
    # The specification's own vector: the fingerprint of the schema "int" is 7275d51a3f395c8f.
    from fastavro.schema import fingerprint

    assert fingerprint('"int"', "CRC-64-AVRO") == "8f5c393f1ad57572"
    assert bytes.fromhex("8f5c393f1ad57572") == 0x7275D51A3F395C8F.to_bytes(8, "little")
    schema = AvroSchema.parse('{"type": "record", "name": "tentalis.X", "fields": [{"name": "a", "type": "int"}]}')
    assert (schema.name, len(schema.fingerprint)) == ("X", 8)


def test_fingerprints_are_distinct() -> None:
    assert len({schema.fingerprint for schema in avro.all_current()}) == len(RECORDS)


@pytest.mark.parametrize("text", ["", "{}", '"int"', '{"type": "record", "name": "x", "fields": [{"name": "a"}]}'])
def test_text_that_is_no_record_schema_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an Avro record schema"):
        AvroSchema.parse(text)


# --- the digest -------------------------------------------------------------------------------------------------------


def rollout() -> Rollout:
    draft = Rollout(
        rollout_id="task/0",
        rollout_event_id="event",
        event_time=1,
        head=TaskHead(
            task_id="task", policy="assistant", environment="chat", terms=Terms(), session_id="session", turn_index=3
        ),
        sample_index=0,
        result_id="result",
        worker_id="worker",
        token_ids=int32_bytes([1, 2, 3]),
        loss_mask=uint8_bytes([0, 1, 1]),
        sampler_logprobs=float32_bytes([0.0, -0.5, -0.25]),
        logprobs_mode=LogprobsMode.PROCESSED,
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=5),
        policy_spans=(PolicySpan(start=1, policy="assistant@v1"),),
        reward=0.5,
        components={"b": 2.0, "a": 1.0},
        n_requested=2,
        n_closed=2,
        group_mean=0.25,
        group_std=0.25,
        has_rl=True,
        has_opd=True,
        step_scores=float32_bytes([1.0]),
        step_spans=(TokenSpan(start=1, end=3),),
        hints=("be short",),
        teacher_policy="base",
        teacher_logprobs=float32_bytes([0.0, -0.1, -0.1]),
        provenance=(Provenance(half="score", half_id="score", topic="t", partition=0, offset=0),),
        digest="pending",
    )
    return with_digest(draft)


CHANGES: dict[str, dict[str, Any]] = {
    "rollout_id": {"rollout_id": "task/1"},
    "policy": {"head": {"policy": "other"}},
    "environment": {"head": {"environment": "math"}},
    "token_ids": {"token_ids": int32_bytes([1, 2, 4])},
    "loss_mask": {"loss_mask": uint8_bytes([0, 0, 1])},
    "sampler_logprobs": {"sampler_logprobs": float32_bytes([0.0, -0.5, -0.75])},
    "logprobs_mode": {"logprobs_mode": LogprobsMode.RAW},
    "temperature": {"sampling": {"temperature": 1.0}},
    "top_p": {"sampling": {"top_p": 1.0}},
    "top_k": {"sampling": {"top_k": 6}},
    "constrained": {"sampling": {"constrained": True}},
    "policy_spans": {"policy_spans": (PolicySpan(start=2, policy="assistant@v1"),)},
    "reward": {"reward": None},
    "components": {"components": {"a": 1.0, "b": 2.5}},
    "n_requested": {"n_requested": 3},
    "n_closed": {"n_closed": 1},
    "group_mean": {"group_mean": 0.5},
    "group_std": {"group_std": None},
    "has_rl": {"has_rl": False},
    "has_opd": {"has_opd": False},
    "step_scores": {"step_scores": b""},
    "step_spans": {"step_spans": (TokenSpan(start=1, end=2),)},
    "teacher_policy": {"teacher_policy": None},
    "teacher_logprobs": {"teacher_logprobs": None},
    "session_id": {"head": {"session_id": None}},
    "turn_index": {"head": {"turn_index": 4}},
    "n_rewarded": {"n_rewarded": 1},
    "topk": {"topk": 2},
    "topk_ids": {"topk_ids": int32_bytes([7])},
    "topk_logprobs": {"topk_logprobs": float32_bytes([-0.5])},
}


def changed(changes: dict[str, Any]) -> Rollout:
    original = rollout()
    update = {
        name: getattr(original, name).model_copy(update=value) if name in ("head", "sampling") else value
        for name, value in changes.items()
    }
    return original.model_copy(update=update)


def test_the_digest_is_what_it_was() -> None:
    # Golden: a change of this value makes every recorded rollout a forgery.
    assert rollout().digest == "986d3c363739cee5dab3050a3597c839bb232bfa9019db3fa66cffdcee1670e8"


def test_every_digest_field_is_tried() -> None:
    assert set(CHANGES) == {*DIGEST_FIELDS, *ADDED_FIELDS}


@pytest.mark.parametrize("name", CHANGES)
def test_the_digest_changes_with_each_of_its_fields(name: str) -> None:
    altered = changed(CHANGES[name])
    assert rollout_digest(altered) != rollout().digest
    assert not digest_holds(altered)


@pytest.mark.parametrize(
    "changes",
    [
        {"event_time": 99},
        {"rollout_event_id": "other"},
        {"worker_id": "other"},
        {"result_id": "other"},
        {"hints": ()},
        {"provenance": ()},
        {"components": {"a": 1.0, "b": 2.0}},
        {"head": {"user_id": "somebody", "manager_id": "other"}},
    ],
)
def test_the_digest_is_independent_of_where_and_when(changes: dict[str, Any]) -> None:
    assert digest_holds(changed(changes))


def test_a_rollout_of_another_task_than_its_id_names_is_forged() -> None:
    """Groups are formed by the task: with another one, the rewards of strangers would be compared."""
    genuine = rollout()
    other_task = genuine.model_copy(update={"head": genuine.head.model_copy(update={"task_id": "other"})})
    assert rollout_digest(other_task) == genuine.digest
    assert digest_holds(genuine) and not digest_holds(other_task)
    assert not digest_holds(genuine.model_copy(update={"sample_index": genuine.sample_index + 1}))


def test_lengths_are_part_of_the_canonical_form() -> None:
    # Without them, moving a byte from one field to the next would leave the digest as it was.
    assert digest._canonical(["ab", "c"]) != digest._canonical(["a", "bc"])
    assert digest._canonical([1, None]) != digest._canonical([1, "n", None][:1])


def test_the_digest_survives_the_wire() -> None:
    from schemas.wire.codec import Codec

    codec = Codec()
    back = codec.decode(codec.encode(topics.ROLLOUTS, rollout()), topic=topics.ROLLOUTS, partition=0, offset=0)
    assert isinstance(back, Rollout)
    assert digest_holds(back)


def test_a_redacted_rollout_holds_and_a_redacted_rollout_alone() -> None:
    redacted_rollout = rollout().model_copy(update={"token_ids": b"", "forgotten": True})
    assert digest_holds(redacted_rollout)
    assert not digest_holds(redacted_rollout.model_copy(update={"forgotten": False}))


# --- the topics -------------------------------------------------------------------------------------------------------

KEYED_BY_TASK = (topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.HALVES, topics.OUTCOMES, topics.ROLLOUTS)


def test_topics_keyed_by_task_have_one_partition_count() -> None:
    table = topics.table()
    together = [*KEYED_BY_TASK, *map(topics.dlq, KEYED_BY_TASK)]
    assert {table[name].partitions for name in together} == {table.keyed_partitions}


def test_one_limit_holds_everywhere() -> None:
    table = topics.with_changelogs(topics.table(), ["x-state-changelog"])
    for name, topic in table.topics.items():
        room = topics.OVERHEAD_BYTES * (2 if name.endswith(".dlq") else 1)
        assert topic.config["max.message.bytes"] == str(table.record_limit_bytes + room), name
        assert topic.config["compression.type"] == "zstd", name


def test_every_record_has_a_topic_and_every_topic_knows_its_records() -> None:
    table = topics.table()
    named = [record for topic in table.topics.values() for record in topic.records]
    assert set(named) == set(RECORDS)
    assert {name for name in RECORDS if named.count(name) > 1} == {"Tick", "Forget"}
    constants = {value for name, value in vars(topics).items() if name.isupper() and isinstance(value, str)}
    assert constants - {topics.PREFIX, topics.PRODUCT} == {name for name in table.topics if name.endswith(".v1")}


def test_every_dead_letter_topic_belongs_to_an_input_topic_and_keeps_a_month() -> None:
    table = topics.table()
    letters = [name for name in table.topics if name.endswith(".dlq")]
    assert set(map(topics.dlq, KEYED_BY_TASK)) <= set(letters)
    for name in letters:
        assert name.removesuffix(".dlq") in table.topics
        assert table[name].config["retention.ms"] == str(30 * 24 * 3600 * 1000)


def test_changelogs_are_compacted_only_and_time_on_the_halves_is_the_brokers() -> None:
    table = topics.with_changelogs(topics.table(), ["x-state-changelog"])
    changelog = table["x-state-changelog"]
    assert changelog.partitions == table.keyed_partitions
    assert changelog.config["cleanup.policy"] == "compact"
    assert int(changelog.config["min.compaction.lag.ms"]) >= 3600 * 1000
    assert table[topics.HALVES].config["message.timestamp.type"] == "LogAppendTime"
    assert table[topics.ROLLOUTS].config["cleanup.policy"] == "compact"
