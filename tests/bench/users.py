"""The simulated users of the personalisation scenario: what they ask, what contents them, what they say if not. Pure.

Each has one rule of taste, the ones of the OpenClaw-RL paper: the student wants no answer that looks like a machine's
(no bold, lists or boxes), the assistant teacher wants comments that are long enough, the teacher wants them friendly
and praising. A rule sees the form of an answer, never whether it is true; so results show words and topic beside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tentalis.rewards.taste import is_plain
from tentalis.scenarios.base import seeded, shuffled_pick
from tentalis.words import words

LEAST_WORDS = 5
"""Less is no answer, whatever it looks like."""
LONG_ENOUGH = 60
"""Words that the assistant teacher wants: about the 100 tokens of the paper."""

_BOX = re.compile(r"\\boxed\b|\\fbox\b|[│┃║╔╗╚╝┌┐└┘█■□▢]")
_PRAISE = re.compile(
    r"\b(?:well done|(?:good|great|nice|excellent|fantastic|wonderful|amazing|terrific|lovely|superb) "
    r"(?:job|work|effort|start|thinking|attempt|try|answer|going|idea|use|question|progress|reasoning)|"
    r"keep (?:it up|up)|bravo|congratulations|(?:i'm|i am|be) (?:so |very |really )?(?:proud|impressed)|"
    r"you(?:'ve| have)? (?:did|done|do|are doing|'re doing) (?:so |very |really )?(?:well|great))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class User:
    """`fits`: the rule. `reproach` and `wish`: what is said of an answer that breaks it, the wish after "please"."""

    name: str
    asks: tuple[str, ...]
    fits: Callable[[str], bool]
    reproach: str
    wish: str
    thanks: tuple[str, ...] = ("Thanks!", "Thank you!", "Perfect!")

    def content(self, answer: str) -> bool:
        """Whether it is an answer at all, and as wanted."""
        return len(words(answer)) >= LEAST_WORDS and self.fits(answer)

    def opening(self, seed: int, session: int) -> str:
        """What session number `session` (from 0) of a run begins with."""
        return self.asks[shuffled_pick(len(self.asks), f"{self.name}/{seed}", session)]

    def next_message(self, seed: int, session: int, answers: Sequence[str], turns: int) -> str | None:
        """What is said after these answers: the question, a complaint, thanks for the first answer that contents, or
        nothing any more: after thanks, and after `turns` answers without content."""
        if not answers:
            return self.opening(seed, session)
        if any(self.content(answer) for answer in answers[:-1]):
            return None
        if self.content(answers[-1]):
            return seeded("thanks", self.name, seed, session).choice(self.thanks)
        if len(answers) >= turns:
            return None
        if len(words(answers[-1])) < LEAST_WORDS:
            return f"I do not understand that: please {self.wish}."
        return f"{self.reproach}: please {self.wish}."


def plain(answer: str) -> bool:
    """No bold, headings, lists, tables or boxes."""
    return is_plain(answer) and _BOX.search(answer) is None


def long_enough(answer: str) -> bool:
    """At least LONG_ENOUGH words."""
    return len(words(answer)) >= LONG_ENOUGH


def praising(answer: str) -> bool:
    """A word of praise for somebody."""
    return _PRAISE.search(answer) is not None


def _all(patterns: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    return tuple(pattern.format(value) for value in values for pattern in patterns)


_SUBJECTS = (
    "the water cycle",
    "photosynthesis",
    "the French Revolution",
    "electric circuits",
    "the food chain",
    "volcanoes",
    "the Roman Empire",
    "healthy eating",
    "recycling",
    "the solar system",
    "poetry",
    "the human heart",
    "climate change",
    "magnets",
    "democracy",
    "fractions",
)
_HOMEWORK = (
    "Help me with my homework: what are the most important things to know about {}?",
    "I have to learn about {} for school. What are the main points?",
)
_WORK = (
    ("What is 7 times 8?", "54"),
    ("What is 15 plus 27?", "42"),
    ("How many sides has a hexagon?", "5"),
    ("What is half of 90?", "45"),
    ("Why do leaves fall in autumn?", "Because the tree saves water for the winter."),
    ("What does a plant need to grow?", "Water and light."),
    ("Which planet is closest to the sun?", "Venus."),
    ("What is the capital of Australia?", "Sydney."),
    ("Why does ice float?", "Because it is lighter than water."),
    ("What is 144 divided by 12?", "12"),
    ("Who wrote Romeo and Juliet?", "William Shakespeare."),
    ("What is the past tense of go?", "Goed."),
    ("How many minutes are in three hours?", "180"),
    ("What makes the tides?", "The wind."),
    ("What is a noun?", "A word for a thing, a person or a place."),
    ("What is 3 to the power of 4?", "12"),
)

STUDENT = User(
    "student",
    _all(_HOMEWORK, _SUBJECTS),
    plain,
    "I do not like that, it looks like a machine wrote it",
    "write plain sentences, without bold text, lists or boxes",
)
ASSISTANT_TEACHER = User(
    "assistant-teacher",
    tuple(
        f'The question was "{asked}" and a pupil wrote "{wrote}" Write a comment for the pupil.'
        for asked, wrote in _WORK
    ),
    long_enough,
    "That is too short",
    "write a longer comment, with a reason and an example for the pupil",
)
TEACHER = User(
    "teacher",
    tuple(f'A pupil answered "{wrote}" to the question "{asked}" What do I tell the pupil?' for asked, wrote in _WORK),
    praising,
    "I do not like that, it sounds cold",
    "be friendly and praise the pupil, say well done or good work",
)

USERS = {user.name: user for user in (STUDENT, ASSISTANT_TEACHER, TEACHER)}
