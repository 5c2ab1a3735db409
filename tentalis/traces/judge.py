"""A cheap judge: rules over the text alone, without model or clock. Detects broken answers; does not rank good ones.

Its `composite` is a sum of points for what is not broken. The scorer `composite` (`tentalis.rewards.composite`) is a
weighted mean of other features: the two numbers cannot be compared.
"""

import re
from dataclasses import dataclass

GOOD, BAD = 80, 40
"""A composite of at least GOOD has the label 1, one below BAD the label -1."""

# Characters in which an error message or a refusal begins.
_BEGINNING = 500
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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Stop words: they do not indicate a topic.
_STOP_WORDS = _words(
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
    """Judges a response by these rules (points in brackets):

    - answered (20): it contains a word. Without one, all points are 0.
    - whole (20): it does not begin like an error message.
    - willing (15): it does not begin like a refusal.
    - on_topic (25): the share of the prompt's words, without stop words, that it contains; full points from a third on,
      and for a prompt without such words.
    - varied (10): the share of distinct ones among its runs of three words; full points from four fifths on, none
      below two fifths.
    - tools (10): no tool failed; half the points if one did.

    Label: 1 from 80 points on, -1 below 40 and for an error message or an empty response, else 0.
    """
    response_words = [word.lower() for word in _WORD.findall(response)]
    if not response_words:
        return Judgement(0, -1, dict.fromkeys(("answered", "whole", "willing", "on_topic", "varied", "tools"), 0))
    beginning = response.lstrip()[:_BEGINNING].replace("\u2019", "'")
    failed = bool(_FAILED.search(beginning))
    parts = {
        "answered": 20,
        "whole": 0 if failed else 20,
        "willing": 0 if _REFUSED.search(beginning) else 15,
        "on_topic": round(25 * min(1.0, 3 * _topic_overlap(prompt, set(response_words)))),
        "varied": round(10 * min(1.0, max(0.0, (_trigram_variety(response_words) - 0.4) / 0.4))),
        "tools": {0: 10, 1: 5}.get(max(0, tool_errors), 0),
    }
    composite = sum(parts.values())
    label = -1 if failed or composite < BAD else 1 if composite >= GOOD else 0
    return Judgement(composite, label, parts)


def _topic_overlap(prompt: str, response_words: set[str]) -> float:
    prompt_words = {word.lower() for word in _WORD.findall(prompt)} - _STOP_WORDS
    return 1.0 if not prompt_words else len(prompt_words & response_words) / len(prompt_words)


def _trigram_variety(response_words: list[str]) -> float:
    trigrams = list(zip(response_words, response_words[1:], response_words[2:], strict=False))
    return 1.0 if not trigrams else len(set(trigrams)) / len(trigrams)
