r"""Verifiers of the environment math: `gsm8k` (a final number), `math` (a boxed LaTeX answer), `reasoning_gym`.

A response that states no answer is wrong (reward 0, `answered` 0). The reward is *unknown* only where the check itself
fails: the reference has no number, or the scorer fails.
"""

import logging
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pydantic import field_validator

from schemas.records import Result, Task
from tentalis.rewards.answers import (
    boxed,
    decimals_of,
    final_number,
    last_number,
    latex_answer,
    same_latex,
    same_number,
    stated_answer,
)
from tentalis.rewards.verdict import BadVerifierData, Verdict, VerifierData, data_of
from tentalis.service.packages import require

log = logging.getLogger(__name__)


def _verdict(answered: bool, reward: float) -> Verdict:
    return Verdict(reward, {"answered": float(answered), "correct": float(reward == 1.0)})


class Gsm8kData(VerifierData):
    """`answer`: the reference as a number or as text that ends with it (`... #### 18`)."""

    answer: str

    @field_validator("answer", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Gsm8kVerifier:
    """Checks that the final number of the answer equals that of the reference."""

    name = "gsm8k/2"
    slow = False

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's data does not fit this verifier."""
        data_of(task, Gsm8kData)

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns 1 or 0; unknown if the reference has no number."""
        reference = final_number(data_of(task, Gsm8kData).answer)
        if reference is None:
            return Verdict.unknown()
        value = final_number(result.text)
        if value is None:
            return _verdict(False, 0.0)
        return _verdict(True, float(same_number(value, reference, decimals_of(value))))

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns the complaint of a user who knows the reference, or None."""
        return complaint_of(self.verify(task, result), data_of(task, Gsm8kData).answer.rpartition("####")[2].strip())


class MathData(VerifierData):
    r"""`answer`: the reference in LaTeX; or `solution`: a text whose last `\boxed{}` holds it."""

    answer: str | None = None
    solution: str | None = None

    def reference(self) -> str | None:
        """Returns the reference answer, or None if there is none."""
        if self.answer is not None:
            return boxed(self.answer) or self.answer
        return boxed(self.solution or "")


def latex_verdict(task: Task, result: Result, equal: Callable[[str, str], bool]) -> Verdict:
    """Returns 1 or 0 for the answer of a text (`latex_answer`), as `equal(answer, reference)` says; unknown if the
    reference has no answer. Raises BadVerifierData and the errors of `equal`."""
    reference = data_of(task, MathData).reference()
    if not reference:
        return Verdict.unknown()
    answer = latex_answer(result.text)
    return _verdict(True, float(equal(answer, reference))) if answer else _verdict(False, 0.0)


class BoxedMathVerifier:
    """Checks that the answer of a text (`latex_answer`) equals the reference."""

    name = "math/3"
    slow = False

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's data does not fit this verifier."""
        data_of(task, MathData)

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns 1 or 0; unknown if the reference has no answer."""
        return latex_verdict(task, result, same_latex)

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns the complaint of a user who knows the reference, or None."""
        return complaint_of(self.verify(task, result), data_of(task, MathData).reference())


class ReasoningGymData(VerifierData):
    """`dataset`: a name registered in reasoning_gym; `entry`: the dataset's entry (question, answer, metadata)."""

    dataset: str
    entry: dict[str, Any]

    @field_validator("entry")
    @classmethod
    def _check_entry(cls, entry: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(entry.get("question"), str) or "answer" not in entry:
            raise ValueError("must have a question and an answer")
        return entry

    @property
    def source(self) -> str:
        """The dataset that made the entry: of a composite, the one that the entry names."""
        named = (self.entry.get("metadata") or {}).get("source_dataset")
        return named if self.dataset == _COMPOSITE and isinstance(named, str) else self.dataset


_COMPOSITE = "composite"
_TUPLES = frozenset({"arc_agi", "rearc"})
"""Datasets whose scorers compare a board with tuples, which JSON has turned into lists."""


def _with_tuples(dataset: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry with the types that the scorer of its dataset expects."""
    if dataset not in _TUPLES:
        return entry
    board = tuple(tuple(row) for row in entry["metadata"]["output"])
    return entry | {"metadata": entry["metadata"] | {"output": board}}


@lru_cache
def _scorer(dataset: str) -> Any:
    require("the verifier reasoning_gym", "math")
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(dataset)


class ReasoningGymVerifier:
    """Applies the dataset's own scorer to the stated answer. Partial scores are kept, in [0, 1]."""

    name = "reasoning_gym/3"
    slow = True

    def check(self, task: Task) -> None:
        """Raises BadVerifierData. Only `verify` checks that the dataset exists: the library takes seconds to load."""
        data_of(task, ReasoningGymData)

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns the score; unknown if the scorer fails or leaves [0, 1]. Raises BadVerifierData (no such dataset)."""
        data = data_of(task, ReasoningGymData)
        try:
            scorer = _scorer(data.source)
        except ValueError as cause:
            raise BadVerifierData(f"reasoning_gym has no dataset {data.source!r}") from cause
        answer = gym_answer(result.text, data.entry["answer"])
        if answer is None:
            return _verdict(False, 0.0)
        try:
            score = float(scorer(answer, _with_tuples(data.source, data.entry)))
        except Exception as error:  # noqa: BLE001 - any of the library's hundred scorers may raise anything on arbitrary text
            log.warning("task %s: the scorer of %s failed: %r", task.task_id, data.dataset, error)
            return Verdict.unknown(answered=1.0)
        if not math.isfinite(score) or not 0.0 <= score <= 1.0:
            log.warning("task %s: the scorer of %s gave %r", task.task_id, data.dataset, score)
            return Verdict.unknown(answered=1.0)
        return _verdict(True, score)

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns the complaint of a user who knows the reference, or None."""
        return complaint_of(self.verify(task, result), str(data_of(task, ReasoningGymData).entry["answer"]))


def gym_answer(text: str, reference: object) -> str | None:
    """Returns the part of a text that a reasoning_gym scorer should grade, or None if there is none.

    Where the reference is a number, it is the stated number, else the last number. Otherwise it is the stated answer,
    else the whole text: the last resort, because scorers give credit for a reference that merely occurs in the text.
    A full stop at the end belongs to the sentence around an answer, unless the reference has one too.
    """
    stated = stated_answer(text)
    if isinstance(reference, str) and _is_plain_number(reference):
        value = final_number(text)
        if value is None:
            return None
        return str(value.numerator) if value.denominator == 1 else repr(float(value))
    answer = (text if stated is None else stated).strip()
    if not (isinstance(reference, str) and reference.rstrip().endswith(".")):
        answer = answer.rstrip(".")
    return answer or None


def _is_plain_number(text: str) -> bool:
    stripped = text.strip().replace(",", "")
    return stripped.lstrip("+-").replace(".", "", 1).isdigit() and last_number(text) is not None


def complaint_of(verdict: Verdict, reference: str | None) -> str | None:
    """Returns the complaint of a user who knows the reference about an answer without the full reward, or None."""
    if verdict.reward is None or verdict.reward >= 1.0 or not reference:
        return None
    if not verdict.components["answered"]:
        return f"You gave no answer. Work it out step by step and end with the answer, which is {reference}."
    return f"That is not right: the answer is {reference}. Work it out step by step and end with the answer."
