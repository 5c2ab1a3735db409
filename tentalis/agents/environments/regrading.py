"""Grades recorded episodes again, with the checks, tests and rules of today: from the result alone, without a model.

`toolcall/answer` compares the recorded answer. `swe/tests` applies the recorded patch, or the attached one if the
record has only a part, and runs the hidden tests. `terminal/checks` runs the recorded commands again in a new folder,
and the checks if every command gives the recorded output. An episode whose record is not enough is refused with the
reason.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from schemas.ids import sha256_hex
from schemas.records import Ending, Result, Task, ToolCall, Verifier
from tentalis.agents.environments.episode_task import task_name
from tentalis.agents.environments.folders import new_folder, remove_folder
from tentalis.agents.environments.protocol import EnvironmentOptions
from tentalis.agents.environments.shell_steps import in_thread
from tentalis.agents.environments.swe import PATCH_CALL, PATCH_FILE, REPOSITORY, SweData, test_parts
from tentalis.agents.environments.swe_instances import SweFolder
from tentalis.agents.environments.swe_repository import apply_difference, make_store, require_git
from tentalis.agents.environments.swe_tests import SweVerdict, check_python, graded
from tentalis.agents.environments.terminal import TerminalData, TerminalEnvironment
from tentalis.agents.environments.terminal_checks import AGENT
from tentalis.agents.environments.terminal_shell import FILES, CommandStops
from tentalis.agents.environments.terminal_task import BadTasks
from tentalis.agents.environments.toolcall import ToolcallData, answer_parts
from tentalis.rewards.verdict import data_of
from tentalis.storage.attachments import read_attachment
from tentalis.storage.errors import StoredFileDamaged, StoredFileMissing
from tentalis.storage.location import BadLocation

_EPISODE = "episode"
_STORE = "store"
_LEFT = (PATCH_CALL, "tests")  # records of what an episode of swe left


class CannotRegrade(Exception):
    """An episode that cannot be graded from its record; the message is the reason."""


class Regrader(Protocol):
    """Grades episodes of one environment from their results."""

    async def parts(self, result: Result) -> Mapping[str, float]:
        """Returns the reward and its parts, as `Environment.score`. Raises CannotRegrade, EnvironmentFault,
        BadVerifierData; and StorageError or MissingExtra if the store of an attachment cannot be read."""
        ...


class AnswerRegrader:
    """`toolcall/answer`: see `answer_parts`."""

    def __init__(self, options: EnvironmentOptions) -> None:
        """Needs no options."""

    async def parts(self, result: Result) -> Mapping[str, float]:
        """See Regrader.parts."""
        data = data_of(_of_environment(result.task), ToolcallData)
        counts = {name: result.rewards.get(name, 0.0) for name in ("calls", "refused_calls")}
        answer = result.text if result.ending is Ending.DONE else None
        return counts | answer_parts(data, answer, counts["calls"])


class TestsRegrader:
    """`swe/tests`: the hidden tests of the instance as they are now, on the recorded patch. Raises BadTasks."""

    __test__ = False

    def __init__(self, options: EnvironmentOptions) -> None:
        if options.tasks is None:
            raise BadTasks("swe/tests needs the folder of instances: --tasks FOLDER")
        require_git()
        self._wall = options.wall()
        self._instances = SweFolder(options.tasks)

    async def parts(self, result: Result) -> Mapping[str, float]:
        """See Regrader.parts."""
        data = data_of(_of_environment(result.task), SweData)
        patch = await asyncio.to_thread(_recorded_patch, result)
        name = task_name(result.task, data.task)
        found = await in_thread(lambda stop: self._graded(name, patch, stop))
        counts = ("commands", "edits", "bad_turns")
        return {**{each: result.rewards.get(each, 0.0) for each in counts}, **test_parts(found, data)}

    def _graded(self, name: str, patch: bytes, stop: CommandStops) -> SweVerdict:
        task = self._instances.task(name)
        check_python(self._wall, task)
        folder = new_folder()
        try:
            store = make_store(task, folder / _STORE)
            store.check_patch(task.instance.test_patch)
            agent = folder / AGENT / FILES / REPOSITORY[1:]
            store.write_tree(store.base, agent)
            apply_difference(patch, agent)
            return graded(self._wall, task, store, agent, folder, stop)
        finally:
            remove_folder(folder)


class ChecksRegrader:
    """`terminal/checks`: the checks of the task folder as they are now, after the recorded commands. Raises BadTasks,
    WallMissing."""

    def __init__(self, options: EnvironmentOptions) -> None:
        TerminalEnvironment(options)
        self._options = options

    async def parts(self, result: Result) -> Mapping[str, float]:
        """See Regrader.parts."""
        if result.ending is Ending.TIMED_OUT:
            raise CannotRegrade("a command was stopped with the episode, and its effects are not known")
        environment = TerminalEnvironment(self._options)
        recorded = [call for call in result.tool_calls if call.name == "bash"]
        try:
            await environment.reset(_without_digest(result.task))
            done = False
            for turn, text in enumerate(_stepped(result), 1):
                if done:
                    raise CannotRegrade(f"the episode ends before turn {turn} with the task folder as it is now")
                transition = await environment.step(text)
                done = transition.done
                for call in transition.tool_calls:
                    if call.name == "bash":
                        _check_same(recorded.pop(0) if recorded else None, call, turn)
            if recorded:
                raise CannotRegrade(f"{len(recorded)} recorded commands are in no recorded turn")
            return await environment.score()
        finally:
            await environment.close()


REGRADERS: Mapping[tuple[str, str], Callable[[EnvironmentOptions], Regrader]] = {
    ("swe", "tests"): TestsRegrader,
    ("terminal", "checks"): ChecksRegrader,
    ("toolcall", "answer"): AnswerRegrader,
}
"""The graders of episodes by environment and name."""


def _of_environment(task: Task) -> Task:
    """Returns the task if its environment grades it. Raises CannotRegrade."""
    if task.verifier is None or task.verifier.name == _EPISODE:
        return task
    raise CannotRegrade(
        f"its verifier is {task.verifier.name}, not the environment: name {task.environment}/{task.verifier.name}"
    )


def _without_digest(task: Task) -> Task:
    """Returns the task without the digest of its folder, which other checks change."""
    data = data_of(_of_environment(task), TerminalData)
    verifier = Verifier(name=_EPISODE, data=data.model_copy(update={"digest": None}).model_dump_json(exclude_none=True))
    return task.model_copy(update={"verifier": verifier})


def _stepped(result: Result) -> tuple[str, ...]:
    """Returns the texts that the environment took as actions: a turn that was cut off at its length is none."""
    cut_off = bool(result.turns) and result.turns[-1].finish_reason == "length"
    return result.steps[:-1] if cut_off else result.steps


def _check_same(recorded: ToolCall | None, call: ToolCall, turn: int) -> None:
    if recorded is None or recorded.arguments != call.arguments:
        raise CannotRegrade(f"turn {turn} runs another command than recorded")
    if recorded.result != call.result:
        raise CannotRegrade(f"the command of turn {turn} gives another output than recorded, so its effects may differ")


def _recorded_patch(result: Result) -> bytes:
    """Returns the patch of an episode. Raises CannotRegrade if neither its record nor the store of attachments has all
    of it, and StorageError if the store cannot be read."""
    left: dict[str, Any] = {
        call.name: json.loads(call.result) for call in result.tool_calls if call.result and call.name in _LEFT
    }
    patch, tests = (left.get(name) for name in _LEFT)
    if patch is None or tests is None:
        raise CannotRegrade("the record has no patch: it was made before patches of such endings were recorded")
    for reason in ("diff_too_large", "no_repository", "left_out"):
        if tests.get(reason):
            raise CannotRegrade(f"the record has no patch: {reason}")
    recorded = str(patch["patch"]).encode()
    if patch["whole"] and sha256_hex(recorded) == patch["sha256"]:
        return recorded
    attached = next((each for each in result.attachments if each.name == PATCH_FILE and each.url is not None), None)
    if attached is None:
        raise CannotRegrade(
            "its patch is not text in UTF-8, and the record has it altered"
            if patch["whole"]
            else "the record has only the beginning of its patch"
        )
    try:
        content = read_attachment(attached)
    except (StoredFileMissing, StoredFileDamaged, BadLocation) as error:
        raise CannotRegrade(f"its patch cannot be read: {error}") from error
    if sha256_hex(content) != patch["sha256"]:
        raise CannotRegrade("its attached patch is another one than the record names")
    return content
