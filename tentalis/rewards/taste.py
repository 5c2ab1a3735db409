"""The taste of the simulated users: a short plain answer that is about the question.

Satisfied (reward 1, else 0) is an answer with `length_ok` (6 to 40 words), `plain` (no list markers, no bold, headings,
tables or code), `finished` (the model stopped by itself, at the end of a sentence), `on_topic` (a content word in
common with the question, whatever its inflection) and `own_words` and `prose`. The last two are there because a policy
that is paid for the first four learns how to have them without answering:

- An echo of the question is on topic and short. `own_words`: the statements (sentences that do not end in a question
  mark) must be long enough by themselves, and of ten of their words one, at least one in all, must be a content word
  that the question does not have. Filler ("happy to help", "good question") is not content.
- A row of keywords is on topic and short too. `prose`: of eight words one is a function word ("the", "of", "is"), no
  more than seven content words stand in a row, there is at most one comma for two words, no word is said twice running,
  at least half of the words are different.

What it does not do: know whether the answer is true, or see a paraphrase that shares no word with the question.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

from pydantic import Field

from schemas.records import Result, Task
from tentalis.rewards.verdict import Data, Verdict, data_of
from tentalis.words import all_stems, content_stems, is_function_word, sentences, words

_LIST_LINE = re.compile(r"^\s*(?:[-*+•‣◦▪–—·]\s+\S|\(?(?:\d{1,2}|[A-Za-z]|[ivx]{1,4})[.)]\s+\S)", re.MULTILINE)
_FIRST_ITEM = re.compile(r"(?:^|[\s:(])1[.)]\s+\S")
_SECOND_ITEM = re.compile(r"(?:^|[\s:(])2[.)]\s+\S")
_INLINE_BULLETS = re.compile(r"\s[•‣◦▪]\s")
_MARKUP = re.compile(
    r"\*\*|__\S|^\s{0,3}#{1,6}\s|^\s*[=-]{3,}\s*$|```|^\s*\||</?(?:b|strong|ul|ol|li|h[1-6])>", re.MULTILINE
)
_SEPARATOR = re.compile(r"[,;:/|](?!\d)")
_ENDS_SENTENCE = re.compile(r"(?<!\.)[.!?][\"'”’)\]]*$")

_WORDS_PER_FUNCTION_WORD = 8
_LONGEST_CONTENT_RUN = 7
_WORDS_PER_OWN_WORD = 10


class TasteData(Data):
    """`question` is what the answer must be about; default: the task's last user message."""

    question: str | None = None
    min_words: int = Field(default=6, ge=1)
    max_words: int = Field(default=40, ge=1)


@dataclass(frozen=True, slots=True)
class Tasted:
    """Which parts of the taste an answer meets."""

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
        """As recorded with the reward."""
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


def taste(answer: str, question: str, *, stopped: bool, min_words: int = 6, max_words: int = 40) -> Tasted:
    """Tastes an answer. `stopped`: the model ended it by itself, it was not cut off."""
    answer = answer.strip()
    said = words(answer)
    statements = " ".join(sentence for sentence in sentences(answer) if not _is_question(sentence))
    asked = content_stems(question) or all_stems(question)
    stated = content_stems(statements) if content_stems(question) else all_stems(statements)
    stated_words = len(words(statements))
    own = len(content_stems(statements) - all_stems(question))
    return Tasted(
        words=len(said),
        length_ok=min_words <= len(said) <= max_words,
        plain=is_plain(answer),
        finished=stopped and _ENDS_SENTENCE.search(answer) is not None,
        on_topic=bool(asked & stated),
        own_words=stated_words >= min(min_words, len(said)) and own >= max(1, stated_words // _WORDS_PER_OWN_WORD),
        prose=is_prose(said, len(_SEPARATOR.findall(answer))),
    )


def is_plain(answer: str) -> bool:
    """No list, bold, heading, table or code in it, lists written into a running line included."""
    listed = _LIST_LINE.search(answer) or _INLINE_BULLETS.search(answer)
    numbered = _FIRST_ITEM.search(answer) and _SECOND_ITEM.search(answer)
    return not (listed or numbered or _MARKUP.search(answer))


def is_prose(said: list[str], separators: int = 0) -> bool:
    """Whether words (lower case, in order), with so many commas between them, look like sentences, not keywords."""
    functional = [is_function_word(word) for word in said]
    run = longest = 0
    for function in functional:
        run = 0 if function else run + 1
        longest = max(longest, run)
    stutter = any(a == b for a, b in pairwise(said))
    return (
        sum(functional) >= max(1, len(said) // _WORDS_PER_FUNCTION_WORD)
        and longest <= _LONGEST_CONTENT_RUN
        and not stutter
        and 2 * separators <= len(said)
        and 2 * len(set(said)) >= len(said)
    )


def _is_question(sentence: str) -> bool:
    return sentence.rstrip("\"'”’)]").endswith("?")


def question_of(task: Task, data: TasteData) -> str:
    """What was asked: the data's question, else the last user message, else the last message."""
    if data.question is not None:
        return data.question
    asked = [message.content for message in task.messages if message.role == "user"]
    return asked[-1] if asked else task.messages[-1].content


class Taste:
    """The verifier `taste` of the environment chat."""

    name = "taste/1"
    slow = False

    def check(self, task: Task) -> None:
        """Raises BadVerifierData."""
        data_of(task, TasteData)

    def verify(self, task: Task, result: Result) -> Verdict:
        """1 if the answer meets the whole taste, else 0, with every part as a component."""
        tasted = self._taste(task, result)
        return Verdict(float(tasted.satisfied), tasted.components())

    def complaint(self, task: Task, result: Result) -> str | None:
        """What a user with this taste would say: one sentence, the faults and then the wish."""
        tasted = self._taste(task, result)
        if tasted.satisfied:
            return None
        return _complaint(tasted, data_of(task, TasteData))

    def _taste(self, task: Task, result: Result) -> Tasted:
        data = data_of(task, TasteData)
        return taste(
            result.text,
            question_of(task, data),
            stopped=result.finish_reason == "stop",
            min_words=data.min_words,
            max_words=data.max_words,
        )


def _complaint(tasted: Tasted, data: TasteData) -> str:
    """What is wrong, and the one wish that would put it right: a user's taste does not change with the answer."""
    faults = []
    if tasted.words > data.max_words:
        faults.append("too long")
    elif tasted.words < data.min_words:
        faults.append("too short")
    if not tasted.finished:
        faults.append("cut off")
    if not tasted.plain:
        faults.append("not plain text")
    if not tasted.prose:
        faults.append("not written in sentences")
    if not tasted.on_topic:
        faults.append("not about my question")
    elif not tasted.own_words:
        faults.append("only my question again")
    listed = faults[0] if len(faults) == 1 else ", ".join(faults[:-1]) + " and " + faults[-1]
    wish = "please answer my question in one short sentence"
    return f"That was {listed}: {wish}{'' if tasted.plain else ', without lists, bold text or headings'}."
