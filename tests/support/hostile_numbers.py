"""Rollouts with one number at its bounds: each number of the record in turn, also of its parts, tokens and versions."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel

from schemas.digest import with_digest
from schemas.records import Provenance, Rollout, TokenSpan
from schemas.tensors import float32_bytes, int32_bytes
from tests.support.trainer_lab import VOCAB, rollout

Place = tuple[str | int, ...]
"""The way to a number: names of fields, indices and keys."""

NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
TINY = (5e-324, -5e-324, 1e-300, 1e-45, -1e-45, 1e-39, 0.0, -0.0)
LARGE = (1.0, -1.0, 1.0 + 2e-16, 1e4, -1e4, -1.0001e4, 3.4e38, -3.4e38, 1e39, 1.7e308, -1.7e308)
FLOATS = (*NOT_FINITE, *TINY, *LARGE, 0.0499, 0.05, 100.0, 100.1)
INTS = (0, 1, -1, 2, 256, 257, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**53, 2**63 - 1, -(2**63))
TOKENS = (0, -1, VOCAB - 1, VOCAB, 2**31 - 1, -(2**31))
VERSIONS = ("0", "1", "01", "-1", "²", "1e3", "nan", "", str(2**31), str(2**63), "9" * 400, "9" * 5000)
MASK = "loss_mask"
INT32S = ("token_ids", "topk_ids")


def complete(task_id: str = "complete", policy: str = "tiny") -> Rollout:
    """An honest rollout of a pair, with every field that can hold a number."""
    made = rollout(task_id, policy=policy, n=2, rewards=[0.0, 1.0], teacher=[-3.0, -4.0, -5.0], n_rewarded=2)
    n = made.n_tokens
    return with_digest(
        made.model_copy(
            update={
                "head": made.head.model_copy(update={"session_id": f"s-{task_id}", "turn_index": 0}),
                "components": {"x": 1.0},
                "step_scores": float32_bytes([1.0]),
                "step_spans": (TokenSpan(start=4, end=n),),
                "topk": 1,
                "topk_ids": int32_bytes([1] * n),
                "topk_logprobs": float32_bytes([-2.0] * n),
                "provenance": (Provenance(half="score", half_id="h", topic="t", partition=0, offset=0),),
            }
        )
    )


def numbers(part: BaseModel) -> list[Place]:
    """Returns the places of all numbers of a record. Bytes and the names of versions are one each."""
    return [place for name in type(part).model_fields for place in _numbers(getattr(part, name), (name,))]


def _numbers(value: Any, at: Place) -> Iterator[Place]:
    if isinstance(value, BaseModel):
        yield from ((*at, *place) for place in numbers(value))
    elif isinstance(value, dict | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, (*at, key))
    elif isinstance(value, bytes | float) or type(value) is int or (isinstance(value, str) and "@v" in value):
        yield at


def bounds(record: Rollout, place: Place) -> Iterator[Any]:
    """Yields the values that the number at a place can have at its bounds, and beyond."""
    value = read(record, place)
    if isinstance(value, str):
        yield from (f"{record.head.policy}@v{version}" for version in VERSIONS)
    elif isinstance(value, bytes):
        yield b""
        yield value + value
        yield from _arrays(value, str(place[-1]))
    else:
        yield from INTS if isinstance(value, int) else FLOATS


def _arrays(data: bytes, name: str) -> Iterator[bytes]:
    kind: Any = np.uint8 if name == MASK else np.int32 if name in INT32S else np.float32
    given: Any = range(256) if name == MASK else TOKENS if name in INT32S else FLOATS
    with np.errstate(over="ignore"):
        values = np.array(given).astype(kind)
    for value in np.unique(values[::17]) if name == MASK else values:
        # All of them, and the last one alone: a prompt has no log-probs, and its tokens are not trained.
        array = np.frombuffer(data, kind).copy()
        array[-1] = value
        yield array.tobytes()
        yield np.full_like(array, value).tobytes()


def read(part: Any, place: Place) -> Any:
    """Returns the value at a place."""
    for name in place:
        part = getattr(part, name) if isinstance(part, BaseModel) else part[name]
    return part


def replaced(part: Any, place: Place, value: Any) -> Any:
    """Returns a copy with another value at a place, unchecked, as a client of its own writes it."""
    if not place:
        return value
    name, rest = place[0], place[1:]
    if isinstance(part, BaseModel):
        return part.model_copy(update={str(name): replaced(getattr(part, str(name)), rest, value)})
    new = replaced(part[name], rest, value)
    if isinstance(part, dict):
        return part | {name: new}
    return tuple(new if index == name else item for index, item in enumerate(part))


def at_bounds(task_id: str, policy: str, place: Place, value: Any) -> Rollout:
    """Returns a rollout with this value at this place, an id that holds its index, and a digest that fits."""
    made = replaced(complete(task_id, policy), place, value)
    return with_digest(made.model_copy(update={"rollout_id": f"{task_id}/{made.sample_index}"}))


def hostile_numbers(policy: str = "tiny") -> Iterator[Rollout]:
    """Yields a rollout for each number at each of its bounds."""
    honest = complete()
    for number, place in enumerate(numbers(honest)):
        for index, value in enumerate(bounds(honest, place)):
            yield at_bounds(f"n{number}-{index}", policy, place, value)


def hostile_number(task_id: str, policy: str, chance: random.Random) -> Rollout:
    """Returns a rollout with one of its numbers at one of its bounds."""
    honest = complete()
    place = chance.choice(numbers(honest))
    return at_bounds(task_id, policy, place, chance.choice(list(bounds(honest, place))))
