"""Scoring: tasks to Opens, results and feedback to Scores, dead letters."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from schemas import topics
from schemas.records import Open, Opens, Polarity, Record, Score, Source, Status, Terms, Verifier
from streams.apps.scoring.processor import Scoring
from streams.runtime.processor import Effects, LogRecord
from tentalis.kafka.partitioner import partition_of
from tentalis.rewards.grade import grade
from tests.support.stream_records import (
    CODEC,
    bare_feedback,
    make_feedback,
    make_result,
    make_task,
    malformed,
    on_log,
    read,
    unchecked,
)

USER_TERMS = Terms(rl=Source.USER, opd=Source.USER)
CHAT_TERMS = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)


def run(*records: LogRecord, app: Scoring | None = None) -> Effects:
    return asyncio.run((app or Scoring(CODEC)).process(records[0].partition, records))


def halves(effects: Effects) -> list[Any]:
    assert all(output.topic == topics.HALVES for output in effects.outputs)
    return [read(output) for output in effects.outputs]


def one(effects: Effects, kind: type[Record]) -> Any:
    (half,) = halves(effects)
    assert isinstance(half, kind) and not effects.dead
    return half


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_a_task_opens_at_its_append_time() -> None:
    opened = one(run(on_log(topics.TASKS, make_task(), timestamp=777)), Open)
    assert (opened.opened_at, opened.event_time, opened.key, opened.task_at) == (777, 777, "t1", 777)
    assert opened.head == make_task().head


def test_a_task_that_opens_with_its_first_feedback_is_opened_by_that() -> None:
    task = make_task(terms=CHAT_TERMS)
    assert not run(on_log(topics.TASKS, task)).outputs
    feedback = make_feedback(make_result(task), source=Source.NEXT_STATE, polarity=Polarity.POSITIVE)
    opened, score = halves(run(on_log(topics.FEEDBACK, feedback, timestamp=999)))
    assert isinstance(opened, Open) and isinstance(score, Score)
    assert opened.opened_at == score.opened_at == 999
    assert opened.task_at == score.task_at == make_result(task).opened_at, "not the feedback's, however late it comes"
    assert opened.head == task.head and score.reward == 1.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"environment": "moon"}, "UnknownEnvironment"),
        ({"verifier": Verifier(name="nope")}, "UnknownVerifier"),
        ({"verifier": Verifier(name="taste", data="{")}, "BadVerifierData"),
    ],
)
def test_a_task_that_nobody_can_score_is_a_dead_letter_and_so_are_its_results(
    fields: dict[str, Any], says: str
) -> None:
    task = make_task(**fields)
    for record in (on_log(topics.TASKS, task), on_log(topics.RESULTS, make_result(task))):
        effects = run(record)
        assert not effects.outputs
        assert [(dead.record, dead.stage) for dead in effects.dead] == [(record, "validate")]
        assert effects.dead[0].error_class.endswith(says)


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_result_is_scored_by_its_verifier() -> None:
    result = make_result(sample=2)
    score = one(run(on_log(topics.RESULTS, result, timestamp=888)), Score)
    assert score.reward == 1.0 and score.components["satisfied"] == 1.0
    assert (score.source, score.scorer, score.feedback_id) == (Source.RESULT, "taste/1", None)
    assert (score.event_time, score.opened_at, score.task_at) == (888, result.opened_at, result.opened_at)
    assert score.sample.result_id == result.result_id and score.sample.sample_index == 2
    assert score.sample.token_ids == result.prompt_token_ids + result.response_token_ids


def test_a_failed_result_has_a_negative_score() -> None:
    failed = make_result(status=Status.FAILED, text="", response=(), sampler_logprobs=b"", error="away")
    score = one(run(on_log(topics.RESULTS, failed)), Score)
    assert score.reward == -1.0 and score.components == {"failed": 1.0}


def test_a_result_whose_infrastructure_failed_has_no_reward_whoever_grades_it() -> None:
    away: dict[str, Any] = {
        "status": Status.INFRA,
        "text": "",
        "response": (),
        "sampler_logprobs": b"",
        "error": "away",
    }
    scored = one(run(on_log(topics.RESULTS, make_result(**away))), Score)
    assert scored.reward is None and scored.components == {"infra": 1.0}
    graded = make_feedback(make_result(make_task(terms=USER_TERMS), **away), score=0.0, polarity=Polarity.NEGATIVE)
    half = one(run(on_log(topics.FEEDBACK, graded)), Score)
    assert half.reward is None and half.components == {"infra": 1.0}


def test_an_unknown_reward_is_written_too() -> None:
    score = one(run(on_log(topics.RESULTS, make_result(make_task(verifier=None)))), Score)
    assert score.reward is None and score.components["unverified"] == 1.0 and score.scorer == "none/1"


def test_a_result_whose_reward_comes_from_feedback_makes_no_score() -> None:
    effects = run(on_log(topics.RESULTS, make_result(make_task(terms=USER_TERMS))))
    assert not effects.outputs and not effects.dead


# --- feedback ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "polarity", "reward"),
    [
        (0.0, Polarity.POSITIVE, -1.0),
        (0.75, Polarity.NONE, 0.5),
        (1.0, Polarity.NEGATIVE, 1.0),
        (None, Polarity.POSITIVE, 1.0),
        (None, Polarity.NEGATIVE, -1.0),
        (None, Polarity.NONE, None),
        (None, Polarity.UNKNOWN, None),
    ],
)
def test_feedback_that_the_reward_answers_to_is_a_score_known_or_not(
    score: float | None, polarity: Polarity, reward: float | None
) -> None:
    result = make_result(make_task(terms=USER_TERMS))
    feedback = make_feedback(result, score=score, polarity=polarity)
    assert grade(feedback) == reward
    half = one(run(on_log(topics.FEEDBACK, feedback)), Score)
    assert half.reward == reward and half.source is Source.USER and half.feedback_id == feedback.feedback_id
    assert half.opened_at == result.opened_at


def test_feedback_on_the_whole_task_speaks_of_the_result_it_carries() -> None:
    feedback = make_feedback(make_result(make_task(terms=USER_TERMS), sample=5), sample_index=None, score=1.0)
    assert one(run(on_log(topics.FEEDBACK, feedback)), Score).sample.sample_index == 5


def test_feedback_from_a_source_outside_the_terms_is_a_late_half_if_it_grades() -> None:
    graded = make_feedback(source=Source.OPERATOR, score=0.5)
    assert one(run(on_log(topics.FEEDBACK, graded)), Score).source is Source.OPERATOR
    assert not run(on_log(topics.FEEDBACK, make_feedback(source=Source.OPERATOR, text="hm", polarity="none"))).outputs


@pytest.mark.parametrize("source", [Source.USER, Source.OPERATOR])
def test_a_thumb_before_the_next_message_does_not_begin_the_deadline_of_a_turn(source: Source) -> None:
    thumb = make_feedback(make_result(make_task(terms=CHAT_TERMS)), source=source, polarity=Polarity.POSITIVE)
    assert one(run(on_log(topics.FEEDBACK, thumb)), Score).source is source, "a late half, and no Open"


def test_a_complaint_of_the_source_that_only_the_hint_answers_to_is_no_score() -> None:
    assert not run(on_log(topics.FEEDBACK, make_feedback(text="Too long, please be brief."))).outputs


def test_feedback_without_a_result_or_not_readable_is_left_to_hinting() -> None:
    app = Scoring(CODEC)
    alone = bare_feedback()
    bad = malformed(topics.FEEDBACK, make_feedback())
    moon = make_feedback(make_result(make_task(environment="moon", terms=USER_TERMS)), score=1.0)
    effects = run(on_log(topics.FEEDBACK, alone), *bad.values(), on_log(topics.FEEDBACK, moon), app=app)
    assert not effects.outputs and not effects.dead
    assert app.skipped.count == len(bad) + 1


def test_a_result_on_another_partition_than_its_keys_is_a_dead_letter() -> None:
    task = make_task("t2")
    good, announced = on_log(topics.RESULTS, make_result(task)), on_log(topics.TASKS, task)
    right = partition_of(b"t2", 8)
    assert right != good.partition
    (dead,) = run(good._replace(partitions=8)).dead
    assert (dead.stage, dead.error_class) == ("validate", "Misplaced")
    assert (
        f"'t2' hashes to partition {right} of 8, but it is on partition 3" in dead.error
        and "murmur2_random" in dead.error
    )
    app = Scoring(CODEC)
    app.restore(right, {})
    assert not run(good._replace(partitions=8, partition=right), app=app).dead
    assert not run(announced._replace(partitions=8)).dead, "nothing is paired with a task by where it lies"


# --- the log ----------------------------------------------------------------------------------------------------------


def samples(topic: str) -> Sequence[Record]:
    return {
        topics.TASKS: [make_task(), make_task("t2")],
        topics.RESULTS: [make_result(), make_result(sample=1)],
        topics.FEEDBACK: [make_feedback(make_result(make_task(terms=USER_TERMS)), score=0.5)],
    }[topic]


@pytest.mark.parametrize("topic", [topics.TASKS, topics.RESULTS])
def test_malformed_records_are_dead_letters_with_their_bytes_and_the_rest_goes_through(topic: str) -> None:
    good = on_log(topic, samples(topic)[1])
    for name, record in malformed(topic, samples(topic)[0]).items():
        effects = run(record, good)
        assert [dead.record for dead in effects.dead] == [record], name
        assert effects.dead[0].stage in ("decode", "validate") and effects.dead[0].error
        assert len(effects.outputs) == 1, name


def test_values_out_of_range_are_dead_letters() -> None:
    nan = unchecked(make_result(), elapsed_s=float("nan"))
    none = unchecked(make_task(), n_samples=0)
    alone = unchecked(make_result(), sampler_logprobs=b"\0" * 4)
    for topic, record in ((topics.RESULTS, nan), (topics.TASKS, none), (topics.RESULTS, alone)):
        (dead,) = run(on_log(topic, record)).dead
        assert dead.stage == "validate"


@pytest.mark.parametrize("topic", [topics.TASKS, topics.RESULTS, topics.FEEDBACK])
def test_the_same_log_gives_the_same_bytes_however_it_is_cut(topic: str) -> None:
    records = [on_log(topic, record, offset) for offset, record in enumerate(samples(topic))]
    whole = run(*records).outputs
    apart = [output for record in records for output in run(record).outputs]
    assert whole == apart == run(*records).outputs
    assert whole


def test_ids_differ_by_result_and_feedback_and_not_by_delivery() -> None:
    result = make_result(make_task(terms=USER_TERMS))
    first = make_feedback(result, score=1.0)
    second = make_feedback(result, score=1.0, feedback_id="another")
    places = ((first, 1), (first, 9), (second, 2))
    ids = [one(run(on_log(topics.FEEDBACK, each, offset)), Score).score_id for each, offset in places]
    assert ids[0] == ids[1] != ids[2]
    answers = (make_result(), make_result(response=(7, 8)))
    assert len({one(run(on_log(topics.RESULTS, each)), Score).score_id for each in answers}) == 2


def test_outputs_carry_cloudevents_headers_and_the_task_key() -> None:
    (output,) = run(on_log(topics.TASKS, make_task())).outputs
    headers = dict(output.headers)
    assert output.key == "t1" and output.partition is None
    assert headers["ce_type"] == b"tentalis.Open" and headers["ce_source"] == b"tentalis-scoring"
    assert headers["ce_id"].decode() == read(output).open_id
