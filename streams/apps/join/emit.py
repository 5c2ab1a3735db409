"""Outcomes and rollouts of a group, a late half or a superseded result: pure functions of the halves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from schemas.digest import with_digest
from schemas.group_statistics import mean_and_std
from schemas.ids import derived_id
from schemas.records import (
    EXPLICIT,
    GIVEN_UP,
    Hint,
    HintKind,
    Outcome,
    OutcomeKind,
    Provenance,
    Rollout,
    Sample,
    Score,
    Status,
    TaskHead,
    not_trainable_by_ratio,
)
from schemas.wire.compiled import trusted
from streams.apps.join.state import answers_terms


@dataclass(frozen=True, slots=True)
class HalvesPartition:
    """The partition of the halves log that is folded."""

    topic: str
    partition: int


class Halves(NamedTuple):
    """The halves of one sample, each with its offset on the halves log."""

    score: Score | None = None
    score_offset: int = -1
    hint: Hint | None = None
    hint_offset: int = -1


class Emission(NamedTuple):
    """One outcome, and its rollout if it has one."""

    outcome: Outcome
    rollout: Rollout | None = None


class JoinedGroup(NamedTuple):
    """Statistics that all rollouts of a group share. `mean` and `std` are over the known rewards, None if there is
    none. `n_rewarded` is the number of known rewards, None if all closed samples have one."""

    n_closed: int = 0
    mean: float | None = None
    std: float | None = None
    n_rewarded: int | None = None


def group(place: HalvesPartition, head: TaskHead, halves: Mapping[int, Halves], at: int) -> list[Emission]:
    """Returns the emissions of a group that closes at stream time `at` (ms), one per requested sample, in sample order.

    `halves` has an entry for each closed sample: each sample with at least one half.
    """
    rewards = [
        score.reward
        for index in sorted(halves)
        if (score := halves[index].score) is not None and score.reward is not None
    ]
    mean, std = mean_and_std(rewards) if rewards else (None, None)
    shared = JoinedGroup(len(halves), mean, std, None if len(rewards) == len(halves) else len(rewards))
    emissions = []
    for index in range(head.n_samples):
        if index in halves:
            emissions.append(_joined(place, head, index, halves[index], shared, at))
        else:
            outcome = _outcome(head, index, f"{head.task_id}/{index}", OutcomeKind.EXPIRED, at, n_closed=len(halves))
            emissions.append(Emission(outcome))
    return emissions


def late(place: HalvesPartition, half: Score | Hint, offset: int, at: int, *, as_rollout: bool) -> Emission:
    """Returns the emission of a late half, or of one whose source fills no slot. `as_rollout`: a usable hint or grade
    becomes a separate rollout."""
    sample, half_id = half.sample, half.event_id
    head, rollout = sample.head, None
    own = f"{head.task_id}/{sample.sample_index}"
    if as_rollout and isinstance(half, Hint):
        halves = Halves(hint=half, hint_offset=offset)
        rollout = _rollout(place, f"{own}/opd/{half_id}", head, sample, halves, JoinedGroup(), at)
    elif as_rollout and isinstance(half, Score) and half.reward is not None:
        halves = Halves(score=half, score_offset=offset)
        mean, std = mean_and_std([half.reward])
        rollout = _rollout(place, f"{own}/grade/{half_id}", head, sample, halves, JoinedGroup(1, mean, std), at)
    return Emission(
        _outcome(
            head,
            sample.sample_index,
            f"{own}/late/{half_id}",
            OutcomeKind.LATE,
            at,
            sample=sample,
            score=half if isinstance(half, Score) else None,
            rollout=rollout,
            half_id=half_id,
        ),
        rollout,
    )


def late_open(head: TaskHead, open_id: str, at: int) -> list[Emission]:
    """Returns the late outcomes, one per sample, of a task that is announced too late to be opened."""
    return [
        Emission(_outcome(head, index, f"{head.task_id}/{index}/late/{open_id}", OutcomeKind.LATE, at, half_id=open_id))
        for index in range(head.n_samples)
    ]


def given_up(head: TaskHead, reason: str, at: int) -> list[Emission]:
    """Returns the outcomes, one per sample, of a task whose halves or state were lost."""
    return [
        Emission(
            _outcome(head, index, f"{head.task_id}/{index}", OutcomeKind.EXPIRED, at).model_copy(
                update={"not_trainable": f"{GIVEN_UP}{reason}"}
            )
        )
        for index in range(head.n_samples)
    ]


def superseded(half: Score | Hint, at: int) -> Emission:
    """Returns the outcome of a result whose sample is bound to another one; `half` is the first half that names it."""
    sample = half.sample
    return Emission(
        _outcome(
            sample.head,
            sample.sample_index,
            f"{sample.head.task_id}/{sample.sample_index}/superseded/{sample.result_id}",
            OutcomeKind.SUPERSEDED,
            at,
            sample=sample,
            score=half if isinstance(half, Score) else None,
            half_id=half.event_id,
        )
    )


def usable_hint(hint: Hint) -> bool:
    """Returns true if a hint can be trained on: it is accepted and has the tokens of an answer that did not fail."""
    return hint.kind is HintKind.ACCEPTED and bool(hint.sample.token_ids) and hint.sample.status is Status.OK


def usable_grade(score: Score) -> bool:
    """Returns true if a score is an explicit grade that can replace the reward of its answer: the task has one sample,
    so that no other reward depends on it, and the answer has tokens and did not fail."""
    sample = score.sample
    graded = score.reward is not None and EXPLICIT in score.components and not answers_terms(score)
    return graded and sample.head.n_samples == 1 and bool(sample.token_ids) and sample.status is Status.OK


def _joined(
    place: HalvesPartition, head: TaskHead, index: int, halves: Halves, shared: JoinedGroup, at: int
) -> Emission:
    score, hint = halves.score, halves.hint
    sample = _with_tokens(halves)
    has_rl = score is not None and score.reward is not None
    has_opd = hint is not None and usable_hint(hint)
    if sample.status is Status.FAILED:
        kind = OutcomeKind.FAILED
    elif sample.status is Status.INFRA:
        kind = OutcomeKind.INFRA
    elif has_rl:
        kind = OutcomeKind.BOTH if has_opd else OutcomeKind.RL
    else:
        kind = OutcomeKind.OPD if has_opd else OutcomeKind.EMPTY
    key = f"{head.task_id}/{index}"
    rollout = _rollout(place, key, head, sample, halves, shared, at) if has_rl or has_opd else None
    outcome = _outcome(
        head, index, key, kind, at, sample=sample, score=score, rollout=rollout, n_closed=shared.n_closed
    )
    return Emission(outcome, rollout)


def _with_tokens(halves: Halves) -> Sample:
    """Returns the sample of the score or, if that has no tokens, of the hint.

    A `none` or `rejected` hint has no tokens. If neither half has tokens, the sample is the score's, if there is one.
    """
    samples = [half.sample for half in (halves.score, halves.hint) if half is not None]
    return next((sample for sample in samples if sample.token_ids), samples[0])


def _rollout(
    place: HalvesPartition, key: str, head: TaskHead, sample: Sample, halves: Halves, shared: JoinedGroup, at: int
) -> Rollout:
    score, hint = halves.score, halves.hint if halves.hint is not None and usable_hint(halves.hint) else None
    if sample.status is not Status.OK:
        # A rollout has no status field. Removing the tokens prevents training on a failed answer.
        sample = sample.without_tokens()
    provenance = [
        trusted(
            Provenance, half=name, half_id=half.event_id, topic=place.topic, partition=place.partition, offset=offset
        )
        for name, half, offset in (
            ("score", halves.score, halves.score_offset),
            ("hint", halves.hint, halves.hint_offset),
        )
        if half is not None
    ]
    return with_digest(
        trusted(
            Rollout,
            rollout_id=key,
            rollout_event_id=derived_id("rollout", key),
            event_time=at,
            head=head,
            sample_index=sample.sample_index,
            result_id=sample.result_id,
            worker_id=sample.worker_id,
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            sampler_logprobs=sample.sampler_logprobs,
            logprobs_mode=sample.logprobs_mode,
            sampling=sample.sampling,
            policy_spans=sample.policy_spans,
            reward=score.reward if score is not None else None,
            components=score.components if score is not None else {},
            n_requested=head.n_samples,
            n_closed=shared.n_closed,
            group_mean=shared.mean,
            group_std=shared.std,
            has_rl=score is not None and score.reward is not None,
            has_opd=hint is not None,
            step_scores=score.step_scores if score is not None else b"",
            step_spans=score.step_spans if score is not None else (),
            hints=hint.hints if hint is not None else (),
            teacher_policy=hint.teacher_policy if hint is not None else None,
            teacher_logprobs=hint.teacher_logprobs if hint is not None else None,
            provenance=tuple(provenance),
            digest="pending",
            forgotten=False,
            n_rewarded=shared.n_rewarded,
            topk=hint.topk if hint is not None else 0,
            topk_ids=hint.topk_ids if hint is not None else b"",
            topk_logprobs=hint.topk_logprobs if hint is not None else b"",
            recorded_by=sample.recorded_by,
        )
    )


def _outcome(
    head: TaskHead,
    index: int,
    key: str,
    kind: OutcomeKind,
    at: int,
    *,
    sample: Sample | None = None,
    score: Score | None = None,
    rollout: Rollout | None = None,
    half_id: str | None = None,
    n_closed: int = 0,
) -> Outcome:
    return trusted(
        Outcome,
        outcome_id=derived_id("outcome", key),
        outcome_key=key,
        event_time=at,
        kind=kind,
        head=head,
        sample_index=index,
        result_id=sample.result_id if sample is not None else None,
        worker_id=sample.worker_id if sample is not None else "",
        policy_spans=sample.policy_spans if sample is not None else (),
        reward=score.reward if score is not None else None,
        components=score.components if score is not None else {},
        has_rl=rollout is not None and rollout.has_rl,
        has_opd=rollout is not None and rollout.has_opd,
        rollout_id=rollout.rollout_id if rollout is not None else None,
        rollout_digest=rollout.digest if rollout is not None else None,
        not_trainable=not_trainable_by_ratio(sample) if sample is not None and rollout is not None else None,
        half_id=half_id,
        n_closed=n_closed,
    )
