"""The scenario `assistant`: simulated users with a preferred style ask everyday questions and complain about answers.

The verifier `taste` (tentalis.rewards) checks the style. This module has the users, their questions and the wording of
their complaints.
"""

from dataclasses import dataclass
from importlib.resources import files

from schemas.records import Feedback, Message, Polarity, Result, Sampling, Source, Status, Terms, Verifier
from tentalis.agents.scenarios.base import Question, seeded, shuffled_pick
from tentalis.rewards.registry import complaint


@dataclass(frozen=True, slots=True)
class User:
    """A simulated user. `opening` is put at the beginning of a complaint's first sentence."""

    user_id: str
    opening: str


USERS = (
    User("user-ana", ""),
    User("user-ben", "Hm, "),
    User("user-chen", "Sorry, but "),
    User("user-dara", "To be honest, "),
    User("user-emil", "Well, "),
    User("user-fatou", "Oh no, "),
)

SHOWCASE = (
    "How can I keep my bread fresh for longer?",
    "Why do leaves change colour in autumn?",
    "What should I take along on a rainy day?",
)


def questions() -> tuple[str, ...]:
    """Returns the questions of the data file, which has one per line."""
    text = files("tentalis.agents.scenarios").joinpath("data/assistant_questions.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def voiced(opening: str, text: str) -> str:
    """Returns a complaint in a user's words: "Hm, " and "That was too long." make "Hm, that was too long."."""
    first_word = text.split(" ", 1)[0]
    keeps_capital = not opening or first_word == "I" or first_word.startswith("I'")
    return opening + (text if keeps_capital else text[:1].lower() + text[1:])


class Assistant:
    """The scenario `assistant`."""

    name = "assistant"
    policy = "assistant"
    environment = "chat"
    n_samples = 8
    owes_feedback = True
    # A hint waits for the model server, which may be restarting: two minutes cover a restart.
    terms = Terms(rl=Source.RESULT, opd=Source.USER, deadline_ms=900_000, opd_window_ms=120_000)
    # At 1.0 a model this small loses the thread before a sentence ends. The trainer's ratio includes the temperature.
    sampling = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_tokens=64)
    showcase = tuple((Message(role="user", content=text),) for text in SHOWCASE)

    def __init__(self) -> None:
        self._questions = questions()

    @property
    def prompt_count(self) -> int:
        """See Scenario.prompt_count."""
        return len(self._questions)

    def question(self, run_id: str, index: int) -> Question:
        """See Scenario.question."""
        text = self._questions[shuffled_pick(len(self._questions), run_id, index)]
        user = seeded("user", run_id, index).choice(USERS)
        return Question((Message(role="user", content=text),), Verifier(name="taste"), user.user_id)

    def feedback(self, result: Result, feedback_id: str, event_time: int) -> Feedback:
        """Returns a complaint if the style is not met, else a thumb up without text; neither for a failed result."""
        said = complaint(result.task, result) if result.status is Status.OK else None
        if said is not None:
            polarity = Polarity.NEGATIVE
        else:
            polarity = Polarity.POSITIVE if result.status is Status.OK else Polarity.NONE
        opening = next((user.opening for user in USERS if user.user_id == result.task.user_id), "")
        return Feedback(
            feedback_id=feedback_id,
            event_time=event_time,
            task_id=result.task.task_id,
            sample_index=result.sample_index,
            source=Source.USER,
            author=result.task.user_id or "",
            polarity=polarity,
            text="" if said is None else voiced(opening, said),
            result=result,
        )
