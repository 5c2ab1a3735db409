"""Verifies the last signals of aggregation against its inputs, without the application's code.

Every distinct outcome and graded feedback of the log counts in the window of its event time, however late it came: a
run is shorter than the hour for which windows accept late records. So the last signal of each key is a function of the
whole log, computed here in one pass and without running means.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, pvariance

from schemas.records import Feedback, MetaSignal, Outcome, OutcomeKind, Polarity
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import Stored
from tests.chaos.findings import Findings

WINDOW_MS = 60_000
TOLERANCE = 1e-9
"""Absolute tolerance of means and variances, of numbers in [-1, 1]; counts must be equal."""


@dataclass(slots=True)
class Bucket:
    """The content of one window, for one partition of outcomes or of feedback."""

    rewards: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    grades: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """The buckets by key; `corrected`: the number of records that came after a record of a later window in their
    topic and partition."""

    buckets: dict[str, Bucket] = field(default_factory=lambda: defaultdict(Bucket))
    corrected: int = 0


def folded(inputs: Iterable[Stored], codec: Codec) -> Totals:
    """Computes the buckets of a log of outcomes and feedback, each partition in order."""
    totals = Totals()
    met: set[tuple[str, str]] = set()
    latest: dict[tuple[str, int], int] = {}
    for stored in inputs:
        record = stored.decode(codec)
        assert isinstance(record, Outcome | Feedback)
        identity = stored.topic, record.event_id
        if identity in met:
            continue  # written again after a worker was killed before its commit
        met.add(identity)
        said = _said(record)
        if said is None:
            continue
        manager, worker, environment, reward, kind, grade = said
        at = min(record.event_time, stored.timestamp)
        start = at - at % WINDOW_MS
        lane = stored.topic, stored.partition
        totals.corrected += start < latest.setdefault(lane, start)
        latest[lane] = max(start, latest[lane])
        counted = "outcomes" if isinstance(record, Outcome) else "feedback"
        bucket = totals.buckets[f"{manager}/{worker}/{environment}/{start}/{stored.partition}/{counted}"]
        bucket.rewards += [] if reward is None else [reward]
        bucket.kinds.update([] if kind is None else [kind])
        bucket.grades += [] if grade is None else [grade]
    return totals


_Said = tuple[str, str, str, float | None, str | None, float | None]


def _said(record: Outcome | Feedback) -> _Said | None:
    """(manager, worker, environment, reward, kind of outcome, grade in [0, 1])"""
    if isinstance(record, Outcome):
        beside = record.kind in (OutcomeKind.LATE, OutcomeKind.SUPERSEDED)
        reward = None if beside else record.reward
        return record.head.manager_id, record.worker_id, record.head.environment, reward, record.kind.value, None
    if record.result is None:
        return None  # without a worker and an environment, the feedback is in no window
    grade = record.score
    if grade is None:
        grade = {Polarity.POSITIVE: 1.0, Polarity.NEGATIVE: 0.0}.get(record.polarity)
    if grade is None:
        return None
    task = record.result.task
    return task.manager_id, record.result.worker_id, task.environment, None, None, grade


def differences(inputs: Iterable[Stored], signals: Iterable[Stored], codec: Codec) -> tuple[Findings, Totals]:
    """Differences between the last signal of each key and the buckets of the inputs; and the buckets.

    Args:
        inputs: outcomes and feedback.
        signals: the meta topic, each partition in order.
    """
    totals = folded(inputs, codec)
    last: dict[str, MetaSignal] = {}
    for stored in signals:
        record = stored.decode(codec)
        assert isinstance(record, MetaSignal) and stored.key == record.key
        last[record.key] = record
    lost = [f"no signal for {key}" for key in totals.buckets.keys() - last.keys()]
    wrong = [f"a signal for {key}, without any input on the log" for key in last.keys() - totals.buckets.keys()]
    for key in last.keys() & totals.buckets.keys():
        wrong += [f"signal {key}: {text}" for text in _contradictions(last[key], totals.buckets[key])]
    return Findings(sorted(lost), sorted(wrong)), totals


def _contradictions(signal: MetaSignal, bucket: Bucket) -> list[str]:
    numbers = {
        "window_ms": (signal.window_ms, WINDOW_MS),
        "count": (signal.count, len(bucket.rewards)),
        "mean_reward": (signal.mean_reward, fmean(bucket.rewards) if bucket.rewards else None),
        "reward_variance": (signal.reward_variance, pvariance(bucket.rewards) if bucket.rewards else None),
        "feedback_count": (signal.feedback_count, len(bucket.grades)),
        "mean_feedback_score": (signal.mean_feedback_score, fmean(bucket.grades) if bucket.grades else None),
        "feedback_variance": (signal.feedback_variance, pvariance(bucket.grades) if bucket.grades else None),
    }
    texts = [f"{name} is {is_}, expected {should}" for name, (is_, should) in numbers.items() if _off(is_, should)]
    if signal.outcomes != dict(bucket.kinds):
        texts.append(f"outcomes are {signal.outcomes}, expected {dict(bucket.kinds)}")
    return texts


def _off(found: float | None, wanted: float | None) -> bool:
    if found is None or wanted is None:
        return found is not wanted
    return not math.isclose(found, wanted, rel_tol=0.0, abs_tol=TOLERANCE)
