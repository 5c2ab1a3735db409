"""A version tried out on prompts: how long its answers are, how far they are from the base model's, what they score."""

import asyncio
from collections.abc import Sequence

import numpy as np

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.ids import derived_id
from schemas.records import Message, Sampling, Task
from tentalis.config import Settings
from tentalis.guard import Evidence, Limits
from tentalis.inference.protocol import Float32, Inference
from tentalis.kafka import end_offsets, read_to_end
from tentalis.rewards.registry import verify
from tentalis.workers.result import result_of

# The log-ratio is cut here before the exponential.
CLAMP = 10.0
# Records per partition that are looked through for prompts.
LOOKED_AT = 64


def prompts_of(settings: Settings, codec: Codec, policy: str, limits: Limits) -> list[Task]:
    """The policy's latest tasks, `limits.prompts` at most, and the fixture; in an order that is always the same."""
    ends = end_offsets(settings, topics.TASKS)
    start = {partition: max(0, end - LOOKED_AT) for partition, end in ends.items()}
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
    """A prompt that nobody asked, as a task without a verifier."""
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
    [n] of tokens that the policy drew (Schulman, "Approximating KL divergence"). Infinite where one is not finite."""
    if not (np.all(np.isfinite(policy)) and np.all(np.isfinite(base))):
        return float("inf")
    d = np.clip(base.astype(np.float64) - policy.astype(np.float64), -CLAMP, CLAMP)
    return float(np.sum(np.expm1(d) - d))


async def evidence(server: Inference, model: str, base_model: str, tasks: Sequence[Task], limits: Limits) -> Evidence:
    """What `model` does with the tasks, one answer each, all at once and with the same seeds for every model. Raises
    InferenceError."""
    seen = await asyncio.gather(*(_answer(server, model, base_model, task, limits) for task in tasks))
    tokens = sum(length for length, _, _ in seen)
    scores = [score for _, _, score in seen if score is not None]
    return Evidence(
        answers=len(seen),
        length=tokens / len(seen) if seen else 0.0,
        kl=None if model == base_model or not tokens else sum(kl for _, kl, _ in seen) / tokens,
        score=sum(scores) / len(scores) if scores else None,
    )


async def _answer(
    server: Inference, model: str, base_model: str, task: Task, limits: Limits
) -> tuple[int, float, float | None]:
    """(tokens, divergence summed over them, score if there is a rule)."""
    sampling, most = task.sampling, task.sampling.max_tokens
    # A greedy or cut distribution says nothing of how far the policy has moved.
    temperature = sampling.temperature or 1.0
    generation = await server.generate(
        model,
        [{"role": message.role, "content": message.content} for message in task.messages],
        n=1,
        temperature=temperature,
        max_tokens=limits.max_tokens if most is None else min(most, limits.max_tokens),
        seed=int(derived_id("guard", task.task_id).split("-")[0], 16) >> 1,
        stop=sampling.stop,
    )
    (completion,) = generation.completions
    kl = 0.0
    if model != base_model and len(completion.token_ids):
        whole = [*generation.prompt_token_ids.tolist(), *completion.token_ids.tolist()]
        base = await server.score(base_model, whole, temperature)
        kl = divergence(completion.logprobs, base[len(generation.prompt_token_ids) :])
    result = result_of(task, 0, generation, completion, worker_id="guard")
    return len(completion.token_ids), kl, verify(task, result).reward
