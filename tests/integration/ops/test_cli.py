"""consume and produce on a real broker: what goes in as JSON comes out as JSON, and what is no record is shown."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from schemas import topics
from schemas.records import Task
from tentalis.cli.main import app
from tentalis.cli.shared.record_json import to_plain
from tentalis.kafka.admin import ensure
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import Kafka
from tests.support.verify_run import consistent

pytestmark = pytest.mark.broker
runner = CliRunner()


@pytest.fixture
def settings(kafka: Kafka) -> Settings:
    found = Settings(bootstrap=kafka.bootstrap)
    ensure(found)
    return found


def run(settings: Settings, *arguments: str, stdin: str | None = None) -> Any:
    return runner.invoke(app, [*arguments, "--bootstrap-server", str(settings.bootstrap)], input=stdin)


def consumed(settings: Settings, *arguments: str) -> list[dict[str, Any]]:
    done = run(settings, "consume", *arguments, "--exit", "-o", "json")
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def a_task(unique: str) -> Task:
    return consistent().tasks[0].record.model_copy(update={"task_id": unique})


def test_what_is_produced_is_consumed_with_key_and_headers(settings: Settings, unique: str) -> None:
    task = a_task(unique)
    done = run(settings, "produce", topics.TASKS, "-o", "json", stdin=json.dumps(to_plain(task)) + "\n\n")
    assert json.loads(done.stdout) == {"topic": topics.TASKS, "records": 1, "refused": 0}
    (found,) = consumed(settings, topics.TASKS, "--key", unique)
    assert (found["type"], found["value"]["task_id"]) == ("Task", unique)
    assert found["headers"]["ce_id"] == unique
    assert found["headers"]["ce_type"] == "tentalis.Task"
    # and once more round: what consume prints, produce takes
    again = run(settings, "produce", topics.TASKS, stdin=json.dumps(found))
    assert again.exit_code == 0, again.stderr
    first, second = consumed(settings, topics.TASKS, "--key", unique)
    assert first["value"] == second["value"]


def test_every_bad_line_is_named_and_every_good_one_is_written(settings: Settings, unique: str) -> None:
    good = json.dumps(to_plain(a_task(unique)))
    huge = good.replace('"event_time": ', f'"event_time": {"9" * 30}', 1)
    lines = [good, "{}", "", "[" * 100_000, huge, "9" * 5000, good, '{"a": "\\ud800"}']
    done = run(settings, "produce", topics.TASKS, "-o", "json", stdin="\n".join(lines))
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"topic": topics.TASKS, "records": 2, "refused": 5}
    named = [line for line in done.stderr.splitlines() if line.startswith("error: line")]
    assert [line.split(":")[1] for line in named] == [f" line {number}" for number in (2, 4, 5, 6, 8)]
    assert "not a Task: task_id: Field required" in named[0]
    assert "5 of 7 lines were refused" in done.stderr
    assert len(consumed(settings, topics.TASKS, "--key", unique)) == 2


def test_a_record_over_the_limit_is_refused_with_the_limit(settings: Settings, unique: str, tmp_path: Path) -> None:
    limit = topics.table().record_limit_bytes
    large = a_task(unique).model_copy(update={"metadata": {"x": "y" * limit}})
    done = run(settings, "produce", topics.TASKS, stdin=json.dumps(to_plain(large)))
    assert done.exit_code == 1
    assert f"the limit is {limit:,} bytes" in done.stderr
    (tmp_path / "large").write_bytes(b"x" * (limit + 1))
    done = run(settings, "produce", topics.TASKS, "--raw", "--key", unique, "--file", str(tmp_path / "large"))
    assert done.exit_code == 1
    assert f"the limit is {limit:,} bytes" in done.stderr
    assert consumed(settings, topics.TASKS, "--key", unique) == []


def test_raw_bytes_go_out_as_they_are_and_are_shown_as_undecodable(
    settings: Settings, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_bytes(b"\xde\xad\xbe\xef")
    assert (
        run(settings, "produce", topics.SESSIONS, "--raw", "--key", unique, "--file", str(tmp_path / "bad")).exit_code
        == 0
    )
    (found,) = consumed(settings, topics.SESSIONS, "--key", unique)
    assert "bad magic dead" in found["error"]
    assert found["value_base64"] == "3q2+7w=="
    (stored,) = [s for s in read_to_end(settings, topics.SESSIONS) if s.key == unique]
    assert stored.value == b"\xde\xad\xbe\xef"
    table = run(settings, "consume", topics.SESSIONS, "--exit", "--key", unique)
    assert "bad magic dead" in table.stdout


def test_a_dead_letter_shows_why_it_is_there(settings: Settings, unique: str) -> None:
    publisher = Publisher(settings, "test", make_codec(settings))
    headers = [("tentalis.dlq.error-stage", b"decode"), ("tentalis.dlq.original-offset", b"7")]
    publisher.send_bytes(topics.dlq(topics.TASKS), unique.encode(), b"\xde", headers)
    publisher.flush()
    (found,) = consumed(settings, topics.dlq(topics.TASKS), "--key", unique)
    assert found["dlq"] == {"error-stage": "decode", "original-offset": "7"}
    assert found["value_base64"] == "3g=="


def test_where_to_start_and_how_many(settings: Settings, unique: str) -> None:
    publisher = Publisher(settings, "test", make_codec(settings))
    for number in range(5):
        publisher.send_bytes(topics.AUDIT, f"{unique}-{number}".encode(), b"x")
    publisher.flush()
    everything = consumed(settings, topics.AUDIT)
    last = everything[-1]
    assert [r["key"] for r in consumed(settings, topics.AUDIT, "--from", "-2")] == [f"{unique}-3", f"{unique}-4"]
    assert [r["offset"] for r in consumed(settings, topics.AUDIT, "--from", str(last["offset"]))] == [last["offset"]]
    assert consumed(settings, topics.AUDIT, "--from", "latest") == []
    assert len(consumed(settings, topics.AUDIT, "-n", "2")) == 2
    assert len(consumed(settings, topics.AUDIT, "--from", everything[0]["timestamp"])) == len(everything)
    assert consumed(settings, topics.AUDIT, "--from", "2999-01-01T00:00:00Z") == []


def test_a_part_of_a_topic_is_shown_up_to_an_offset_or_a_time_and_by_a_filter(settings: Settings, unique: str) -> None:
    # More tasks than partitions: one partition has two, so the greatest offset has records before it.
    count = topics.table()[topics.TASKS].partitions + 1
    tasks = [a_task(f"{unique}-{number}") for number in range(count)]
    lines = "\n".join(json.dumps(to_plain(task)) for task in tasks)
    dry = run(settings, "produce", topics.TASKS, "--dry-run", "-o", "json", stdin=lines)
    assert json.loads(dry.stdout)["records"] == count
    mine = f'key.startsWith("{unique}")'
    assert consumed(settings, topics.TASKS, "--filter", mine) == [], "a dry run writes nothing"
    assert run(settings, "produce", topics.TASKS, stdin=lines).exit_code == 0
    found = consumed(settings, topics.TASKS, "--filter", mine)
    assert {record["key"] for record in found} == {task.task_id for task in tasks}
    exact = consumed(settings, topics.TASKS, "--filter", f'value.task_id == "{unique}-2"')
    assert [record["key"] for record in exact] == [f"{unique}-2"]

    last = max(found, key=lambda record: record["offset"])
    before = consumed(settings, topics.TASKS, "--to", str(last["offset"]))
    assert before and all(record["offset"] < last["offset"] for record in before)
    # Without --exit too, it ends at --to: everything before these positions is on the log.
    until = run(settings, "consume", topics.TASKS, "--to", "latest", "--filter", mine, "-o", "yaml")
    assert len(list(yaml.safe_load_all(until.stdout))) == count
    earlier = consumed(settings, topics.TASKS, "--filter", mine, "--to", min(record["timestamp"] for record in found))
    assert earlier == []
    missing = run(settings, "consume", topics.TASKS, "--exit", "--filter", f"{mine} && value.nothing == 1")
    assert missing.stdout == "" and f"left out: {count} records for which the filter has no value" in missing.stderr
    assert run(settings, "consume", topics.TASKS, "--exit", "--filter", "value.").exit_code == 2


def test_the_rate_of_a_topic_counts_what_came_within_the_time(settings: Settings, unique: str) -> None:
    def came(*options: str) -> int:
        done = run(settings, "topics", "produce-rate", topics.TASKS, *options, "-o", "json")
        assert done.exit_code == 0, done.stderr
        ((row),) = json.loads(done.stdout)
        assert row["per_second"] == pytest.approx(row["records"] / 3600, abs=1e-3)
        return int(row["records"])

    before = came("--over", "1h")
    run(settings, "produce", topics.TASKS, stdin=json.dumps(to_plain(a_task(unique))))
    assert came("--over", "1h") == before + 1
    assert run(settings, "topics", "produce-rate", "--over", "soon").exit_code == 2


def test_a_topic_that_is_not_there(settings: Settings, unique: str) -> None:
    done = run(settings, "consume", unique, "--exit")
    assert done.exit_code == 3
    assert f"the broker has no topic {unique}" in done.stderr
    assert run(settings, "produce", unique, stdin="{}").exit_code == 2
    for command in ("describe", "produce-rate"):
        done = run(settings, "topics", command, unique)
        assert done.exit_code == 3, command
        assert f"the broker has no topic {unique}" in done.stderr and "`tentalis topics list`" in done.stderr


def test_what_was_stored_is_what_the_record_says(settings: Settings, unique: str) -> None:
    task = a_task(unique)
    run(settings, "produce", topics.TASKS, stdin=json.dumps(to_plain(task)))
    codec = make_codec(settings)
    found: list[Stored] = [s for s in read_to_end(settings, topics.TASKS) if s.key == unique]
    assert [stored.decode(codec) for stored in found] == [task]
