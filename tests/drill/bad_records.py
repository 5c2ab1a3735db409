"""Records that cannot be decoded, or lie on the wrong partition."""

import json
from collections.abc import Iterator

from schemas import topics
from tentalis.cli.shared.record_json import to_plain
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.partitioner import partition_of
from tentalis.text.timestamps import now_ms
from tests.drill.bench import Bench
from tests.drill.fault import Sight, fault
from tests.support.loop_records import result

EXIT_5 = "exit-5.md"
PARTITIONS = topics.table()[topics.TASKS].partitions


@fault("bench", EXIT_5, code=0, says="DecodeError")
def a_bad_record(bench: Bench) -> Iterator[Sight]:
    offset = end_offsets(bench.settings, topics.RESULTS)[0]
    bench.shell.env["OFFSET"] = str(offset)
    bench.work.garbage(topics.RESULTS, 1)
    bench.work.answer(bench.work.ask("bad-record"))
    bench.caught_up("scoring")
    yield bench.shell.run(f"tentalis dlq list --topic {topics.RESULTS}")
    with bench.running("join"):
        bench.work.settled("bad-record")


@fault("bench", EXIT_5, code=5, says="tentalis groups skip tentalis-join")
def a_topic_full_of_garbage(bench: Bench) -> Iterator[Sight]:
    asked = bench.work.ask("garbage")
    bench.caught_up("scoring")
    bench.work.garbage(topics.HALVES, 150)
    bench.work.answer(asked)
    bench.caught_up("scoring")
    yield bench.refused("join")
    with bench.running("join"):
        bench.work.settled("garbage")


@fault("bench", EXIT_5, code=0, says="Misplaced")
def a_misplaced_record(bench: Bench) -> Iterator[Sight]:
    """A producer without murmur2 puts a result on the partition of another key."""
    (asked,) = bench.work.ask("misplaced-record", 1)
    answer = result(asked, version=0, opened_at=asked.event_time, event_time=now_ms())
    key, value = asked.task_id.encode(), bench.work.codec.encode(topics.RESULTS, answer)
    wrong = (partition_of(key, PARTITIONS) + 1) % PARTITIONS
    bench.work.publisher.send_bytes(topics.RESULTS, key, value, partition=wrong)
    bench.work.publisher.flush()
    bench.caught_up("scoring")
    (bench.folder / "result.json").write_text(json.dumps(to_plain(answer)), encoding="utf-8")
    yield bench.shell.run(f"tentalis dlq list --topic {topics.RESULTS}")
    with bench.running("join"):
        bench.work.settled("misplaced-record")
