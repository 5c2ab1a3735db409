"""Plays the episodes of a task: one per sample, each one result. The worker owns loop, tokens and policy of every turn.

A turn: the policy samples on all tokens so far; the environment takes its text as an action; the tokens of the
observation are appended. Text is never tokenised again. Each turn is sampled by the version that is assigned or
served at that moment, which its span records. An environment whose turns a program makes is played by
`ProgramEpisodes` instead.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from pydantic import ValidationError

from schemas.ids import derived_id
from schemas.records import Attachment, Ending, Message, RecordedBy, Result, Status, Task, ToolCall, result_id
from tentalis.agents.environments import (
    Environment,
    EnvironmentFault,
    LeavesFiles,
    LeftFile,
    LimitsScore,
    NamesEpisode,
    Observation,
    RecordsEnding,
    RunsProgram,
)
from tentalis.agents.environments.protocol import SCORE_MARGIN_S
from tentalis.agents.environments.registry import default_turns, limits_of
from tentalis.agents.environments.stoppable import StuckThread
from tentalis.agents.workers.answer import seed_of
from tentalis.agents.workers.episode_tokens import EpisodeTokens, appended_tokens
from tentalis.agents.workers.policy_calls import PolicyCalls
from tentalis.agents.workers.program_episodes import ProgramPlayer
from tentalis.inference import protocol
from tentalis.inference.protocol import (
    Generation,
    Inference,
    NotTokenExact,
    RequestRefused,
    ServerUnavailable,
)
from tentalis.inference.result import sampled_mode
from tentalis.storage.attachments import AttachmentStore
from tentalis.storage.errors import StorageError
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""Pause before the second attempt at an episode; it doubles."""
PARALLEL = 16
"""Episodes of a worker at the same time."""
_PROBE = "A question."
_PROBES = tuple(
    (Message(role="user", content=_PROBE), Message(role="assistant", content=said)) for said in ("Yes", "No, never")
)
# Models whose renderings of the probes are kept: the versions that answer at the same time, and a few before them.
_CACHED_MODELS = 8


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """`max_turns`: turns of the policy in one episode. `parallel`: episodes of this worker at the same time.
    `environment_s`: seconds that the environment may take in one episode, all steps together; waits for the model
    server do not count; and again the seconds for the score, unless the environment has a higher limit (LimitsScore).
    `attempts`: attempts at an episode whose infrastructure fails."""

    max_turns: int = 10
    parallel: int = PARALLEL
    environment_s: float = 600.0
    attempts: int = 3

    @classmethod
    def of(
        cls,
        environment: str,
        parallel: int = PARALLEL,
        max_turns: int | None = None,
        environment_s: float | None = None,
        attempts: int | None = None,
    ) -> "EpisodeLimits":
        """Returns the limits of an environment: the given ones, else those of the file of environments, else the
        defaults. Raises BadEnvironmentFile."""
        filed, plain = limits_of(environment), cls()
        return cls(
            max_turns or default_turns(environment),
            parallel,
            environment_s or filed.environment_seconds or plain.environment_s,
            attempts or filed.attempts or plain.attempts,
        )


class InfrastructureFault(Exception):
    """An attempt at an episode failed, and not by the policy."""


@dataclass(slots=True)
class EpisodeState:
    """The state of an attempt: all that it has produced so far. `parts`: parts of its reward that the worker adds."""

    tokens: EpisodeTokens = field(default_factory=EpisodeTokens)
    messages: list[Message] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    attachments: tuple[Attachment, ...] = ()
    rewards: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    ending: Ending = Ending.DONE
    error: str | None = None
    wall: str = ""
    left_s: float = 0.0


class EpisodePlayer:
    """Answers tasks with episodes of an environment. `make` makes a new environment for each attempt. `attachments`:
    the store of the files that an episode leaves; None: they are not kept. `programs`: plays environments whose turns a
    program makes; None: it plays none."""

    def __init__(
        self,
        inference: Inference,
        policies: PolicyCalls,
        make: Callable[[], Environment],
        limits: EpisodeLimits,
        *,
        worker_id: str,
        server_id: str,
        attachments: AttachmentStore | None = None,
        programs: ProgramPlayer | None = None,
    ) -> None:
        self._programs = programs
        self._inference = inference
        self._policies = policies
        self._make = make
        self._limits = limits
        self._worker_id = worker_id
        self._server_id = server_id
        self._attachments = attachments
        self._free = asyncio.Semaphore(limits.parallel)
        self.stuck: str | None = None
        """The fault of an episode whose thread could not be stopped: this process must be replaced. None: all ended."""
        self._rendered_probes: dict[str, list[protocol.Int32]] = {}

    async def answer(self, task: Task, opened_at: int) -> list[Result]:
        """Returns the n results of a task, in sample order. `opened_at`: the append time of the task's record, in ms.

        A result is ok however its episode ended, failed if the server refused a request's content, and infra if the
        infrastructure failed in every attempt. Waits without a limit until a version is served.
        """
        return list(await asyncio.gather(*(self._sample(task, index, opened_at) for index in range(task.n_samples))))

    async def _sample(self, task: Task, index: int, opened_at: int) -> Result:
        async with self._free:
            started = time.monotonic()
            pause = FIRST_PAUSE_S
            for attempt in range(1, self._limits.attempts + 1):
                try:
                    episode = await self._attempt(task, index, attempt, opened_at)
                    return self._result(task, index, opened_at, started, attempt, episode)
                except InfrastructureFault as fault:
                    log.warning(
                        "task %s, sample %d, attempt %d of %d: %s",
                        task.task_id,
                        index,
                        attempt,
                        self._limits.attempts,
                        fault,
                    )
                    reason = str(fault)
                if attempt < self._limits.attempts:
                    await asyncio.sleep(pause)
                    pause *= 2
            lost = EpisodeState(ending=Ending.INFRA, error=reason)
            return self._result(task, index, opened_at, started, self._limits.attempts, lost)

    async def _attempt(self, task: Task, index: int, attempt: int, opened_at: int) -> EpisodeState:
        """Plays one attempt, from 1. Raises InfrastructureFault."""
        episode = EpisodeState(left_s=self._limits.environment_s)
        try:
            async with AsyncExitStack() as closing:
                environment = self._make()
                closing.push_async_callback(environment.close)
                if isinstance(environment, NamesEpisode):
                    environment.name_episode(index, attempt)
                try:
                    await self._policies.wait_for_issued(task, opened_at)
                    await self._play(environment, task, index, attempt, episode)
                except StuckThread:
                    closing.pop_all()  # its thread may still change what `close` would free
                    raise
        except StuckThread as error:
            log.error("task %s, sample %d: %s", task.task_id, index, error)
            self.stuck = str(error)
            return EpisodeState(ending=Ending.INFRA, error=self.stuck)
        except (ServerUnavailable, EnvironmentFault, StorageError) as error:
            raise InfrastructureFault(str(error)) from error
        except RequestRefused as error:
            if not error.by_content:
                raise InfrastructureFault(str(error)) from error
            log.error("task %s, sample %d: %s", task.task_id, index, error)
            return EpisodeState(ending=Ending.REFUSED, error=str(error))
        except InfrastructureFault:
            raise
        except Exception as error:
            log.exception("task %s, sample %d: the environment has a defect", task.task_id, index)
            raise InfrastructureFault(f"{type(error).__name__}: {error}") from error
        return episode

    async def _play(
        self, environment: Environment, task: Task, index: int, attempt: int, episode: EpisodeState
    ) -> None:
        try:
            async with asyncio.timeout(self._limits.environment_s) as limit:
                observation = await environment.reset(task)
        except TimeoutError as error:
            if not limit.expired():  # the environment raised it
                raise
            raise InfrastructureFault(f"the environment's reset took over {self._limits.environment_s:g} s") from error
        if isinstance(environment, RunsProgram):
            await self._run_program(environment, task, index, attempt, episode)
        else:
            episode.messages += observation.messages
            episode.tokens.begin(await self._rendered(task, episode.messages))
            episode.ending = await self._turns(environment, task, index, episode)
        episode.wall = environment.wall
        score_s = self._limits.environment_s
        if isinstance(environment, LimitsScore):
            score_s = max(score_s, environment.score_s + SCORE_MARGIN_S)
        try:
            async with asyncio.timeout(score_s) as limit:
                episode.rewards = episode.parts | _checked_rewards(await environment.score())
            if isinstance(environment, RecordsEnding):
                episode.calls += environment.ending_calls()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise InfrastructureFault(f"the environment's score took over {score_s:g} s") from error
        if isinstance(environment, LeavesFiles) and self._attachments is not None:
            episode.attachments = await asyncio.to_thread(_stored, self._attachments, environment.left_files())

    async def _run_program(
        self, environment: RunsProgram, task: Task, index: int, attempt: int, episode: EpisodeState
    ) -> None:
        """Plays an episode whose turns a program makes. Raises EnvironmentFault or InferenceError."""
        if self._programs is None:
            raise EnvironmentFault(f"{task.environment} is played by a program, and this worker has no gateway for it")
        played = await self._programs.play(environment, task, index, attempt, self._limits.max_turns)
        episode.tokens, episode.ending = played.tokens, played.ending
        episode.texts += played.texts
        episode.steps += played.texts
        episode.calls += played.calls
        episode.parts = {"turns_left_out": float(played.left_out)}

    async def _turns(self, environment: Environment, task: Task, index: int, episode: EpisodeState) -> Ending:
        """Plays turns until the episode ends. Returns its ending."""
        for turn in range(self._limits.max_turns):
            try:
                generation = await self._turn(task, index, turn, episode)
            except RequestRefused as error:
                if turn and _context_is_full(error):
                    return Ending.TRUNCATED
                raise
            completion = generation.completions[0]
            mode = sampled_mode(generation.logprobs_mode, task.sampling)
            episode.tokens.sample(completion, generation.model, mode)
            episode.texts.append(completion.text)
            episode.steps.append(completion.text)
            if completion.finish_reason == "length":
                return Ending.TRUNCATED
            started = time.monotonic()
            try:
                async with asyncio.timeout(episode.left_s) as limit:
                    transition = await environment.step(completion.text)
            except TimeoutError:
                if not limit.expired():
                    raise
                return Ending.TIMED_OUT
            episode.left_s -= time.monotonic() - started
            episode.calls += transition.tool_calls
            if transition.steps:
                episode.steps[-1:] = transition.steps
            if transition.rewards:
                episode.tokens.reward(_checked_parts(transition.rewards))
            if transition.done:
                return Ending.DONE
            if turn + 1 < self._limits.max_turns:
                await self._observe(task, episode, completion, transition.observation)
        return Ending.TURN_LIMIT

    async def _turn(self, task: Task, index: int, turn: int, episode: EpisodeState) -> Generation:
        sampling = task.sampling
        generation = await self._policies.call(
            task,
            lambda model: self._inference.generate(
                model,
                episode.tokens.context,
                n=1,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                seed=seed_of(derived_id("turn", task.task_id, index, turn)),
                stop=sampling.stop,
            ),
        )
        if not generation.completions or generation.completions[0].token_ids is None:
            raise NotTokenExact("the server gives no token ids, which an episode needs")
        return generation

    async def _observe(
        self, task: Task, episode: EpisodeState, completion: protocol.Completion, observation: Observation
    ) -> None:
        """Appends an observation to the tokens, or renders all messages again if the template cannot append."""
        assert completion.token_ids is not None
        episode.messages += [Message(role="assistant", content=completion.text), *observation.messages]
        end_token = int(completion.token_ids[-1]) if len(completion.token_ids) else -1
        tokens = await self._appended(task, observation.messages, end_token)
        if tokens is not None:
            episode.tokens.observe(tokens)
            return
        log.warning(
            "task %s: the chat template cannot append to turn %d; the prompt is rendered again, and the turns before "
            "it are not trained on",
            task.task_id,
            episode.tokens.n_turns,
        )
        episode.tokens.render_anew(await self._rendered(task, episode.messages))

    async def _appended(self, task: Task, messages: Sequence[Message], end_token: int) -> list[int] | None:
        """Returns the tokens between the end of a turn and the beginning of the next one, or None; see
        `appended_tokens`."""
        continued = [await self._rendered_array(task, [*probe, *messages], generation=True) for probe in _PROBES]
        while True:
            model, answered, cached = await self._policies.call(task, self._answered_probes)
            tokens = appended_tokens(answered, continued, end_token)
            if tokens is not None or not cached:
                return tokens
            # A server that was replaced may have another template under the same name.
            self._rendered_probes.pop(model, None)

    async def _answered_probes(self, model: str) -> tuple[str, list[protocol.Int32], bool]:
        """Returns the model, its renderings of the probes, and True if they are cached: they depend on nothing else."""
        found = self._rendered_probes.get(model)
        if found is not None:
            return model, found, True
        rendered = [await self._inference.render(model, _wired(each), add_generation_prompt=False) for each in _PROBES]
        self._rendered_probes[model] = rendered
        if len(self._rendered_probes) > _CACHED_MODELS:
            del self._rendered_probes[next(iter(self._rendered_probes))]
        return model, rendered, False

    async def _rendered(self, task: Task, messages: Sequence[Message]) -> list[int]:
        return [int(token) for token in await self._rendered_array(task, messages, generation=True)]

    async def _rendered_array(self, task: Task, messages: Sequence[Message], *, generation: bool) -> protocol.Int32:
        return await self._policies.call(
            task, lambda model: self._inference.render(model, _wired(messages), add_generation_prompt=generation)
        )

    def _result(
        self, task: Task, index: int, opened_at: int, started: float, attempts: int, episode: EpisodeState
    ) -> Result:
        """Returns the result of an episode. Raises InfrastructureFault if the server's answers cannot be one."""
        status = {Ending.INFRA: Status.INFRA, Ending.REFUSED: Status.FAILED}.get(episode.ending, Status.OK)
        values = episode.tokens.fields()
        spans, tokens = tuple(episode.tokens.spans), values["response_token_ids"]
        text = episode.texts[-1] if episode.texts else ""
        assert isinstance(tokens, bytes)
        try:
            return Result.model_validate(
                {
                    **values,
                    "result_id": result_id(task.task_id, index, spans, tokens, text),
                    "event_time": now_ms(),
                    "opened_at": opened_at,
                    "task": task,
                    "sample_index": index,
                    "worker_id": self._worker_id,
                    "status": status,
                    "error": episode.error,
                    "text": text,
                    "steps": tuple(episode.steps),
                    "sampling": task.sampling,
                    "tool_calls": tuple(episode.calls),
                    "server_id": self._server_id,
                    "elapsed_s": time.monotonic() - started,
                    "ending": episode.ending,
                    "rewards": episode.rewards,
                    "wall": episode.wall,
                    "attempts": attempts,
                    "attachments": episode.attachments,
                    "recorded_by": RecordedBy.WORKER,
                }
            )
        except ValidationError as error:
            raise InfrastructureFault(f"the server's answers cannot be a result: {error}") from error


def _stored(store: AttachmentStore, files: Sequence[LeftFile]) -> tuple[Attachment, ...]:
    """Stores files of an episode; those without a content are only named. Raises StorageError."""
    return tuple(
        Attachment(name=file.name, media_type=file.media_type, sha256="", bytes=file.size)
        if file.content is None
        else store.put(file.name, file.media_type, file.content)
        for file in files
    )


def _wired(messages: Sequence[Message]) -> list[protocol.Message]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _context_is_full(error: RequestRefused) -> bool:
    """Returns True if the server refused a prompt because it exceeds the model's context (`tentalis serve model` and
    vLLM say so with status 400)."""
    return error.status == 400 and "context" in error.message


def _checked_parts(parts: object) -> dict[str, float]:
    """Returns reward parts of an environment. Raises EnvironmentFault if one is not a finite number."""
    if not hasattr(parts, "items"):
        raise EnvironmentFault(f"the environment's rewards are a {type(parts).__name__}, not a mapping")
    checked: dict[str, float] = {}
    for name, value in parts.items():
        if isinstance(value, bool | int | float) and math.isfinite(value):
            checked[str(name)] = float(value)
        else:
            raise EnvironmentFault(f"the environment's reward {name!r} is {value!r}, not a finite number")
    return checked


def _checked_rewards(parts: object) -> dict[str, float]:
    """Like `_checked_parts`; `reward` must be in [-1, 1]."""
    checked = _checked_parts(parts)
    if abs(checked.get("reward", 0.0)) > 1.0:
        raise EnvironmentFault(f"the environment's reward is {checked['reward']}, outside [-1, 1]")
    return checked
