"""Which scenarios there are."""

from pathlib import Path

from tentalis.scenarios.base import Scenario, UnknownScenario

NAMES = ("assistant", "math")


def make_scenario(name: str, data: Path | None = None) -> Scenario:
    """The scenario of that name; `data` is a folder with data sets for those that read some. Raises UnknownScenario."""
    if name == "assistant":
        from tentalis.scenarios.assistant import Assistant

        return Assistant()
    if name == "math":
        from tentalis.scenarios.math import Arithmetic, GradeSchool

        return Arithmetic() if data is None else GradeSchool(data)
    raise UnknownScenario(f"there is no scenario {name!r}; there are {', '.join(NAMES)}")
