"""The style that the simulated users prefer: a short plain answer that is about the question.

An answer gets reward 1 if it meets all parts, else 0: `length_ok` (6 to 40 words), `plain` (no list markers, bold,
headings, tables or code), `finished` (the model stopped by itself, at the end of a sentence), `on_topic` (a content
word in common with the question, in any inflection), `own_words` and `prose`. The last two exist because a policy that
is rewarded for the first four learns to meet them without answering:

- An echo of the question is on topic and short. `own_words`: the statements (sentences that do not end in a question
  mark) must be long enough by themselves, and one in ten of their words, at least one in all, must be a content word
  that the question does not have. Filler ("happy to help", "good question") is not content.
- A list of keywords is on topic and short too. `prose`: at least one in eight words is a function word ("the", "of",
  "is"), at most seven content words follow each other, there is at most one comma per two words, no word is repeated
  immediately, and at least half of the words are different.

Limits: it does not check that the answer is true, and does not see a paraphrase that shares no word with the question.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

from pydantic import Field

from schemas.records import Result, Task
from tentalis.rewards.prompting import request_of
from tentalis.rewards.verdict import Verdict, VerifierData, data_of
from tentalis.text.words import all_stems, content_stems, is_function_word, sentences, words

_LIST_LINE = re.compile(r"^[^\S\n]*(?:[-*+•‣◦▪–—·]\s+\S|\(?(?:\d{1,2}|[A-Za-z]|[ivx]{1,4})[.)]\s+\S)", re.MULTILINE)
_FIRST_ITEM = re.compile(r"(?:^|[\s:(])1[.)]\s+\S")
_SECOND_ITEM = re.compile(r"(?:^|[\s:(])2[.)]\s+\S")
_INLINE_BULLETS = re.compile(r"\s[•‣◦▪]\s")
_MARKUP = re.compile(
    r"\*\*|__\S|^\s{0,3}#{1,6}\s|^[^\S\n]*[=-]{3,}\s*$|```|^[^\S\n]*\||</?(?:b|strong|ul|ol|li|h[1-6])>", re.MULTILINE
)
_SEPARATOR = re.compile(r"[,;:/|](?!\d)")
_ENDS_SENTENCE = re.compile(r"(?<!\.)[.!?][\"'”’)\]]*$")

_WORDS_PER_FUNCTION_WORD = 8
_LONGEST_CONTENT_RUN = 7
_WORDS_PER_OWN_WORD = 10


class StyleData(VerifierData):
    """`question`: the question that the answer must be about; default: the task's last user message."""

    question: str | None = None
    min_words: int = Field(default=6, ge=1)
    max_words: int = Field(default=40, ge=1)


@dataclass(frozen=True, slots=True)
class StyleVerdict:
    """The parts of the style that an answer meets."""

    words: int
    length_ok: bool
    plain: bool
    finished: bool
    on_topic: bool
    own_words: bool
    prose: bool

    @property
    def satisfied(self) -> bool:
        return all((self.length_ok, self.plain, self.finished, self.on_topic, self.own_words, self.prose))

    def components(self) -> dict[str, float]:
        """Returns the components that are recorded with the reward."""
        return {
            "words": float(self.words),
            "length_ok": float(self.length_ok),
            "plain": float(self.plain),
            "finished": float(self.finished),
            "on_topic": float(self.on_topic),
            "own_words": float(self.own_words),
            "prose": float(self.prose),
            "satisfied": float(self.satisfied),
        }


def check_style(answer: str, question: str, *, stopped: bool, min_words: int = 6, max_words: int = 40) -> StyleVerdict:
    """Checks the style of an answer. `stopped`: the model ended it by itself; it was not cut off."""
    answer = answer.strip()
    answer_words = words(answer)
    statements = " ".join(sentence for sentence in sentences(answer) if not _is_question(sentence))
    question_stems = content_stems(question) or all_stems(question)
    answer_stems = content_stems(statements) if content_stems(question) else all_stems(statements)
    statement_words = len(words(statements))
    new_stems = len(content_stems(statements) - all_stems(question))
    return StyleVerdict(
        words=len(answer_words),
        length_ok=min_words <= len(answer_words) <= max_words,
        plain=is_plain(answer),
        finished=stopped and _ENDS_SENTENCE.search(answer) is not None,
        on_topic=bool(question_stems & answer_stems),
        own_words=statement_words >= min(min_words, len(answer_words))
        and new_stems >= max(1, statement_words // _WORDS_PER_OWN_WORD),
        prose=is_prose(answer_words, len(_SEPARATOR.findall(answer))),
    )


def is_plain(answer: str) -> bool:
    """Returns True if an answer has no list (also none within a line), bold text, heading, table or code."""
    listed = _LIST_LINE.search(answer) or _INLINE_BULLETS.search(answer)
    numbered = _FIRST_ITEM.search(answer) and _SECOND_ITEM.search(answer)
    return not (listed or numbered or _MARKUP.search(answer))


def is_prose(text_words: list[str], separators: int = 0) -> bool:
    """Returns True if words (lower case, in order) with that many separators look like sentences, not keywords."""
    functional = [is_function_word(word) for word in text_words]
    run = longest = 0
    for function in functional:
        run = 0 if function else run + 1
        longest = max(longest, run)
    stutter = any(a == b for a, b in pairwise(text_words))
    return (
        sum(functional) >= max(1, len(text_words) // _WORDS_PER_FUNCTION_WORD)
        and longest <= _LONGEST_CONTENT_RUN
        and not stutter
        and 2 * separators <= len(text_words)
        and 2 * len(set(text_words)) >= len(text_words)
    )


def _is_question(sentence: str) -> bool:
    return sentence.rstrip("\"'”’)]").endswith("?")


def question_of(task: Task, data: StyleData) -> str:
    """Returns the question: that of the data, else the last user message, else the last message."""
    return request_of(task) if data.question is None else data.question


class StyleScorer:
    """The verifier `taste` of the environment chat: a rule that checks the style (see the module docstring)."""

    name = "taste/1"
    slow = False

    def check(self, task: Task) -> None:
        """Raises BadVerifierData if the task's data does not fit this verifier."""
        data_of(task, StyleData)

    def verify(self, task: Task, result: Result) -> Verdict:
        """Returns 1 if the answer meets every part of the style, else 0, with every part as a component."""
        style = self._style(task, result)
        return Verdict(float(style.satisfied), style.components())

    def complaint(self, task: Task, result: Result) -> str | None:
        """Returns the complaint of a user who prefers this style: one sentence with the faults and then the wish."""
        style = self._style(task, result)
        if style.satisfied:
            return None
        return _complaint(style, data_of(task, StyleData))

    def _style(self, task: Task, result: Result) -> StyleVerdict:
        data = data_of(task, StyleData)
        return check_style(
            result.text,
            question_of(task, data),
            stopped=result.finish_reason == "stop",
            min_words=data.min_words,
            max_words=data.max_words,
        )


def _complaint(style: StyleVerdict, data: StyleData) -> str:
    """Returns the faults and the wish. The wish is always the same: a user's style does not depend on the answer."""
    faults = []
    if style.words > data.max_words:
        faults.append("too long")
    elif style.words < data.min_words:
        faults.append("too short")
    if not style.finished:
        faults.append("cut off")
    if not style.plain:
        faults.append("not plain text")
    if not style.prose:
        faults.append("not written in sentences")
    if not style.on_topic:
        faults.append("not about my question")
    elif not style.own_words:
        faults.append("only my question again")
    listed = faults[0] if len(faults) == 1 else ", ".join(faults[:-1]) + " and " + faults[-1]
    wish = "please answer my question in one short sentence"
    return f"That was {listed}: {wish}{'' if style.plain else ', without lists, bold text or headings'}."
