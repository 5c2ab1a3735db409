"""The hidden tests of a swe episode: they come to a new folder after the agent ended, and give the reward.

The tests run on a fresh checkout of the base commit with the agent's changes. Left out are changes of tests, of files
that configure them, and of files that Python or pytest load by themselves. The tree of the tests cannot be written
while they run. A few tests that must fail run with them, so that code that lets every test pass gets nothing. Code that
forges the tests that it aims at is not noticed.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tentalis.agents.environments import swe_runner
from tentalis.agents.environments.folders import PREFIX, make_accessible, remove_folder
from tentalis.agents.environments.swe_instances import SweTask
from tentalis.agents.environments.swe_must_fail import MustFailTests, must_fail_tests
from tentalis.agents.environments.swe_repository import SweStore, diff_of_trees
from tentalis.agents.environments.swe_trees import ChangesTooLarge, carry, changes_between, check_size
from tentalis.agents.environments.terminal_checks import CHECKS
from tentalis.agents.environments.terminal_shell import CommandStops, clean_variables, only_with
from tentalis.agents.environments.terminal_task import TaskRefused
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits, Wall

MOST_FILES, MOST_BYTES = 500, 16 << 20
"""Limits of what an agent may change."""
RECORDED_PATCH = 128 * 1024
"""Bytes of the agent's patch that the result records; of a longer one, the beginning."""
_OUTPUT_BYTES = 1 << 18
_LARGEST_REPORT = 1 << 24
_TEST_FOLDERS = frozenset(("test", "tests", "testing"))
_CONFIGURATION = frozenset(
    (
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", "sitecustomize.py", "usercustomize.py"),
    )
)
_CONFIGURATION_ENDS = (".pth", ".egg-link", ".egg-info", ".dist-info")
_WITH_PYTEST: set[Path] = set()


@dataclass(frozen=True, slots=True)
class SweVerdict:
    """The result of the hidden tests. `outcomes`: of each graded test; `missing` if it did not run. `parts`: why all
    tests count as failed. `output`: None if they were not run."""

    fail_to_pass: float
    pass_to_pass: float
    resolved: bool
    outcomes: Mapping[str, str]
    patch: bytes = b""
    n_files: int = 0
    n_lines: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    output: CommandOutput | None = None


def test_python(task: SweTask) -> Path:
    """Returns the Python that runs the tests of a task."""
    return Path(sys.executable) if task.python is None else task.python / "bin/python"


def readable_for(task: SweTask) -> tuple[Path, ...]:
    """Returns the folders that a task's Python needs, and that its agent and its tests may read."""
    if task.python is None:
        return (Path(sys.prefix),)
    return (task.python, (task.python / "bin/python").resolve().parents[1])


def check_python(wall: Wall, task: SweTask) -> None:
    """Raises TaskRefused if the Python of a task has no pytest. One that has it is looked at once."""
    python = test_python(task)
    if python in _WITH_PYTEST:
        return
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-python-") as folder:
        limits = Limits(time_s=120.0)
        found = wall.run(
            [str(python), "-I", "-B", "-c", "import pytest"], Path(folder), limits, readable=readable_for(task)
        )
    if found.exit_code != 0:
        said = found.stderr.decode(errors="replace").strip()[-300:]
        raise TaskRefused(f"{python} runs no pytest; name a virtual environment that has it in swe.yaml: {said}")
    _WITH_PYTEST.add(python)


def graded(wall: Wall, task: SweTask, store: SweStore, agent: Path, episode: Path, stop: CommandStops) -> SweVerdict:
    """Runs the hidden tests on what the agent left in its repository `agent`, when no process of it is left.

    Raises OSError, SandboxFault or TaskRefused.
    """
    checks = episode / CHECKS
    if checks.exists():
        remove_folder(checks)  # an earlier attempt was stopped
    (checks / "scratch").mkdir(parents=True)
    if not _is_there(agent, episode):
        return _failed(task, b"", 0, 0, {"no_repository": 1.0})
    base, left, hidden, tree = (checks / name for name in ("base", "left", "hidden", "tree"))
    for folder in (base, left, tree):
        store.write_tree(store.base, folder)
    store.write_tree(store.tests or store.base, hidden, "" if store.tests else task.instance.test_patch)
    try:
        changes = changes_between(base, agent)
        check_size(changes, MOST_FILES, MOST_BYTES)
    except ChangesTooLarge:
        return _failed(task, b"", 0, 0, {"diff_too_large": 1.0})
    carry(changes, agent, left)
    patch = diff_of_trees(base, left)
    n_files, n_lines = len(changes.paths), n_lines_of(patch)
    tests = changes_between(base, hidden)
    if not changes.paths:
        return _failed(task, patch, n_files, n_lines, {})
    kept = kept_paths(task, tests.paths)
    carry(changes.without(frozenset(path for path in changes.paths if kept.covers(path))), left, tree)
    carry(tests, hidden, tree)
    added = _add_must_fail(task, tree)
    report, output = _run(wall, task, checks, added, stop)
    counted = {"patch": patch, "n_files": n_files, "n_lines": n_lines}
    outcomes = _outcomes(task, report)
    if output.end is not CommandEnd.EXITED:
        return _failed(task, patch, n_files, n_lines, {"tests_stopped": 1.0}, output)
    must_fail = [outcome for each, outcome in report.items() if each.startswith(f"{added.path}::")]
    if not must_fail:  # the process ended before the report
        return _failed(task, patch, n_files, n_lines, {"tests_stopped": 1.0}, output)
    if not added.outcomes_agree(must_fail):
        return _failed(task, patch, n_files, n_lines, {"forged": 1.0}, output)
    fixed, kept_passing = (
        _share(outcomes, tests) for tests in (task.instance.FAIL_TO_PASS, task.instance.PASS_TO_PASS)
    )
    resolved = fixed == kept_passing == 1.0
    return SweVerdict(fixed, kept_passing, resolved, outcomes, output=output, **counted)  # type: ignore[arg-type]


def _is_there(agent: Path, episode: Path) -> bool:
    """Gives this user its rights to the agent's repository back. Returns False if the agent removed it, or put a link
    in its place, which would lead the worker to files that the agent could not read."""
    for folder in (*reversed([each for each in agent.parents if episode in each.parents]), agent):
        if folder.is_symlink() or not folder.is_dir():
            return False
        folder.chmod(0o700)
    make_accessible(agent)
    return True


@dataclass(frozen=True, slots=True)
class KeptPaths:
    """The paths at which an agent's changes are left out: `paths`, and everything in `folders`."""

    paths: frozenset[str]
    folders: frozenset[str]

    def covers(self, path: str) -> bool:
        """Returns True if a change at this path is left out."""
        parts = path.split("/")
        return (
            path in self.paths
            or parts[-1] in _CONFIGURATION
            or any(part.endswith(_CONFIGURATION_ENDS) for part in parts)
            or any("/".join(parts[:n]) in self.folders for n in range(1, len(parts) + 1))
            or any(each.startswith(f"{path}/") for each in self.paths | self.folders)
        )


def kept_paths(task: SweTask, hidden: frozenset[str]) -> KeptPaths:
    """Returns the paths that the hidden tests set: their files, and the topmost folders of tests that these are in."""
    paths = hidden | frozenset(task.test_files)
    folders = set()
    for path in paths:
        parts = path.split("/")[:-1]
        found = next((n for n, part in enumerate(parts, 1) if part in _TEST_FOLDERS), None)
        if found is not None:
            folders.add("/".join(parts[:found]))
    return KeptPaths(paths, frozenset(folders))


def _add_must_fail(task: SweTask, tree: Path) -> MustFailTests:
    """Writes tests that must fail beside the first graded file."""
    folder = tree / Path(task.test_files[0]).parent
    folder.mkdir(parents=True, exist_ok=True)
    taken = {each.name for each in folder.iterdir()} | {Path(each).name for each in task.test_files}
    ids = (*task.instance.FAIL_TO_PASS, *task.instance.PASS_TO_PASS)
    added = must_fail_tests(ids, frozenset(taken), random.SystemRandom())
    (tree / added.path).write_text(added.text, encoding="utf-8")
    return added


def _run(
    wall: Wall, task: SweTask, checks: Path, added: MustFailTests, stop: CommandStops
) -> tuple[dict[str, str], CommandOutput]:
    """Runs the tests, the added ones at a random place. Returns the outcomes and the output."""
    tree, scratch = checks / "tree", checks / "scratch"
    files = [path for path in task.test_files if (tree / path).is_file()]
    files.insert(random.SystemRandom().randint(0, len(files)), added.path)
    runner, config = checks / "runner.py", checks / "run.json"
    runner.write_bytes(Path(swe_runner.__file__).read_bytes())
    values = {"tree": str(tree), "paths": task.paths, "files": files, "report": str(scratch / "report.json")}
    config.write_text(json.dumps(values), encoding="utf-8")
    (scratch / "tmp").mkdir()
    settings = task.settings
    variables = clean_variables(scratch, scratch / "tmp")
    words = [*only_with(variables), str(test_python(task)), "-I", "-B", str(runner), str(config)]
    limits = Limits(
        time_s=settings.tests_s,
        cpu_s=int(settings.tests_s) + 1,
        memory_mb=settings.memory_mb,
        processes=64,
        output_bytes=_OUTPUT_BYTES,
    )
    readable = (tree, runner, config, *readable_for(task))
    output = wall.run(words, scratch, limits, readable=readable, stop=stop.event())
    return _report(scratch / "report.json"), output


def _report(path: Path) -> dict[str, str]:
    """Returns the outcomes of a report. Code of the agent may have written it, or kept it from being written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(_LARGEST_REPORT)
    try:
        outcomes = json.loads(text)["outcomes"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(outcomes, dict):
        return {}
    return {str(name): str(outcome) for name, outcome in outcomes.items()}


def _outcomes(task: SweTask, report: Mapping[str, str]) -> dict[str, str]:
    ids = (*task.instance.FAIL_TO_PASS, *task.instance.PASS_TO_PASS)
    return {each: report.get(each, "missing") for each in ids}


def _share(outcomes: Mapping[str, str], ids: tuple[str, ...]) -> float:
    return sum(outcomes[each] == "passed" for each in ids) / len(ids) if ids else 1.0


def n_lines_of(patch: bytes) -> int:
    """Returns the number of lines that a patch of git adds and removes."""
    n_lines, in_hunk = 0, False
    for line in patch.split(b"\n"):
        if line.startswith((b"diff --git ", b"@@ ")):  # lines of a file have a sign or a space before them
            in_hunk = line.startswith(b"@@ ")
        elif in_hunk and line.startswith((b"+", b"-")):
            n_lines += 1
    return n_lines


def _failed(
    task: SweTask,
    patch: bytes,
    n_files: int,
    n_lines: int,
    parts: Mapping[str, float],
    output: CommandOutput | None = None,
) -> SweVerdict:
    """Returns the verdict on an episode none of whose tests count as passed."""
    return SweVerdict(0.0, 0.0, False, _outcomes(task, {}), patch, n_files, n_lines, parts, output)
