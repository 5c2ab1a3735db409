"""Rules about rollouts: unaltered, each made of one result, with correct group statistics, and with its outcome."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from schemas.digest import digest_holds
from schemas.place import RecordPlace
from schemas.records import (
    Hint,
    Outcome,
    OutcomeKind,
    Result,
    Rollout,
    Score,
    Status,
    not_trainable_by_ratio,
    sample_of,
)
from tentalis.ops.verify.index import Index, half_id, says_something
from tentalis.ops.verify.model import ProblemKind, VerifyProblem

TOLERANCE = 1e-9
NOT_TAUGHT: dict[str, Any] = {
    "its hints": ((), None),
    "the teacher's log-probs": None,
    "the teacher's likeliest tokens": (0, b"", b""),
}
HAS = {OutcomeKind.RL: (True, False), OutcomeKind.OPD: (False, True), OutcomeKind.BOTH: (True, True)}
WITHOUT_ROLLOUT = {OutcomeKind.EMPTY, OutcomeKind.EXPIRED, OutcomeKind.SUPERSEDED, OutcomeKind.INFRA}


def rollouts_are_unaltered(index: Index) -> Iterator[VerifyProblem]:
    """Every rollout matches its digest, and all copies of a key are equal, except that a copy may be redacted."""
    for key, copies in index.rollouts.items():
        sound = [copy for copy in copies if digest_holds(copy.record)]
        for copy in copies:
            if copy not in sound:
                yield VerifyProblem(
                    ProblemKind.WRONG, "forged-rollout", key, f"{copy}: its content does not match its digest"
                )
        whole = [_fixed(copy.record) for copy in sound if not copy.record.forgotten]
        if len({copy.record.digest for copy in copies}) > 1:
            where = ", ".join(map(str, copies))
            yield VerifyProblem(ProblemKind.WRONG, "forged-rollout", key, f"copies with different digests: {where}")
        elif any(rollout != whole[0] for rollout in whole):
            yield VerifyProblem(ProblemKind.WRONG, "rollout-rewritten", key, "its copies differ outside the digest")


def _fixed(rollout: Rollout) -> Rollout:
    """Returns a rollout without the fields in which its copies may differ.

    A rollout that consists of a late hint alone may be made again from another copy of the hint, after the join has
    dropped the state of the task.
    """
    alone = rollout.rollout_id != f"{rollout.head.task_id}/{rollout.sample_index}"
    return rollout.model_copy(update={"event_time": 0, "provenance": ()}) if alone else rollout


def _same_tokens(rollout: Rollout, result: Result) -> bool:
    n_prompt, n_response = len(result.prompt_token_ids) // 4, len(result.response_token_ids) // 4
    if result.status is not Status.OK and not rollout.token_ids:
        return True  # an answer that failed keeps its reward and loses its tokens
    return (
        rollout.token_ids == result.prompt_token_ids + result.response_token_ids
        and rollout.loss_mask == bytes(n_prompt) + (result.loss_mask or b"\1" * n_response)
        and rollout.sampler_logprobs == bytes(4 * n_prompt) + (result.sampler_logprobs or bytes(4 * n_response))
        and rollout.sampling == result.sampling
        and [(s.start, s.policy) for s in rollout.policy_spans]
        == [(s.start + n_prompt, s.policy) for s in result.policy_spans]
    )


def rollouts_are_of_one_result(index: Index) -> Iterator[VerifyProblem]:
    """Tokens, reward and teacher log-probs of a rollout come from halves of the one result that it names."""
    for key, copies in index.rollouts.items():
        rollout = copies[0].record
        if rollout.forgotten:
            continue

        def mixed(message: str, key: str = key) -> VerifyProblem:
            return VerifyProblem(ProblemKind.WRONG, "mixed-rollout", key, message)

        slot = (rollout.head.task_id, rollout.sample_index)
        results = [
            r.record
            for r in index.results.get(rollout.result_id, ())
            if (r.record.task.task_id, r.record.sample_index) == slot
        ]
        if not results:
            yield mixed(f"its sample has no result {rollout.result_id}")
        elif not any(_same_tokens(rollout, result) for result in results):
            yield mixed(f"tokens, log-probs, sampling or policy are not those of result {rollout.result_id}")
        score: Score | None = None
        hint: Hint | None = None
        lost = False
        for origin in rollout.provenance:
            place = RecordPlace(origin.topic, origin.partition, origin.offset)
            half = index.half_at.get(place)
            if half is None or half_id(half.record) != origin.half_id:
                half = index.moved_half(origin.half_id)
            if half is None and index.losses.halves_lost(copies[0].partition, rollout.event_time):
                lost = True
                continue
            if half is None:
                yield mixed(f"no half {origin.half_id} is at {place}")
                continue
            if half.record.sample.result_id != rollout.result_id:
                yield mixed(f"its {origin.half} is of another result, {half.record.sample.result_id}")
            if isinstance(half.record, Score):
                score = half.record
            else:
                hint = half.record
        if lost:
            continue  # what its halves said is not known any more
        if rollout.has_rl != (rollout.reward is not None) or (rollout.has_rl and score is None):
            yield mixed("has_rl, its reward and its provenance do not agree")
        scored: tuple[Any, ...] = (None, {}, b"", ())
        if score is not None:
            scored = score.reward, score.components, score.step_scores, score.step_spans
        if (rollout.reward, rollout.components, rollout.step_scores, rollout.step_spans) != scored:
            yield mixed(f"reward {rollout.reward} but its score has {scored[0]}, or components or steps differ")
        if rollout.has_opd != (rollout.teacher_logprobs is not None) or (rollout.has_opd and hint is None):
            yield mixed("has_opd, its teacher's log-probs and its provenance do not agree")
        taught = _taught(hint) if hint is not None and says_something(hint) else NOT_TAUGHT
        for what, said in _taught(rollout).items():
            if said != taught[what]:
                yield mixed(f"{what} differ from those of its accepted hint")


def _taught(said: Hint | Rollout) -> dict[str, Any]:
    return {
        "its hints": (said.hints, said.teacher_policy),
        "the teacher's log-probs": said.teacher_logprobs,
        "the teacher's likeliest tokens": (said.topk, said.topk_ids, said.topk_logprobs),
    }


def halves_are_in_one_rollout(index: Index) -> Iterator[VerifyProblem]:
    """A half is used in at most one rollout: its sample's, or the separate one of a late hint.

    The join ensures this while it has the state of the task.
    """
    keys: dict[str, set[str]] = defaultdict(set)
    for key, copies in index.rollouts.items():
        for rollout in (copy.record for copy in copies if not copy.record.forgotten):
            for origin in rollout.provenance:
                if rollout.has_opd if origin.half == "hint" else rollout.has_rl:
                    keys[origin.half_id].add(key)
    for origin_id, found in keys.items():
        if len(found) > 1:
            yield VerifyProblem(
                ProblemKind.DUPLICATE,
                "half-in-two-rollouts",
                origin_id,
                f"{' and '.join(sorted(found))}: it was written again after the join had dropped its task, and may be "
                "trained twice; perhaps hinting lost its offsets and read old feedback again (docs/concepts/join.md)",
            )


def _named_by(index: Index) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for copies in index.outcomes.values():
        outcome = copies[0].record
        if outcome.rollout_id is not None:
            found.setdefault(outcome.rollout_id, []).append(outcome)
    return found


def outcomes_and_rollouts_agree(index: Index) -> Iterator[VerifyProblem]:
    """Every rollout is named by exactly one outcome, and every outcome that names a rollout agrees with it."""
    named = _named_by(index)
    for key in index.rollouts:
        if len(named.get(key, ())) != 1:
            yield VerifyProblem(
                ProblemKind.WRONG, "stray-rollout", key, f"named by {len(named.get(key, ()))} outcomes, not by 1"
            )
    for key, copies in index.outcomes.items():
        outcome = copies[0].record
        wanted = HAS.get(outcome.kind)
        too_large = outcome.rollout_id is None and outcome.not_trainable is not None
        if wanted is not None and (outcome.has_rl, outcome.has_opd) != wanted and not too_large:
            yield VerifyProblem(ProblemKind.WRONG, "outcome-kind", key, f"{outcome.kind.value} with {_parts(outcome)}")
        if (outcome.rollout_id is not None) != (outcome.has_rl or outcome.has_opd) or (
            outcome.kind in WITHOUT_ROLLOUT and outcome.rollout_id is not None
        ):
            yield VerifyProblem(
                ProblemKind.WRONG,
                "outcome-kind",
                key,
                f"{outcome.kind.value}, {_parts(outcome)}, rollout {outcome.rollout_id}",
            )
        if outcome.rollout_id is None:
            continue
        rollouts = index.rollouts.get(outcome.rollout_id)
        if outcome.rollout_id in index.lost_rollouts:
            continue
        if rollouts is None:
            yield VerifyProblem(ProblemKind.LOST, "missing-rollout", outcome.rollout_id, f"outcome {key} names it")
            continue
        rollout = rollouts[0].record
        if outcome.rollout_digest != rollout.digest:
            yield VerifyProblem(
                ProblemKind.WRONG, "forged-rollout", outcome.rollout_id, f"outcome {key} has another digest"
            )
        if rollout.forgotten:
            continue
        mine = (outcome.result_id, outcome.has_rl, outcome.has_opd, outcome.reward, outcome.components)
        its = (rollout.result_id, rollout.has_rl, rollout.has_opd, rollout.reward, rollout.components)
        if mine != its or (outcome.sample_index, outcome.head) != (rollout.sample_index, rollout.head):
            yield VerifyProblem(
                ProblemKind.WRONG,
                "outcome-rollout",
                key,
                f"the outcome and rollout have different values: {mine} and {its}",
            )


def _parts(outcome: Outcome) -> str:
    return f"has_rl={outcome.has_rl}, has_opd={outcome.has_opd}"


def rewards_are_the_scores(index: Index) -> Iterator[VerifyProblem]:
    """The reward and the components of an outcome are those of a score of the result that it names."""
    for key, copies in index.outcomes.items():
        outcome = copies[0].record
        if (outcome.reward, outcome.components) == (None, {}):
            continue
        halves = index.halves_of.get((outcome.head.task_id, outcome.sample_index), ())
        scored = [
            (half.record.reward, half.record.components)
            for half in halves
            if isinstance(half.record, Score) and half.record.sample.result_id == outcome.result_id
        ]
        lost = not scored and index.losses.halves_lost(copies[0].partition, outcome.event_time)
        if (outcome.reward, outcome.components) not in scored and not lost:
            yield VerifyProblem(
                ProblemKind.WRONG,
                "outcome-reward",
                key,
                f"reward {outcome.reward} of {outcome.components}; the scores of result {outcome.result_id} have "
                + ", ".join(f"{reward} of {components}" for reward, components in scored),
            )


def outcomes_say_what_cannot_be_trained(index: Index) -> Iterator[VerifyProblem]:
    """The `not_trainable` of a rollout's outcome is the reason why its result has no importance ratio, if it has none.

    An outcome of a kind without a rollout has no `not_trainable`.
    """
    for key, copies in index.outcomes.items():
        outcome = copies[0].record
        results = index.results.get(outcome.result_id or "", ())
        if outcome.rollout_id is not None:
            reasons = {not_trainable_by_ratio(sample_of(seen.record)) for seen in results}
        elif outcome.kind in WITHOUT_ROLLOUT and not outcome.given_up:
            reasons = {None}
        else:
            continue  # it was given up, or its rollout was too large: other values of `not_trainable`
        if reasons and outcome.not_trainable not in reasons:
            yield VerifyProblem(
                ProblemKind.WRONG,
                "not-trainable",
                key,
                f"is {outcome.not_trainable or 'nothing'}, but by its result must be {' or '.join(map(str, reasons))}",
            )


def _close(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def groups_add_up(index: Index) -> Iterator[VerifyProblem]:
    """Mean, standard deviation and size of each closed group equal those of the outcomes of its samples."""
    for task_id, task in index.live_tasks().items():
        mains = [index.main_outcome((task_id, i)) for i in range(task.n_samples)]
        if any(main is None for main in mains):
            continue
        outcomes = [main for main in mains if main is not None]
        if any(outcome.given_up for outcome in outcomes):
            continue  # the loss may have cut the group in two
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        # Independent of `schemas.group_statistics`, whose results are verified here.
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        spread = None if mean is None else math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
        closed = sum(outcome.kind is not OutcomeKind.EXPIRED for outcome in outcomes)
        for outcome in outcomes:
            if outcome.n_closed != closed:
                yield VerifyProblem(
                    ProblemKind.WRONG,
                    "group-statistics",
                    outcome.outcome_key,
                    f"n_closed {outcome.n_closed}, but {closed} samples of the group closed",
                )
            for seen in index.rollouts.get(outcome.outcome_key, ())[:1]:
                rollout = seen.record
                if rollout.forgotten:
                    continue
                sizes = (rollout.n_requested, rollout.n_closed)
                rewarded = rollout.n_closed if rollout.n_rewarded is None else rollout.n_rewarded
                if (
                    sizes != (task.n_samples, closed)
                    or not _close(rollout.group_mean, mean)
                    or not _close(rollout.group_std, spread)
                    or rewarded != len(rewards)
                ):
                    yield VerifyProblem(
                        ProblemKind.WRONG,
                        "group-statistics",
                        rollout.rollout_id,
                        f"size {sizes}, {rewarded} rewards, mean {rollout.group_mean}, std {rollout.group_std}; the "
                        f"outcomes of its group give {(task.n_samples, closed)}, {len(rewards)}, {mean}, {spread}",
                    )


RULES = (
    rollouts_are_unaltered,
    rollouts_are_of_one_result,
    halves_are_in_one_rollout,
    outcomes_and_rollouts_agree,
    rewards_are_the_scores,
    outcomes_say_what_cannot_be_trained,
    groups_add_up,
)
