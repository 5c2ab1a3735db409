"""Tries versions on prompts: length and variety of their answers, their divergence from the base model's, their scores.

Begin with `TrialAnswers`, which samples the answers of all models of a trial in rounds.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeVar

import numpy as np

from schemas import topics
from schemas.ids import derived_id
from schemas.records import Message, Result, Sampling, Task
from schemas.wire.codec import Codec, DecodeError
from tentalis.inference.protocol import Float32, Inference, InferenceError, Int32, NotTokenExact, RequestRefused
from tentalis.inference.result import result_of
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.policies.guard import GuardEvidence, GuardLimits
from tentalis.policies.guard_statistics import distinct_n, similarity_across
from tentalis.policies.trial_judge import TrialJudge
from tentalis.rewards.registry import scorer_of, verify
from tentalis.rewards.verdict import FeedbackJudge, Judge, RewardError, Verdict
from tentalis.rewards.votes import NoVote
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# The log-ratio is clipped to this before the exponential.
CLAMP = 10.0
# Records per partition that are searched for prompts.
SEARCHED_RECORDS = 64
# Answers of a trial that are sampled and scored at the same time: more than that is a burden on a judge's server.
CONCURRENT_ANSWERS = 32
# An answer on which the judge gives no vote this often, although it votes on another, has no score.
VOTE_TRIES = 3


class PromptRefused(InferenceError):
    """The server refuses the prompt of a task for its content, such as its length: no model answers it."""

    def __init__(self, task: Task, refusal: RequestRefused) -> None:
        super().__init__(f"task {task.task_id}: {refusal}")
        self.task_id = task.task_id


def prompts_of(
    settings: Settings, codec: Codec, policy: str, limits: GuardLimits, refused: Collection[str] = ()
) -> list[Task]:
    """The policy's latest tasks, at most `limits.prompts`, and the fixture, in a deterministic order. `refused`: ids of
    tasks that are left out."""
    ends = end_offsets(settings, topics.TASKS)
    start = {partition: max(0, end - SEARCHED_RECORDS) for partition, end in ends.items()}
    found: dict[str, tuple[int, Task]] = {}
    for stored in read_to_end(settings, topics.TASKS, start=start, end=ends):
        if stored.value is None:
            continue
        try:
            record = stored.decode(codec)
        except DecodeError:  # scoring owns the dead letters of tasks
            continue
        if isinstance(record, Task) and record.policy == policy and record.task_id not in refused:
            found[record.task_id] = stored.timestamp, record
    latest = sorted(found.values(), key=lambda item: (-item[0], item[1].task_id))[: limits.prompts]
    tasks = sorted((task for _, task in latest), key=lambda task: task.task_id)
    fixture = [fixture_task(policy, text) for text in limits.fixture]
    return tasks + [task for task in fixture if task.task_id not in refused]


def fixture_task(policy: str, text: str) -> Task:
    """A fixture prompt as a task without a verifier."""
    return Task(
        task_id=derived_id("guard-fixture", policy, text),
        event_time=0,
        policy=policy,
        environment="chat",
        messages=(Message(role="user", content=text),),
        n_samples=1,
        sampling=Sampling(),
    )


def divergence(policy: Float32, base: Float32) -> float:
    """Sum over tokens of the k3 estimate of KL(policy || base), exp(d) - 1 - d with d = base - policy, from log-probs
    [n] of tokens that the policy drew (Schulman, "Approximating KL divergence"). Infinite if one is not finite."""
    if not (np.all(np.isfinite(policy)) and np.all(np.isfinite(base))):
        return float("inf")
    d = np.clip(base.astype(np.float64) - policy.astype(np.float64), -CLAMP, CLAMP)
    return float(np.sum(np.expm1(d) - d))


async def all_or_none(*calls: Coroutine[Any, Any, _T]) -> list[_T]:
    """The results of calls that run at the same time. If one fails, the others are cancelled, and have ended when its
    error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to a task. `kl` is summed over its tokens, None if it was not measured; `score` is None if nothing
    scores the task."""

    prompt: str
    tokens: tuple[int, ...]
    kl: float | None
    score: float | None
    unfinished: bool


class TrialAnswers:
    """The answers of several models to the same prompts, in rounds over the prompts and with the same seeds.

    A round is sampled once for each model. There are as many rounds as `limits.min_answers` needs; the order of prompts
    in a round is drawn once. The divergence from the base model is measured on half of the answers.
    """

    def __init__(
        self,
        server: Inference,
        base_model: str,
        tasks: Sequence[Task],
        limits: GuardLimits,
        judge: TrialJudge | None = None,
    ) -> None:
        self._server, self._base_model, self._limits, self._judge = server, base_model, limits, judge
        self.rounds = max(1, ceil(limits.min_answers / len(tasks))) if tasks else 0
        self._tasks = (
            sorted(tasks, key=lambda task: derived_id("guard-order", task.task_id)) if limits.min_answers else tasks
        )
        self._answers: dict[str, list[_Answer]] = {}
        self._without_scorer: set[str] = set()
        self._places = asyncio.Semaphore(CONCURRENT_ANSWERS)

    async def evidence(self, model: str, rounds: int, *, measures_kl: bool = False) -> GuardEvidence:
        """The evidence in a model's answers of the first rounds; those that are missing are sampled in one
        batch. `measures_kl`: the divergence too, of answers that are sampled now. Raises PromptRefused and other errors
        of the server (InferenceError), ScorerAway and NoVote."""
        answers = self._answers.setdefault(model, [])
        answers += await all_or_none(
            *(
                self._answer(model, task, number, measures_kl and self._measured(place))
                for number in range(len(answers) // len(self._tasks), rounds)
                for place, task in enumerate(self._tasks)
            )
        )
        return _evidence_of(answers[: rounds * len(self._tasks)])

    def keep(self, models: Collection[str]) -> None:
        """Forgets the answers of other models."""
        self._answers = {model: answers for model, answers in self._answers.items() if model in models}

    def _measured(self, place: int) -> bool:
        """True if the divergence is measured on the answer to the prompt at a place of a round."""
        return place % 2 == 0 or not self._limits.min_answers

    async def _answer(self, model: str, task: Task, number: int, measures_kl: bool) -> _Answer:
        """The answer to a task in a round, once a place is free."""
        async with self._places:
            try:
                return await self._sampled_answer(model, task, number, measures_kl)
            except RequestRefused as error:
                if error.by_content:
                    raise PromptRefused(task, error) from error
                raise

    async def _sampled_answer(self, model: str, task: Task, number: int, measures_kl: bool) -> _Answer:
        sampling, limit = task.sampling, self._limits.max_tokens
        # A greedy or truncated distribution does not show how far the policy has moved.
        temperature = sampling.temperature or 1.0
        generation = await self._server.generate(
            model,
            [{"role": message.role, "content": message.content} for message in task.messages],
            n=1,
            temperature=temperature,
            max_tokens=limit if sampling.max_tokens is None else min(sampling.max_tokens, limit),
            seed=int(derived_id("guard", task.task_id, *([str(number)] if number else [])).split("-")[0], 16) >> 1,
            stop=sampling.stop,
        )
        (completion,) = generation.completions
        prompt, response, logprobs = generation.prompt_token_ids, completion.token_ids, completion.logprobs
        if prompt is None or response is None or logprobs is None:
            raise NotTokenExact(f"the server gave no token ids or no log-probs for {model}: it cannot be evaluated")
        result = result_of(task, 0, generation, completion, worker_id="guard")
        return _Answer(
            prompt="\n".join(message.content or "" for message in task.messages),
            tokens=tuple(int(token) for token in response),
            kl=await self._divergence(model, prompt, response, logprobs, temperature) if measures_kl else None,
            score=await self._score(task, result),
            unfinished=completion.finish_reason == "length",
        )

    async def _divergence(
        self, model: str, prompt: Int32, response: Int32, logprobs: Float32, temperature: float
    ) -> float:
        """The divergence from the base model, summed over the answer's tokens."""
        if not len(response):
            return 0.0
        tokens = [*prompt.tolist(), *response.tolist()]
        try:
            base = await self._server.score(self._base_model, tokens, temperature)
        except RequestRefused:
            if temperature == 1.0:
                raise
            # vLLM scores at temperature 1 only: both models are compared there.
            logprobs = (await self._server.score(model, tokens))[len(prompt) :]
            base = await self._server.score(self._base_model, tokens)
        return divergence(logprobs, base[len(prompt) :])

    async def _score(self, task: Task, result: Result) -> float | None:
        """The score of an answer in [-1, 1]: by the task's rule, else by the configured judge; None without both."""
        try:
            reward = (await _verdict(task, result)).reward
        except RewardError as error:
            reward = None
            if str(error) not in self._without_scorer:
                self._without_scorer.add(str(error))
                log.warning("a candidate is tried without the rule of a task: %s", error)
        if reward is None and self._judge is not None:
            return await _grade(self._judge, task, result)
        return reward


async def _grade(judge: TrialJudge, task: Task, result: Result) -> float | None:
    """The judge's grade of an answer; None if it is unreadable, or if the judge gives no vote on this answer alone. Its
    text is then the cause, and the candidate would wait for ever. Raises ScorerAway, NoVote."""
    for _ in range(VOTE_TRIES):
        try:
            return await judge.score(task, result)
        except NoVote as error:
            failure = error
    if not await judge.votes():
        raise failure
    log.warning(
        "an answer to the task %s has no score: the judge gave no vote on it %d times", task.task_id, VOTE_TRIES
    )
    return None


async def _verdict(task: Task, result: Result) -> Verdict:
    """The verdict of the task's rule; unknown if the task has none, or a judge. Raises RewardError."""
    scorer = scorer_of(task)
    slow = scorer is not None and not isinstance(scorer, Judge | FeedbackJudge) and scorer.slow
    return await asyncio.to_thread(verify, task, result) if slow else verify(task, result)


def _evidence_of(answers: Sequence[_Answer]) -> GuardEvidence:
    tokens = sum(len(answer.tokens) for answer in answers)
    measured = [(answer.kl, len(answer.tokens)) for answer in answers if answer.kl is not None]
    measured_tokens = sum(length for _, length in measured)
    scores = [answer.score for answer in answers if answer.score is not None]
    said = [answer.tokens for answer in answers]
    return GuardEvidence(
        answers=len(answers),
        length=tokens / len(answers) if answers else 0.0,
        kl=sum(kl for kl, _ in measured) / measured_tokens if measured_tokens else None,
        score=sum(scores) / len(scores) if scores else None,
        distinct=distinct_n(said),
        similarity=similarity_across([answer.prompt for answer in answers], said),
        unfinished=sum(answer.unfinished for answer in answers) / len(answers) if answers else None,
        scores=tuple(answer.score for answer in answers),
    )
