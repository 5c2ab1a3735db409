"""Rewards made of parts: weights, the combined scorer, steps, the composite, scorers of one's own."""

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import topics
from schemas.records import Feedback, Message, Opens, Polarity, Result, Score, Source, Task, Terms, Verifier
from schemas.tensors import float32_view
from streams.apps.scoring.judging import JudgeLimits, Judging
from streams.apps.scoring.processor import Scoring
from tentalis.rewards import registry
from tentalis.rewards.chat import ChatClient, ChatEndpoint
from tentalis.rewards.combined import CombinedScorer, CombinedSettings
from tentalis.rewards.composite import CompositeScorer, CompositeSettings, composite
from tentalis.rewards.custom import BadTarget, CustomSettings, custom_scorer
from tentalis.rewards.next_state_rules import NextStateRules
from tentalis.rewards.step_judge import StepGrade, StepJudge, StepJudgeSettings, median_grade, step_grade
from tentalis.rewards.steps import partition, spans_of, step_starts, steps_of
from tentalis.rewards.style_scorer import StyleScorer
from tentalis.rewards.verdict import BadVerifierData, ScoredStep, ScorerAway, Verdict
from tentalis.rewards.votes import NoVote
from tentalis.rewards.weights import weighted_mean
from tests.support.judge_server import Reply, judge_server, says
from tests.support.stream_records import CODEC, GOOD, make_feedback, make_result, make_task, on_log, read
from tests.support.trainer_lab import rollout
from trainer.advantages.rewarded_sample import rewarded_sample
from trainer.advantages.session import gae
from trainer.advantages.steps import stepwise
from trainer.config.loss import LossConfig

NEXT = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)

# --- weights ----------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdef")
VALUES = st.dictionaries(NAMES, st.none() | st.floats(-1, 1), min_size=1)


@settings(deadline=None, max_examples=60)
@given(VALUES, st.data())
def test_the_weights_of_what_is_there_take_the_place_of_what_is_missing(
    values: dict[str, float | None], data: st.DataObject
) -> None:
    weights = {name: data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])) for name in values}
    found = weighted_mean(values, weights)
    there = {name: value for name, value in values.items() if value is not None and weights[name]}
    assert found.missing == tuple(name for name, value in values.items() if value is None)
    if not there:
        assert found.value is None and found.present == 0.0
        return
    total = sum(weights[name] for name in there)
    assert found.value == pytest.approx(sum(weights[name] * value for name, value in there.items()) / total)
    assert min(there.values()) <= found.value <= max(there.values())
    assert found.present == pytest.approx(total / sum(weights.values()))
    again = weighted_mean(there, {name: weights[name] for name in there})
    assert again.value == found.value, "as if the others had never been asked for"


# --- combined ---------------------------------------------------------------------------------------------------------


class Fixed:
    """A judge that says what it is told to."""

    time_limit_s = 5.0

    def __init__(self, name: str, says: Verdict | Exception) -> None:
        self.name = name
        self.says = says
        self.tasks: list[Task] = []

    def check(self, task: Task) -> None:
        """Every task will do."""

    async def judge(self, task: Task, result: Result) -> Verdict:
        self.tasks.append(task)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def combined(parts: dict[str, Any], **scorers: Any) -> CombinedScorer:
    return CombinedScorer(CombinedSettings(kind="combined", parts=parts), scorers)


def judged(scorer: CombinedScorer, task: Task | None = None, feedback: Feedback | None = None) -> Verdict:
    task = task or make_task(verifier=Verifier(name="all"))
    result = make_result(task) if feedback is None or feedback.result is None else feedback.result
    if feedback is None:
        return asyncio.run(scorer.judge(task, result))
    return asyncio.run(scorer.judge_feedback(result.task, result, feedback))


def parts_of(**weights: float) -> dict[str, Any]:
    return {name: {"scorer": name, "weight": weight} for name, weight in weights.items()}


def test_the_parts_are_weighed_and_each_is_a_component() -> None:
    scorer = combined(
        parts_of(a=3.0, b=1.0), a=Fixed("a/1", Verdict(1.0, {"x": 2.0}, ("1",))), b=Fixed("b/1", Verdict(-1.0))
    )
    verdict = judged(scorer)
    assert verdict.reward == 0.5
    assert verdict.components == {"weight_present": 1.0, "a": 1.0, "a.x": 2.0, "b": -1.0}
    assert verdict.votes == ("a:1",)


@pytest.mark.parametrize("lost", [Verdict.unknown(), RuntimeError("broken"), Verdict(7.0)])
def test_a_part_that_is_unknown_or_fails_is_left_out_and_said_to_be_missing(lost: Any) -> None:
    scorer = combined(parts_of(a=3.0, b=1.0), a=Fixed("a/1", lost), b=Fixed("b/1", Verdict(-0.5)))
    verdict = judged(scorer)
    assert verdict.reward == -0.5
    assert verdict.components["missing.a"] == 1.0 and verdict.components["weight_present"] == 0.25
    assert "a" not in verdict.components


def test_with_every_part_missing_the_reward_is_unknown() -> None:
    verdict = judged(combined(parts_of(a=1.0), a=Fixed("a/1", Verdict.unknown())))
    assert verdict.reward is None and verdict.components["unverified"] == 1.0
    with pytest.raises(RuntimeError, match="broken"):  # so that it is tried again
        judged(
            combined(parts_of(a=1.0, b=1.0), a=Fixed("a/1", RuntimeError("broken")), b=Fixed("b/1", Verdict.unknown()))
        )


def test_a_part_whose_endpoint_is_away_makes_the_result_wait() -> None:
    with pytest.raises(ScorerAway):
        judged(combined(parts_of(a=1.0, b=1.0), a=Fixed("a/1", ScorerAway("gone")), b=Fixed("b/1", Verdict(1.0))))


def test_each_part_reads_its_own_data() -> None:
    fixed = Fixed("a/1", Verdict(1.0))
    parts = {
        "a": {"scorer": "a", "weight": 1.0, "data": {"from": "settings"}},
        "short": {"scorer": "taste", "weight": 1.0, "data": {"max_words": 3}},
    }
    scorer = combined(parts, a=fixed, taste=StyleScorer())
    verdict = judged(scorer, make_task(verifier=Verifier(name="all")))
    assert verdict.components["short.length_ok"] == 0.0 and verdict.reward == 0.5
    task = make_task(verifier=Verifier(name="all", data='{"short": {"max_words": 30}}'))
    assert judged(scorer, task).components["short.length_ok"] == 1.0
    assert json.loads(fixed.tasks[0].verifier.data) == {"from": "settings"}  # type: ignore[union-attr]
    for data in ('{"tall": {}}', "[]", "{", '{"short": {"max_words": "x"}}'):
        with pytest.raises(BadVerifierData):
            scorer.check(make_task(verifier=Verifier(name="all", data=data)))


GRADED = {
    "taste": {"scorer": "taste", "weight": 1.0},
    "manager": {"source": "manager", "weight": 2.0},
    "user": {"source": "user", "weight": 1.0},
}


@pytest.mark.parametrize(
    ("source", "said", "reward", "missing"),
    [
        (Source.MANAGER, {"score": 0.25}, (1.0 * 1.0 + 2.0 * -0.5) / 3.0, {"user"}),
        (Source.USER, {"polarity": Polarity.NEGATIVE}, (1.0 * 1.0 + 1.0 * -1.0) / 2.0, {"manager"}),
        (Source.USER, {"polarity": Polarity.POSITIVE}, 1.0, {"manager"}),
        (Source.USER, {}, 1.0, {"manager", "user"}),
    ],
)
def test_the_managers_score_and_the_users_thumb_are_parts_where_the_terms_name_them(
    source: Source, said: dict[str, Any], reward: float, missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = combined(GRADED, taste=StyleScorer())
    monkeypatch.setitem(registry.ENVIRONMENTS["chat"], "all", scorer)
    task = make_task(terms=Terms(rl=source), verifier=Verifier(name="all"))
    feedback = make_feedback(make_result(task), source=source, **{"polarity": Polarity.NONE} | said)
    effects = asyncio.run(Scoring(CODEC).process(3, [on_log(topics.FEEDBACK, feedback)]))
    (score,) = (read(output) for output in effects.outputs)
    assert isinstance(score, Score) and score.scorer == scorer.name
    assert score.reward == pytest.approx(reward)
    assert {name for name in score.components if name.startswith("missing.")} == {f"missing.{name}" for name in missing}


def test_what_came_next_and_the_text_itself_make_one_reward() -> None:
    scorer = combined(
        {"next": {"scorer": "rules", "weight": 3.0}, "taste": {"scorer": "taste", "weight": 1.0}},
        rules=NextStateRules(),
        taste=StyleScorer(),
    )
    result = make_result(make_task(terms=NEXT, n_samples=1, verifier=Verifier(name="all")))
    feedback = make_feedback(
        result, "No, that is wrong.", source=Source.NEXT_STATE, polarity=Polarity.NONE, author="user"
    )
    verdict = judged(scorer, feedback=feedback)
    assert verdict.reward == pytest.approx((3.0 * -1.0 + 1.0) / 4.0)
    scorer.check(result.task)
    # At the end of the session nothing came next: the rest is still known.
    last = make_feedback(result, "", source=Source.NEXT_STATE, author="")
    assert judged(scorer, feedback=last).reward == 1.0
    only_next = combined({"next": {"scorer": "rules", "weight": 1.0}}, rules=NextStateRules())
    with pytest.raises(BadVerifierData, match=r"no part for terms\.rl 'result'"):
        only_next.check(make_task(verifier=Verifier(name="all")))


def test_the_name_changes_with_weights_parts_and_what_the_parts_are() -> None:
    one = Fixed("a/1", Verdict(1.0))
    names = [
        combined(parts_of(a=1.0), a=one).name,
        combined(parts_of(a=2.0), a=one).name,
        combined(parts_of(a=1.0), a=Fixed("a/2", Verdict(1.0))).name,
        combined({"b": {"scorer": "a", "weight": 1.0}}, a=one).name,
    ]
    assert len(set(names)) == 4 and names[0] == combined(parts_of(a=1.0), a=one).name


# --- steps ------------------------------------------------------------------------------------------------------------

TEXT = "First, add 2 and 3.\n\nThat is 5.\n\nSo the answer is 5."


class Letters:
    """A tokenizer: token i is the i-th letter of a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.text[i] for i in ids if i < len(self.text))


def stepped(text: str = TEXT, prompt: int = 3, **fields: Any) -> Result:
    # One token more than there are letters: the end of the turn, which has no text.
    task = make_task(messages=(Message(role="user", content="What is 2 and 3?"),))
    return make_result(task, text=text, prompt=range(prompt), response=range(len(text) + 1), **fields)


def grading(**by_step: tuple[float, float] | str) -> Any:
    """A script that grades step n as `stepn` says."""

    def script(_: int, body: dict[str, Any]) -> Reply:
        question = body["messages"][1]["content"]
        name = next(name for name in by_step if f"<<<step {name[4:]} " in question)
        given = by_step[name]
        if isinstance(given, str):
            return says(given)
        return says(f'Fine. {{"reason": "{{}}", "progress": {given[0]}, "correctness": {given[1]}}}')

    return script


def verdict_by_steps(script: Any, result: Result, tokenizer: Any = None, **settings: Any) -> tuple[Verdict, int]:
    async def run() -> tuple[Verdict, int]:
        async with judge_server(script) as server, ChatClient(ChatEndpoint(url=server.url, model="m")) as chat:
            judge = StepJudge(chat, StepJudgeSettings(**({"kind": "steps", "judge": "j", "votes": 1} | settings)))
            judge._tokenizer = tokenizer
            verdict = await judge.judge(result.task, result)
            return verdict, len(server.asked)

    return asyncio.run(run())


def test_each_step_is_graded_for_progress_and_correctness_and_placed_on_its_tokens() -> None:
    result = stepped()
    script = grading(step1=(1.0, 1.0), step2=(0.5, 1.0), step3=(0.0, 0.0))
    verdict, asked = verdict_by_steps(script, result, Letters(TEXT))
    assert asked == 3
    second, third = 3 + TEXT.index("That"), 3 + TEXT.index("So")
    assert verdict.steps == (
        ScoredStep(3, second, 1.0),
        ScoredStep(second, third, 0.5),
        ScoredStep(third, 3 + len(TEXT) + 1, -1.0),
    )
    assert verdict.reward == pytest.approx(2 * (1.0 + 0.75 + 0.0) / 3 - 1)
    assert verdict.components["progress"] == 0.5 and verdict.components["correctness"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("third", [says('{"progress": 1, "correctness": 1}'), Reply(500)])
def test_while_the_endpoint_is_away_for_one_step_the_result_waits_whatever_the_others_met(third: Reply) -> None:
    replies = {"step 1": Reply(500), "step 2": Reply(503), "step 3": third}

    def script(_: int, body: dict[str, Any]) -> Reply:
        question = body["messages"][1]["content"]
        return next(reply for name, reply in replies.items() if f"<<<{name} " in question)

    with pytest.raises(ScorerAway):
        verdict_by_steps(script, stepped())


def test_a_step_that_cannot_be_read_is_unknown_and_never_a_half() -> None:
    script = grading(step1=(1.0, 1.0), step2="good", step3=(1.0, 1.0))
    verdict, _ = verdict_by_steps(script, stepped(), Letters(TEXT))
    assert verdict.reward == 1.0, "of what is known"
    assert verdict.components["steps_unknown"] == 1.0 and verdict.steps == ()
    nothing, _ = verdict_by_steps(grading(step1="x", step2="y", step3='{"progress": 1}'), stepped())
    assert nothing.reward is None and nothing.components["steps_unknown"] == 3.0
    assert verdict_by_steps(grading(step1=(1, 1), step2=(1, 1), step3="?"), stepped(), outcome="last")[0].reward is None
    with pytest.raises(NoVote):
        verdict_by_steps([Reply(500, b"")], stepped())
    with pytest.raises(ScorerAway):
        verdict_by_steps([Reply(503, b"")], stepped())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda pair: StepGrade(*pair)), max_size=7))
def test_the_grade_of_a_step_is_the_median_of_the_votes_that_could_be_read(votes: list[StepGrade | None]) -> None:
    found = median_grade(votes)
    known = sorted(vote.progress for vote in votes if vote is not None)
    if not known:
        assert found is None
        return
    assert found is not None and found.progress == pytest.approx(float(np.median(known)))
    assert median_grade([*votes, None]) == found == median_grade(votes[::-1])


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=80), st.floats() | st.integers(-(10**400), 10**400), st.floats(0, 1))
def test_grades_are_clamped_and_what_is_no_number_is_unknown(before: str, progress: float, correctness: float) -> None:
    text = before.replace("{", "(") + json.dumps({"progress": progress, "correctness": correctness})
    found = step_grade(text)
    if not math.isfinite(progress) if isinstance(progress, float) else abs(progress) > 10**308:
        assert found is None
    else:
        assert found == StepGrade(min(1.0, max(0.0, progress)), correctness)
    assert step_grade('{"progress": true, "correctness": 1}') is None
    assert step_grade(text + ' or {"progress": 0, "correctness": 0}') == StepGrade(0.0, 0.0), "the last one"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_steps_cover_every_token_once_in_order(widths: list[int], begins: list[int]) -> None:
    offsets = np.cumsum([0, *widths[:-1]]).tolist()
    spans = partition(offsets, sorted(begins))
    assert len(spans) == len(begins)
    assert [token for start, end in spans for token in range(start, end)] == list(range(len(widths)))
    for (start, end), begin in zip(spans[1:], sorted(begins)[1:], strict=True):
        assert all(offsets[token] >= begin for token in range(start, end))


def test_steps_that_are_not_in_the_text_or_were_written_by_another_tokenizer_have_no_place() -> None:
    assert step_starts("a b a", ["a", "b", "a"]) == [0, 2, 4] and step_starts("a b", ["b", "a"]) is None
    assert spans_of(stepped(), ["First", "nowhere"], Letters(TEXT)) is None
    assert spans_of(stepped(), ["First"], Letters(TEXT[::-1])) is None
    assert spans_of(make_result(response=(), text="x", sampler_logprobs=b""), ["x"], Letters("x")) is None
    assert steps_of(stepped(steps=("one", "", "two")), 8) == ["one", "two"]
    assert steps_of(stepped(), 2) == ["First, add 2 and 3.", "That is 5.\n\nSo the answer is 5."]
    spans = spans_of(stepped(), steps_of(stepped(), 2), Letters(TEXT))
    assert spans is not None and spans[1][0] == 3 + TEXT.index("That")


def test_the_trainer_takes_step_scores_for_stepwise_advantages_and_for_gae(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the judge by way of the Score to the advantage of each step's tokens."""
    script = grading(step1=(1.0, 1.0), step2=(0.5, 0.5), step3=(0.0, 0.0))

    async def run() -> Score:
        async with judge_server(script) as server, ChatClient(ChatEndpoint(url=server.url, model="m")) as chat:
            judge = StepJudge(chat, StepJudgeSettings(kind="steps", judge="j", votes=1))
            judge._tokenizer = Letters(TEXT)
            monkeypatch.setitem(registry.ENVIRONMENTS["chat"], "steps", judge)
            task = make_task(n_samples=1, verifier=Verifier(name="steps"))
            result = stepped().model_copy(update={"task": task})
            app = Scoring(CODEC, Judging(JudgeLimits()))
            effects = await app.process(3, [on_log(topics.RESULTS, result)])
            return read(effects.outputs[0])  # type: ignore[no-any-return]

    score = asyncio.run(run())
    assert float32_view(score.step_scores).tolist() == [1.0, 0.0, -1.0]
    made = rollout().model_copy(
        update={"step_scores": score.step_scores, "step_spans": score.step_spans, "reward": 0.25, "n_requested": 1}
    )
    sample = rewarded_sample(made)
    assert sample is not None
    spans = [(span.start, span.end) for span in score.step_spans]
    by_step = stepwise([sample], LossConfig(advantage="stepwise", step_coef=0.5))[made.rollout_id]
    assert [(start, end) for start, end, _ in by_step] == spans
    assert [value for *_, value in by_step] == [0.75, 0.25, -0.25]
    over_steps = LossConfig.model_validate(
        {"advantage": "gae", "step_coef": 1.0, "gae": {"rewards": "step", "gamma": 1.0, "lam": 1.0}}
    )
    assert [value for *_, value in gae([sample], over_steps)[made.rollout_id]] == [0.25, -0.75, -0.75]


# --- composite --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "response", "finish", "binary"),
    [
        ("Why do cats purr?", GOOD, "stop", 1),
        ("Why do cats purr?", "", "stop", -1),
        ("Why do cats purr?", "cats purr " * 40, "length", -1),
        ("Why do cats purr?", "The weather in Rome is warm in spring and dry in summer.", "stop", 1),
        ("", "Fine.", "", 1),
    ],
)
def test_the_composite_sees_from_outside(prompt: str, response: str, finish: str, binary: int) -> None:
    found = composite(prompt, response, finish)
    assert found.binary == binary, found
    assert found.score is not None and 0.0 <= found.score <= 100.0


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=200), st.text(max_size=200), st.sampled_from(["", "stop", "length", "odd"]), st.booleans())
def test_the_composite_stays_within_its_range(prompt: str, response: str, finish: str, failed: bool) -> None:
    found = composite(prompt, response, finish, failed=failed)
    assert found.score is None or 0.0 <= found.score <= 100.0
    assert found.binary in (-1, 0, 1)
    if failed:
        assert found.score == 0.0


def test_the_composite_is_a_reward_too() -> None:
    scorer = CompositeScorer(CompositeSettings(kind="composite"))
    result = make_result()
    verdict = scorer.verify(result.task, result)
    assert verdict.reward == pytest.approx(verdict.components["composite"] / 50.0 - 1.0) and verdict.reward > 0.5
    only = CompositeScorer(CompositeSettings(kind="composite", weights={"on_topic": 0, "own_words": 0, "varied": 0}))
    assert only.name != scorer.name
    assert only.verify(result.task, make_result(finish_reason="odd")).reward is None


# --- one's own --------------------------------------------------------------------------------------------------------


HERE = "tests.support.own_scorers"


def test_a_scorer_of_ones_own_is_a_function_or_an_object() -> None:
    result = make_result()

    def made(name: str, **fields: Any) -> Any:
        return custom_scorer(CustomSettings(kind="custom", target=f"{HERE}:{name}", **fields))

    function = made("three_quarters")
    assert function.verify(result.task, result) == Verdict(0.75)
    assert (
        function.name.startswith(f"{HERE}:three_quarters/1+")
        and made("three_quarters", version="2").name != function.name
    )
    assert asyncio.run(made("cannot_say").judge(result.task, result)).reward is None
    with pytest.raises(TypeError, match="good"):
        made("a_word").verify(result.task, result)
    assert made("TASTE").name == "taste/1"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_module:f", "cannot be imported"),
        (f"{HERE}:nothing", "has no nothing"),
        (f"{HERE}:Nothing", "is a class"),
        (f"{HERE}:WORD", "neither a scorer nor a function"),
    ],
)
def test_what_is_no_scorer_is_refused(target: str, says: str) -> None:
    with pytest.raises(BadTarget, match=says):
        custom_scorer(CustomSettings(kind="custom", target=target))
