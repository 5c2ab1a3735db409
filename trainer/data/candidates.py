"""Offers: a rank's report to rank 0 about the rollouts it has read, and the reasons not to train on one. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from schemas.bounds import out_of_bounds
from schemas.ids import graded_sample, parse_policy_name
from schemas.records import Rollout, Sample, not_trainable_by_ratio, topk_problem
from schemas.tensors import float32_view, int32_view
from trainer.advantages.batch import is_too_long
from trainer.advantages.rewarded_sample import answer_length, equal_rewards, n_rewarded
from trainer.config.loss import LossConfig

FORGOTTEN = "forgotten"
SKIPPED = "skipped by an operator"
UNREAD_HINT = "a hint, which opd_weight 0 does not read"
UNREAD_REWARD = "no hint, and rl_weight 0 does not read the reward"
NO_REWARD = "no reward"
LONE_REWARD = "fewer than two samples of its group have a reward"
EQUAL_REWARDS = "equal rewards"
REWARD_REASONS = frozenset({NO_REWARD, LONE_REWARD, EQUAL_REWARDS})
"""Reasons that depend on the rewards of a rollout's group."""
NOTHING_BEFORE = "its first token would be trained, and nothing comes before it"
WITHOUT_TOPK = "a hint without the likeliest tokens that opd_kind: topk needs"
IMPORTER = "tentalis-import"
"""The source (`ce_source`) of rollouts that came with an imported run: they serve its replay and are not offered."""
DEFAULT_LOSS = LossConfig()


@dataclass(frozen=True, slots=True)
class Offer:
    """A rollout of the policy as it is on the log.

    `oldest_version`, `newest_version`: the versions of the oldest and the newest adapter that sampled any of it.
    `unfit`: the reason it cannot be trained on, else None. `supersedes`: for a grade that came late, the sample
    (`<task>/<sample>`) whose reward it replaces.

    Example: Offer("t1/0", "t1", "9f..", 3, 120, 1700000000000, 110, True, False, 4, 5, None)
    """

    key: str
    task_id: str
    digest: str
    partition: int
    offset: int
    append_time: int
    n_tokens: int
    rl: bool
    opd: bool
    oldest_version: int
    newest_version: int
    unfit: str | None
    supersedes: str | None = None


@dataclass(frozen=True, slots=True)
class ReadSegment:
    """The records [start, end) of a partition that a rank has read; `offers`: the policy's rollouts among them."""

    partition: int
    start: int
    end: int
    offers: tuple[Offer, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, for the channel between ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReadSegment":
        """The inverse of `to_json`."""
        return cls(data["partition"], data["start"], data["end"], tuple(Offer(**offer) for offer in data["offers"]))


def malformed_reason(rollout: Rollout, vocab_size: int) -> str | None:
    """Returns the reason why the fields of a rollout contradict each other, or None. Only a faulty producer of rollouts
    writes such a record, so it is dead-lettered and counts towards the limits that stop the trainer."""
    if rollout.forgotten:
        return None
    n = rollout.n_tokens
    lengths = {"loss_mask": len(rollout.loss_mask), "sampler_logprobs": len(rollout.sampler_logprobs) // 4}
    if rollout.teacher_logprobs is not None:
        lengths["teacher_logprobs"] = len(rollout.teacher_logprobs) // 4
    for name, length in lengths.items():
        if length != n:
            return f"{n} tokens but {length} values in {name}"
    problem = topk_problem(n, rollout.topk, rollout.topk_ids, rollout.topk_logprobs)
    if problem is not None:
        return problem
    if len(rollout.step_scores) // 4 != len(rollout.step_spans):
        return f"{len(rollout.step_scores) // 4} scores for {len(rollout.step_spans)} steps"
    if rollout.step_scores and not bool(np.isfinite(float32_view(rollout.step_scores)).all()):
        return "the score of a step is not finite"
    topk_ids = int32_view(rollout.topk_ids)
    if len(topk_ids) and (int(topk_ids.min()) < -1 or int(topk_ids.max()) >= vocab_size):
        return f"likeliest tokens outside the model's vocabulary of {vocab_size}"
    return None


def untrainable_tokens(rollout: Rollout, vocab_size: int) -> str | None:
    """Returns the reason why a model cannot compute the tokens of a rollout, or None. Any client of the bridge can send
    such tokens (another tokenizer, no prompt), so the rollout is dropped and cannot stop the trainer."""
    tokens = int32_view(rollout.token_ids)
    if not len(tokens):
        return None
    if rollout.loss_mask[0]:
        return NOTHING_BEFORE
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return f"token ids outside the model's vocabulary of {vocab_size}"
    return None


def no_rl_reason(rollout: Rollout, loss: LossConfig) -> str | None:
    """Returns the reason why the RL half of a rollout does not train, or None.

    It needs a known reward and, where the estimator compares the samples of a group of more than one requested sample,
    at least two with a reward: over a single one the group mean is the reward itself, and trains nothing. Dynamic
    sampling and the filter of long answers exclude more.
    """
    if not rollout.has_rl or rollout.reward is None:
        return NO_REWARD
    if loss.compares_groups and rollout.n_requested > 1 and (n_rewarded(rollout) < 2 or rollout.group_mean is None):
        return LONE_REWARD
    if loss.drops_equal_rewards and equal_rewards(rollout.n_requested, rollout.group_std):
        return EQUAL_REWARDS
    return "too long an answer" if is_too_long(answer_length(rollout), loss) else None


def lacks_topk(rollout: Rollout, loss: LossConfig) -> bool:
    """True if the teacher was not asked for the top-K that the loss distils from: the OPD part trains nothing."""
    return loss.distils and loss.opd_kind == "topk" and rollout.has_opd and rollout.topk == 0


def _unfit_reason(rollout: Rollout, trains: tuple[bool, bool], max_tokens: int, loss: LossConfig) -> str | None:
    if rollout.forgotten:
        return FORGOTTEN
    sample = Sample.model_construct(
        head=rollout.head,
        sample_index=rollout.sample_index,
        result_id=rollout.result_id,
        response_digest="",
        token_ids=rollout.token_ids,
        loss_mask=rollout.loss_mask,
        logprobs_mode=rollout.logprobs_mode,
        sampling=rollout.sampling,
    )
    reason = not_trainable_by_ratio(sample) or out_of_bounds(rollout)
    if reason is not None:
        return reason
    if rollout.n_tokens > max_tokens:
        return f"over {max_tokens} tokens"
    rl, opd = trains
    if not opd and (not rl or loss.distils_alone):
        if lacks_topk(rollout, loss):
            return WITHOUT_TOPK
        if rollout.has_opd and not rollout.has_rl and not loss.distils:
            return UNREAD_HINT
        if rl:
            return UNREAD_REWARD
        return no_rl_reason(rollout, loss) if rollout.has_rl else "neither reward nor teacher"
    return None


def offer_of(
    rollout: Rollout, partition: int, offset: int, append_time: int, max_tokens: int, loss: LossConfig = DEFAULT_LOSS
) -> Offer:
    """Returns the offer of a decoded rollout with a valid digest, for a run with that loss."""
    has_teacher = rollout.topk > 0 if loss.opd_kind == "topk" else rollout.teacher_logprobs is not None
    parts = no_rl_reason(rollout, loss) is None, loss.distils and rollout.has_opd and has_teacher
    unfit = _unfit_reason(rollout, parts, max_tokens, loss)
    oldest_version = newest_version = -1
    if unfit is None:
        try:
            sampled_by = [parse_policy_name(span.policy) for span in rollout.policy_spans]
        except ValueError:
            sampled_by = []
        if not sampled_by or any(policy != rollout.head.policy for policy, _ in sampled_by):
            unfit = "sampled by no version of its policy"
        else:
            versions = [version for _, version in sampled_by]
            oldest_version, newest_version = min(versions), max(versions)
    return Offer(
        rollout.rollout_id,
        rollout.head.task_id,
        rollout.digest,
        partition,
        offset,
        append_time,
        rollout.n_tokens,
        *parts,
        oldest_version,
        newest_version,
        unfit,
        graded_sample(rollout.rollout_id),
    )
