"""Promises kept from the earlier systems: records, topics and the join. The losses are in tests/unit/trainer."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from schemas import topics
from schemas.records import RECORDS, AuditRecord, EvalResult, Feedback, HintKind, MetaSignal, Skill, Source
from schemas.wire import avro
from tentalis.cli.shared.record_json import from_plain, to_plain
from tests.support import ROOT
from tests.support.join_support import (
    LIMITS,
    alive,
    fold,
    head,
    hint,
    log_of,
    open_,
    process,
    sample,
    score,
    tick,
    worker,
)
from tests.support.loop_records import update
from tests.support.sessions_support import turn
from tests.support.stream_records import make_feedback, make_result, make_task
from tests.support.trainer_lab import rollout
from trainer.data.candidates import malformed_reason

NEWS = {"name": "added_by_a_later_version", "type": "string", "default": "", "doc": "x"}


def examples() -> list[Any]:
    of = sample(head())
    result = make_result()
    return [
        make_task(),
        result,
        make_feedback(result),
        open_(head()),
        score(of),
        hint(of, HintKind.REJECTED),
        rollout(teacher=[-1, -2, -3]),
        update(1),
        turn("a", "Why do cats purr?"),
        Skill(skill_id="s", event_time=1, name="brevity", text="Say it in one sentence.", source_score=0.5),
        MetaSignal(
            manager_id="m",
            worker_id="w",
            partition=0,
            event_time=2,
            window_start=1,
            window_ms=1,
            count=1,
            mean_reward=0.5,
            outcomes={"both": 1},
        ),
        EvalResult(eval_id="e", event_time=1, experiment="power", scenario="s", passed=False, metrics={"p": 0.5}),
        AuditRecord(
            audit_id="a",
            event_time=1,
            component="gateway",
            topic="t",
            partition=0,
            offset=1,
            record_type="Task",
            record_id="t",
            sha256="s",
        ),
    ]


@pytest.mark.parametrize("record", examples(), ids=lambda record: type(record).__name__)
def test_records_round_trip_and_outlive_their_schema(record: Any) -> None:
    name = type(record).__name__
    assert from_plain(type(record), json.loads(json.dumps(to_plain(record)))) == record
    reader = avro.current(name)
    text = json.loads(reader.text)
    # A later version added a field, an earlier one lacked those that have a default.
    later = avro.AvroSchema.parse(json.dumps(text | {"fields": [*text["fields"], NEWS]}))
    assert RECORDS[name].model_validate(avro.read(later, reader, avro.write(later, record.model_dump()))) == record
    optional = [field["name"] for field in text["fields"] if "default" in field]
    needed = [field for field in text["fields"] if field["name"] not in optional]
    before = avro.AvroSchema.parse(json.dumps(text | {"fields": needed}))
    read = avro.read(before, reader, avro.write(before, record.model_dump()))
    old = RECORDS[name].model_validate(read)
    assert all(getattr(old, field["name"]) == getattr(record, field["name"]) for field in needed)
    assert set(optional) <= set(read)


@pytest.mark.parametrize("wrong", [-0.01, 1.01, float("nan")])
def test_scores_outside_0_and_1_are_refused_with_the_reason(wrong: float) -> None:
    with pytest.raises(ValidationError, match="score") as refused:
        make = make_feedback(make_result())
        Feedback.model_validate(make.model_dump() | {"score": wrong})
    assert re.search("greater than or equal to 0|less than or equal to 1|finite", str(refused.value))


def test_what_fails_is_set_aside_and_the_next_record_is_handled() -> None:
    good = sample(head())
    written = fold((0, b"no record at all"), (1, score(good)), (2, hint(good)))
    assert written.dead and [outcome.kind.value for outcome in written.outcomes.values()] == ["both"]


def test_every_topic_of_the_earlier_systems_has_one_of_ours() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    rows = re.findall(r"^\| `([a-z.{}]+)` \| `(tentalis\.[a-z.0-9-]+)` \| (\w+) \|$", page, re.MULTILINE)
    assert {theirs for theirs, _, _ in rows} == {
        *("tasks.{type}", "results.{type}", "feedback.scored", "training.rollouts", "training.combined"),
        *("model.updates", "sessions.logged", "sessions.start", "sessions.end", "opd.hints", "meta.rollouts"),
        *("meta.updates", "skills.created", "alignment.evals", "alignment.audit"),
    }
    for _, ours, record in rows:
        assert record in topics.table().records_of(ours)
    assert {record for *_, record in rows} <= {type(record).__name__ for record in examples()}, (
        "each outlives its schema"
    )


ONE = sample(head())
TWO = sample(head(), result="of another worker")


@pytest.mark.parametrize(
    ("halves", "outcomes"),
    [
        pytest.param([(0, hint(ONE)), (10, score(ONE))], {"t1/0": "both"}, id="hint then rollout"),
        pytest.param([(0, score(ONE)), (10, hint(ONE))], {"t1/0": "both"}, id="rollout then hint"),
        pytest.param([(0, score(ONE)), (101, tick())], {"t1/0": "rl"}, id="rollout and no hint in time"),
        pytest.param(
            [(0, score(ONE)), (101, tick()), (200, hint(ONE, id="h"))],
            {"t1/0": "rl", "t1/0/late/h": "late"},
            id="late hint",
        ),
        pytest.param(
            [(0, score(ONE)), (1, score(ONE)), (2, hint(ONE)), (3, score(ONE))], {"t1/0": "both"}, id="rollout twice"
        ),
        pytest.param(
            [(0, score(ONE)), (1, score(TWO)), (2, hint(TWO)), (3, hint(ONE))],
            {"t1/0": "both", f"t1/0/superseded/{TWO.result_id}": "superseded"},
            id="two workers, one task",
        ),
    ],
)
def test_the_join_in_every_order(halves: Any, outcomes: dict[str, str]) -> None:
    written = fold(*halves)
    assert {key: outcome.kind.value for key, outcome in written.outcomes.items()} == outcomes
    assert written.rollouts["t1/0"].result_id == ONE.result_id, "one answer's reward, never with another's hint"


def test_memory_is_bounded_by_age_and_a_tasks_size_by_count() -> None:
    join = worker({})
    tasks = [(i, open_(head(f"t{i}"))) for i in range(50)]
    process(join, log_of(*tasks))
    assert len(alive(join)) >= 50
    over = 1_000 + LIMITS.marker_ttl_ms + 100
    join = worker({})
    process(join, log_of(*tasks, (over, tick()), (2 * over, tick())))
    assert not [key for key in alive(join) if key.startswith("t/")] and len(alive(join)) < 5
    assert fold((0, open_(head(n=LIMITS.max_samples + 1)))).dead == [(0, "validate")]


def test_teacher_log_probs_of_another_length_train_nothing() -> None:
    longer = sample(head(), n=6)
    wrong = hint(longer).model_copy(update={"teacher_logprobs": hint(ONE).teacher_logprobs})
    written = fold((0, score(longer)), (10, wrong), (1001, tick()))
    assert written.dead == [(1, "validate")]
    assert not written.rollouts["t1/0"].has_opd and written.rollouts["t1/0"].teacher_logprobs is None
    short = rollout(teacher=[-1, -1, -1]).model_copy(update={"teacher_logprobs": b"\0" * 4})
    assert malformed_reason(short, 64) == "7 tokens but 1 values in teacher_logprobs"
    assert fold((0, score(ONE)), (5, hint(ONE, HintKind.REJECTED))).rollouts["t1/0"].has_opd is False
    assert Source.USER is hint(ONE).source
