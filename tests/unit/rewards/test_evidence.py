"""The rules say only what they know: without evidence a reward is unknown. An explicit grade comes first."""

import asyncio

import pytest

from schemas.records import Feedback, Opens, Source, Terms
from tentalis.rewards.next_state_rules import NextStateRules
from tests.support.loop_records import result, task

TERMS = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)
TURN = task("t", n=1, terms=TERMS)
ANSWER = result(TURN)


def next_message(text: str, author: str = "user") -> Feedback:
    return Feedback(
        feedback_id="f", event_time=0, task_id="t", source=Source.NEXT_STATE, author=author, text=text, result=ANSWER
    )


def reward(text: str, author: str = "user") -> float | None:
    return asyncio.run(NextStateRules().judge_feedback(TURN, ANSWER, next_message(text, author))).reward


@pytest.mark.parametrize(
    "text",
    [
        "And how do I get from Oslo to Bergen by train?",
        "We're closed on Sundays, and the shop opens at nine.",
        "No, está bien así, gracias.",
        "Non, c'est bon comme ça.",
        "Non c'est parfait, c'était juste pour comprendre",
        "Je veux que la liste ne montre pas les fichiers cachés.",
        "Wenn der Test nicht durchläuft, sag mir Bescheid.",
        "¿Puedes explicarlo de otra forma para mi hijo?",
        "如果测试不通过，请告诉我。",
        "それは違います。もう一度お願いします。",
        "Great, now the build fails and I lost two hours.",
        "Oh wonderful, another error in the same line.",
        "Perfect numbers: which ones are below 1000?",
        "Right now I need the other file instead.",
        "Good morning! What is on my calendar today?",
        "Write a poem about the sea and the wind.",
    ],
)
def test_without_evidence_the_reward_is_unknown(text: str) -> None:
    assert reward(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Das ist leider nicht das, was ich wollte: die Frist ist falsch.", -1.0),
        ("Nein, das stimmt nicht.", -1.0),
        ("Super, vielen Dank! Und wie geht es weiter?", 1.0),
        ("Danke, aber das ist falsch.", -1.0),
        ("No, eso está mal, te pedí cuatro.", -1.0),
        ("Muchas gracias, me sirvió.", 1.0),
        ("Ça ne marche toujours pas.", -1.0),
        ("Merci, c'est parfait !", 1.0),
        ("Você esqueceu a segunda parte.", -1.0),
        ("Obrigada, ficou ótimo.", 1.0),
        ("这不是我要的答案，请重新写一遍。", -1.0),
        ("太好了，谢谢！", 1.0),
    ],
)
def test_complaints_and_thanks_are_read_in_six_languages(text: str, expected: float) -> None:
    assert reward(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("String to replace was not found in the file", None),
        ("Paris, 12 degrees, rain", None),
        ("3 files changed", None),
        ('{"temperature": 12}', None),
        ('{"success": true, "rows": 3}', 1.0),
        ('{"exit_code": 0, "stdout": ""}', 1.0),
        ("<returncode>0</returncode>\n<output>ok</output>", 1.0),
        ("<returncode>2</returncode>\n<output>no rule</output>", -1.0),
        ("collected 3 items\n\n3 passed in 0.1s", 1.0),
        ("1 failed, 2 passed in 0.1s", -1.0),
        ("..\n=== 2 passed, 1 skipped, 3 warnings in 75.31s (0:01:15) ===", 1.0),
        ("=== 2 errors ===", -1.0),
        ("Test Suites: 1 failed, 1 total\nTests:       1 failed, 4 passed, 5 total", -1.0),
        (" Test Files  2 passed (2)\n      Tests  5 passed (5)", 1.0),
        ("  5 passed (2.3s)", 1.0),
        ("test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s", 1.0),
        ("test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s", -1.0),
        ("[INFO] BUILD SUCCESS", 1.0),
        ("> Task :test\nBUILD SUCCESSFUL in 1m 3s", 1.0),
        ("OK (3 tests)", 1.0),
        ("Your command ran successfully and did not produce any output.", 1.0),
        ("gone\n[exit code 3]", -1.0),
        ("Exit code 1\nno rule to make it", -1.0),
        ("Exit Code: 0", 1.0),
        ("built\nProcess finished with exit code 0", 1.0),
        ("Observation: exit code: 1", -1.0),
        ("web-1 exited with code 137", -1.0),
        ("<exit_code>0</exit_code><stdout>ok</stdout>", 1.0),
        ("ok\n[The command completed with exit code 0.]", 1.0),
        ("ok\n[The command completed with exit code 2.]\n[Current working directory: /work]", -1.0),
    ],
)
def test_a_tool_is_judged_by_what_it_reports(text: str, expected: float | None) -> None:
    assert reward(text, "tool") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Thanks!", 1.0), ("Perfect, that works.", 1.0), ("That's wrong, it is 56.", -1.0), ("No, the second one.", -1.0)],
)
def test_evidence_decides(text: str, expected: float) -> None:
    assert reward(text) == expected


@pytest.mark.parametrize("text", ["", "That's wrong, it is 56.", "And the weather in Oslo tomorrow?", "Thanks!"])
def test_an_explicit_grade_comes_first(text: str) -> None:
    def graded(grades: dict[Source, float]) -> float | None:
        judge = NextStateRules()
        return asyncio.run(judge.judge_grades(TURN, ANSWER, next_message(text), grades)).reward

    assert graded({Source.USER: 1.0}) == 1.0
    assert graded({Source.USER: -1.0}) == -1.0
    assert graded({Source.USER: 0.5, Source.OPERATOR: -0.5}) == -0.5
    assert graded({}) == (reward(text) if text else None)
