"""What a scenario is. Everything in it follows from (run_id, index) and the results, so a manager can begin again."""

import hashlib
import random
from dataclasses import dataclass
from typing import Protocol

from schemas.records import Feedback, Message, Result, Sampling, Terms, Verifier


class UnknownScenario(ValueError):
    """A scenario that does not exist, or cannot be played with the data given."""


@dataclass(frozen=True, slots=True)
class Question:
    """The content of one task."""

    messages: tuple[Message, ...]
    verifier: Verifier
    user_id: str


class Scenario(Protocol):
    """What a manager plays. Pure: the same arguments give the same question and the same feedback."""

    @property
    def name(self) -> str:
        """As the command line calls it."""
        ...

    @property
    def policy(self) -> str:
        """The policy that a demo of this scenario trains."""
        ...

    @property
    def environment(self) -> str:
        """Which workers answer it."""
        ...

    @property
    def terms(self) -> Terms:
        """What its tasks wait for."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How its tasks are sampled."""
        ...

    @property
    def n_samples(self) -> int:
        """Samples per task."""
        ...

    @property
    def owes_feedback(self) -> bool:
        """Whether its users answer every result: so if the terms name them."""
        ...

    @property
    def showcase(self) -> tuple[tuple[Message, ...], ...]:
        """Three prompts to show the base model and the newest adapter side by side; never asked in a run."""
        ...

    def question(self, run_id: str, index: int) -> Question:
        """Task number `index` (from 0) of a run."""
        ...

    def feedback(self, result: Result, feedback_id: str, event_time: int) -> Feedback:
        """The one feedback of the simulated user on a result; `event_time` in ms. Only where feedback is owed."""
        ...


def seeded(*parts: str | int) -> random.Random:
    """A generator of its own for these parts: the same on every machine."""
    return random.Random(hashlib.sha256("/".join(map(str, parts)).encode()).digest())


def shuffled_pick(count: int, run_id: str, index: int) -> int:
    """Which of `count` things comes at place `index` of a run: each once before any comes again, then shuffled anew."""
    lap, place = divmod(index, count)
    order = list(range(count))
    seeded("order", run_id, lap).shuffle(order)
    return order[place]
