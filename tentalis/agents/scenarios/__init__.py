"""Scenarios of tasks. In: a run id and a task number, or a result. Out: a question, or a feedback.

Begin reading with `Scenario` in `base`; `registry` makes a scenario by name; `prompts` asks the prompts of a file.
"""

from tentalis.agents.scenarios.base import Question, Scenario, UnknownScenario
from tentalis.agents.scenarios.registry import NAMES, make_scenario

__all__ = ["NAMES", "Question", "Scenario", "UnknownScenario", "make_scenario"]
