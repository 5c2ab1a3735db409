"""The simulated users of the personalisation scenario: their questions, rules and complaints. Pure.

Each has one style rule from the OpenClaw-RL paper: the student wants no answer that looks machine-made (no bold, lists
or boxes), the assistant teacher wants long comments, the teacher wants friendly comments with praise. A rule checks the
form of an answer, not its truth; so results also show words and topic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tentalis.agents.scenarios.base import seeded, shuffled_pick
from tentalis.rewards.style_scorer import is_plain
from tentalis.text.words import words

LEAST_WORDS = 5
"""Minimum words of an answer: a shorter text never satisfies a user."""
LONG_ENOUGH = 60
"""Minimum words for the assistant teacher: about the 100 tokens of the paper."""

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
    """`fits`: the rule. `reproach` and `wish`: the complaint about an answer that breaks it, with the wish after
    "please"."""

    name: str
    asks: tuple[str, ...]
    fits: Callable[[str], bool]
    reproach: str
    wish: str
    thanks: tuple[str, ...] = ("Thanks!", "Thank you!", "Perfect!")

    def content(self, answer: str) -> bool:
        """True if the text is long enough for an answer and meets the rule."""
        return len(words(answer)) >= LEAST_WORDS and self.fits(answer)

    def opening(self, seed: int, session: int) -> str:
        """The first message of session number `session` (from 0) of a run."""
        return self.asks[shuffled_pick(len(self.asks), f"{self.name}/{seed}", session)]

    def next_message(self, seed: int, session: int, answers: Sequence[str], turns: int) -> str | None:
        """The next message after these answers: the question, a complaint, or thanks for the first answer that
        satisfies the user; None after thanks, and after `turns` answers that do not satisfy."""
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
    """True if the answer has no bold, headings, lists, tables or boxes."""
    return is_plain(answer) and _BOX.search(answer) is None


def long_enough(answer: str) -> bool:
    """True if the answer has at least LONG_ENOUGH words."""
    return len(words(answer)) >= LONG_ENOUGH


def praising(answer: str) -> bool:
    """True if the answer has a word of praise."""
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
