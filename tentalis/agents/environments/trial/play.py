"""Plays one episode in the terminal, by hand or with a model server; nothing is written to Kafka."""

import asyncio
import json
from collections.abc import Callable
from typing import Protocol

from pydantic import ValidationError

from schemas.problems import problems
from schemas.records import Message, Result, Status, Task, Verifier
from tentalis.agents.environments.protocol import Environment, ProgramAccess, RunsProgram
from tentalis.agents.environments.trial.relay import ProgramRelay
from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import RequestRefused
from tentalis.rewards import registry
from tentalis.rewards.verdict import BadVerifierData
from tentalis.text.timestamps import now_ms

Show = Callable[[str], None]


class NotATask(ValueError):
    """Input that is not a task; the message has the reason."""


class ProgramNeedsServer(ValueError):
    """A program makes the turns, and no model server was named for it."""


class TurnPlayer(Protocol):
    """Plays the policy's turns."""

    async def turn(self, messages: list[dict[str, str]]) -> str | None:
        """Returns the text of the next turn, None to give up."""
        ...


class ByHand:
    """A person. `typed` returns the next turn, None at the end of the input."""

    def __init__(self, typed: Callable[[], str | None]) -> None:
        self._typed = typed

    async def turn(self, messages: list[dict[str, str]]) -> str | None:
        """See TurnPlayer.turn."""
        return await asyncio.to_thread(self._typed)


class ByModel:
    """A model server with OpenAI's API. `model` None: the first one that it lists."""

    def __init__(self, server: str, model: str | None, max_tokens: int) -> None:
        self.server = server
        self._model, self._max_tokens = model, max_tokens

    async def turn(self, messages: list[dict[str, str]]) -> str | None:
        """See TurnPlayer.turn. Raises InferenceError."""
        async with OpenAIClient(self.server) as client:
            generation = await client.generate(await self._named(client), messages, max_tokens=self._max_tokens)
        return generation.completions[0].text

    async def model(self) -> str:
        """Returns the name of the model. Raises InferenceError."""
        async with OpenAIClient(self.server) as client:
            return await self._named(client)

    async def _named(self, client: OpenAIClient) -> str:
        if self._model is None:
            cards = await client.models()
            if not cards:
                raise RequestRefused(404, f"{self.server} serves no model")
            self._model = str(cards[0]["id"])
        return self._model


def trial_task(environment: str, question: str, data: str) -> Task:
    """Makes a task with one user message. Its verifier is `episode`, or that of the file of environments with its data,
    which `data` complete. Raises NotATask, BadEnvironmentFile."""
    try:
        own = json.loads(data)
    except ValueError as error:
        raise NotATask(f"--data is not JSON: {error}") from error
    scorer, declared = "episode", registry.declared_environments().get(environment)
    if declared is not None:
        if not isinstance(own, dict):
            raise NotATask(f"--data is not a JSON object, but {type(own).__name__}")
        scorer, data = declared.scorer, json.dumps({**declared.data, **own})
    try:
        return Task(
            task_id="trial",
            event_time=now_ms(),
            policy="trial",
            environment=environment,
            messages=(Message(role="user", content=question),),
            verifier=Verifier(name=scorer, data=data),
        )
    except ValidationError as error:
        raise NotATask(f"not a task: {problems(error, 'task')}") from error


def first_messages(
    make: Callable[[], Environment], environment: str, question: str
) -> tuple[str, list[dict[str, str]]]:
    """Returns the wall of an environment, and the messages with which an episode of a question begins. Raises
    EnvironmentFault or NotATask."""

    async def begun() -> tuple[str, list[dict[str, str]]]:
        made = make()
        try:
            observation = await made.reset(trial_task(environment, question, "{}"))
            return made.wall, [_wired(message) for message in observation.messages]
        finally:
            await made.close()

    return asyncio.run(begun())


def play_trial(make: Callable[[], Environment], task: Task, player: TurnPlayer, max_turns: int, show: Show) -> None:
    """Plays one episode and shows each message, reward and the score. Raises EnvironmentFault, InferenceError or
    ProgramNeedsServer."""
    asyncio.run(_play(make(), task, player, max_turns, show))


async def _play(environment: Environment, task: Task, player: TurnPlayer, max_turns: int, show: Show) -> None:
    try:
        if isinstance(environment, RunsProgram):
            answer = await _run_program(environment, environment, task, player, max_turns, show)
        else:
            answer = await _take_turns(environment, task, player, max_turns, show)
        show(f"[score] {_listed(dict(await environment.score())) or 'none'}")
        if task.verifier is not None and task.verifier.name != "episode":
            show(f"[reward] {_rewarded(task, answer)}")
    finally:
        await environment.close()


async def _run_program(
    environment: Environment, runs: RunsProgram, task: Task, player: TurnPlayer, max_turns: int, show: Show
) -> str:
    """Lets a program make the turns, and shows its calls. Returns the last answer that it got."""
    if not isinstance(player, ByModel):
        raise ProgramNeedsServer(
            f"a program makes the turns of {task.environment}: name the model server that it calls with --server URL, "
            "such as one of `tentalis serve model`"
        )
    model = await player.model()
    await environment.reset(task)
    with ProgramRelay(player.server, model, max_turns, show) as relay:
        end = await runs.run_program(ProgramAccess(relay.url, "trial", model))
        said = f": {end.said}" if end.said else ""
        how = "its time was over" if end.timed_out else f"exit code {end.exit_code}"
        show(f"[the program ended: {how}]{said}")
        return relay.answers[-1] if relay.answers else ""


async def _take_turns(environment: Environment, task: Task, player: TurnPlayer, max_turns: int, show: Show) -> str:
    """Plays turn by turn. Returns the text of the last turn."""
    messages: list[dict[str, str]] = []
    observation = await environment.reset(task)
    for turn in range(max_turns):
        for message in observation.messages:
            messages.append(_wired(message))
            show(f"[{message.role}]\n{message.content}\n")
        text = await player.turn(messages)
        if text is None:
            show("[given up]")
            break
        messages.append({"role": "assistant", "content": text})
        show(f"[turn {turn + 1}]\n{text}\n")
        transition = await environment.step(text)
        if transition.rewards:
            show(f"[rewards of the step] {_listed(dict(transition.rewards))}")
        if transition.done:
            break
        observation = transition.observation
    else:
        show("[the turns are over]")
    return next((each["content"] for each in reversed(messages) if each["role"] == "assistant"), "")


def _rewarded(task: Task, answer: str) -> str:
    """Returns the reward of the last turn's text by the verifier of the task, in words."""
    result = Result(
        result_id="trial",
        event_time=task.event_time,
        opened_at=task.event_time,
        task=task,
        sample_index=0,
        worker_id="trial",
        status=Status.OK,
        text=answer,
    )
    try:
        registry.check(task)
        verdict = registry.verify(task, result)
    except BadVerifierData as error:
        return f"unknown: {error}"
    name = registry.scorer_name(task)
    return f"unknown by {name}" if verdict.reward is None else f"{verdict.reward:g} by {name}"


def _wired(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(parts.items()))
