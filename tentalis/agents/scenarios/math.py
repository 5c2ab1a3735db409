"""The scenario `math`: sums from reasoning-gym that a small model sometimes gets right, or GSM8K."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from schemas.records import Feedback, Message, Result, Sampling, Source, Terms, Verifier
from tentalis.agents.scenarios.base import Question, UnknownScenario, shuffled_pick
from tentalis.service.packages import require

GSM8K_FILE = "gsm8k_train.jsonl"
USER = "user-math"
LARGEST = 20
SHOWN = ("7 + 6", "9 - 4", "12 + 5")


class _Mathematics:
    """Base class of both variants: the reward comes from the result alone, without feedback."""

    name = "math"
    policy = "math"
    environment = "math"
    n_samples = 8
    owes_feedback = False
    terms = Terms(rl=Source.RESULT, opd=None, deadline_ms=900_000)

    def feedback(self, result: Result, feedback_id: str, event_time: int) -> Feedback:
        """Raises NotImplementedError: the terms of this scenario do not name its users as a source."""
        raise NotImplementedError("the scenario math has no feedback")


class Arithmetic(_Mathematics):
    """Sums and differences of two numbers (`chain_sum` of reasoning-gym) with a result between 0 and LARGEST."""

    dataset = "chain_sum"
    sampling = Sampling(temperature=1.0, max_tokens=24)

    def __init__(self) -> None:
        self.showcase = tuple(self._messages(sum_) for sum_ in SHOWN)

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        require("the scenario math", "math")
        import reasoning_gym

        drawn = reasoning_gym.create_dataset(
            self.dataset, size=4000, seed=20, min_terms=2, max_terms=2, min_digits=1, max_digits=2
        )
        by_sum = {entry["metadata"]["expression"]: entry for entry in drawn if 0 <= int(entry["answer"]) <= LARGEST}
        return [by_sum[sum_] for sum_ in sorted(by_sum) if sum_ not in SHOWN]

    @staticmethod
    def _messages(sum_: str) -> tuple[Message, ...]:
        # Of the wordings that were tried, the small model answers this one with a number most often.
        return (Message(role="user", content=f"What is {sum_}? Answer with the number only."),)

    @property
    def prompt_count(self) -> int:
        """See Scenario.prompt_count."""
        return len(self._entries)

    def question(self, run_id: str, index: int) -> Question:
        """See Scenario.question."""
        entry = self._entries[shuffled_pick(len(self._entries), run_id, index)]
        data = {"dataset": self.dataset, "entry": entry}
        return Question(
            self._messages(entry["metadata"]["expression"]),
            Verifier(name="reasoning_gym", data=json.dumps(data, sort_keys=True)),
            USER,
        )


class GradeSchool(_Mathematics):
    """GSM8K from `gsm8k_train.jsonl` in a folder: one JSON object per line, with question and answer."""

    sampling = Sampling(temperature=1.0, max_tokens=192)

    def __init__(self, folder: Path) -> None:
        self._file = folder / GSM8K_FILE
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UnknownScenario(
                f"cannot read GSM8K from {self._file}: {error.strerror}. The data folder must contain {GSM8K_FILE}"
            ) from error
        self._problems = [self._problem(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if len(self._problems) <= 3:
            raise UnknownScenario(f"{self._file} has {len(self._problems)} problems; at least four are needed")
        # The last three are the showcase and are not trained on.
        self.prompt_count = len(self._problems) - 3
        self.showcase = tuple(self._messages(problem["question"]) for problem in self._problems[self.prompt_count :])

    def _problem(self, number: int, line: str) -> dict[str, str]:
        try:
            problem = json.loads(line)
            return {"question": str(problem["question"]), "answer": str(problem["answer"])}
        except (ValueError, KeyError, TypeError) as error:
            raise UnknownScenario(f"{self._file}, line {number}: not a JSON object with question and answer") from error

    @staticmethod
    def _messages(question: str) -> tuple[Message, ...]:
        text = f"{question}\n\nWork it out briefly and end with the answer as `#### number`."
        return (Message(role="user", content=text),)

    def question(self, run_id: str, index: int) -> Question:
        """See Scenario.question."""
        problem = self._problems[shuffled_pick(self.prompt_count, run_id, index)]
        data = json.dumps({"answer": problem["answer"].rpartition("####")[2].strip()})
        return Question(self._messages(problem["question"]), Verifier(name="gsm8k", data=data), USER)
