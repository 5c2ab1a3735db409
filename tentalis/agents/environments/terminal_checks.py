"""The checks of a terminal task: they come to the episode's folder after the agent ended, and give the reward.

Nothing of the agent but its files is left then: its processes ended with their commands, and its shell's state is not
read. The checks have programs of the system alone, new folders for home and temporary files, and no links of the agent
that lead out of its folder.
"""

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tentalis.agents.environments.agent_repositories import disarm, is_repository
from tentalis.agents.environments.folders import remove_folder
from tentalis.agents.environments.shown_paths import ShownPaths
from tentalis.agents.environments.terminal_shell import FILES, CommandStops, clean_variables, only_with
from tentalis.agents.environments.terminal_task import HOME, LOGS, TEMPORARY, TESTS, TerminalTask
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits, Wall

AGENT, CHECKS = "agent", "checks"
"""Folders of an episode: the agent's only one, and that of the checks, which is made after the agent ended."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
_LARGEST_TEXT = 1 << 20
"""Bytes of a file of the checks in which names of folders are replaced."""
_LARGEST_REWARD = 1 << 16
_LONGEST_FOLDER = 3000
"""Bytes of the path of a folder. With the longest name in it, it stays below the 4,096 of a path."""
_OUTPUT_BYTES = 1 << 18
_START = 'cd -- "$1" && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class CheckedEpisode:
    """The reward, its further parts, and the output of the checks."""

    reward: float
    parts: Mapping[str, float]
    output: CommandOutput


class BadReward(ValueError):
    """A reward of the checks that is not in [-1, 1]."""


def agent_paths(task: TerminalTask, episode: Path) -> dict[str, Path]:
    """Returns the folders here of those that the agent knows."""
    return {root: episode / AGENT / FILES / root[1:] for root in task.roots}


def checked(wall: Wall, task: TerminalTask, episode: Path, stop: CommandStops) -> CheckedEpisode:
    """Runs the checks of an episode that ended. Raises OSError, SandboxFault or BadReward."""
    remove_outside_links(episode / AGENT)
    checks = episode / CHECKS
    if checks.exists():
        shutil.rmtree(checks)  # an earlier attempt was stopped
    for name in ("logs/verifier", "logs/runs", "home", "tmp"):
        (checks / name).mkdir(parents=True)
    paths = ShownPaths({**agent_paths(task, episode), TESTS: checks / "tests", LOGS: checks / "logs"})
    _copy_tests(task, checks / "tests", paths)
    for name, command in task.settings.runs.items():
        _record_run(wall, task, episode, name, command, stop)
    disarm_repositories(episode / AGENT)
    variables = clean_variables(checks / "home", checks / "tmp")
    variables |= {
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",  # no module of the agent's folder in the place of one of Python
        **{key: paths.real(value) for key, value in (task.variables | task.check_variables).items()},
    }
    script = str(checks / "tests" / task.script.name)
    limits = Limits(
        time_s=task.checks_s,
        cpu_s=int(task.checks_s) + 1,
        memory_mb=task.memory_mb,
        processes=64,
        output_bytes=_OUTPUT_BYTES,
    )
    words = [*only_with(variables), "/bin/sh", "-c", _START, "sh"]
    words += [str(paths.path(task.workdir)), "/bin/bash", "--noprofile", "--norc", script]
    output = wall.run(words, episode, limits, stop=stop.event())
    return CheckedEpisode(*_reward(task, checks / "logs/verifier", output), output)


def _record_run(wall: Wall, task: TerminalTask, episode: Path, name: str, command: str, stop: CommandStops) -> None:
    """Runs a command of the task behind the agent's wall, and writes what it did where only the checks reach."""
    paths = ShownPaths(agent_paths(task, episode))
    variables = clean_variables(paths.path(HOME), paths.path(TEMPORARY))
    variables |= {key: paths.real(value) for key, value in task.variables.items()}
    limits = Limits(time_s=task.settings.command_s, memory_mb=task.memory_mb, output_bytes=_OUTPUT_BYTES)
    words = [*only_with(variables), "/bin/sh", "-c", _START, "sh", str(paths.path(task.workdir))]
    words += ["/bin/bash", "--noprofile", "--norc", "-c", paths.real(command)]
    output = wall.run(words, episode / AGENT, limits, stop=stop.event())
    logs = episode / CHECKS / "logs/runs"
    (logs / f"{name}.out").write_bytes(output.stdout)
    (logs / f"{name}.err").write_bytes(output.stderr)
    (logs / f"{name}.code").write_text(f"{output.end if output.exit_code is None else output.exit_code}\n")


def _copy_tests(task: TerminalTask, target: Path, paths: ShownPaths) -> None:
    """Copies the checks, with the folders of this episode in the place of /app, /tests and /logs."""
    if task.tests.is_dir():
        shutil.copytree(task.tests, target, ignore=shutil.ignore_patterns("__pycache__"))
    target.mkdir(exist_ok=True)
    if task.script.parent != task.tests:
        shutil.copy2(task.script, target / task.script.name)
    for path in target.rglob("*"):
        if not path.is_file() or path.stat().st_size > _LARGEST_TEXT:
            continue
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        replaced = paths.real(text)
        if replaced != text and "\0" not in text:
            path.write_text(replaced, encoding="utf-8")


def remove_outside_links(folder: Path) -> None:
    """Removes the links in a folder that lead out of it, but for those to programs of the system.

    A link to where the checks will be would give the agent their expected answers. The agent may have taken its own
    rights to folders away, so they are given back for the time of the search. Folders whose paths are too long to look
    into are removed: a chain of short links can lead there. Call it when no process of the agent is left.
    """
    inside = folder.resolve()
    with _accessible() as modes:
        links = [entry for entries in _entries(folder, modes) for entry in entries if entry.is_symlink()]
        for link in map(Path, links):
            try:
                target = link.resolve()
            except (OSError, RuntimeError):  # links that go in a circle, or to a name that is too long
                target = Path("/")
            if not any(target.is_relative_to(allowed) for allowed in (inside, *_SYSTEM)):
                link.unlink()


def disarm_repositories(folder: Path) -> None:
    """Removes hooks and settings that name programs from the git repositories in a folder, at any depth. Call it after
    `remove_outside_links`."""
    with _accessible() as modes:
        found = [
            Path(entries[0].path).parent
            for entries in _entries(folder, modes)
            if entries and is_repository(frozenset(entry.name for entry in entries))
        ]
        for repository in found:
            disarm(repository)


@contextmanager
def _accessible() -> Iterator[list[tuple[Path, int]]]:
    """Gives a list for folders and the modes that they had, and sets these modes again at the end."""
    modes: list[tuple[Path, int]] = []
    try:
        yield modes
    finally:
        for path, mode in reversed(modes):
            path.chmod(mode)


def _entries(folder: Path, modes: list[tuple[Path, int]]) -> Iterator[list[os.DirEntry[str]]]:
    """Yields the entries of a folder and of each one below. Makes all folders accessible, and adds the modes that they
    had to `modes`."""
    folders = [folder]
    while folders:
        path = folders.pop()
        if len(os.fsencode(path)) > _LONGEST_FOLDER:
            remove_folder(path)
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            path.chmod(mode | stat.S_IRWXU)
            modes.append((path, mode))
        with os.scandir(path) as found:
            entries = list(found)
        folders += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        yield entries


def _reward(task: TerminalTask, logs: Path, output: CommandOutput) -> tuple[float, dict[str, float]]:
    """Returns the reward and its parts. Checks that give no reward count as 0: the agent may have made them fail."""
    if output.end is not CommandEnd.EXITED:
        return 0.0, {"checks_stopped": 1.0}
    if not task.rewarded:
        return float(output.exit_code == 0), {}
    parts = {f"check.{name}": value for name, value in _numbers(logs / "reward.json").items()}
    reward = parts.pop("check.reward", None)
    if reward is None:
        reward = _number(_content(logs / "reward.txt"))
    if reward is None:
        return 0.0, parts | {"no_reward": 1.0}
    if not -1.0 <= reward <= 1.0:
        raise BadReward(f"the checks of the task {task.name} gave the reward {reward}, outside [-1, 1]")
    return reward, parts


def _content(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_LARGEST_REWARD).decode("utf-8", errors="replace")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _numbers(path: Path) -> dict[str, float]:
    try:
        read = json.loads(_content(path) or "{}")
    except ValueError:
        return {}
    values = read.items() if isinstance(read, dict) else ()
    return {
        str(name): float(value)
        for name, value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
