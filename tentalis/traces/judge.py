"""A cheap judge: rules over the text alone, no model, no clock. It tells a broken answer from a whole one, not a good
one from a better one.
"""

import re
from dataclasses import dataclass

GOOD, BAD = 80, 40
"""From this composite on the label is 1, below that one it is -1."""

_WORD = re.compile(r"\w+")
_FAILED = re.compile(
    r"^\s*(traceback \(most recent call last\)|(fatal |internal |runtime |uncaught )?(error|exception)\b"
    r"|\w+(error|exception):|command not found|segmentation fault)",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"^\W*(i'?m sorry|i am sorry|sorry|unfortunately)?[\s,.:;!-]*(but )?"
    r"(i|we) (can'?t|cannot|can not|am unable to|'?m unable to|am not able to|won'?t)\b"
    r"|^\W*as an ai (language )?model\b",
    re.IGNORECASE,
)


# Words that say nothing of a subject.
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They say nothing of a subject.
_COMMON = _words(
    """
    a an and are as at be but by can could do does for from give had has have how i if in is it its make me my no not
    of on or our please so tell that the their them there these they this to us was we were what when where which who
    why will with would write you your
    """
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """`composite` 0..100, the sum of `parts` (name -> points); `label` -1, 0 or 1."""

    composite: int
    label: int
    parts: dict[str, int]


def judge(prompt: str, response: str, *, tool_errors: int = 0) -> Judgement:
    """The judgement of a response by these rules, the points in brackets:

    - answered (20): there is a word in it. Without one everything is 0.
    - whole (20): it does not begin as an error message does.
    - willing (15): it does not begin as a refusal does.
    - on_topic (25): the share of the prompt's words, common ones aside, that it takes up, full from a third on; also
      full where the prompt has none.
    - varied (10): different among all of its runs of three words, full from four fifths on, none below two fifths.
    - tools (10): no tool failed; half of it for one that did.

    Label: 1 from 80 points on, -1 below 40 and for what is an error message or empty, else 0.
    """
    said = [word.lower() for word in _WORD.findall(response)]
    if not said:
        return Judgement(0, -1, dict.fromkeys(("answered", "whole", "willing", "on_topic", "varied", "tools"), 0))
    failed = bool(_FAILED.search(response))
    parts = {
        "answered": 20,
        "whole": 0 if failed else 20,
        "willing": 0 if _REFUSED.search(response.replace("\u2019", "'")) else 15,
        "on_topic": round(25 * min(1.0, 3 * _taken_up(prompt, set(said)))),
        "varied": round(10 * min(1.0, max(0.0, (_varied(said) - 0.4) / 0.4))),
        "tools": {0: 10, 1: 5}.get(max(0, tool_errors), 0),
    }
    composite = sum(parts.values())
    label = -1 if failed or composite < BAD else 1 if composite >= GOOD else 0
    return Judgement(composite, label, parts)


def _taken_up(prompt: str, said: set[str]) -> float:
    asked = {word.lower() for word in _WORD.findall(prompt)} - _COMMON
    return 1.0 if not asked else len(asked & said) / len(asked)


def _varied(said: list[str]) -> float:
    runs = list(zip(said, said[1:], said[2:], strict=False))
    return 1.0 if not runs else len(set(runs)) / len(runs)
