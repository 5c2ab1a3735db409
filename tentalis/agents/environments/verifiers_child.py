"""The process that plays an environment of the package verifiers: it reads requests and writes replies, JSON by line.

It runs with the Python that has verifiers, which may have other packages than tentalis. So this file is started by its
path and imports the standard library and verifiers alone. verifiers' own loop plays an episode: the client that it asks
for the policy's turn waits for the request with that turn.
"""

import asyncio
import atexit
import contextvars
import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, BinaryIO

END_S = 5.0
"""Seconds that the teardown may take after the requests have ended."""
OWN_SANDBOX = frozenset(
    {"BrowserEnv", "CliAgentEnv", "HarborEnv", "MCPEnv", "OpenEnvEnv", "PythonEnv", "SandboxEnv", "SandboxMixin"}
)
"""Classes of verifiers that bring a sandbox, a browser, a server or an agent program."""
_FAILURES: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures")
Reply = dict[str, Any]


class Refused(Exception):
    """An environment or an episode that cannot be played; the message has the reason."""


def refusal(environment: Any, verifiers: Any, judge: bool) -> str | None:
    """Returns the reason why an environment cannot be played turn by turn, or None. `judge`: judge models may be
    called."""
    members = getattr(environment, "envs", None)
    if isinstance(environment, verifiers.EnvGroup) and members is not None:
        reasons = [refusal(member, verifiers, judge) for member in members]
        return next((reason for reason in reasons if reason is not None), None)
    kind = type(environment)
    if not isinstance(environment, verifiers.MultiTurnEnv):
        return f"{kind.__name__} is not a SingleTurnEnv, a MultiTurnEnv or an EnvGroup"
    own = sorted({base.__name__ for base in kind.__mro__} & OWN_SANDBOX)
    if own:
        return f"{kind.__name__} is a {own[0]}, which brings a sandbox, a server or an agent program of its own"
    if kind.get_model_response is not verifiers.Environment.get_model_response:
        return f"{kind.__name__} asks the model through a client of its own (get_model_response)"
    if environment.tool_defs or isinstance(environment, verifiers.ToolEnv):
        names = ", ".join(tool.name for tool in environment.tool_defs or ()) or "none yet"
        return f"{kind.__name__} has tools ({names}), which need the tool calls of a model's API; turns here are text"
    if environment.message_type != "chat":
        return f"its message_type is {environment.message_type!r}: only chat is played"
    return _refused_rubric(environment.rubric, verifiers, judge)


def _refused_rubric(rubric: Any, verifiers: Any, judge: bool) -> str | None:
    if rubric.has_group_rewards or getattr(rubric, "has_advantages", False):
        return f"{type(rubric).__name__} rewards whole groups of answers; here each episode has its own reward"
    asks = isinstance(rubric, verifiers.JudgeRubric) or "judge_client" in rubric.class_objects
    if asks and not judge:
        model = rubric.class_objects.get("judge_model", "a judge model")
        return f"{type(rubric).__name__} sends each answer to {model}: set `judge: true` in its data to allow that"
    reasons = [_refused_rubric(member, verifiers, judge) for member in getattr(rubric, "rubrics", ())]
    return next((reason for reason in reasons if reason is not None), None)


def report_failures(rubric: Any) -> None:
    """Lets the functions of a rubric report what they raise: verifiers itself takes an exception for the reward 0."""
    for member in getattr(rubric, "rubrics", ()):
        report_failures(member)
    for environment in getattr(rubric, "env_map", {}).values():
        report_failures(environment.rubric)
    rubric.funcs[:] = [each if hasattr(each, "reports_failures") else _reporting(each) for each in rubric.funcs]


def _reporting(function: Callable[..., Any]) -> Callable[..., Awaitable[float]]:
    @functools.wraps(function)  # verifiers reads the signature, which it follows
    async def called(*arguments: Any, **named: Any) -> float:
        try:
            returned = function(*arguments, **named)
            return float(await returned if inspect.isawaitable(returned) else returned)
        except Exception as error:
            _FAILURES.get().append(f"{getattr(function, '__name__', function)}: {described(error)}")
            raise

    called.reports_failures = True  # type: ignore[attr-defined]
    return called


def described(error: BaseException) -> str:
    """Returns an exception and those that caused it, in words."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    cause = error.__cause__
    return said if cause is None or str(cause) in said else f"{said} ({described(cause)})"


def plain(message: Any) -> dict[str, str]:
    """Returns a message as role and text. Raises Refused for images, audio, tool calls and completion prompts."""
    role, content = message["role"], message["content"]
    if message.get("tool_calls"):
        raise Refused("a message has tool calls, which an episode of text cannot have")
    if isinstance(content, list):
        parts = [part["text"] if part["type"] == "text" else None for part in content]
        if None in parts:
            raise Refused(f"a message of the role {role} has a part that is not text")
        content = "".join(part for part in parts if part is not None)
    if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
        raise Refused(f"a message of the role {role} has no text")
    return {"role": role, "content": content}


class Turns:
    """The turns of one episode, between verifiers' loop and the requests."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[list[dict[str, str]]] = asyncio.Queue()
        self.waiting: asyncio.Future[str] | None = None
        self.state: Any = None
        self.refused: str | None = None
        self._known: list[dict[str, str]] = []
        self._begun = False

    async def turn(self, prompt: Any, tools: Any, state: Any) -> str:
        """Returns the policy's turn after a prompt. Raises Refused if a prompt does not continue the one before."""
        self.state = state
        try:
            messages = [plain(message) for message in prompt]
            self._check(messages, tools)
        except Refused as error:
            self.refused = str(error)
            raise
        new = messages[len(self._known) :]
        self._begun = True
        self.waiting = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(new)
        text = await self.waiting
        self._known = [*messages, {"role": "assistant", "content": text}]
        return text

    def _check(self, messages: list[dict[str, str]], tools: Any) -> None:
        if tools:
            raise Refused(f"the row has tools ({', '.join(tool.name for tool in tools)}), which need a model's API")
        new = messages[len(self._known) :]
        if messages[: len(self._known)] != self._known:
            raise Refused("its prompt changes earlier messages; an episode here only appends to them")
        if not new:
            raise Refused("it asks for a turn without a new message")
        if self._begun and any(message["role"] == "assistant" for message in new):
            raise Refused("it writes a message of the assistant, which only the policy may write")


def client_of(turns: Turns) -> Any:
    """Returns the client that verifiers asks for the policy's turns."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class TurnClient(Client):  # type: ignore[misc]
        """Has no server: a turn comes with a request."""

        def setup_client(self, config: Any) -> None:
            """See Client."""

        async def to_native_tool(self, tool: Any) -> Any:
            """See Client."""
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            """See Client."""
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            """See Client."""
            text = await turns.turn(prompt, tools, kwargs.get("state"))
            message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
            return Response(id="turn", created=int(time.time()), model=model, message=message)

        async def raise_from_native_response(self, response: Any) -> None:
            """See Client."""

        async def from_native_response(self, response: Any) -> Any:
            """See Client."""
            return response

        async def close(self) -> None:
            """See Client."""

    return TurnClient(None)


class Episode:
    """One episode: `open`, `step` for each turn, `score`, `close`; `stop` ends what runs."""

    def __init__(self, environment: Any, row: Mapping[str, Any], cut: type[Exception]) -> None:
        self._environment = environment
        self._cut = cut
        self._turns = Turns()
        self._scoring: asyncio.Task[Reply] | None = None
        self._stopped = False
        client = client_of(self._turns)
        self._rollout = asyncio.ensure_future(environment.rollout(dict(row), client, "policy", {}))

    async def until_turn(self) -> Reply:
        """Returns the new messages before the next turn, or that the episode is done. Raises what the environment
        raises."""
        asked = asyncio.ensure_future(self._turns.asked.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return {"messages": asked.result(), "done": False}
        asked.cancel()
        self._finished()
        return {"messages": [], "done": True}

    async def step(self, text: str) -> Reply:
        """Takes a turn. One that comes after verifiers' own time limit is not taken."""
        if self._turns.waiting is not None and not self._turns.waiting.done():
            self._turns.waiting.set_result(text)
        return await self.until_turn()

    def _finished(self) -> Any:
        """Returns the state of an episode that has ended. Raises what ended it."""
        if self._turns.refused is not None:
            raise Refused(self._turns.refused)
        if self._rollout.cancelled():
            if not self._stopped:
                raise Refused("the environment cancelled its episode")
            return self._turns.state
        state = self._rollout.result()
        if state.get("error") is not None:
            raise Refused(f"the environment failed: {described(state['error'])}")
        return state

    async def score(self) -> Reply:
        """Returns the reward and the value of each function of the rubric. An episode without a finished turn has
        none. One that waits for a turn ends as if the context were full."""
        if self._scoring is None:
            self._scoring = asyncio.ensure_future(self._scored())
        await asyncio.wait({self._scoring})
        if self._scoring.cancelled():
            raise Refused("the score was stopped")
        return self._scoring.result()

    async def _scored(self) -> Reply:
        if self._turns.waiting is not None and not self._turns.waiting.done():
            self._turns.waiting.set_exception(self._cut("the episode was ended before this turn"))
        await asyncio.wait({self._rollout})
        state = self._finished()
        if state is None or not state["trajectory"]:
            return {"reward": None, "metrics": {}}
        failures: list[str] = []
        _FAILURES.set(failures)
        await self._environment.rubric.score_rollout(state)
        if failures:
            raise Refused(f"a reward function failed: {'; '.join(failures)}")
        metrics = {str(name): float(value) for name, value in state["metrics"].items()}
        return {"reward": float(state["reward"]), "metrics": metrics}

    async def stop(self) -> Reply:
        """Ends what runs. What was played can still be scored, unless the score is what runs."""
        self._stopped = True
        running = [task for task in (self._scoring, self._rollout) if task is not None and not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        return {}

    async def close(self) -> Reply:
        """Ends the episode, and runs the cleanup of the rubric."""
        await self.stop()
        if not self._rollout.cancelled() and self._rollout.exception() is None:
            await self._environment.rubric.cleanup(self._rollout.result())
        return {}


class Player:
    """Answers requests: `load` first, then `rows` and episodes."""

    def __init__(self) -> None:
        self._environment: Any = None
        self._episodes: dict[int, Episode] = {}

    async def answer(self, request: Mapping[str, Any]) -> Reply:
        """Returns the reply to a request. Raises what the environment raises."""
        match request["op"]:
            case "load":
                return self._load(request["name"], request["arguments"], request["judge"])
            case "rows":
                return self._rows(request["evaluation"], request["start"], request["count"])
            case "open":
                from verifiers.errors import OverlongPromptError

                opened = Episode(self._environment, request["row"], OverlongPromptError)
                self._episodes[request["episode"]] = opened
                return await opened.until_turn()
            case "step":
                return await self._episodes[request["episode"]].step(request["text"])
            case "score":
                return await self._episodes[request["episode"]].score()
            case "stop":
                running = self._episodes.get(request["episode"])
                return {} if running is None else await running.stop()
            case "close":
                episode = self._episodes.pop(request["episode"], None)
                return {} if episode is None else await episode.close()
        raise Refused(f"there is no request {request['op']!r}")

    def _load(self, name: str, arguments: Mapping[str, Any], judge: bool) -> Reply:
        import verifiers

        if not hasattr(verifiers, "load_environment"):
            raise Refused(
                f"verifiers {verifiers.__version__} has no load_environment any more: install 'verifiers==0.3.0'"
            )
        environment = verifiers.load_environment(name, **arguments)
        reason = refusal(environment, verifiers, judge)
        if reason is not None:
            raise Refused(f"the environment {name} of verifiers cannot be played: {reason}")
        report_failures(environment.rubric)
        self._environment = environment
        return {}

    def _rows(self, evaluation: bool, start: int, count: int) -> Reply:
        """Returns rows of the data set: the prompt as messages, and the other columns."""
        environment = self._environment
        data = environment.get_eval_dataset() if evaluation else environment.get_dataset()
        rows = []
        for index in range(start, min(start + count, len(data))):
            columns = dict(data[index])
            prompt = columns.pop("prompt")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            try:
                rows.append({"messages": [plain(message) for message in messages], "row": columns})
                json.dumps(columns)
            except (Refused, TypeError) as error:
                raise Refused(f"row {index} cannot be a task: {error}") from error
        return {"rows": rows, "total": len(data)}

    async def teardown(self) -> None:
        """Closes all episodes."""
        for episode in self._episodes.values():
            await episode.stop()


async def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers requests until they end."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    player = Player()
    running: set[asyncio.Task[None]] = set()

    async def answer(request: Mapping[str, Any]) -> None:
        try:
            reply = {"id": request["id"], "ok": await player.answer(request)}
        except Refused as error:
            reply = {"id": request["id"], "error": str(error)}
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the environment's code; the worker names it
            reply = {"id": request["id"], "error": described(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()

    def take(line: bytes) -> None:
        task = asyncio.ensure_future(answer(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(take, line)
        loop.call_soon_threadsafe(ended.set)
        time.sleep(END_S)
        os.killpg(0, signal.SIGKILL)  # code that blocks the loop, and the processes that it started

    threading.Thread(target=read, name="requests", daemon=True).start()
    await ended.wait()
    await player.teardown()


def main() -> None:
    """Serves on the standard streams. What the environment prints goes to standard error."""
    atexit.register(os.killpg, 0, signal.SIGKILL)  # it runs last: no process of the environment stays behind
    sys.path[:0] = sys.argv[1:]
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    asyncio.run(serve(requests, replies))


if __name__ == "__main__":
    main()
