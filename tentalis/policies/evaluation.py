"""Tries a version on prompts: length of its answers, their divergence from the base model's, and their scores."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from schemas import topics
from schemas.ids import derived_id
from schemas.records import Message, Sampling, Task
from schemas.wire.codec import Codec, DecodeError
from tentalis.inference.protocol import Float32, Inference, NotTokenExact
from tentalis.inference.result import result_of
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.policies.guard import GuardEvidence, GuardLimits
from tentalis.policies.guard_statistics import distinct_n, similarity_across
from tentalis.rewards.registry import verify
from tentalis.service.settings import Settings

# The log-ratio is clipped to this before the exponential.
CLAMP = 10.0
# Records per partition that are searched for prompts.
SEARCHED_RECORDS = 64


def prompts_of(settings: Settings, codec: Codec, policy: str, limits: GuardLimits) -> list[Task]:
    """The policy's latest tasks, at most `limits.prompts`, and the fixture, in a deterministic order."""
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
        if isinstance(record, Task) and record.policy == policy:
            found[record.task_id] = stored.timestamp, record
    latest = sorted(found.values(), key=lambda item: (-item[0], item[1].task_id))[: limits.prompts]
    tasks = sorted((task for _, task in latest), key=lambda task: task.task_id)
    return tasks + [fixture_task(policy, text) for text in limits.fixture]


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


async def gather_evidence(
    server: Inference, model: str, base_model: str, tasks: Sequence[Task], limits: GuardLimits
) -> GuardEvidence:
    """Measures `model` on the tasks: one answer each or, for `limits.min_answers`, as many as needed, in rounds over
    all tasks and with the same seeds for every model. The order of prompts in a round is drawn once. Raises
    InferenceError."""
    rounds = max(1, ceil(limits.min_answers / len(tasks))) if tasks else 0
    order = sorted(tasks, key=lambda task: derived_id("guard-order", task.task_id)) if limits.min_answers else tasks
    answers: list[_Answer] = []
    for number in range(rounds):
        answers += await asyncio.gather(*(_answer(server, model, base_model, task, limits, number) for task in order))
    return _evidence_of(answers, with_kl=model != base_model)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to a task: `kl` is summed over its tokens, `score` is None if the task has no verifier."""

    prompt: str
    tokens: tuple[int, ...]
    kl: float
    score: float | None
    unfinished: bool


def _evidence_of(answers: Sequence[_Answer], with_kl: bool) -> GuardEvidence:
    tokens = sum(len(answer.tokens) for answer in answers)
    scores = [answer.score for answer in answers if answer.score is not None]
    said = [answer.tokens for answer in answers]
    return GuardEvidence(
        answers=len(answers),
        length=tokens / len(answers) if answers else 0.0,
        kl=sum(answer.kl for answer in answers) / tokens if with_kl and tokens else None,
        score=sum(scores) / len(scores) if scores else None,
        distinct=distinct_n(said),
        similarity=similarity_across([answer.prompt for answer in answers], said),
        unfinished=sum(answer.unfinished for answer in answers) / len(answers) if answers else None,
        scores=tuple(answer.score for answer in answers),
    )


async def _answer(
    server: Inference, model: str, base_model: str, task: Task, limits: GuardLimits, number: int
) -> _Answer:
    """The answer to a task in a round."""
    sampling, max_tokens = task.sampling, task.sampling.max_tokens
    # A greedy or truncated distribution does not show how far the policy has moved.
    temperature = sampling.temperature or 1.0
    generation = await server.generate(
        model,
        [{"role": message.role, "content": message.content} for message in task.messages],
        n=1,
        temperature=temperature,
        max_tokens=limits.max_tokens if max_tokens is None else min(max_tokens, limits.max_tokens),
        seed=int(derived_id("guard", task.task_id, *([str(number)] if number else [])).split("-")[0], 16) >> 1,
        stop=sampling.stop,
    )
    (completion,) = generation.completions
    prompt, response, logprobs = generation.prompt_token_ids, completion.token_ids, completion.logprobs
    if prompt is None or response is None or logprobs is None:
        raise NotTokenExact(f"the server gave no token ids or no log-probs for {model}: it cannot be evaluated")
    kl = 0.0
    if model != base_model and len(response):
        base = await server.score(base_model, [*prompt.tolist(), *response.tolist()], temperature)
        kl = divergence(logprobs, base[len(prompt) :])
    result = result_of(task, 0, generation, completion, worker_id="guard")
    return _Answer(
        prompt="\n".join(message.content or "" for message in task.messages),
        tokens=tuple(int(token) for token in response),
        kl=kl,
        score=verify(task, result).reward,
        unfinished=completion.finish_reason == "length",
    )
