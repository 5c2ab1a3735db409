"""Samples answers of a model to prompts, or plays episodes with it, and scores them, in the way of a worker and of the
scoring application."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from schemas.ids import derived_id
from schemas.records import Result, Sampling, Status, Task
from tentalis.agents.environments import Environment
from tentalis.agents.scenarios.prompt_file import Prompt
from tentalis.agents.scenarios.prompts import PromptScenario, messages_of
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.agents.workers.policy_calls import PolicyCalls
from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import RequestRefused
from tentalis.inference.result import result_of
from tentalis.learning.environments import programs_play
from tentalis.learning.relayed_programs import RelayedPrograms
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.candidates import Candidates
from tentalis.policies.served import ServedVersions
from tentalis.rewards import registry
from tentalis.rewards.episode import EpisodeScorer
from tentalis.rewards.functions.errors import OutOfRange
from tentalis.rewards.thread_runner import time_limit_of, verify_in_thread
from tentalis.rewards.verdict import FeedbackJudge, Judge, Scorer, Verdict
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

_OWN = "learn"
CONCURRENT = 16
"""Prompts that are answered at the same time."""


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer with its reward and its parts; without a reward, `problem` has the reason."""

    text: str
    reward: float | None
    components: Mapping[str, float]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """The way of asking: `n` answers per prompt at a temperature; 0 is greedy. `make`: makes the environment that plays
    each answer as an episode; None: an answer is one completion. `seed`: of completions; that of an episode comes from
    its number."""

    n: int
    temperature: float
    seed: int = 0
    make: Callable[[], Environment] | None = None


async def base_model(client: OpenAIClient) -> str:
    """Returns the name under which the server serves the base model."""
    return next(str(card["id"]) for card in await client.models() if not card.get("parent"))


async def scored_answers(
    client: OpenAIClient,
    model: str,
    scenario: PromptScenario,
    prompts: Sequence[Prompt],
    asked: Asked,
    slots: asyncio.Semaphore | None = None,
) -> list[list[ScoredAnswer]]:
    """Returns the scored answers of a model to each prompt. `slots`: those of several models that are asked at the same
    time; None: CONCURRENT.

    An answer that the server refuses has an unknown reward. Raises ServerUnavailable.
    """
    slots = slots or asyncio.Semaphore(CONCURRENT)
    player = None if asked.make is None else _player(client, model, scenario.environment, asked.make)

    async def one(number: int, prompt: Prompt) -> list[ScoredAnswer]:
        async with slots:
            task = _task(scenario, prompt, number, asked)
            return await (_answer(client, model, task, asked) if player is None else _played(player, task))

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def _task(scenario: PromptScenario, prompt: Prompt, number: int, asked: Asked) -> Task:
    return Task(
        task_id=derived_id("task", "learn", number, asked.n, asked.seed),
        event_time=now_ms(),
        policy=scenario.policy,
        environment=scenario.environment,
        messages=messages_of(prompt),
        n_samples=asked.n,
        sampling=Sampling(temperature=asked.temperature, max_tokens=scenario.sampling.max_tokens),
        verifier=scenario.verifier(prompt),
        terms=scenario.terms,
    )


def _player(client: OpenAIClient, model: str, environment: str, make: Callable[[], Environment]) -> EpisodePlayer:
    policies = PolicyCalls(
        ServedVersions(), AssignedVersions(), Candidates(), worker_id=_OWN, server_id=_OWN, model=model
    )
    programs = RelayedPrograms(client.base_url, model) if programs_play(environment) else None
    limits = EpisodeLimits.of(environment)
    return EpisodePlayer(client, policies, make, limits, worker_id=_OWN, server_id=_OWN, programs=programs)


async def _played(player: EpisodePlayer, task: Task) -> list[ScoredAnswer]:
    results = await player.answer(task, now_ms())
    return list(await asyncio.gather(*(_scored_episode(task, result) for result in results)))


async def _scored_episode(task: Task, result: Result) -> ScoredAnswer:
    if result.status is Status.OK:
        return await _scored(task, result)
    return ScoredAnswer(result.text, None, {}, f"the episode has no result: {result.error or result.status.value}")


async def _answer(client: OpenAIClient, model: str, task: Task, asked: Asked) -> list[ScoredAnswer]:
    try:
        generation = await client.generate(
            model,
            [{"role": message.role, "content": message.content} for message in task.messages],
            n=task.n_samples,
            temperature=task.sampling.temperature,
            max_tokens=task.sampling.max_tokens,
            seed=asked.seed,
        )
    except RequestRefused as error:
        return [ScoredAnswer("", None, {}, f"the model server refused it: {error.message}")] * task.n_samples
    results = [
        result_of(task, index, generation, completion, worker_id=_OWN)
        for index, completion in enumerate(generation.completions)
    ]
    return list(await asyncio.gather(*(_scored(task, result) for result in results)))


async def _scored(task: Task, result: Result) -> ScoredAnswer:
    scorer = registry.scorer_of(task)
    assert scorer is not None, "the task names a verifier"
    try:
        scorer.check(task)
        verdict = await _verdict(scorer, task, result)
    except TimeoutError as error:
        late = f"the reward function took longer than {time_limit_of(scorer):g} s"
        return ScoredAnswer(result.text, None, {}, str(error) or late)
    except OutOfRange as error:
        return ScoredAnswer(result.text, None, {}, f"{error}. `tentalis learn` takes it as --reward-range LOW,HIGH")
    except Exception as error:  # the user's function may raise anything, and the reward is then unknown
        log.info("unknown reward", exc_info=error)
        return ScoredAnswer(result.text, None, {}, str(error) or type(error).__name__)
    giver = "the environment" if isinstance(scorer, EpisodeScorer) else "the reward function"
    problem = "" if verdict.reward is not None else f"{giver} gave none"
    return ScoredAnswer(result.text, verdict.reward, verdict.components, problem)


async def _verdict(scorer: Scorer, task: Task, result: Result) -> Verdict:
    if isinstance(scorer, Judge):
        async with asyncio.timeout(scorer.time_limit_s):
            return await scorer.judge(task, result)
    assert not isinstance(scorer, FeedbackJudge), "a reward function scores answers, not feedback"
    return await verify_in_thread(scorer, task, result)
