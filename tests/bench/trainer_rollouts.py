"""Rollouts with random tokens for the benchmarks of the trainer."""

import numpy as np

from schemas.records import Rollout
from tests.support.trainer_lab import rollout

Range = tuple[int, int]
"""Smallest and largest number of tokens."""


def grouped(vocabulary: int, groups: int, prompts: Range, responses: Range) -> list[Rollout]:
    """Groups of eight rollouts with a shared prompt, rewards and teacher log-probs."""
    draw = np.random.default_rng(0)
    made = []
    for group in range(groups):
        prompt = draw.integers(1, vocabulary, draw.integers(prompts[0], prompts[1] + 1)).tolist()
        rewards = draw.random(8).tolist()
        for index in range(8):
            response = draw.integers(1, vocabulary, draw.integers(responses[0], responses[1] + 1)).tolist()
            sampler = (-2.0 + 0.1 * draw.standard_normal(len(response))).tolist()
            made.append(
                rollout(
                    f"g{group}",
                    index,
                    policy="bench",
                    prompt=prompt,
                    response=response,
                    sampler=sampler,
                    teacher=sampler,
                    reward=rewards[index],
                    rewards=rewards,
                    n=8,
                )
            )
    return made


def single(vocabulary: int, conversations: int, tokens: Range) -> list[Rollout]:
    """Conversations of one answer each, a third of their tokens in the prompt; nothing is shared."""
    draw = np.random.default_rng(0)
    made = []
    for number, n in enumerate(draw.integers(tokens[0], tokens[1] + 1, conversations).tolist()):
        ids = draw.integers(1, vocabulary, n).tolist()
        sampler = (-2.0 + 0.1 * draw.standard_normal(n - n // 3)).tolist()
        made.append(
            rollout(
                f"c{number}",
                policy="bench",
                prompt=ids[: n // 3],
                response=ids[n // 3 :],
                sampler=sampler,
                teacher=sampler,
                reward=float(draw.choice([-1.0, 1.0])),
            )
        )
    return made
