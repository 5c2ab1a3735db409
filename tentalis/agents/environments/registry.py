"""The registry of environments: the built-in ones, those of installed packages, and those of the file of environments.

[project.entry-points."tentalis.environments"]
guess = "mypackage.guess:Guess"    # environment guess; Guess(options) makes one
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schemas.problems import problems
from tentalis.agents.environments.folders import remove_abandoned
from tentalis.agents.environments.protocol import Environment, EnvironmentMaker, EnvironmentOptions
from tentalis.agents.sandbox import choose_wall
from tentalis.rewards.environment_file import BadEnvironmentFile, DeclaredEnvironment, EnvironmentLimits
from tentalis.rewards.episode import ENVIRONMENT_GROUP
from tentalis.rewards.registry import check_environment, declared_environments
from tentalis.rewards.verdict import UnknownEnvironment, VerifierData
from tentalis.service import variables
from tentalis.service.packages import require

BUILT_IN = {
    "agent": "tentalis.agents.environments.agent:AgentEnvironment",
    "echo": "tentalis.agents.environments.echo:EchoEnvironment",
    "env-pool": "tentalis.agents.environments.env_pool:EnvPoolEnvironment",
    "gui": "tentalis.agents.environments.gui:GuiEnvironment",
    "llm": "tentalis.agents.environments.llm:LlmEnvironment",
    "openenv": "tentalis.agents.environments.openenv.environment:OpenEnvEnvironment",
    "swe": "tentalis.agents.environments.swe:SweEnvironment",
    "terminal": "tentalis.agents.environments.terminal:TerminalEnvironment",
    "toolcall": "tentalis.agents.environments.toolcall:ToolcallEnvironment",
    "verifiers": "tentalis.agents.environments.verifiers:VerifiersEnvironment",
}
"""The built-in environments and their makers. Imported when they are needed: their packages are an extra."""
DATA = {
    "agent": "tentalis.agents.environments.agent:AgentData",
    "echo": "tentalis.agents.environments.echo:EchoData",
    "env-pool": "tentalis.agents.environments.env_pool:EnvPoolData",
    "gui": "tentalis.agents.environments.gui:GuiData",
    "llm": "tentalis.agents.environments.llm:LlmData",
    "openenv": "tentalis.agents.environments.openenv.environment:OpenEnvData",
    "swe": "tentalis.agents.environments.swe:SweData",
    "terminal": "tentalis.agents.environments.terminal:TerminalData",
    "toolcall": "tentalis.agents.environments.toolcall:ToolcallData",
    "verifiers": "tentalis.agents.environments.verifiers:VerifiersData",
}
"""The data of the verifier `episode` of each built-in environment."""
EXTRAS = {"gui": ("environments", "gui")}
"""The extras with the packages of built-in environments, where they are not `environments` alone."""
WITHOUT_EXTRA = frozenset({"echo", "llm", "verifiers"})
"""Built-in environments that need no package of an extra. verifiers has a Python of its own."""
TURNS = {"agent": 50, "env-pool": 50, "gui": 20, "openenv": 50, "swe": 50, "terminal": 50}
"""Turns of an episode where they are not 10."""


class BadEnvironment(Exception):
    """An environment that is not known or cannot be loaded."""


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """A known environment. `origin`: `built in`, the package and the object of its entry point, or the file and the
    base. `episodes`: its tasks are played as episodes; else one completion answers them."""

    name: str
    origin: str
    episodes: bool = True


def known_environments() -> list[EnvironmentEntry]:
    """Returns the environments with episodes and those of the file of environments, by name. Raises
    BadEnvironmentFile."""
    found = {name: EnvironmentEntry(name, "built in") for name in BUILT_IN}
    for point in entry_points(group=ENVIRONMENT_GROUP):
        if point.name not in BUILT_IN:
            found[point.name] = EnvironmentEntry(point.name, _origin(point))
    for each in declared_environments().values():
        found[each.name] = EnvironmentEntry(each.name, each.origin, each.base in found)
    return [found[name] for name in sorted(found)]


def has_episodes(name: str) -> bool:
    """Returns True if tasks of this environment are played as episodes; False if one completion answers them."""
    return any(entry.name == name and entry.episodes for entry in known_environments())


def default_turns(name: str) -> int:
    """Returns the default number of turns of an episode in an environment."""
    declared = declared_environments().get(name)
    if declared is None:
        return TURNS.get(name, 10)
    return declared.limits.max_turns or TURNS.get(declared.base, 10)


def limits_of(name: str) -> EnvironmentLimits:
    """Returns the limits that the file of environments sets for an environment; without it, none is set."""
    declared = declared_environments().get(name)
    return EnvironmentLimits() if declared is None else declared.limits


def data_problem(name: str, data: Mapping[str, Any]) -> str | None:
    """Returns the reason why an environment with episodes cannot use these data of the verifier `episode`, or None.

    That of an installed package may use any. Raises MissingExtra.
    """
    declared = declared_environments().get(name)
    base = name if declared is None else declared.base
    if base not in DATA:
        return None
    _require_extra(base)
    model: type[VerifierData] = EntryPoint(base, DATA[base], ENVIRONMENT_GROUP).load()
    try:
        model.model_validate(data)
    except ValidationError as error:
        return f"{problems(error, 'data')}; the data of {base} are {', '.join(model.model_fields)}"
    return None


def maker_of(name: str) -> EnvironmentMaker:
    """Returns the maker of an environment. Raises BadEnvironment, and MissingExtra for a built-in one."""
    if name in BUILT_IN:
        _require_extra(name)
        built_in: EnvironmentMaker = EntryPoint(name, BUILT_IN[name], ENVIRONMENT_GROUP).load()
        return built_in
    points = [point for point in entry_points(group=ENVIRONMENT_GROUP) if point.name == name]
    if not points:
        names = ", ".join(entry.name for entry in known_environments() if entry.episodes)
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
    name: str,
    *,
    tools: Path | None = None,
    tasks: Path | None = None,
    allow_unsandboxed: bool = False,
    attachment_bytes: int | None = None,
) -> Callable[[], Environment] | None:
    """Returns a function that makes an environment for each episode, or None if its tasks are not played as episodes.

    One environment is made immediately, so that a missing wall, a bad file of tools or a bad folder of tasks is refused
    at the start. Folders that killed processes left are removed. `attachment_bytes`: see EnvironmentOptions.

    Raises BadEnvironment, also for an environment that neither this installation nor the file of environments has,
    BadEnvironmentFile, BadOpenEnv, BadPool, BadProgram, BadTasks, BadTools, BadVerifiersEnvironment, MissingExtra or
    WallMissing.
    """
    if not has_episodes(name):
        _check_known(name)
        return None
    wall = cache(partial(choose_wall, allow_unsandboxed=allow_unsandboxed))
    declared = declared_environments().get(name)
    if declared is None:
        maker, options = maker_of(name), EnvironmentOptions(wall, tools, tasks, attachment_bytes=attachment_bytes)
    else:
        maker = maker_of(declared.base)
        places = _places(declared, tools, tasks)
        options = EnvironmentOptions(wall, *places, declared.tool_mapping, declared.server, attachment_bytes, declared)
    maker(options)
    remove_abandoned()
    return partial(maker, options)


def _check_known(name: str) -> None:
    try:
        check_environment(name)
    except UnknownEnvironment as error:
        raise BadEnvironment(
            f"{error}; see `tentalis env list`. If it is of a file of environments, name the file with "
            f"{variables.ENVIRONMENT_FILE.name}; if it is of a package, install the package"
        ) from error


def _places(declared: DeclaredEnvironment, tools: Path | None, tasks: Path | None) -> tuple[Path | None, Path | None]:
    """Returns the tools and tasks of an environment of the file; those of the command if the file has none. Raises
    BadEnvironmentFile if both have them, or if the base cannot use its data."""
    where = f"{declared.file}: environments.{declared.name}"
    for key, option, own, given in (
        ("tools", "--tools (TOOLS_CONFIG)", declared.tools, tools),
        ("tasks", "--tasks", declared.tasks, tasks),
    ):
        if own is not None and given is not None:
            raise BadEnvironmentFile(f"{where}.{key}: {own}, and the command names {given}: leave {option} out")
    if (problem := data_problem(declared.name, declared.data)) is not None:
        raise BadEnvironmentFile(f"{where}.data: {problem}")
    return declared.tools or tools, declared.tasks or tasks


def _require_extra(name: str) -> None:
    if name not in WITHOUT_EXTRA:
        require(f"the environment {name}", *EXTRAS.get(name, ("environments",)))


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "unknown package"
    return f"{package} ({point.value})"
