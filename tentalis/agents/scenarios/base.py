"""The interface of a scenario. It depends only on (run_id, index) and on results, so that a manager can restart."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from schemas.records import Feedback, Message, Result, Sampling, Terms, Verifier


class UnknownScenario(ValueError):
    """A scenario that does not exist, or that cannot run with the given data."""


@dataclass(frozen=True, slots=True)
class Question:
    """The content of one task. `metadata` is added to the task's."""

    messages: tuple[Message, ...]
    verifier: Verifier
    user_id: str | None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Scenario(Protocol):
    """The questions and the feedback of a run. Pure: the same arguments give the same question and feedback."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        ...

    @property
    def policy(self) -> str:
        """The policy that a demo of this scenario trains."""
        ...

    @property
    def environment(self) -> str:
        """Environment of its tasks; selects the workers."""
        ...

    @property
    def terms(self) -> Terms:
        """Terms of its tasks."""
        ...

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of its tasks."""
        ...

    @property
    def n_samples(self) -> int:
        """Samples per task."""
        ...

    @property
    def owes_feedback(self) -> bool:
        """True if its users give feedback on every result, which is the case if the terms name them as a source."""
        ...

    @property
    def showcase(self) -> tuple[tuple[Message, ...], ...]:
        """Three prompts for the comparison of the base model with the newest adapter; never asked in a run."""
        ...

    @property
    def prompt_count(self) -> int:
        """Number of different prompts of a run: `question` asks each once in its first `prompt_count` tasks."""
        ...

    def question(self, run_id: str, index: int) -> Question:
        """Returns the content of task number `index` (from 0) of a run."""
        ...

    def feedback(self, result: Result, feedback_id: str, event_time: int) -> Feedback:
        """Returns the simulated user's only feedback on a result; `event_time` in ms. Requires `owes_feedback`."""
        ...


def seeded(*parts: str | int) -> random.Random:
    """Returns a random generator seeded with the parts; it is the same on every machine."""
    return random.Random(hashlib.sha256("/".join(map(str, parts)).encode()).digest())


def shuffled_pick(count: int, run_id: str, index: int) -> int:
    """Returns the item in range(count) at position `index` of a run: each item once, then all in a new random order."""
    lap, place = divmod(index, count)
    order = list(range(count))
    seeded("order", run_id, lap).shuffle(order)
    return order[place]
