"""The registry of environments: the built-in ones, and those of installed packages.

[project.entry-points."tentalis.environments"]
guess = "mypackage.guess:Guess"    # environment guess; Guess(options) makes one
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tentalis.agents.environments.folders import remove_abandoned
from tentalis.agents.environments.protocol import Environment, EnvironmentMaker, EnvironmentOptions
from tentalis.agents.sandbox import choose_wall
from tentalis.rewards.episode import ENVIRONMENT_GROUP
from tentalis.service.packages import require

BUILT_IN = {
    "echo": "tentalis.agents.environments.echo:EchoEnvironment",
    "llm": "tentalis.agents.environments.llm:LlmEnvironment",
    "swe": "tentalis.agents.environments.swe:SweEnvironment",
    "terminal": "tentalis.agents.environments.terminal:TerminalEnvironment",
    "toolcall": "tentalis.agents.environments.toolcall:ToolcallEnvironment",
}
"""The built-in environments and their makers. Imported when they are needed: their packages are an extra."""
EXTRA = "environments"
WITHOUT_EXTRA = frozenset({"echo", "llm"})
"""Built-in environments that run no actions and need no package of the extra."""
TURNS = {"swe": 50, "terminal": 50}
"""Turns of an episode where they are not 10."""


class BadEnvironment(Exception):
    """An environment that is not known or cannot be loaded."""


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """A known environment. `origin`: `built in`, or the package and the object of its entry point."""

    name: str
    origin: str


def known_environments() -> list[EnvironmentEntry]:
    """Returns the environments with episodes, by name."""
    found = {name: EnvironmentEntry(name, "built in") for name in BUILT_IN}
    for point in entry_points(group=ENVIRONMENT_GROUP):
        if point.name not in BUILT_IN:
            found[point.name] = EnvironmentEntry(point.name, _origin(point))
    return [found[name] for name in sorted(found)]


def has_episodes(name: str) -> bool:
    """Returns True if tasks of this environment are played as episodes; False if one completion answers them."""
    return any(entry.name == name for entry in known_environments())


def default_turns(name: str) -> int:
    """Returns the default number of turns of an episode in an environment."""
    return TURNS.get(name, 10)


def maker_of(name: str) -> EnvironmentMaker:
    """Returns the maker of an environment. Raises BadEnvironment, and MissingExtra for a built-in one."""
    if name in BUILT_IN:
        if name not in WITHOUT_EXTRA:
            require(f"the environment {name}", EXTRA)
        built_in: EnvironmentMaker = EntryPoint(name, BUILT_IN[name], ENVIRONMENT_GROUP).load()
        return built_in
    points = [point for point in entry_points(group=ENVIRONMENT_GROUP) if point.name == name]
    if not points:
        names = ", ".join(entry.name for entry in known_environments())
        raise BadEnvironment(f"no environment {name!r} with episodes; known: {names}")
    if len(points) > 1:
        raise BadEnvironment(f"several packages have an environment {name!r}: {', '.join(map(_origin, points))}")
    try:
        made = points[0].load()
    except (ImportError, AttributeError) as error:
        raise BadEnvironment(f"the environment {name!r} cannot be loaded from {_origin(points[0])}: {error}") from error
    if not callable(made):
        raise BadEnvironment(f"the environment {name!r} ({_origin(points[0])}) is not a class or a function")
    return made  # type: ignore[no-any-return]


def prepared_environment(
    name: str, *, tools: Path | None = None, tasks: Path | None = None, allow_unsandboxed: bool = False
) -> Callable[[], Environment] | None:
    """Returns a function that makes an environment for each episode, or None if its tasks are not played as episodes.

    One environment is made immediately, so that a missing wall, a bad file of tools or a bad folder of tasks is refused
    at the start. Folders that killed processes left are removed. Raises BadEnvironment, BadTasks, BadTools,
    MissingExtra or WallMissing.
    """
    if not has_episodes(name):
        return None
    maker = maker_of(name)
    options = EnvironmentOptions(cache(partial(choose_wall, allow_unsandboxed=allow_unsandboxed)), tools, tasks)
    maker(options)
    remove_abandoned()
    return partial(maker, options)


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "unknown package"
    return f"{package} ({point.value})"
