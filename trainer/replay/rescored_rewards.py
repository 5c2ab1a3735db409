"""The rewards of a run's rollouts by the scores of another verifier, with the statistics of their groups. Pure.

Begin with `RescoredRewards.of`: it takes the rollouts of the run's groups and the verifier's scores.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from schemas.group_statistics import mean_and_std
from schemas.place import RecordPlace
from schemas.records import Provenance, Record, Rollout, Score
from schemas.tensors import float32_view

SCORE_HALF = "score"
"""The `half` of a rollout's provenance that names its Score."""


class CannotRescore(ValueError):
    """The rewards of a run cannot be replaced; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A recorded rollout, without its tokens. `score_id`: the recorded Score's, None if it has none. `rewarded`: it has
    a recorded reward. `late`: a late hint became this rollout; it belongs to no group."""

    rollout_id: str
    task_id: str
    sample_index: int
    result_id: str
    n_closed: int
    score_id: str | None
    rewarded: bool
    late: bool
    forgotten: bool

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        """Returns the facts of a rollout."""
        task_id = rollout.head.task_id
        return cls(
            rollout.rollout_id,
            task_id,
            rollout.sample_index,
            rollout.result_id,
            rollout.n_closed,
            next((half.half_id for half in rollout.provenance if half.half == SCORE_HALF), None),
            rollout.has_rl,
            rollout.rollout_id != f"{task_id}/{rollout.sample_index}",
            rollout.forgotten,
        )


@dataclass(slots=True)
class VerifierScores:
    """The scores of one verifier for some results, folded from the halves log.

    `label`: their `scorer`. `found`: the Score without its tokens, and its place, by result. `labels`: number of scored
    results by any scorer. `scorers`: scorer by the id of its Score.
    """

    label: str
    results: Collection[str]
    found: dict[str, tuple[Score, RecordPlace]] = field(default_factory=dict)
    labels: dict[str, set[str]] = field(default_factory=dict)
    scorers: dict[str, str] = field(default_factory=dict)

    def apply(self, record: Record, place: RecordPlace) -> None:
        """Applies a record of the halves log. Raises CannotRescore if the label has two different scores of a
        result."""
        if not isinstance(record, Score) or record.sample.result_id not in self.results:
            return
        result_id = record.sample.result_id
        self.labels.setdefault(record.scorer, set()).add(result_id)
        self.scorers[record.score_id] = record.scorer
        if record.scorer != self.label:
            return
        score = record.model_copy(update={"sample": record.sample.without_tokens()})
        other, other_place = self.found.setdefault(result_id, (score, place))
        if _verdict(other) != _verdict(score):
            raise CannotRescore(
                f"{self.label} has two different scores of sample {score.sample.sample_index} of task {score.key}: "
                f"{other.reward} at {other_place} and {score.reward} at {place}. Score the answers again under another "
                "version, and name that"
            )


def _verdict(score: Score) -> tuple[object, ...]:
    return score.reward, score.components, score.step_scores, score.step_spans


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The statistics of a group's rewards, as its rollouts carry them: `n_rewarded` is None if all closed samples have
    a reward, `mean` and `std` are None if none has."""

    n_rewarded: int | None
    mean: float | None
    std: float | None


@dataclass(frozen=True, slots=True)
class RescoredRewards:
    """The new scores of a run's groups.

    `recorded`: the scorers of the recorded rewards. `scores`: by result, with their places on the halves log. `groups`:
    the new statistics by task. `unscored`: answers with a recorded reward and without a new score, with the reason, by
    rollout id. `digest`: sha256 of all that replaces a recorded reward.
    """

    label: str
    recorded: str
    scores: Mapping[str, tuple[Score, RecordPlace]]
    groups: Mapping[str, GroupStatistics]
    unscored: Mapping[str, str]
    digest: str

    @classmethod
    def of(cls, answers: Iterable[RecordedAnswer], scores: VerifierScores) -> Self:
        """Returns the new rewards. `answers`: all recorded rollouts of the groups that the run has trained on.

        A group is its recorded rollouts: an answer that got neither reward nor hint has none, and stays out of the
        statistics. Raises CannotRescore if no answer has a score of the label.
        """
        members = sorted(answers, key=lambda answer: answer.rollout_id)
        used: dict[str, tuple[Score, RecordPlace]] = {}
        unscored: dict[str, str] = {}
        rewards: dict[str, dict[int, float | None]] = {}
        closed: dict[str, int] = {}
        for answer in members:
            if answer.late:
                continue
            found = None if answer.forgotten else scores.found.get(answer.result_id)
            if found is not None:
                used[answer.result_id] = found
            elif answer.rewarded or answer.forgotten:
                unscored[answer.rollout_id] = (
                    "its user or session was erased" if answer.forgotten else f"no score of {scores.label}"
                )
            rewards.setdefault(answer.task_id, {})[answer.sample_index] = None if found is None else found[0].reward
            closed[answer.task_id] = max(answer.n_closed, closed.get(answer.task_id, 0))
        if not used:
            raise CannotRescore(_no_score(scores))
        groups = {task_id: _statistics(by_sample, closed[task_id]) for task_id, by_sample in rewards.items()}
        wanted = {answer.score_id for answer in members}
        recorded = sorted({scorer for score_id, scorer in scores.scorers.items() if score_id in wanted})
        content = [
            (answer.rollout_id, None if found is None else _digested(found[0]))
            for answer in members
            for found in [used.get(answer.result_id)]
            if not answer.late
        ]
        digest = hashlib.sha256(repr((scores.label, content)).encode()).hexdigest()
        return cls(scores.label, ", ".join(recorded) or "not on the log", used, groups, unscored, digest)


def _digested(score: Score) -> tuple[object, ...]:
    spans = [(span.start, span.end) for span in score.step_spans]
    return (
        score.score_id,
        score.reward,
        sorted(score.components.items()),
        float32_view(score.step_scores).tolist(),
        spans,
    )


def _statistics(by_sample: Mapping[int, float | None], n_closed: int) -> GroupStatistics:
    # In the order of the samples, as the join adds them: the same rewards give the same bits.
    rewards = [reward for _, reward in sorted(by_sample.items()) if reward is not None]
    mean, std = mean_and_std(rewards) if rewards else (None, None)
    return GroupStatistics(None if len(rewards) == n_closed else len(rewards), mean, std)


def _no_score(scores: VerifierScores) -> str:
    known = ", ".join(f"{label} ({len(results)} answers)" for label, results in sorted(scores.labels.items())) or "none"
    return (
        f"the log has no score of {scores.label} for the rollouts of this run; it has scores of: {known}. `tentalis "
        "rescore RUN --verifier ENVIRONMENT/NAME@VERSION` writes scores; halves are kept for 30 days by default"
    )


def rescored_provenance(rollout: Rollout, new: tuple[Score, RecordPlace] | None) -> tuple[Provenance, ...]:
    """Returns the provenance of a rollout with the new Score in place of the recorded one."""
    others = tuple(half for half in rollout.provenance if half.half != SCORE_HALF)
    if new is None:
        return others
    score, place = new
    own = Provenance(
        half=SCORE_HALF, half_id=score.score_id, topic=place.topic, partition=place.partition, offset=place.offset
    )
    return own, *others
