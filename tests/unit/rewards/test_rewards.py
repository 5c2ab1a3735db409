"""Verifiers: the registry, the taste of the simulated users, mathematics."""

import json
from typing import Any

import pytest

from schemas.records import Message, Status, Task, Verifier
from tentalis.rewards import registry
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.rewards.style_scorer import StyleData, check_style, is_plain
from tentalis.rewards.verdict import BadVerifierData, UnknownEnvironment, UnknownVerifier, Verdict
from tentalis.text.words import content_stems
from tests.support.stream_records import GOOD, make_result, make_task


def judged(answer: str, question: str = "Why do cats purr?", **fields: Any) -> Any:
    task = make_task(messages=(Message(role="user", content=question),))
    return registry.verify(task, make_result(task, text=answer, **fields))


# --- registry ---------------------------------------------------------------------------------------------------------


def test_an_unknown_environment_is_refused() -> None:
    task = make_task(environment="moon")
    for call in (registry.check, registry.scorer_of, registry.scorer_name):
        with pytest.raises(
            UnknownEnvironment, match="'moon' is not known; the known ones are agent, chat, echo, env-pool"
        ):
            call(task)
    with pytest.raises(UnknownEnvironment):
        registry.verify(task, make_result(task))


def test_an_unknown_verifier_is_refused_and_one_of_another_environment_too() -> None:
    for name in ("nope", "gsm8k"):
        with pytest.raises(UnknownVerifier, match="has no verifier"):
            registry.check(make_task(verifier=Verifier(name=name)))


@pytest.mark.parametrize("data", ["", "[]", "{", '{"max_words": "many"}', '{"words": 3}', '{"min_words": NaN}'])
def test_verifier_data_that_cannot_be_read_is_refused(data: str) -> None:
    with pytest.raises(BadVerifierData, match="'taste'"):
        registry.check(make_task(verifier=Verifier(name="taste", data=data)))


def test_without_a_verifier_the_reward_is_unknown() -> None:
    task = make_task(verifier=None)
    registry.check(task)
    verdict = registry.verify(task, make_result(task))
    assert verdict.reward is None and verdict.components == {"unverified": 1.0}
    assert registry.complaint(task, make_result(task)) is None


def test_a_failed_result_is_a_negative_signal() -> None:
    result = make_result(status=Status.FAILED, text="", response=())
    assert registry.verify(result.task, result) == Verdict(-1.0, {"failed": 1.0})
    assert registry.complaint(result.task, result)


def test_scorer_names_carry_a_version() -> None:
    kinds = {type(verifier): verifier.name for verifiers in ENVIRONMENTS.values() for verifier in verifiers.values()}
    names = list(kinds.values())
    assert len(set(names)) == len(names), "an environment may share a scorer with another; two scorers share no name"
    assert all(name.rpartition("/")[2].partition("+")[0].isdigit() for name in names)


# --- taste ------------------------------------------------------------------------------------------------------------

ANSWERS = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Is the sky blue?", "Yes, the sky is blue on clear days."),
    ("How do I keep bananas from going brown?", "Store a banana in the fridge and wrap its stem to slow browning."),
    ("How does photosynthesis work?", "Photosynthesis converts sunlight, water, carbon dioxide into sugar."),
    ("What should I bake for a birthday?", "A chocolate cake is easy when you are baking for many."),
    ("Which cities are the largest?", "Tokyo is the biggest city, followed by Delhi and Shanghai."),
    ("How can children sleep better?", "A child who slept at regular hours will rest well."),
    ("What is a good way to start the day?", "A good way to start the day is a glass of water and a walk."),
    ("When was the telephone invented?", "Alexander Graham Bell's invention, the telephone, dates from 1876."),
]


@pytest.mark.parametrize(("question", "answer"), ANSWERS)
def test_a_short_plain_answer_about_the_question_is_liked(question: str, answer: str) -> None:
    verdict = judged(answer, question)
    assert verdict.reward == 1.0, verdict.components


CHEATS = {
    "the question": ("Why do cats purr? Why do cats purr, why?", "own_words"),
    "the question as a statement": ("Why do all of the cats purr.", "own_words"),
    "the question and one word": ("Why do cats purr? Well, yes.", "own_words"),
    "asking back": ("What kind of cats do you have, and how old are they?", "own_words"),
    "an offer of help": ("I would be happy to help you with the purr of your cats.", "own_words"),
    "keywords": ("Cats purr content happy relaxed vibration larynx.", "prose"),
    "keywords with an article": ("Cats, purring, vibration, larynx, contentment, the, feline, healing, calm.", "prose"),
    "one word": ("Purring.", "length_ok"),
    "one word again and again": ("Cats purr the purr the purr the purr the purr the purr.", "prose"),
    "stutter": ("Cats purr purr because they are happy and calm.", "prose"),
    "another subject": ("The weather in Spain is warm and sunny today.", "on_topic"),
    "words only": ("The of and is a to in it for that on.", "on_topic"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_what_a_policy_would_try_is_not_liked(name: str) -> None:
    answer, part = CHEATS[name]
    verdict = judged(answer)
    assert verdict.reward == 0.0 and verdict.components["satisfied"] == 0.0
    assert verdict.components[part] == 0.0, verdict.components


def test_length_is_counted_in_words_and_both_limits_belong_to_it() -> None:
    for words, fits in ((5, False), (6, True), (40, True), (41, False)):
        answer = " ".join(["Cats", *(part for i in range(20) for part in ("the", f"thing{i}"))][:words]) + "."
        tasted = check_style(answer, "cats?", stopped=True)
        assert (tasted.words, tasted.length_ok) == (words, fits)


@pytest.mark.parametrize(
    "answer",
    [
        "- Cats purr when they are content.",
        "Cats purr:\n* when content\n* when ill.",
        "Cats purr:\n1. when content\n2. when ill.",
        "Cats purr 1) when content and 2) when ill.",
        "Cats purr: • when content • when ill.",
        "Cats **purr** when they are content.",
        "# Purring\nCats purr when they are content.",
        "Cats purr when they are `content`.\n```\ncode\n```",
        "| cat | purr |\n|---|---|",
        "a) Cats purr when they are content.",
        "Cats <b>purr</b> when they are content.",
    ],
)
def test_lists_bold_and_headings_are_not_plain(answer: str) -> None:
    assert not is_plain(answer)


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        "A well-known reason - there are others - is comfort.",
        "About 3.5 times as much, i.e. 1.75 kg.",
        "It was founded in 1876. Bell owned it.",
        "I like it. A cat does too.",
    ],
)
def test_ordinary_punctuation_is_plain(answer: str) -> None:
    assert is_plain(answer)


def test_an_answer_is_finished_when_the_model_stopped_at_the_end_of_a_sentence() -> None:
    assert judged(GOOD).components["finished"] == 1.0
    assert judged(GOOD.rstrip(".") + '."').components["finished"] == 1.0
    assert judged(GOOD, finish_reason="length").components["finished"] == 0.0
    assert judged(GOOD.rstrip(".")).components["finished"] == 0.0
    assert judged(GOOD.rstrip(".") + "...").components["finished"] == 0.0


def test_inflection_does_not_hide_the_subject() -> None:
    for one, other in (("bake", "baking"), ("cities", "city"), ("children", "child"), ("invented", "invention")):
        assert content_stems(one) & content_stems(other), (one, other)
    assert not content_stems("planet") & content_stems("plane")


def test_the_question_and_the_limits_may_come_with_the_task() -> None:
    data = json.dumps({"question": "dogs", "min_words": 2, "max_words": 5})
    task = make_task(verifier=Verifier(name="taste", data=data))
    assert registry.verify(task, make_result(task, text="Dogs bark at strangers.")).reward == 1.0
    assert StyleData().min_words == 6 and StyleData().max_words == 40


def complaint(answer: str, **fields: Any) -> str | None:
    task = make_task()
    return registry.complaint(task, make_result(task, text=answer, **fields))


def test_a_good_answer_gets_no_complaint() -> None:
    assert complaint(GOOD) is None


@pytest.mark.parametrize(
    ("answer", "fields", "named"),
    [
        ("Cats purr because " + "they are warm and calm and " * 12 + "happy.", {}, ["too long", "one short sentence"]),
        ("Purring.", {}, ["too short", "one short sentence"]),
        ("Cats **purr** when they are content.", {}, ["not plain text", "without lists, bold"]),
        (GOOD, {"finish_reason": "length"}, ["cut off"]),
        ("The weather in Spain is warm and sunny today.", {}, ["not about my question"]),
        ("Why do all of the cats purr.", {}, ["only my question again"]),
        ("Cats purr content happy relaxed vibration larynx.", {}, ["not written in sentences"]),
        ("", {}, ["too short", "not about my question"]),
    ],
)
def test_a_complaint_names_what_is_wrong_in_one_sentence(answer: str, fields: dict[str, Any], named: list[str]) -> None:
    said = complaint(answer, **fields)
    assert said is not None
    assert all(part in said for part in named), said
    assert 10 < len(said) < 300 and said.count(".") + said.count("?") == 1


@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_is_complained_about(name: str) -> None:
    assert complaint(CHEATS[name][0])


# --- mathematics ------------------------------------------------------------------------------------------------------


def solved(verifier: str, data: dict[str, Any], answer: str) -> tuple[Task, Any]:
    task = make_task(environment="math", verifier=Verifier(name=verifier, data=json.dumps(data)))
    return task, registry.verify(task, make_result(task, text=answer))


@pytest.mark.parametrize(
    ("reference", "answer", "correct"),
    [
        ("... #### 18", "She makes 9 * 2 = $18 a day.", True),
        ("18", "First I thought 17. The answer is 18.", True),
        ("18", "The answer is 17. No: the answer is 18.", True),
        ("18", "The answer is 18. No: the answer is 17.", False),
        ("18", "The answer is $18.00. She has 3 cats.", True),
        ("1234", "It costs $1,234.", True),
        ("1,234,567", "1234567", True),
        ("0.5", "The answer is 1/2.", True),
        ("1.5", "You need 1 1/2 cups.", True),
        ("-4", "So 4 - 1 - 7 = -4", True),
        ("-4", "The answer is 4", False),
        ("3", "It takes 10-3", True),
        ("18", "18 19 20", False),
        ("18", "The answer is 6 * 3 = 18 eggs for 4 people", True),
        ("18", "#### 18", True),
        ("18", "<answer>18</answer> or so, of 20", True),
        ("18", "\\boxed{18}", True),
        ("50", "The answer is 50%.", True),
        ("18", "18.004", False),
        ("0.75", "\\frac{3}{4}", True),
        ("18", "So it is 18. \\boxed{17}", False),
        ("18", "She has 3. <answer>6 * 3 = 18 eggs", True),
        ("18", "I write it in <answer> tags.\n#### Result\nIt is 18.", True),
        ("18", "Of 20 <answer>18<answer>", True),
        ("18", "<answer>17<answer>18", True),
        ("18", "<answer>18</answer> not 17<answer>", True),
        ("18", "<answer>18<answer>17</answer>", False),
        ("18", "The answer is 18</answer>", True),
        ("18", "Of 18 </answer><answer>17", False),
    ],
)
def test_the_last_stated_number_is_the_answer(reference: str, answer: str, correct: bool) -> None:
    _, verdict = solved("gsm8k", {"answer": reference}, answer)
    assert verdict.reward == float(correct) and verdict.components == {"answered": 1.0, "correct": float(correct)}


def test_an_answer_without_a_number_is_wrong_and_a_reference_without_one_is_unknown() -> None:
    _, verdict = solved("gsm8k", {"answer": 18}, "I do not know.")
    assert verdict.reward == 0.0 and verdict.components["answered"] == 0.0
    for answer in ("18 <answer>none</answer>", r"It is 18: \boxed{}", "18 <answer></answer>"):
        _, verdict = solved("gsm8k", {"answer": 18}, answer)
        assert verdict.components == {"answered": 0.0, "correct": 0.0}, answer
    _, verdict = solved("gsm8k", {"answer": "who knows"}, "18")
    assert verdict.reward is None and verdict.components == {"unverified": 1.0}


@pytest.mark.parametrize(
    ("reference", "answer", "correct"),
    [
        (r"\frac{1}{\sqrt{2}}", r"so \boxed{\frac{1}{\sqrt{2}}}.", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\dfrac{\pi}{2})}", True),
        (r"\frac12", r"\boxed{0.5}", True),
        ("1/3", r"\boxed{0.333}", True),
        ("1/3", r"\boxed{0.3}", False),
        ("5", r"\boxed{5 \text{ cm}}", True),
        ("10,000", r"\boxed{10000}", True),
        ("x = 7", r"\boxed{7}", True),
        (r"90^\circ", r"\boxed{90}", True),
        ("(1, 2)", r"\boxed{(2, 1)}", False),
        ("[1, 2)", r"\boxed{(1, 2)}", False),
        ("7", r"\boxed{1} no \boxed{7}", True),
        ("7", r"\boxed{7} no \boxed{1}", False),
        ("7", "The answer is 7", True),
        ("7", "I see 7 of them", False),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
        ("7", "<answer>The answer is 7</answer>", True),
    ],
)
def test_boxed_answers_are_compared_as_latex_and_as_numbers(reference: str, answer: str, correct: bool) -> None:
    assert solved("math", {"answer": reference}, answer)[1].reward == float(correct)


def test_the_reference_may_be_in_a_solution() -> None:
    assert solved("math", {"solution": r"thus \boxed{\frac{1}{2}}"}, r"\boxed{\tfrac 1 2}")[1].reward == 1.0
    assert solved("math", {"solution": "thus"}, r"\boxed{2}")[1].reward is None


ENTRY = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {}}


@pytest.mark.parametrize(
    ("answer", "reward"), [("The answer is -4.", 1.0), ("I get 4 - 1 - 7 = -4", 1.0), ("-3", 0.0), ("?", 0.0)]
)
def test_reasoning_gym_scores_with_the_datasets_own_scorer(answer: str, reward: float) -> None:
    verdict = solved("reasoning_gym", {"dataset": "chain_sum", "entry": ENTRY}, answer)[1]
    assert verdict.reward == pytest.approx(reward, abs=0.02)
    assert verdict.components["answered"] == float(answer != "?")


def test_a_scorer_that_fails_leaves_the_reward_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(answer: str, entry: dict[str, Any]) -> float:
        raise KeyError("metadata")

    monkeypatch.setattr("tentalis.rewards.mathematics._scorer", lambda dataset: broken)
    verdict = solved("reasoning_gym", {"dataset": "chain_sum", "entry": ENTRY}, "-4")[1]
    assert verdict.reward is None and verdict.components["unverified"] == 1.0
    monkeypatch.setattr("tentalis.rewards.mathematics._scorer", lambda dataset: lambda answer, entry: float("nan"))
    assert solved("reasoning_gym", {"dataset": "chain_sum", "entry": ENTRY}, "-4")[1].reward is None


def test_an_unknown_dataset_or_half_an_entry_is_malformed() -> None:
    with pytest.raises(BadVerifierData, match="no dataset 'nope'"):
        solved("reasoning_gym", {"dataset": "nope", "entry": ENTRY}, "1")
    with pytest.raises(BadVerifierData, match="question and an answer"):
        solved("reasoning_gym", {"dataset": "chain_sum", "entry": {"question": "1?"}}, "1")


def test_a_complaint_tells_the_reference_answer() -> None:
    task, _ = solved("gsm8k", {"answer": "... #### 18"}, "17")
    assert "the answer is 18" in (registry.complaint(task, make_result(task, text="17")) or "")
    assert "no answer" in (registry.complaint(task, make_result(task, text="hm")) or "")
    assert registry.complaint(task, make_result(task, text="18")) is None
