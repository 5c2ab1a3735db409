"""What a rank tells rank 0 about the rollouts it has read, and whether one can be trained on. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from schemas.ids import parse_policy_name
from schemas.records import Rollout, Sample, not_trainable_by_ratio
from schemas.tensors import int32_view

FORGOTTEN = "forgotten"


@dataclass(frozen=True, slots=True)
class Offer:
    """A rollout of the policy, as it lies on the log.

    `oldest_version` is that of the oldest adapter that sampled any of it; `unfit` says why it cannot be trained on.

    Example: Offer("t1/0", "t1", "9f..", 3, 120, 1700000000000, 110, True, False, 4, None)
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
    unfit: str | None


@dataclass(frozen=True, slots=True)
class Segment:
    """The records [start, end) of a partition were read; `offers` are those of them that are rollouts of the policy."""

    partition: int
    start: int
    end: int
    offers: tuple[Offer, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the channel between ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Segment":
        """The reverse of `to_json`."""
        return cls(data["partition"], data["start"], data["end"], tuple(Offer(**offer) for offer in data["offers"]))


def malformed(rollout: Rollout, vocab_size: int) -> str | None:
    """Why the fields of a rollout contradict one another or the model's vocabulary, or None. Such a record is dead."""
    if rollout.forgotten:
        return None
    n = rollout.n_tokens
    lengths = {"loss_mask": len(rollout.loss_mask), "sampler_logprobs": len(rollout.sampler_logprobs) // 4}
    if rollout.teacher_logprobs is not None:
        lengths["teacher_logprobs"] = len(rollout.teacher_logprobs) // 4
    for name, length in lengths.items():
        if length != n:
            return f"{n} tokens but {length} values in {name}"
    if n and rollout.loss_mask[0]:
        return "the first token cannot be trained: nothing comes before it"
    tokens = int32_view(rollout.token_ids)
    if n and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        return f"token ids outside the model's vocabulary of {vocab_size}"
    return None


def trainable_parts(rollout: Rollout) -> tuple[bool, bool]:
    """(rl, opd): which halves of the rollout train.

    The RL half needs a known reward and, in a group of more than one requested sample, at least two that closed: over a
    single one the group mean is the reward itself, and trains nothing.
    """
    rl = rollout.has_rl and rollout.reward is not None
    if rollout.n_requested > 1:
        rl = rl and rollout.n_closed >= 2 and rollout.group_mean is not None
    return rl, rollout.has_opd and rollout.teacher_logprobs is not None


def _unfit(rollout: Rollout, parts: tuple[bool, bool], max_tokens: int) -> str | None:
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
    reason = not_trainable_by_ratio(sample)
    if reason is not None:
        return reason
    if rollout.n_tokens > max_tokens:
        return f"over {max_tokens} tokens"
    if not any(parts):
        return "fewer than two samples of its group closed" if rollout.has_rl else "neither reward nor teacher"
    return None


def offer_of(rollout: Rollout, partition: int, offset: int, append_time: int, max_tokens: int) -> Offer:
    """The offer of a decoded rollout whose digest holds."""
    parts = trainable_parts(rollout)
    unfit = _unfit(rollout, parts, max_tokens)
    oldest = -1
    if unfit is None:
        try:
            sampled_by = [parse_policy_name(span.policy) for span in rollout.policy_spans]
        except ValueError:
            sampled_by = []
        if not sampled_by or any(policy != rollout.head.policy for policy, _ in sampled_by):
            unfit = "sampled by no version of its policy"
        else:
            oldest = min(version for _, version in sampled_by)
    return Offer(
        rollout.rollout_id,
        rollout.head.task_id,
        rollout.digest,
        partition,
        offset,
        append_time,
        rollout.n_tokens,
        *parts,
        oldest,
        unfit,
    )
