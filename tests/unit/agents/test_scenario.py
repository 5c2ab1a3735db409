"""The scenarios: questions, users, feedback."""

import json
from collections import Counter
from pathlib import Path

import pytest

from schemas.records import Polarity, Result, Source, Status, Task, Terms
from tentalis.agents.scenarios import NAMES, Scenario, UnknownScenario, make_scenario
from tentalis.agents.scenarios.assistant import SHOWCASE, USERS, questions, voiced
from tentalis.rewards import registry
from tests.support.loop_records import T0, result, task


def task_of(scenario: Scenario, index: int) -> Task:
    question = scenario.question("r", index)
    return task(
        f"t{index}",
        n=1,
        environment=scenario.environment,
        messages=question.messages,
        verifier=question.verifier,
        terms=scenario.terms,
        user_id=question.user_id,
    )


def test_the_questions_are_many_and_different_and_not_those_that_are_shown() -> None:
    asked = questions()
    assert len(asked) == len({q.lower() for q in asked}) >= 120
    assert all(q.endswith("?") and 3 <= len(q.split()) <= 16 for q in asked)
    assert not set(SHOWCASE) & set(asked)


def test_no_question_twice_until_all_were_asked_and_another_order_in_another_run() -> None:
    scenario, count = make_scenario("assistant"), len(questions())
    order = [scenario.question("r", i).messages[0].content for i in range(2 * count)]
    assert len(set(order[:count])) == count
    assert Counter(order) == Counter(dict.fromkeys(questions(), 2))
    assert order[:count] != order[count:]
    assert order[:20] == [make_scenario("assistant").question("r", i).messages[0].content for i in range(20)]
    assert order[:20] != [scenario.question("s", i).messages[0].content for i in range(20)]


def test_every_user_gets_to_ask() -> None:
    scenario = make_scenario("assistant")
    assert {scenario.question("r", i).user_id for i in range(60)} == {u.user_id for u in USERS}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_scenario_asks_can_be_verified_by_its_environment(name: str) -> None:
    scenario = make_scenario(name)
    for index in range(20):
        registry.check(task_of(scenario, index))
    assert scenario.owes_feedback == (scenario.terms.opd is not None)
    assert len(scenario.showcase) == 3


def answered(scenario: Scenario, text: str, **more: object) -> Result:
    return result(task_of(scenario, 0), 0, text=text, **more)


def test_a_complaint_names_what_is_wrong_and_praise_has_no_words() -> None:
    scenario = make_scenario("assistant")
    bad = answered(scenario, "**No.**")
    said = scenario.feedback(bad, "f", T0)
    assert (said.polarity, said.source, said.sample_index) == (Polarity.NEGATIVE, Source.USER, 0)
    assert said.text and said.result == bad and said.author == bad.task.user_id
    asked = bad.task.messages[0].content
    good = answered(scenario, f"You want to know this: {asked[:-1].lower()}, and the answer is that it is very simple.")
    if registry.complaint(good.task, good) is None:
        content = scenario.feedback(good, "f", T0)
        assert (content.polarity, content.text) == (Polarity.POSITIVE, "")


def test_nothing_to_say_on_a_failed_result() -> None:
    scenario = make_scenario("assistant")
    failed = answered(scenario, "", status=Status.FAILED, response_token_ids=b"", sampler_logprobs=b"")
    said = scenario.feedback(failed, "f", T0)
    assert (said.polarity, said.text) == (Polarity.NONE, "")


def test_a_users_words_stay_one_sentence() -> None:
    assert voiced("", "That was too long.") == "That was too long."
    assert voiced("Hm, ", "That was too long.") == "Hm, that was too long."
    assert voiced("Hm, ", "I got no answer.") == "Hm, I got no answer."


def test_arithmetic_has_right_and_wrong_answers() -> None:
    scenario = make_scenario("math")
    of = task_of(scenario, 3)
    right = json.loads(of.verifier.data)["entry"]["answer"] if of.verifier else ""
    assert registry.verify(of, result(of, 0, text=right)).reward == 1.0
    assert (registry.verify(of, result(of, 0, text=str(int(right) + 1))).reward or 0.0) < 1.0
    assert scenario.terms == Terms(rl=Source.RESULT, opd=None, deadline_ms=scenario.terms.deadline_ms)


def gsm8k(folder: Path, lines: list[str]) -> Path:
    (folder / "gsm8k_train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_gsm8k_from_a_folder(tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"How much is {i} and {i}?", "answer": f"x\n#### {2 * i}"}) for i in range(10)]
    scenario = make_scenario("math", gsm8k(tmp_path, lines))
    of = task_of(scenario, 0)
    number = json.loads(of.verifier.data)["answer"] if of.verifier else ""
    assert registry.verify(of, result(of, 0, text=f"It is easy.\n#### {number}")).reward == 1.0
    asked = {scenario.question("r", i).messages[0].content for i in range(7)}
    assert len(asked) == 7
    assert not asked & {shown[0].content for shown in scenario.showcase}


def test_data_that_is_not_there_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownScenario, match=r"gsm8k_train\.jsonl"):
        make_scenario("math", tmp_path)
    with pytest.raises(UnknownScenario, match="line 2"):
        make_scenario("math", gsm8k(tmp_path, ['{"question": "q", "answer": "a"}', '["no"]']))
    with pytest.raises(UnknownScenario, match="at least four"):
        make_scenario("math", gsm8k(tmp_path, ['{"question": "q", "answer": "a"}']))
    with pytest.raises(UnknownScenario, match="the scenarios are assistant, echo, math"):
        make_scenario("chess")
