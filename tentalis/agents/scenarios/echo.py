"""The scenario `echo`: episodes of several turns in the environment echo. It needs no extra package, wall or file."""

import json

from schemas.records import Feedback, Message, Result, Sampling, Source, Terms, Verifier
from tentalis.agents.scenarios.base import Question, seeded, shuffled_pick

RULE = "Repeat each message of the user, word for word, and nothing else."
EXAMPLE = "blue sky"
USER = "user-echo"
TURNS = 3
NOUNS = (
    *("apple", "bird", "boat", "book", "box", "bread", "bridge", "chair", "clock", "cloud"),
    *("door", "field", "fire", "fish", "flower", "garden", "glass", "horse", "house", "island"),
    *("key", "lamp", "leaf", "letter", "moon", "paper", "plate", "rain", "river", "road"),
    *("school", "sea", "ship", "shoe", "snow", "star", "stone", "sun", "table", "tree"),
)
SHOWN = ("green door", "old clock", "cold rain")


class Echo:
    """Messages of two words in TURNS turns. The reward comes from the result alone: the share of right turns."""

    name = "echo"
    policy = "echo"
    environment = "echo"
    n_samples = 8
    owes_feedback = False
    sampling = Sampling(temperature=1.0, max_tokens=16)
    terms = Terms(rl=Source.RESULT, opd=None, deadline_ms=900_000)

    def __init__(self) -> None:
        self._pairs = [f"{first} {second}" for first in NOUNS for second in NOUNS if first != second]
        self.prompt_count = len(self._pairs)
        self.showcase = tuple(_messages(said) for said in SHOWN)

    def question(self, run_id: str, index: int) -> Question:
        """See Scenario.question."""
        draw = seeded("echo", run_id, index)
        data = {"then": [draw.choice(self._pairs) for _ in range(TURNS - 1)]}
        first = self._pairs[shuffled_pick(self.prompt_count, run_id, index)]
        return Question(_messages(first), Verifier(name="episode", data=json.dumps(data)), USER)

    def feedback(self, result: Result, feedback_id: str, event_time: int) -> Feedback:
        """Raises NotImplementedError: the terms of this scenario do not name its users as a source."""
        raise NotImplementedError("the scenario echo has no feedback")


def _messages(said: str) -> tuple[Message, ...]:
    # With the rule alone the small model repeats nothing. After one example about half of its turns are right.
    turns = [("system", RULE), ("user", EXAMPLE), ("assistant", EXAMPLE), ("user", said)]
    return tuple(Message(role=role, content=content) for role, content in turns)
