"""The environment gui: the policy works on web pages in a real browser, and a check of the task gives the reward.

A turn is one or more calls of tools, in the format of Qwen and Hermes. The policy sees the accessibility tree of the
page after them. `done`, a turn without a call or the last step ends the episode. The verifier's data are `GuiData`.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.records import Message, Task, ToolCall
from tentalis.agents.environments.episode_task import episode_data, named_prompt, task_name
from tentalis.agents.environments.folders import new_folder, remove_folder
from tentalis.agents.environments.gui_actions import DONE, NAVIGATE, PARAMETERS, ActionRefused, act, signatures
from tentalis.agents.environments.gui_browser import GuiBrowser
from tentalis.agents.environments.gui_checks import MiniwobState, begin_miniwob, check_parts, miniwob_state
from tentalis.agents.environments.gui_chromium import ChromiumFiles, chromium_files
from tentalis.agents.environments.gui_devtools import DevToolsError, PageCrashed
from tentalis.agents.environments.gui_pages import LocalPages, shown_page
from tentalis.agents.environments.gui_task import GuiTask, gui_task_names, load_gui_task
from tentalis.agents.environments.gui_tree import ElementNumbers, page_text, quoted
from tentalis.agents.environments.protocol import (
    EnvironmentFault,
    EnvironmentOptions,
    LeftFile,
    Observation,
    Transition,
)
from tentalis.agents.environments.shell_steps import recorded_call
from tentalis.agents.environments.terminal_task import TaskRefused, check_out_of_reach
from tentalis.agents.environments.tool_turns import SHOWN_CHARACTERS, after_calls, call_problem, with_tools
from tentalis.agents.sandbox import Limits, Wall
from tentalis.rewards.answers import stated_answer
from tentalis.rewards.verdict import VerifierData
from tentalis.text.tool_calls import RequestedCall, requested_calls
from tentalis.text.tool_output import head_and_tail, readable_text

RULES = """You work on web pages in a browser. You see a page as a list of its elements; the ones you can act on have a
number in brackets, which you pass as `ref`. After your calls you see the page again. When the task is finished, call
`done`."""
RECORDED_FORMS = 20
"""Forms of an episode that the result records."""
_CPU_S = 3600
_PROCESSES, _OPEN_FILES = 64, 4096


class GuiData(VerifierData):
    """The task by its name, a folder or `miniwob/PAGE`; without it, the user's message is the name. `digest`: SHA-256
    of the task as the result of an episode records it; an episode of another content is refused. `seed`: of a page of
    MiniWoB, which draws its problem from it."""

    task: str | None = None
    digest: str | None = None
    seed: int = 0


class GuiEnvironment:
    """See the module docstring. Raises BadTasks, BrowserMissing or WallMissing."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._wall = options.wall()
        self._attachment_bytes = options.attachment_bytes
        self._tasks = None if options.tasks is None else options.tasks.resolve()
        if self._tasks is not None:
            gui_task_names(self._tasks)
            check_out_of_reach(self._tasks, self._wall.readable, "the checks of the tasks in")
        self._chromium = chromium_files()
        self._folder: Path | None = None
        self._episode: _GuiEpisode | None = None

    @property
    def wall(self) -> str:
        """See Environment.wall."""
        return self._wall.name

    async def reset(self, task: Task) -> Observation:
        """See Environment.reset: rules and tools, what the task says beside its name, the goal and the first page."""
        data = episode_data(task, GuiData)
        name = task_name(task, data.task)
        try:
            loaded = await asyncio.to_thread(load_gui_task, self._tasks, name)
            if data.digest is not None and data.digest != loaded.digest:
                raise EnvironmentFault(
                    f"the task {name} has changed: its digest is {loaded.digest}, and the task names {data.digest}"
                )
            self._folder = await asyncio.to_thread(new_folder)
        except (TaskRefused, OSError) as error:
            raise EnvironmentFault(str(error)) from error
        self._episode = _GuiEpisode(loaded, data.seed, self._attachment_bytes)
        said = await self._episode.begin(self._wall, self._chromium, self._folder)
        return Observation(with_tools(named_prompt(task, name, RULES, said), self.tool_schemas()))

    def tool_schemas(self) -> list[dict[str, Any]]:
        """See OffersTools.tool_schemas."""
        assert self._episode is not None, "tool_schemas before reset"
        return signatures(navigate=self._episode.navigates)

    async def step(self, action: str) -> Transition:
        """See Environment.step. When it is cancelled no further action is sent; scripts of the page run on."""
        assert self._episode is not None, "step before reset"
        requested = requested_calls(action)
        if not requested:
            return self._episode.answered(action)
        return await self._episode.turn(requested)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Transition:
        """See OffersTools.call_tool."""
        assert self._episode is not None, "call_tool before reset"
        made = await self._episode.turn([RequestedCall(name, arguments)])
        shown = tuple(Message(role="tool", content=call.result or "") for call in made.tool_calls[-1:])
        return Transition(Observation(shown), done=made.done, tool_calls=made.tool_calls)

    async def answer(self, text: str) -> Transition:
        """See OffersTools.answer."""
        assert self._episode is not None, "answer before reset"
        return self._episode.answered(text)

    async def score(self) -> Mapping[str, float]:
        """See Environment.score: the checks of the task, or the reward of the page of MiniWoB."""
        assert self._episode is not None, "score before reset"
        return await self._episode.score()

    def ending_calls(self) -> tuple[ToolCall, ...]:
        """See RecordsEnding: the conditions of the check, and what they are about."""
        return () if self._episode is None else self._episode.ending_calls()

    def left_files(self) -> tuple[LeftFile, ...]:
        """See LeavesFiles: a picture of the page before each turn."""
        return () if self._episode is None else tuple(self._episode.pictures)

    async def close(self) -> None:
        """See Environment.close: kills the browser and removes its folder."""
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove_folder, folder)


class _GuiEpisode:
    """One episode of a task in its browser. `attachment_bytes`: the most bytes of a picture; None: none is made."""

    def __init__(self, task: GuiTask, seed: int, attachment_bytes: int | None) -> None:
        self._task, self._seed, self._attachment_bytes = task, seed, attachment_bytes
        self.pictures: list[LeftFile] = []
        self._pages = LocalPages(task.pages, fixed=task.settings is None)
        self._browser = GuiBrowser(self._pages)
        self._numbers = ElementNumbers()
        self._documents = 0
        self._turns = self._actions = self._refused = 0
        self._answer: str | None = None
        self._state = MiniwobState(False, 0.0)
        self._found: dict[str, float] | None = None
        self._problem = ""

    @property
    def navigates(self) -> bool:
        """True if the policy may name the page to show."""
        return self._task.settings is not None

    async def begin(self, wall: Wall, chromium: ChromiumFiles, folder: Path) -> str:
        """Starts the browser on the first page. Returns the goal and the page for the policy. Raises
        EnvironmentFault."""
        limits = Limits(
            cpu_s=_CPU_S, memory_mb=self._task.memory_mb, processes=_PROCESSES, open_files=_OPEN_FILES, file_mb=256
        )
        await self._browser.start(wall, chromium, folder, limits)
        try:
            async with asyncio.timeout(self._task.action_s):
                await self._browser.open(self._pages.url(self._task.start))
                goal = await self._goal()
                shown = await self._looked()
        except (DevToolsError, PageCrashed, TimeoutError) as error:
            said = "it takes too long" if isinstance(error, TimeoutError) else str(error)
            raise EnvironmentFault(f"the first page of the task {self._task.name} cannot be shown: {said}") from error
        return f"{goal}\n\n{shown}"

    async def _goal(self) -> str:
        settings = self._task.settings
        if settings is None:
            return _readable(await begin_miniwob(self._browser, self._seed))
        if settings.check.expression is not None:
            await self._check_syntax(settings.check.expression)
        return settings.goal.strip()

    async def _check_syntax(self, expression: str) -> None:
        """Raises EnvironmentFault if the expression of the check is not JavaScript. One that raises another exception
        may hold later, on another page."""
        try:
            await self._browser.evaluate(expression)
        except DevToolsError as error:
            if str(error).startswith("SyntaxError"):
                raise EnvironmentFault(f"the expression of the task {self._task.name} is wrong: {error}") from error

    def answered(self, text: str) -> Transition:
        """Ends the episode with the text of a turn without a call."""
        calls = self._first_calls()
        self._answer = stated_answer(text) or text.strip()
        return Transition(done=True, tool_calls=tuple(calls))

    async def turn(self, requested: Sequence[RequestedCall]) -> Transition:
        """Carries the calls of a turn out; see Environment.step."""
        calls = self._first_calls()
        known = {name: schema for name, schema in PARAMETERS.items() if self.navigates or name != NAVIGATE}
        made: list[ToolCall] = []
        over = False
        for number, call in enumerate(requested):
            problem = "the episode is over" if over else call_problem(call, number, known)
            if problem is None:
                said, over = await self._carried_out(call)
            else:
                self._refused += 1
                said = f"error: {problem}"
            shown = head_and_tail(_readable(said), SHOWN_CHARACTERS)
            made.append(ToolCall(name=call.name or "?", arguments=json.dumps(dict(call.arguments)), result=shown))
        if over or self._turns >= self._task.steps:
            return Transition(done=True, tool_calls=(*calls, *made))
        page = await self._page_after()
        made[-1] = made[-1].model_copy(update={"result": f"{made[-1].result}\n\n{page}"})
        if self._browser.crashed:
            return Transition(done=True, tool_calls=(*calls, *made))
        return Transition(after_calls(made), tool_calls=(*calls, *made))

    def _first_calls(self) -> list[ToolCall]:
        """Counts a turn; returns the record of the task with the first one."""
        self._turns += 1
        if self._turns > 1:
            return []
        task = {"task": self._task.name, "digest": self._task.digest}
        return [recorded_call("task", task | ({} if self.navigates else {"seed": self._seed}), None)]

    async def _carried_out(self, call: RequestedCall) -> tuple[str, bool]:
        """Returns what a call did, and True if the episode is over."""
        if call.name == DONE:
            self._answer = call.arguments.get("answer")
            return "done", True
        self._actions += 1
        try:
            async with asyncio.timeout(self._task.action_s):
                said = await act(self._browser, self._numbers, call.name, call.arguments)
                if self._task.settings is None:
                    self._state = await miniwob_state(self._browser)
            return said, self._state.done
        except ActionRefused as error:
            self._refused += 1
            return f"error: {error}", False
        except PageCrashed as error:
            return f"error: {error}", True
        except TimeoutError:
            return f"error: the page did not react within {self._task.action_s:g} s", False

    async def _page_after(self) -> str:
        try:
            async with asyncio.timeout(self._task.action_s):
                return await self._looked()
        except PageCrashed as error:
            return f"[{error}]"
        except DevToolsError as error:  # such as one that loads anew again and again
            return f"[the page cannot be looked at: {_readable(str(error))}]"
        except TimeoutError:
            return f"[the page does not answer within {self._task.action_s:g} s]"

    async def _looked(self) -> str:
        """Returns the page as the policy sees it, and keeps its picture. Raises as GuiBrowser.call."""
        if self._documents != self._browser.documents:
            self._documents = self._browser.documents
            self._numbers.forget()
        nodes = (await self._browser.call("Accessibility.getFullAXTree"))["nodes"]
        snapshot = await self._browser.call("DOMSnapshot.captureSnapshot", computedStyles=[])
        where = quoted(shown_page(self._browser.url))
        text = page_text(nodes, clickable_nodes(snapshot), self._numbers, where)
        if self._attachment_bytes is not None:
            name, picture = f"turn-{self._turns + 1:03}.png", await self._browser.screenshot()
            self.pictures.append(LeftFile.of(name, "image/png", picture, self._attachment_bytes))
        return "\n".join((*self._browser.notes(), text))

    async def score(self) -> dict[str, float]:
        """Returns the reward and its parts; see Environment.score. Raises EnvironmentFault."""
        if self._found is None:
            self._found = await self._scored()
        return self._found | {
            "actions": float(self._actions),
            "refused_calls": float(self._refused),
        }

    async def _scored(self) -> dict[str, float]:
        settings = self._task.settings
        try:
            async with asyncio.timeout(self._task.action_s):
                if settings is None:
                    if not self._state.done:
                        self._state = await miniwob_state(self._browser)
                    return {"raw_reward": self._state.raw, "reward": max(0.0, self._state.raw)}
                parts = await check_parts(self._browser, settings.check, self._pages.forms, self._answer)
                return {f"check.{name}": value for name, value in parts.items()} | {"reward": min(parts.values())}
        except PageCrashed as error:
            self._problem = str(error)
            return {"page_crashed": 1.0, "reward": 0.0}
        except DevToolsError as error:
            self._problem = str(error)
            return {"check_raised": 1.0, "reward": 0.0}
        except TimeoutError:
            await self._check_browser()
            self._problem = f"the page did not answer the check within {self._task.action_s:g} s"
            return {"page_hung": 1.0, "reward": 0.0}

    async def _check_browser(self) -> None:
        """Raises EnvironmentFault if the browser does not answer, so that it is not the page that hangs."""
        try:
            async with asyncio.timeout(self._task.action_s):
                await self._browser.alive()
        except TimeoutError as error:
            raise EnvironmentFault("the browser does not answer any more") from error

    def ending_calls(self) -> tuple[ToolCall, ...]:
        """See RecordsEnding."""
        if self._found is None:
            return ()
        forms = [{"method": each.method, "page": each.page, "fields": each.fields} for each in self._pages.forms]
        seen = {"page": shown_page(self._browser.url), "answer": self._answer, "forms": forms[:RECORDED_FORMS]}
        found = {"parts": self._found, **({"problem": self._problem} if self._problem else {}), **seen}
        return (recorded_call("check", {"task": self._task.name}, found),)

    async def close(self) -> None:
        """Kills the browser."""
        await self._browser.close()


def clickable_nodes(snapshot: Mapping[str, Any]) -> dict[int, str]:
    """Returns the tag names of the nodes of a page that react to clicks, by their backend ids. `snapshot`: as
    the protocol's command captureSnapshot returns it. The whole page, which may react too, is left out."""
    strings, document = snapshot["strings"], snapshot["documents"][0]["nodes"]
    names, backends = document["nodeName"], document["backendNodeId"]
    found = {backends[at]: str(strings[names[at]]) for at in document["isClickable"]["index"]}
    return {node: name for node, name in found.items() if name not in ("HTML", "BODY", "#document")}


def _readable(text: str) -> str:
    return readable_text(text.encode("utf-8", errors="replace"))
