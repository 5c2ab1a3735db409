"""Task folders of the environment terminal: those of Harbor and of Terminal-Bench.

Harbor: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`. Terminal-Bench: `task.yaml`, `Dockerfile`,
`run-tests.sh`, `tests/`. A task that needs what only a container has is refused with the list of it.
"""

import hashlib
import posixpath
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.problems import problems
from tentalis.agents.environments.dockerfile import (
    CopiedFiles,
    DockerfileSteps,
    SetupCommand,
    installation,
    parsed_dockerfile,
)
from tentalis.text.settings_text import settings_text
from tentalis.text.toml_file import read_table
from tentalis.text.yaml_file import read_mapping, value_in

WORKDIR, HOME, TEMPORARY = "/app", "/root", "/tmp"
TESTS, LOGS = "/tests", "/logs"
STEPS, COMMAND_S, CHECKS_S, MEMORY_MB = 50, 10.0, 120.0, 2048
# Folders of the operating system. Those of a task must not hide them.
_SYSTEM = frozenset(("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr", "var"))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
# What Terminal-Bench has beside the files of the environment.
_NOT_FILES = frozenset(("task.toml", "task.yaml", "instruction.md", "run-tests.sh", "tests", "solution"))
_BUILD = frozenset(("Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"))


class BadTasks(ValueError):
    """A folder of tasks that cannot be used."""


class TaskRefused(Exception):
    """A task folder that cannot be played on this machine; the message has what it needs."""


class _TaskModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Agent(_TaskModel):
    timeout_sec: float | None = Field(default=None, gt=0.0)


class _Verifier(_TaskModel):
    timeout_sec: float | None = Field(default=None, gt=0.0)
    env: dict[str, str] = {}


class _Environment(_TaskModel):
    docker_image: str | None = None
    memory_mb: int = Field(default=MEMORY_MB, ge=16)
    gpus: int = 0
    network_mode: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    mcp_servers: tuple[Any, ...] = ()
    healthcheck: Any = None
    env: dict[str, str] = {}


class TerminalSettings(BaseModel):
    """The table `tentalis` of task.toml. `steps`: turns of the policy. `command_s`: seconds of one command. `runs`:
    commands that are run after the episode and before the checks, by name, as the agent would run them; the checks find
    their output and exit code in /logs/runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=STEPS, ge=1, le=1000)
    command_s: float = Field(default=COMMAND_S, gt=0.0, le=600.0)
    runs: dict[str, str] = {}


class _HarborTask(_TaskModel):
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    tentalis: TerminalSettings = TerminalSettings()
    steps: Any = None


class _TerminalBenchTask(_TaskModel):
    instruction: str
    max_agent_timeout_sec: float | None = Field(default=None, gt=0.0)
    max_test_timeout_sec: float | None = Field(default=None, gt=0.0)
    run_tests_in_same_shell: bool = False


@dataclass(frozen=True, slots=True)
class TerminalTask:
    """A task that this machine can play. `script`: the checks, beside or in `tests`. `rewarded`: they write a reward
    file; else their exit code is the reward. `context`: the folder that the copied files come from."""

    name: str
    digest: str
    instruction: str
    context: Path
    steps: tuple[CopiedFiles | SetupCommand, ...]
    workdir: str
    variables: dict[str, str]
    tests: Path
    script: Path
    rewarded: bool
    settings: TerminalSettings
    agent_s: float | None = None
    checks_s: float = CHECKS_S
    memory_mb: int = MEMORY_MB
    check_variables: dict[str, str] = field(default_factory=dict)

    @property
    def roots(self) -> tuple[str, ...]:
        """The top folders that the agent's files are in, such as /app; always with home and temporary folder."""
        paths = [self.workdir, *(step.target for step in self.steps if isinstance(step, CopiedFiles)), HOME, TEMPORARY]
        return tuple(dict.fromkeys(f"/{path.split('/')[1]}" for path in paths))


def task_names(tasks: Path) -> list[str]:
    """Returns the names of the task folders in a folder. Raises BadTasks."""
    try:
        found = sorted(each.name for each in tasks.iterdir() if _is_task(each))
    except OSError as error:
        raise BadTasks(f"the folder of tasks {tasks} cannot be read: {error.strerror}") from error
    if not found:
        raise BadTasks(
            f"the folder of tasks {tasks} has no task: each task is a folder in it with task.toml or task.yaml"
        )
    return found


def check_out_of_reach(
    place: Path, readable: Sequence[Path], what: str = "the checks and solutions of the tasks in"
) -> None:
    """Raises BadTasks if commands of the agent may read a folder or file; `what` it holds that they must not see."""
    for each in readable:
        if place.is_relative_to(each):
            where = "; without a wall there is no place for it" if each == Path("/") else ""
            raise BadTasks(f"commands of the agent may read {each}, and with it {what} {place}: move it{where}")


def _is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("task.toml", "task.yaml"))


def task_digest(folder: Path) -> str:
    """Returns the SHA-256 of all files of a task folder: names, content, and whether they can be executed."""
    digest = hashlib.sha256()
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            kind, content = "link", str(path.readlink()).encode()
        else:
            kind, content = ("program" if path.stat().st_mode & 0o100 else "file"), path.read_bytes()
        digest.update(f"{kind} {len(content)} {name}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts and (path.is_symlink() or path.is_file()):
            yield path


def is_installed_here(package: str) -> bool:
    """Returns True if this machine has a package of Debian; without dpkg, if it has a program of that name."""
    if shutil.which("dpkg-query") is None:
        return shutil.which(package.partition("=")[0]) is not None
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", package.partition("=")[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.startswith("ii")


def load_task(tasks: Path, name: str, is_installed: Callable[[str], bool] = is_installed_here) -> TerminalTask:
    """Loads a task folder. `is_installed`: of a package of Debian. Raises TaskRefused."""
    folder = tasks / name
    if not _NAME.match(name) or not _is_task(folder):
        raise TaskRefused(f"no task {name!r} in {tasks}: `tentalis env tasks FOLDER` lists them")
    try:
        harbor = (folder / "task.toml").is_file()
        task, built = _harbor(folder, name) if harbor else _terminal_bench(folder, name)
    except ValidationError as error:
        raise TaskRefused(f"the task {name} is not valid: {problems(error, 'task')}") from error
    except (OSError, ValueError) as error:
        raise TaskRefused(f"the task {name} cannot be read: {error}") from error
    needs = [*built.needs, *_needs_of_scripts(task)]
    absent = [package for package in built.packages if not is_installed(package)]
    if absent:
        needs.append(f"packages that are not installed here: {' '.join(absent)}")
    targets = [task.workdir, *(step.target for step in task.steps if isinstance(step, CopiedFiles))]
    needs += [f"the folder {path}" for path in targets if path.split("/")[1] in ("", *_SYSTEM)]
    if needs:
        raise TaskRefused(f"the task {name} needs a container: {'; '.join(dict.fromkeys(needs))}")
    return task


def _built(context: Path, dockerfile: Path) -> DockerfileSteps:
    if dockerfile.is_file():
        return parsed_dockerfile(dockerfile.read_text(encoding="utf-8"), "/")
    return DockerfileSteps(WORKDIR, [CopiedFiles((".",), WORKDIR, True)] if context.is_dir() else [])


def _harbor(folder: Path, name: str) -> tuple[TerminalTask, DockerfileSteps]:
    read = _HarborTask.model_validate(read_table(folder / "task.toml"))
    context = folder / "environment"
    built = _built(context, context / "Dockerfile")
    needs = {
        f"the image {read.environment.docker_image}": bool(read.environment.docker_image),
        "GPUs": read.environment.gpus > 0,
        # The whole internet is the default of both formats; a list of hosts is a need.
        "the network": bool(read.environment.allowed_hosts) or read.environment.network_mode == "allowlist",
        "MCP servers": bool(read.environment.mcp_servers),
        "services (a health check)": read.environment.healthcheck is not None,
        "several steps": bool(read.steps) or (folder / "steps").is_dir(),
        "variables of the host": any(
            "${" in value for value in [*read.verifier.env.values(), *read.environment.env.values()]
        ),
        "services (docker-compose.yaml)": any((context / each).exists() for each in _BUILD if "compose" in each),
    }
    built.needs += [need for need, needed in needs.items() if needed]
    task = TerminalTask(
        name=name,
        digest=task_digest(folder),
        instruction=(folder / "instruction.md").read_text(encoding="utf-8").strip(),
        context=context,
        steps=tuple(built.steps),
        workdir=built.workdir,
        variables=built.variables | read.environment.env,
        tests=folder / "tests",
        script=folder / "tests/test.sh",
        rewarded=True,
        settings=read.tentalis,
        agent_s=read.agent.timeout_sec,
        checks_s=read.verifier.timeout_sec or CHECKS_S,
        memory_mb=read.environment.memory_mb,
        check_variables=read.verifier.env,
    )
    return task, built


def _terminal_bench(folder: Path, name: str) -> tuple[TerminalTask, DockerfileSteps]:
    read = _TerminalBenchTask.model_validate(read_mapping(folder / "task.yaml", "the task"))
    built = _built(folder, folder / "Dockerfile")
    if read.run_tests_in_same_shell:
        built.needs.append("checks in the agent's own shell")
    compose = folder / "docker-compose.yaml"
    if compose.is_file() and len(_services(compose)) > 1:
        built.needs.append("services (docker-compose.yaml)")
    task = TerminalTask(
        name=name,
        digest=task_digest(folder),
        instruction=read.instruction.strip(),
        context=folder,
        steps=tuple(built.steps),
        workdir=built.workdir,
        variables=built.variables,
        tests=folder / "tests",
        script=folder / "run-tests.sh",
        rewarded=False,
        settings=TerminalSettings(),
        agent_s=read.max_agent_timeout_sec,
        checks_s=read.max_test_timeout_sec or CHECKS_S,
        check_variables={"TEST_DIR": TESTS},
    )
    return task, built


def _services(compose: Path) -> dict[Any, Any]:
    found = value_in(settings_text(compose), str(compose)) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{compose}: expected a mapping with services, not {type(found).__name__}")
    services = found.get("services") or {}
    if not isinstance(services, dict):
        raise ValueError(f"{compose}: services: expected a mapping, not {type(services).__name__}")
    return services


def _needs_of_scripts(task: TerminalTask) -> Iterator[str]:
    """Yields what the checks would install."""
    for number, line in enumerate(task.script.read_text(encoding="utf-8").splitlines(), 1):
        found = installation(line)
        if found is not None and not line.lstrip().startswith("#"):
            yield f"software that its checks install ({task.script.name}, line {number}: {found})"


def copy_files(task: TerminalTask, step: CopiedFiles, target: Path) -> None:
    """Copies files of a task to a folder or file here. Raises OSError or ValueError."""
    for source in step.sources:
        pattern = posixpath.normpath(source).lstrip("/")
        found = [task.context] if pattern in (".", "") else sorted(task.context.glob(pattern))
        if not found:
            raise FileNotFoundError(f"the task {task.name} has no {source}")
        for path in found:
            if path.is_dir():
                left_out = _left_out(task.context)
                shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True, ignore=left_out)
            else:
                into = target / path.name if step.into or target.is_dir() else target
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, into, follow_symlinks=False)


def _left_out(context: Path) -> Callable[[str, list[str]], set[str]]:
    """Returns the filter of what belongs to a task and not to its files, at the top of its context."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        if Path(folder) != context:
            return set()
        own = _BUILD if context.name == "environment" else _BUILD | _NOT_FILES
        return {name for name in names if name in own or (name.startswith("solution.") and own is not _BUILD)}

    return left_out
