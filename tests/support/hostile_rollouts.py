"""Rollouts as a hostile client writes them: every number at its bounds, denormal, huge or none; truncated; replayed."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from schemas import topics
from schemas.digest import with_digest
from schemas.records import Rollout, TokenSpan
from schemas.tensors import float32_bytes, int32_bytes, uint8_bytes
from schemas.wire.codec import Codec
from tests.support.hostile_numbers import hostile_number
from tests.support.trainer_lab import VOCAB, rollout

FLOATS = (float("nan"), float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, 1.0, -1e4, -9999.0, 0.5)
FINITE = (1e300, -1e300, 5e-324, 1e-39, 3.4e38, -3.4e38, 0.0, -1e-4, 1.0, -1.0)
TEMPERATURES = (5e-324, 1e-39, 1e-6, 0.0, 0.0499, 0.05, 100.0, 101.0, 1e30, 1.7e308)
SPAN = (TokenSpan(start=0, end=7),)


def hostile(prefix: str, policy: str, chance: random.Random, codec: Codec) -> Iterator[tuple[str, bytes]]:
    """Yields key and value of record after record."""
    for number in count():
        made = _record(f"{prefix}{number}", policy, chance)
        value = codec.encode(topics.ROLLOUTS, made)
        if chance.random() < 0.1:
            value = value[: chance.randrange(len(value))]
        yield made.key, value


def _record(task_id: str, policy: str, chance: random.Random) -> Rollout:
    three = [chance.choice(FLOATS) for _ in range(3)]
    fields: dict[str, Any] = chance.choice(
        (
            {"temperature": chance.choice(TEMPERATURES)},
            {"temperature": chance.choice(TEMPERATURES[:3])},
            {"sampler": three},
            {"teacher": three},
            {"step_scores": float32_bytes([chance.choice(FLOATS)]), "step_spans": SPAN},
            {"step_scores": float32_bytes([1.0]), "step_spans": (TokenSpan(start=5, end=2**31 - 1),)},
            {"n": 2, "group_mean": chance.choice(FINITE), "group_std": chance.choice(FINITE)},
            {"n": 2, "group_std": -1e-4, "n_rewarded": 2},
            {"n": 256, "n_rewarded": 2**31 - 1, "n_closed": 2**31 - 1},
            {"reward": chance.choice((-1.0, 1.0, 5e-324, -0.0))},
            {"components": {"x": chance.choice(FINITE)}},
            {"loss_mask": uint8_bytes([0, *chance.choices(range(256), k=6)])},
            {"loss_mask": uint8_bytes([1] * 7)},
            {"loss_mask": b"", "sampler_logprobs": b""},
            {"token_ids": int32_bytes(chance.choices((0, VOCAB - 1, VOCAB, -1, 2**31 - 1, -(2**31)), k=7))},
            {"topk": 1, "topk_ids": int32_bytes([0] * 7), "topk_logprobs": float32_bytes((three * 3)[:7])},
            {"prompt": [1], "response": np.arange(1, 60).tolist()},
        )
    )
    if chance.random() < 0.2:
        fields = {"temperature": chance.choice(TEMPERATURES[:2])}
    made = rollout(task_id, policy=policy, **({"rewards": [0.0, 1.0]} | fields))
    if chance.random() < 0.4:
        made = hostile_number(task_id, policy, chance)
    return made if chance.random() < 0.9 else with_digest(made).model_copy(update={"digest": "0" * 64})
