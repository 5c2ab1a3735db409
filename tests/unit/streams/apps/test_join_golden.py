"""The join writes today what it wrote before: one long log, and the sha256 of all that comes of it.

A digest here changes only when the semantics change, on purpose, or when a record's schema has a new version: then the
bytes differ in the 8 bytes of its fingerprint and in its new fields alone. It never changes because something became
faster.
"""

import hashlib
import random
from collections.abc import Iterable

from schemas.records import Hint, HintKind, LogprobsMode, PolicySpan, Record, Sampling, Score, Source, Status, TokenSpan
from schemas.tensors import float32_bytes
from streams.runtime.processor import LogRecord
from tests.support.join_support import (
    PARTITION,
    START,
    drive,
    forget,
    head,
    hint,
    open_,
    record_at,
    sample,
    score,
    worker,
)

RECORDS = 3000
OUTPUTS = "a8938fba61402075915099a75681537bc50aea77a7f0deaa140e63b3270c1a3d"
CHANGES = "64426f7a7cea61583e5c70d1ddcd525321cba1c5056a8b9ae03c1450ef570960"
DEAD = "ca09b9649cd5e489a6dcf1ab6d7ab9865e4685090ed57a6b18dc5aeec5099f77"


def varied(half: Score | Hint, chance: random.Random) -> Score | Hint:
    """The half with fields filled that the plain ones leave at their defaults."""
    sampling = Sampling(
        temperature=chance.choice([0.0, 0.7, 1.0]),
        top_p=chance.choice([0.9, 1.0]),
        top_k=chance.choice([0, 40]),
        stop=chance.choice([(), ("\n", "ende")]),
        constrained=chance.random() < 0.1,
    )
    spans = chance.choice([(), (PolicySpan(start=1, policy="a@v1"), PolicySpan(start=3, policy="a@v2"))])
    mode = chance.choice([LogprobsMode.PROCESSED, LogprobsMode.RAW])
    of = half.sample.model_copy(update={"sampling": sampling, "policy_spans": spans, "logprobs_mode": mode})
    update: dict[str, object] = {"sample": of, "feedback_id": chance.choice([None, "feedback"])}
    if isinstance(half, Score):
        update |= {
            "components": chance.choice([{}, {"länge": 0.25, "b": -0.0, "a": 1e-9}]),
            "step_scores": float32_bytes([0.5, -1.0]),
            "step_spans": (TokenSpan(start=0, end=2), TokenSpan(start=2, end=4)),
            "votes": ("ja", "no"),
        }
    elif half.hints:
        update |= {"hints": ("Kürzer.", "Say \N{SNOWMAN}.", ""), "teacher_policy": chance.choice([None, "base"])}
    return half.model_copy(update=update)


def made(chance: random.Random, now: int) -> Record | bytes:
    """One record of a log that has something of everything."""
    number, what = chance.randrange(40), chance.random()
    terms = {"rl": Source.RESULT, "opd": [Source.USER, None, Source.MANAGER][number % 3]}
    task = head(f"täsk-{number}-{now // 7000}", 1 + number % 4 + (chance.random() < 0.01), **terms)
    if number % 5:
        task = task.model_copy(update={"session_id": None, "user_id": None, "turn_index": number})
    if what < 0.08:
        return open_(task, START + now - chance.choice([0, 30, 6000]))
    if what < 0.09:
        return forget(user_id=f"user-{task.task_id}")
    if what < 0.11:
        return b"\xc3\x01rubbish"
    index = chance.randrange(task.n_samples)
    status = Status.FAILED if number % 7 == 0 else Status.OK
    of = sample(task, index, chance.choice(["r1"] * 9 + ["r2"]), status=status, n=4 + (chance.random() < 0.02))
    source, at = chance.choice([Source.USER, Source.MANAGER]), START + now - chance.choice([0, 0, 0, 6000])
    if what < 0.6:
        scored = score(of, chance.choice([1.0, 0.1, -0.7, None]), at=at, source=chance.choice([Source.RESULT, source]))
        return varied(scored, chance)
    kind = chance.choice([HintKind.ACCEPTED, HintKind.NONE, HintKind.REJECTED])
    return varied(hint(of, kind, at=at, source=source), chance)


def golden_log() -> list[LogRecord]:
    """The log; the same on every machine."""
    chance, now, records = random.Random(42), 0, []
    for offset in range(RECORDS):
        now += chance.choice([0, 0, 1, 3, 10, 10, 40, -30])
        what = made(chance, now)
        records.append(record_at(offset, now, what, "strange" if chance.random() < 0.01 else None))
        if chance.random() < 0.02 and not isinstance(what, bytes):
            cut = records[-1]
            records[-1] = LogRecord(cut.topic, PARTITION, offset, cut.timestamp, cut.key, cut.value[:-3])
    return records


def digest(items: Iterable[object]) -> str:
    sha = hashlib.sha256()
    for item in items:
        sha.update(repr(item).encode() + b"\n")
    return sha.hexdigest()


def test_the_same_log_gives_the_same_bytes() -> None:
    log, processor = golden_log(), worker({})
    effects = [drive(processor.process(PARTITION, log[at : at + 13])) for at in range(0, len(log), 13)]
    outputs = [(o.topic, o.key, o.value, o.headers, o.partition) for e in effects for o in e.outputs]
    dead = [(d.record.offset, d.stage, d.error_class, d.error) for e in effects for d in e.dead]
    assert min(len(outputs), len(dead)) > 100
    assert digest(outputs) == OUTPUTS
    assert digest(e.changes for e in effects) == CHANGES
    assert digest(dead) == DEAD
