"""The file of environments: each is a known environment under a name of its own, with its settings, tools, scorer and
limits (docs/how-to/environment-file.md). Pure, apart from the reading of the file.
"""

import difflib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from tentalis.rewards.verdict import FeedbackJudge, Judge, Scorer
from tentalis.text.yaml_file import BadYaml, read_mapping

EPISODE = "episode"
"""The verifier of environments with episodes."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
TAKES_TOOLS = frozenset({"toolcall"})
TAKES_TASKS = frozenset({"gui", "swe", "terminal"})
TAKES_SERVER = frozenset({"env-pool", "openenv"})
TAKES_PYTHON = frozenset({"agent", "verifiers"})
TAKES_PROGRAM = frozenset({"agent"})


class BadEnvironmentFile(ValueError):
    """A file of environments that cannot be used. The message names the file, the key and what is right."""


class EnvironmentLimits(BaseModel):
    """Limits of an episode, where they are not the defaults.

    Attributes:
        max_turns: turns of the policy.
        environment_seconds: seconds that the environment may take in all steps together.
        attempts: at an episode whose infrastructure fails.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int | None = Field(default=None, ge=1, le=1000)
    environment_seconds: float | None = Field(default=None, ge=1.0, le=86_400.0)
    attempts: int | None = Field(default=None, ge=1, le=100)


class EnvironmentServer(BaseModel):
    """A server that plays the episodes of an environment, and the time limits of calls to it, in seconds.

    Attributes:
        url: its address.
        key_env: the variable with the key that calls carry as bearer token; None: for env-pool TENTALIS_ENV_POOL_KEY,
            if it is set.
        wait_s: waits for a free place, all tries together.
        heartbeat_s: between two heartbeats of env-pool, if the server does not say when a lease expires.
        reset_s: of the call that begins an episode.
        exec_s: of one call of a tool, or one action.
        evaluate_s: of the score of env-pool.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://[^\s@]+$")
    key_env: str | None = None
    wait_s: float = Field(default=300.0, ge=0.0, le=86_400.0)
    heartbeat_s: float = Field(default=20.0, gt=0.0, le=3600.0)
    reset_s: float = Field(default=300.0, gt=0.0, le=86_400.0)
    exec_s: float = Field(default=300.0, gt=0.0, le=86_400.0)
    evaluate_s: float = Field(default=600.0, gt=0.0, le=86_400.0)


Words = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
"""A command: the program and its arguments."""


class AgentProgram(BaseModel):
    """A program that plays the episodes of an environment, and what scores them (docs/how-to/unchanged-agents.md).

    Attributes:
        command: the program with its arguments, in which {prompt}, {model}, {workspace}, {folder} and {python} are
            replaced.
        check: the command that scores the files and the output of the program after its end; None: the verifier of the
            task grades the answer.
        workspace: the folder whose copy the program works in; None: an empty one.
        variables: further variables of the program, with the same replacements.
        readable: files and folders that the program may read, beside those of the system and of Python.
        network: endpoints that it may connect to, as HOST:PORT, beside the gateway.
        seconds: time limit of the program, with its waits for the model.
        check_seconds: time limit of the check.
        memory_mb: memory limit of all processes of the program together, in MiB.
        processes: most processes of the program.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Words
    check: Words | None = None
    workspace: str | None = None
    variables: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    readable: tuple[str, ...] = ()
    network: tuple[Annotated[str, Field(pattern=r"^[^\s:]+:\d+$")], ...] = ()
    seconds: float = Field(default=1800.0, ge=1.0, le=86_400.0)
    check_seconds: float = Field(default=600.0, ge=1.0, le=86_400.0)
    memory_mb: int = Field(default=4096, ge=64)
    processes: int = Field(default=64, ge=1, le=4096)


class _Entry(BaseModel):
    """An environment as the file has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    scorer: str | None = None
    data: dict[str, JsonValue] = {}
    tools: Any = None
    tasks: str | None = None
    server: EnvironmentServer | None = None
    program: AgentProgram | None = None
    python: str | None = None
    limits: EnvironmentLimits = EnvironmentLimits()


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    environments: dict[Annotated[str, Field(pattern=NAME)], _Entry] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class DeclaredEnvironment:
    """An environment of a file.

    Attributes:
        name: its name, which tasks have.
        file: the file.
        base: the environment that plays it.
        scorer: the verifier of its tasks, one of the base.
        data: defaults of the data of the verifier `episode`; those of a task come first.
        tools: the file with its tools, or None. With `tool_mapping` that is `file` itself.
        tool_mapping: the tools, if `file` has them.
        tasks: the folder with its tasks, or None.
        server: the server that plays its episodes, or None.
        limits: those of its episodes.
        python: the interpreter that has its packages; None: that of this process.
        program: the program that plays its episodes, or None. Its paths are those of the file.
    """

    name: str
    file: Path
    base: str
    scorer: str
    data: Mapping[str, Any] = field(default_factory=dict)
    tools: Path | None = None
    tool_mapping: Mapping[str, Any] | None = None
    tasks: Path | None = None
    server: EnvironmentServer | None = None
    limits: EnvironmentLimits = field(default_factory=EnvironmentLimits)
    python: Path | None = None
    program: AgentProgram | None = None

    @property
    def origin(self) -> str:
        """The file and the base, in words."""
        return f"{self.file} ({self.base})"


def read_environments(
    path: Path, known: Mapping[str, Mapping[str, Scorer]], built_in: Set[str]
) -> dict[str, DeclaredEnvironment]:
    """Reads a file of environments. `known`: the verifiers of each environment that a base may be. `built_in`: those
    that are of no package; those of packages take tools, tasks and a server as they like. Raises BadEnvironmentFile."""
    try:
        given = read_mapping(path, "the key environments")
    except BadYaml as error:
        raise BadEnvironmentFile(str(error)) from error
    try:
        found = _File.model_validate(given)
    except ValidationError as error:
        said = "; ".join(dict.fromkeys(_described(item) for item in error.errors(include_url=False)))
        raise BadEnvironmentFile(f"{path}: {said}") from error
    return {name: _declared(path, name, entry, known, built_in) for name, entry in found.environments.items()}


def _declared(
    path: Path, name: str, entry: _Entry, known: Mapping[str, Mapping[str, Scorer]], built_in: Set[str]
) -> DeclaredEnvironment:
    def bad(key: str, problem: str) -> BadEnvironmentFile:
        return BadEnvironmentFile(f"{path}: environments.{name}{key}: {problem}")

    if name in known:
        raise bad("", "there is an environment with this name: choose another name")
    if entry.base not in known:
        raise bad(".base", f"there is no environment {entry.base!r}{_nearest(entry.base, known)}")
    verifiers = {each for each, scorer in known[entry.base].items() if not isinstance(scorer, Judge | FeedbackJudge)}
    scorer = entry.scorer or (EPISODE if EPISODE in verifiers else None)
    if scorer is None:
        raise bad("", f"the key scorer is missing: name one of {entry.base}, which has {_listed(verifiers)}")
    if scorer not in verifiers:
        raise bad(".scorer", f"{entry.base} has no verifier {scorer!r} for answers{_nearest(scorer, verifiers)}")
    if entry.data and scorer != EPISODE:
        raise bad(".data", f"these are data of the verifier episode, and the scorer is {scorer}: leave them out")
    plays = EPISODE in known[entry.base]
    if not plays and entry.limits.model_fields_set:
        raise bad(".limits", f"one completion answers a task of {entry.base}, which has no limits: leave them out")
    for key, value, takes in (
        ("tools", entry.tools, TAKES_TOOLS),
        ("tasks", entry.tasks, TAKES_TASKS),
        ("server", entry.server, TAKES_SERVER),
    ):
        own = plays and entry.base not in built_in
        if value is not None and entry.base not in takes and not own:
            raise bad(f".{key}", f"{entry.base} takes no {key}, as {_listed(takes)} does: leave them out")
    if entry.python is not None and entry.base not in TAKES_PYTHON:
        raise bad(".python", f"{entry.base} takes no python, as {_listed(TAKES_PYTHON)} does: leave it out")
    if entry.program is not None and entry.base not in TAKES_PROGRAM:
        raise bad(".program", f"{entry.base} takes no program, as {_listed(TAKES_PROGRAM)} does: leave it out")
    if entry.program is None and entry.base in TAKES_PROGRAM:
        raise bad(".program", f"{entry.base} needs the program that plays: program: {{command: [...]}}")
    folder = path.resolve().parent
    tools, mapping = path.resolve(), None
    if isinstance(entry.tools, dict):
        mapping = entry.tools
    elif isinstance(entry.tools, str):
        tools = folder / entry.tools
        if not tools.is_file():
            raise bad(".tools", f"there is no file {tools}: paths are relative to {folder}")
    elif entry.tools is not None:
        raise bad(".tools", "give the name of a file of tools, or the tools as in such a file: {tools: [...]}")
    tasks = None if entry.tasks is None else folder / entry.tasks
    if tasks is not None and not tasks.is_dir():
        raise bad(".tasks", f"there is no folder {tasks}: paths are relative to {folder}")
    python = None if entry.python is None else folder / entry.python  # not resolved: a link in a virtual environment
    if python is not None and not python.is_file():
        raise bad(".python", f"there is no interpreter {python}: paths are relative to {folder}")
    return DeclaredEnvironment(
        name,
        path.resolve(),
        entry.base,
        scorer,
        entry.data,
        None if entry.tools is None else tools,
        mapping,
        tasks,
        entry.server,
        entry.limits,
        python,
        entry.program,
    )


def _described(error: Any) -> str:
    place = [str(part) for part in error["loc"]]
    name = ".".join(part for part in place if part != "[key]") or "the file"
    if error["type"] == "extra_forbidden":
        inner: type[BaseModel] = EnvironmentLimits
        if "server" in place:
            inner = EnvironmentServer
        if "program" in place:
            inner = AgentProgram
        models: dict[int, type[BaseModel]] = {1: _File, 3: _Entry}
        model = models.get(len(place), inner)
        return f"{name}: no such key{_nearest(place[-1], model.model_fields)}"
    if error["type"] == "missing":
        return f"{name}: this key is missing"
    if error["type"] == "string_pattern_mismatch":
        return f"{name}: a name has letters, digits, `_`, `.` and `-`, and begins with a letter or a digit"
    return f"{name}: {error['msg']}"


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    closest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f", did you mean {closest[0]}?" if closest else f"; give one of {', '.join(names)}"


def _listed(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))
