"""Scenarios: what simulated users ask for, and what they say about the answers."""

from tentalis.scenarios.base import Question, Scenario, UnknownScenario
from tentalis.scenarios.registry import NAMES, make_scenario

__all__ = ["NAMES", "Question", "Scenario", "UnknownScenario", "make_scenario"]
