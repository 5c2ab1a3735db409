"""`tentalis dlq` on a real broker, with a real application that writes the letters and processes what is replayed."""

import asyncio
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import Open, Task
from schemas.topics import dlq
from schemas.wire import avro
from schemas.wire.avro import AvroSchema
from schemas.wire.codec import SINGLE_OBJECT, Codec
from tentalis.cli.main import app
from tentalis.dlq.actions import ActionResult, DeadLetterActions
from tentalis.dlq.context import context_headers
from tentalis.kafka.codec import SchemaLookup, make_codec
from tentalis.kafka.consumer import Stored, messages_to_end, read_to_end
from tentalis.kafka.partitioner import partition_of
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.service.settings import Settings
from tests.support.fork_server import ForkedProcess
from tests.support.kafka_fixture import ensure_topics, eventually
from tests.support.kept_broker import KeptBroker
from tests.support.stream_records import make_task

pytestmark = pytest.mark.broker
runner = CliRunner()
LETTERS = dlq(topics.TASKS)


class Dlq:
    """A broker with our topics, and `tentalis dlq` on it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.publisher = Publisher(settings, "test", make_codec(settings))
        self._log = folder / "scoring.log"
        self._home = folder
        self.scoring: subprocess.Popen[bytes] | None = None

    def __call__(self, *arguments: str, code: int = 0) -> Any:
        done = runner.invoke(app, ["dlq", *arguments, "--bootstrap-server", str(self.settings.bootstrap), "-o", "json"])
        assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr)
        return json.loads(done.stdout) if done.stdout else done.stderr

    def text(self, *arguments: str) -> str:
        done = runner.invoke(app, ["dlq", *arguments, "--bootstrap-server", str(self.settings.bootstrap)])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def put(self, topic: str, key: bytes | None, value: bytes | None, partition: int = 3, **more: Any) -> None:
        self.publisher.send_bytes(topic, key, value, partition=partition, **more)
        self.publisher.flush()

    def start_scoring(self) -> None:
        environment = os.environ | {
            "TENTALIS_BOOTSTRAP": self.settings.require_bootstrap(),
            "TENTALIS_HOME": str(self._home),
            "OMP_NUM_THREADS": "1",
        }
        command = ["-m", "tentalis.cli", "serve", "scoring", "--instance", "scoring"]
        self.scoring = ForkedProcess(command, environment, self._log)

    def stop_scoring(self) -> None:
        assert self.scoring is not None
        self.scoring.terminate()
        assert self.scoring.wait(10) == 0

    def wait(self, what: Any) -> Any:
        assert self.scoring is not None and self.scoring.poll() is None, self._log.read_text()[-3000:]
        return eventually(what, 60)

    def opens(self) -> Counter[str]:
        codec = make_codec(self.settings)
        return Counter(
            record.key
            for stored in read_to_end(self.settings, topics.HALVES)
            if isinstance(record := stored.decode(codec), Open)
        )

    def on(self, topic: str) -> list[Any]:
        return list(messages_to_end(self.settings, topic))


@pytest.fixture(scope="module")
def broker(kept_broker: KeptBroker) -> Iterator[EmbeddedBroker]:
    yield kept_broker.lent()
    kept_broker.take_back()


@pytest.fixture(scope="module")
def tool(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dlq]:
    settings = Settings(bootstrap=broker.bootstrap)

    ensure_topics(settings)
    tool = Dlq(settings, tmp_path_factory.mktemp("home"))
    yield tool
    if tool.scoring is not None and tool.scoring.poll() is None:
        tool.scoring.kill()
        tool.scoring.wait(10)


async def put_with_bad_header_name(bootstrap: str, topic: str, partition: int, key: bytes, value: bytes) -> None:
    from aiokafka import AIOKafkaProducer
    from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

    class NoText(str):
        def encode(self, *_: Any, **__: Any) -> bytes:
            return b"\xff\xfe"

    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    batch = producer.create_batch()
    batch._builder = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, 0, 2**20)
    assert batch.append(timestamp=None, key=key, value=value, headers=[(NoText("x"), b"1")]) is not None
    batch.close()
    await (await producer.send_batch(batch, topic, partition=partition))
    await producer.stop()


def tomorrows_task(task_id: str) -> tuple[AvroSchema, bytes]:
    """A task of a later version of its schema, which nobody has published yet, and that schema."""
    raw = json.loads(avro.current("Task").text)
    raw["fields"].append({"name": "mood", "type": "string", "default": ""})
    schema = AvroSchema.parse(json.dumps(raw))
    datum = make_task(task_id).model_dump() | {"mood": "fine"}
    return schema, SINGLE_OBJECT + schema.fingerprint + avro.write(schema, datum)


def test_a_header_name_that_is_no_text_stops_nobody(tool: Dlq) -> None:
    """Neither an application (aiokafka) nor a reader (confluent-kafka) gets past such a record by itself."""
    task = make_task("poison")
    value = make_codec(tool.settings).encode(topics.TASKS, task)
    asyncio.run(put_with_bad_header_name(tool.settings.require_bootstrap(), topics.TASKS, 5, b"poison", value))
    assert [each.key for each in read_to_end(tool.settings, topics.TASKS)] == ["poison"]
    tool.start_scoring()
    tool.wait(lambda: tool.opens() == {"poison": 1})
    tool.stop_scoring()


def test_letters_are_listed_shown_replayed_once_and_processed(tool: Dlq) -> None:
    schema, early = tomorrows_task("early")
    garbage = b"\xff\xfe\x00garbage"
    tool.put(topics.TASKS, b"early", early, headers=[("ce_id", b"e1"), ("traceparent", b"\x00\x01"), ("none", None)])
    tool.put(topics.TASKS, b"\xff\xff", garbage)
    tool.put(LETTERS, b"stranger", b"wrote this by hand")
    tool.publisher.send(topics.TASKS, make_task("fine"))
    tool.publisher.flush()
    tool.start_scoring()
    tool.wait(lambda: len(tool("list", "--topic", topics.TASKS)) == 3 and tool.opens() == {"fine": 1, "poison": 1})

    found = {each["key"]: each for each in tool("list")}
    assert found["early"]["record"] == f"{topics.TASKS}[3]@0" and found["early"]["group"] == "tentalis-scoring"
    assert "unknown schema" in found["early"]["error"] and found["early"]["stage"] == "decode"
    assert "bad magic fffe" in found["\\xff\\xff"]["error"]
    assert "it has no original-topic" in found["stranger"]["foreign"]
    assert [each["key"] for each in tool("list", "--error", "unknown schema", "--since", "1h")] == ["early"]
    assert tool("list", "--until", "1h") == tool("list", "--app", "hinting") == []
    assert len(tool("list", "--limit", "2")) == 2
    (shown,) = tool("show", f"{topics.TASKS}[3]@1")
    assert shown["value_hex"] == garbage.hex() and shown["key_hex"] == "ffff" and shown["type"] is None
    table = tool.text("list").splitlines()
    assert table[0].split()[:4] == ["LETTER", "STATE", "FAILED", "FAILURES"] and len(table) == 4
    page = tool.text("show", found["early"]["letter"])
    assert "state         open" in page and "unknown schema" in page and "\n  traceparent: " in page
    assert "00000000  c3 01 " in page
    assert "there is no dead letter at" in tool("show", f"{LETTERS}[0]@99", code=1)

    # a letter that has no origin is refused, and the rest goes on its way; a dry run writes nothing
    before = len(tool.on(topics.TASKS)), len(tool.on(LETTERS))
    rows = tool("replay", "--topic", topics.TASKS, "--dry-run", code=1)
    assert Counter(each["result"] for each in rows) == {"planned": 2, "refused": 1}
    assert (len(tool.on(topics.TASKS)), len(tool.on(LETTERS))) == before
    tool.put(topics.SCHEMAS, schema.fingerprint.hex().encode(), schema.text.encode(), partition=0)
    (row,) = tool("replay", "--error", "unknown schema", "--yes")
    assert row["result"] == "replayed"
    (message,) = [each for each in tool.on(topics.TASKS) if each.value() == early and each.partition() != 3]
    home = partition_of(b"early", topics.table()[topics.TASKS].partitions)
    assert row["to"] == f"{topics.TASKS}[{home}]@{message.offset()}" and message.partition() == home
    assert message.key() == b"early"
    assert message.headers() == [("ce_id", b"e1"), ("traceparent", b"\x00\x01"), ("none", None)]
    tool.wait(lambda: tool.opens() == {"fine": 1, "early": 1, "poison": 1})

    # asked again, it is not replayed again
    (row,) = tool("replay", found["early"]["letter"], "--yes", code=1)
    assert row["result"] == "refused" and "already replayed" in row["reason"]
    (shown,) = tool("show", found["early"]["letter"])
    assert shown["state"] == "replayed" and [step["what"] for step in shown["history"]][-1] == "replayed"
    assert (shown["type"], shown["value"]["task_id"]) == ("Task", "early")
    assert '"task_id": "early"' in tool.text("show", found["early"]["letter"])
    assert len(tool.on(topics.TASKS)) == before[0] + 1

    # what fails again is a new letter that knows of the old one
    tool("replay", found["\\xff\\xff"]["letter"], "--yes")
    again = tool.wait(lambda: tool("list", "--error", "bad magic"))
    home = partition_of(b"\xff\xff", topics.table()[topics.TASKS].partitions)
    assert [(each["failures"], each["record"].partition("@")[0]) for each in again] == [(2, f"{topics.TASKS}[{home}]")]
    assert again[0]["first_failed"] <= again[0]["failed"]
    (row,) = tool("drop", again[0]["letter"], "--reason", "noise of a test", "--yes")
    assert row["result"] == "dropped"
    assert tool("drop", again[0]["letter"], "--reason", "x", "--yes", code=1)[0]["result"] == "refused"
    (shown,) = tool("show", again[0]["letter"])
    assert (shown["state"], shown["reason"], shown["value_hex"]) == ("dropped", "noise of a test", garbage.hex())
    assert [each["key"] for each in tool("list")] == ["stranger"]
    assert len(tool("list", "--all")) == 4
    assert tool.opens() == {"fine": 1, "early": 1, "poison": 1}


def a_letter(tool: Dlq, topic: str, key: bytes, offset: int, value: bytes = b"v") -> None:
    headers = context_headers(
        topic=topic,
        partition=0,
        offset=offset,
        timestamp=5_000,
        group="tentalis-test",
        error_class="ValueError",
        error="made up",
        stage="process",
        attempts=1,
        version="0",
        failed_at=time.time(),
    )
    tool.put(dlq(topic), key, value, partition=0, headers=list(headers))


def test_two_who_replay_at_once_replay_once(tool: Dlq) -> None:
    for offset in range(20):
        a_letter(tool, topics.SESSIONS, b"race", 100 + offset)
    names = [dlq(topics.SESSIONS)]
    boxes = [DeadLetterActions(tool.settings, names, time.time) for _ in range(2)]
    plans = [box.plan(box.cases(), again=False) for box in boxes]
    results = [[done.result for done in box.replay(plan)] for box, plan in zip(boxes, plans, strict=True)]
    assert results == [[ActionResult.DONE] * 20, [ActionResult.TAKEN] * 20]
    assert len([each for each in tool.on(topics.SESSIONS) if each.key() == b"race"]) == 20


def test_a_replay_that_died_is_in_doubt_until_told(tool: Dlq, monkeypatch: pytest.MonkeyPatch) -> None:
    a_letter(tool, topics.SESSIONS, b"doubt", 500)
    box = DeadLetterActions(tool.settings, [dlq(topics.SESSIONS)], time.time)
    (case,) = [each for each in box.cases() if each.letter.key == b"doubt"]
    plan = box.plan([case], again=False)

    class Died(BaseException):
        pass

    def died(_: Any) -> None:
        raise Died

    monkeypatch.setattr("tentalis.dlq.actions.own_headers", died)
    with pytest.raises(Died):
        list(box.replay(plan))
    monkeypatch.undo()
    place = str(RecordPlace(topics.SESSIONS, 0, 500))
    assert [each["state"] for each in tool("list", "--topic", topics.SESSIONS)] == ["replaying"]
    (row,) = tool("replay", place, "--yes", code=1)
    assert row["result"] == "refused" and "did not finish" in row["reason"]
    (row,) = tool("replay", place, "--yes", "--again")
    assert row["result"] == "replayed"
    assert len([each for each in tool.on(topics.SESSIONS) if each.key() == b"doubt"]) == 1


def test_where_the_broker_differs_or_the_key_is_newer_nothing_is_replayed(tool: Dlq) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": tool.settings.bootstrap})
    other = "not.ours"
    for future in admin.create_topics([NewTopic(name, 1, 1) for name in (other, dlq(other))]).values():
        future.result(30)
    a_letter(tool, other, b"k", 0)
    (row,) = tool("replay", "--topic", other, "--yes", code=3)
    assert "not in schemas/topics.yaml" in row["reason"]

    tool.put(topics.ROLLOUTS, b"k", b"older", partition=0)
    tool.put(topics.ROLLOUTS, b"k", b"newer", partition=0)
    a_letter(tool, topics.ROLLOUTS, b"k", 0, b"older")
    a_letter(tool, topics.ROLLOUTS, b"k", 1, b"newer")
    rows = tool("replay", "--topic", topics.ROLLOUTS, "--yes", code=1)
    assert {each["result"]: each["reason"] for each in rows} == {
        "refused": f"{topics.ROLLOUTS} is compacted and has a newer record under its key, at offset 1",
        "replayed": None,
    }
    assert [each.value() for each in tool.on(topics.ROLLOUTS)] == [b"older", b"newer", b"newer"]


def test_wrong_arguments_are_refused_with_the_reason(tool: Dlq) -> None:
    assert "nothing is selected" in tool("replay", code=2)
    assert "is not a time" in tool("list", "--since", "whenever", code=2)
    assert "is not a place" in tool("show", "x@y", code=2)
    assert "the broker has no topic" in tool("list", "--topic", "nowhere", code=3)


def test_schemas_are_found_as_soon_as_they_are_there_and_garbage_among_them_is_passed_over(tool: Dlq) -> None:
    schema, value = tomorrows_task("schemas")
    schema = AvroSchema.parse(schema.text.replace("mood", "temper"))
    lookup = SchemaLookup(tool.settings)
    codec = Codec(None, lookup)
    value = SINGLE_OBJECT + schema.fingerprint + value[10:]
    stored = Stored(topics.TASKS, 0, 0, 0, "schemas", value, ())
    tool.put(topics.SCHEMAS, b"garbage", b"\xff\xfe no schema", partition=0)
    tool.put(topics.SCHEMAS, b"text", b"{}", partition=0)
    assert lookup(schema.fingerprint) is None
    tool.put(topics.SCHEMAS, schema.fingerprint.hex().encode(), schema.text.encode(), partition=0)
    record = stored.decode(codec)
    assert isinstance(record, Task) and record.task_id == "schemas"
