"""The halves that the join's benchmarks fold, encoded once.

Each task has one Score of 9 KB (1,000 tokens, mask, log-probs) and one Hint, either without content (kind none, 300
bytes) or with the teacher's log-probs (accepted, 13 KB). The hint comes up to `spread` tasks before or after its score.
One in `open_every` tasks never gets its hint: it stays open, with its payload.
"""

import random
import time
from collections.abc import Container, Iterator, Sequence

import numpy as np

from schemas import topics
from schemas.ids import derived_id, sha256_hex
from schemas.records import (
    Hint,
    HintKind,
    LogprobsMode,
    PolicySpan,
    Record,
    Sample,
    Score,
    Source,
    TaskHead,
    Terms,
)
from schemas.tensors import float32_bytes, int32_bytes
from schemas.wire.codec import Codec
from tentalis.kafka.producer import Publisher, headers_of
from tentalis.service.settings import Settings

TOKENS = 1000

Half = tuple[str, bytes, list[tuple[str, bytes]]]
"""(key, value, headers)"""


def sample_of(task_id: str, rng: np.random.Generator, n_tokens: int = TOKENS) -> Sample:
    """A sample of n_tokens tokens, the first fifth of them the prompt."""
    prompt = n_tokens // 5
    tokens = int32_bytes(rng.integers(0, 49_000, n_tokens))
    logprobs = -rng.exponential(0.7, n_tokens).astype(np.float32)
    logprobs[:prompt] = 0.0
    return Sample(
        head=TaskHead(
            task_id=task_id,
            policy="bench",
            environment="chat",
            terms=Terms(rl=Source.RESULT, opd=Source.USER, opd_window_ms=3_500_000),
            manager_id="manager",
            run_id="run",
            session_id=f"session-{task_id}",
            turn_index=3,
            user_id="user",
        ),
        sample_index=0,
        result_id=derived_id("result", task_id),
        response_digest=sha256_hex(tokens[4 * prompt :]),
        worker_id="worker",
        token_ids=tokens,
        loss_mask=b"\0" * prompt + b"\1" * (n_tokens - prompt),
        sampler_logprobs=float32_bytes(logprobs),
        logprobs_mode=LogprobsMode.PROCESSED,
        policy_spans=(PolicySpan(start=prompt, policy="bench@v3"),),
    )


def score_of(sample: Sample, at: int) -> Score:
    """The RL half of a sample."""
    return Score(
        score_id=derived_id("score", sample.result_id),
        event_time=at,
        opened_at=at,
        sample=sample,
        source=Source.RESULT,
        reward=0.5,
        components={"taste": 0.5, "length": 0.25},
        scorer="bench/1",
    )


def hint_of(sample: Sample, at: int, accepted: bool, rng: np.random.Generator) -> Hint:
    """The OPD half of a sample."""
    return Hint(
        hint_id=derived_id("hint", sample.result_id),
        event_time=at,
        opened_at=at,
        sample=sample if accepted else sample.without_tokens(),
        source=Source.USER,
        kind=HintKind.ACCEPTED if accepted else HintKind.NONE,
        hints=("Say first what to do, then why.",) if accepted else (),
        teacher_policy="bench@base" if accepted else None,
        teacher_logprobs=float32_bytes(-rng.exponential(0.7, TOKENS).astype(np.float32)) if accepted else None,
        hinter="bench/1",
    )


def halves(
    name: str, tasks: int, spread: int, open_every: int, codec: Codec, accepted: Container[int] = ()
) -> Iterator[Half]:
    """Yields the load in log order; the same for the same arguments, except for the opening times.

    Args:
        open_every: one in so many tasks gets no hint; 0: every task gets one.
        accepted: the numbers of the tasks whose hints are accepted; the others are of kind none.
    """
    chance, rng, now = random.Random(7), np.random.default_rng(7), time.time_ns() // 1_000_000
    order = []
    for index in range(tasks):
        order.append((float(index), index, False))
        if not open_every or index % open_every:
            order.append((index + chance.uniform(-spread, spread), index, True))
    waiting: dict[int, Sample] = {}
    for _, index, is_hint in sorted(order):
        if index not in waiting:
            sample = waiting[index] = sample_of(f"{name}-{index}", rng)
        else:
            sample = waiting.pop(index)
        record: Record = hint_of(sample, now, index in accepted, rng) if is_hint else score_of(sample, now)
        yield record.key, codec.encode(topics.HALVES, record), headers_of(record, "bench")


def send(settings: Settings, codec: Codec, load: Sequence[Half] | Iterator[Half]) -> None:
    """Writes a load to the halves topic as fast as possible."""
    publisher = Publisher(settings, "bench", codec)
    for key, value, headers in load:
        publisher.send_bytes(topics.HALVES, key.encode(), value, headers)
    publisher.flush(120)
