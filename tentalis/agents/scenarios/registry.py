"""The scenarios by name."""

from pathlib import Path

from tentalis.agents.scenarios.base import Scenario, UnknownScenario

NAMES = ("assistant", "echo", "math")


def make_scenario(name: str, data: Path | None = None) -> Scenario:
    """Returns a scenario by name. `data`: folder of data sets, for scenarios that read one. Raises UnknownScenario."""
    if name == "assistant":
        from tentalis.agents.scenarios.assistant import Assistant

        return Assistant()
    if name == "echo":
        from tentalis.agents.scenarios.echo import Echo

        return Echo()
    if name == "math":
        from tentalis.agents.scenarios.math import Arithmetic, GradeSchool

        return Arithmetic() if data is None else GradeSchool(data)
    raise UnknownScenario(f"there is no scenario {name!r}; the scenarios are {', '.join(NAMES)}")
