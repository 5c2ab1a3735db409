"""The verifier math_verify: equal in algebra, the same each time, and within limits whatever a model writes."""

import json
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from schemas.records import Verifier
from tentalis.rewards import math_verify, registry
from tentalis.rewards.functions.errors import FunctionTimeout
from tentalis.rewards.math_verify import MathVerifyVerifier
from tentalis.rewards.verdict import Verdict
from tentalis.service.packages import MissingExtra
from tests.support.stream_records import make_result, make_task

pytest.importorskip("math_verify", reason="the extra math is not installed")


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifyVerifier]:
    scorer = MathVerifyVerifier()
    yield scorer
    scorer.close()


def verdict(scorer: MathVerifyVerifier, text: str, reference: str) -> Verdict:
    task = make_task(environment="math", verifier=Verifier(name="math_verify", data=json.dumps({"answer": reference})))
    return scorer.verify(task, make_result(task, text=text))


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        (r"(b+2)(a+5)", r"(a+5)(b+2)", 1.0),
        (r"ab+2a+5b+10", r"(a+5)(b+2)", 1.0),
        (r"\sqrt{117}", r"3\sqrt{13}", 1.0),
        (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}", 1.0),
        (r"9i+6", r"6+9i", 1.0),
        (r"\frac{28}{6}", r"\frac{14}{3}", 1.0),
        (r"\text{Evelyn}", r"\text{Evelyn}", 1.0),
        (r"(a+5)(b-2)", r"(a+5)(b+2)", 0.0),
        (r"\sqrt{118}", r"3\sqrt{13}", 0.0),
        (r"(3,2)", r"(2,3)", 0.0),
        (r"\frac{", r"\frac{14}{3}", 0.0),
    ],
)
def test_answers_are_compared_as_algebra(
    verifier: MathVerifyVerifier, answer: str, reference: str, reward: float
) -> None:
    found = verdict(verifier, rf"So it is \boxed{{{answer}}}." if answer[-1] != "{" else f"#### {answer}", reference)
    assert found.reward == reward and found.components == {"answered": 1.0, "correct": reward}


@pytest.mark.parametrize(("answer", "reward"), [(r"2x+2", 1.0), (r"so \boxed{2x+2}", 1.0), (r"2x+1", 0.0)])
def test_the_tagged_answer_is_graded_and_not_a_box_in_a_step(
    verifier: MathVerifyVerifier, answer: str, reward: float
) -> None:
    other = "2(x+1)" if reward == 0.0 else "x"
    text = rf"<step>First \boxed{{{other}}}</step><answer>{answer}</answer>"
    assert verdict(verifier, text, "2(x+1)").reward == reward


def test_without_an_answer_the_reward_is_0_and_without_a_reference_unknown(verifier: MathVerifyVerifier) -> None:
    assert verdict(verifier, "I do not know.", "3") == Verdict(0.0, {"answered": 0.0, "correct": 0.0})
    assert verdict(verifier, r"\boxed{3}", "").reward is None


def test_an_answer_that_takes_too_long_is_ended_and_the_next_one_is_scored() -> None:
    scorer = MathVerifyVerifier()
    scorer.time_limit_s = 2.0
    try:
        verdict(scorer, r"\boxed{x+1}", "1+x")  # starts the process
        with pytest.raises(FunctionTimeout):
            verdict(scorer, r"\boxed{9^{9^{9^{9}}} + x}", "x+1")
        assert verdict(scorer, r"\boxed{x+1}", "1+x").reward == 1.0
    finally:
        scorer.close()


def test_the_name_has_the_versions_that_a_verdict_depends_on(verifier: MathVerifyVerifier) -> None:
    libraries = (version("math-verify"), version("latex2sympy2-extended"), version("sympy"))
    assert verifier.name == f"math_verify/3+{'-'.join(libraries)}"


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise math_verify.PackageNotFoundError(name)

    monkeypatch.setattr(math_verify, "version", missing)
    monkeypatch.setattr("tentalis.service.packages.importable", lambda module: module != "math_verify")
    scorer = MathVerifyVerifier()
    assert scorer.name == "math_verify/3+missing"
    with pytest.raises(MissingExtra, match=r"needs packages that are not installed \(math-verify\)"):
        verdict(scorer, r"\boxed{3}", "3")


def test_it_is_a_verifier_of_the_environments_with_text_answers() -> None:
    for environment in ("math", "llm", "toolcall"):
        task = make_task(environment=environment, verifier=Verifier(name="math_verify", data='{"answer": "3"}'))
        registry.check(task)
        assert registry.scorer_name(task).startswith("math_verify/3+")
