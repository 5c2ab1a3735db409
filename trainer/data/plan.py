"""Turns offers into plans. Pure: a plan depends on the log's order and the settings, never on read timing.

Offers merge across partitions by (append time, partition, offset). The append time of a partition is its running
maximum (a broker's clock may step back), so the merge keeps the order of offsets within a partition. A batch is formed
only when every partition has offered past its last rollout or is at its end, because later records have later times.
Exceptions to the order: a redacted rollout takes effect as soon as it is offered, also for content before it, and so
does a grade that came late, for the reward that it replaces.
"""

import hashlib
import heapq
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from schemas import topics
from schemas.digest import record_digest
from schemas.ids import graded_sample
from schemas.records import BatchPlan, Drop, PlanRow, Rollout
from trainer.data.candidates import FORGOTTEN, Offer, ReadSegment
from trainer.data.positions import positions_of

FORGED = "forged"
UNPUBLISHED = "sampled by a version that was not published"
"""Reason of a rollout that names a version above the trained one. Versions rise over all runs of a policy, and one is
published only after its step, when it is the trained one: no order of publishing and arrival can make this wrong."""

SUPERSEDED = "a later grade of its answer replaces its reward"
GRADED_TOO_LATE = "a grade that came after its answer's reward was trained on"

# A plan is one record, and one value in the store of the ranks, which takes 8 MiB. With more ranges of drops than this
# it has one per partition and reason instead: reasons that alternate must not make it too large, at every start again.
MAX_DROPS = 10_000

# Sequence length at which attention costs as much as everything else: 4 N / (6 layers width), 4,100 for SmolLM2-135M,
# 16,000 for Qwen3-4B. One number for all models, because a plan depends only on offers and settings.
ATTENTION_TOKENS = 8192


class LostOffers(RuntimeError):
    """Records of a partition were skipped between two segments: a rank began to read too late."""


@dataclass(frozen=True, slots=True)
class BatchDraft:
    """A batch before it is laid out: its rollouts in merge order, the drops, and the offsets where reading
    continues."""

    offers: tuple[Offer, ...]
    drops: tuple[Drop, ...]
    low_water: dict[int, int]
    forged: tuple[str, ...]


@dataclass(slots=True)
class BatchPlanner:
    """The unused offers, and the rollouts that the run has consumed.

    `consumed` maps the key of every rollout in a plan of the lineage to its digest. Per partition, `next_offset` is the
    first offset that no rank has offered, and `low_water` the first that no plan has considered. A batch is full with
    `batch_rollouts` rollouts or, if that comes first, `batch_tokens` tokens. `staleness` counts the steps between the
    trained version and one that sampled. `rewarded`: the samples (`<task>/<sample>`) whose reward is in such a plan,
    whether from their own rollout or from a grade that came late.
    """

    batch_rollouts: int
    max_staleness: int
    consumed: dict[str, str]
    low_water: dict[int, int]
    batch_tokens: int | None = None
    staleness: Callable[[int, int], int] = operator.sub
    rewarded: set[str] = field(default_factory=set)
    next_offset: dict[int, int] = field(init=False)
    _pending: dict[int, list[tuple[int, Offer]]] = field(init=False)
    _append_times: dict[int, int] = field(init=False)
    _forgotten: set[str] = field(init=False, default_factory=set)
    _newest_grades: dict[str, tuple[tuple[int, int, int], str]] = field(init=False, default_factory=dict)
    """Place in the merge order, and key, of the newest grade that came late and can train, by sample."""

    def __post_init__(self) -> None:
        self.next_offset = dict(self.low_water)
        self._pending = {partition: [] for partition in self.low_water}
        self._append_times = {partition: 0 for partition in self.low_water}

    def add_segment(self, segment: ReadSegment) -> None:
        """Adds a rank's segment; offers that are already known are ignored. Raises LostOffers if records before the
        segment are missing."""
        partition = segment.partition
        self._add_partition(partition)
        expected = self.next_offset[partition]
        if segment.start > expected:
            raise LostOffers(
                f"partition {partition} was offered from offset {segment.start}, but the last offer ended at {expected}"
            )
        self._forgotten.update(offer.key for offer in segment.offers if offer.unfit == FORGOTTEN)
        for offer in segment.offers:
            if offer.offset >= max(expected, self.low_water[partition]):
                self._append_times[partition] = max(self._append_times[partition], offer.append_time)
                item = self._append_times[partition], offer
                self._pending[partition].append(item)
                if offer.supersedes is not None and offer.rl and offer.unfit is None:
                    found = _merge_key(item), offer.key
                    self._newest_grades[offer.supersedes] = max(found, self._newest_grades.get(offer.supersedes, found))
        self.next_offset[partition] = max(expected, segment.end)

    def _add_partition(self, partition: int) -> None:
        """Adds a partition that the topic did not have when the run began, from its first offset on."""
        if partition not in self.low_water:
            self.low_water[partition] = self.next_offset[partition] = self._append_times[partition] = 0
            self._pending[partition] = []

    @property
    def pending(self) -> int:
        """Number of offers that no plan has considered."""
        return sum(map(len, self._pending.values()))

    def caught_up(self, ends: Mapping[int, int]) -> bool:
        """True if everything below the partitions' end offsets was offered."""
        return all(self.next_offset[partition] >= ends.get(partition, 0) for partition in self.next_offset)

    def count_full_batches(self, version: int, at_most: int | None = None) -> int:
        """Returns the number of full batches among the offers that a step on `version` can use; stops counting at
        `at_most`."""
        batches = rollouts = tokens = 0
        seen: set[str] = set()
        for pending in self._pending.values():
            for _, offer in pending:
                consumed_digest = self.consumed.get(offer.key)
                if offer.key in seen or self._drop_reason(offer, consumed_digest, version) is not None:
                    continue
                seen.add(offer.key)
                rollouts, tokens = rollouts + 1, tokens + offer.n_tokens
                if self._is_full(rollouts, tokens):
                    batches, rollouts, tokens = batches + 1, 0, 0
                    if batches == at_most:
                        return batches
        return batches

    def has_batch(self, version: int) -> bool:
        """True if there are enough rollouts for a step on `version`; then the ends of the partitions decide. Counting
        needs no order, so offers that cannot be trained on do not cause repeated merges."""
        return self.count_full_batches(version, at_most=1) > 0

    def count_usable(self, version: int) -> tuple[int, dict[str, int]]:
        """Returns the number of offers that the next step on `version` can use, at most one batch, and the number that
        it skips, by reason."""
        draft, _ = self._form_batch(version)
        skipped: Counter[str] = Counter()
        for drop in draft.drops:
            skipped[drop.reason] += drop.count
        return len(draft.offers), dict(skipped)

    def next_draft(self, version: int, ends: Mapping[int, int]) -> BatchDraft | None:
        """Returns the next batch for a step that trains `version`, or None if it cannot be formed yet. Changes nothing.

        `ends`: the partitions' end offsets, queried after the last offer was taken.
        """
        draft, last_key = self._form_batch(version)
        if last_key is None:
            return None
        for partition, pending in self._pending.items():
            offered_past = bool(pending) and _merge_key(pending[-1]) > last_key
            if not offered_past and self.next_offset[partition] < ends.get(partition, 0) and partition != last_key[1]:
                return None
        return draft

    def consume(self, rows: Iterable[PlanRow], low_water: Mapping[int, int]) -> None:
        """Marks the rows of a published plan as used, and everything below `low_water` as considered."""
        for row in rows:
            self.consumed[row.rollout_id] = row.digest
            if row.rl:
                self.rewarded.add(rewarded_sample_of(row))
        for partition, offset in low_water.items():
            self._add_partition(partition)
            self.low_water[partition] = max(self.low_water[partition], offset)
            # A plan found on the log is executed before its partitions are offered; reading then begins after it.
            self.next_offset[partition] = max(self.next_offset[partition], self.low_water[partition])
            kept = [item for item in self._pending[partition] if item[1].offset >= self.low_water[partition]]
            self._pending[partition] = kept

    def release(self, keys: Iterable[str]) -> None:
        """Marks rollouts of a published plan as unused: they were dropped from it."""
        for key in keys:
            self.consumed.pop(key, None)
            self.rewarded.discard(graded_sample(key) or key)

    def _form_batch(self, version: int) -> tuple[BatchDraft, tuple[int, int, int] | None]:
        """Returns the batch in merge order, and the place of its last rollout if it is full."""
        offers: list[Offer] = []
        drops: list[tuple[Offer, str]] = []
        low_water = dict(self.low_water)
        seen_digests: dict[str, str] = {}
        last_key, tokens = None, 0
        for item in heapq.merge(*self._pending.values(), key=_merge_key):
            offer = item[1]
            low_water[offer.partition] = offer.offset + 1
            known_digest = self.consumed.get(offer.key, seen_digests.get(offer.key))
            reason = self._drop_reason(offer, known_digest, version)
            if reason is not None:
                drops.append((offer, reason))
                continue
            seen_digests[offer.key] = offer.digest
            offers.append(replace(offer, rl=False) if self._reward_reason(offer) is not None else offer)
            tokens += offer.n_tokens
            if self._is_full(len(offers), tokens):
                last_key = _merge_key(item)
                break
        forged = tuple(offer.key for offer, reason in drops if reason == FORGED)
        return BatchDraft(tuple(offers), _drop_ranges(drops), low_water, forged), last_key

    def _drop_reason(self, offer: Offer, known_digest: str | None, version: int) -> str | None:
        if known_digest is not None:
            return "duplicate" if known_digest == offer.digest else FORGED
        if offer.key in self._forgotten:
            return FORGOTTEN
        if offer.unfit is not None:
            return offer.unfit
        if offer.newest_version > version:
            return UNPUBLISHED
        if self.staleness(version, offer.oldest_version) > self.max_staleness:
            return "stale"
        return None if offer.opd else self._reward_reason(offer)

    def _reward_reason(self, offer: Offer) -> str | None:
        """Returns the reason why the reward of an offer does not train, or None: another rollout has its sample's."""
        if not offer.rl:
            return None
        sample = offer.supersedes or offer.key
        if sample in self.rewarded:
            return SUPERSEDED if offer.supersedes is None else GRADED_TOO_LATE
        _, newest = self._newest_grades.get(sample, (None, offer.key))
        return None if newest == offer.key else SUPERSEDED

    def _is_full(self, rollouts: int, tokens: int) -> bool:
        return rollouts == self.batch_rollouts or (self.batch_tokens is not None and tokens >= self.batch_tokens)


def rewarded_sample_of(row: PlanRow) -> str:
    """Returns the sample (`<task>/<sample>`) whose reward a row of a plan trains."""
    return graded_sample(row.rollout_id) or row.rollout_id


def rewarded_samples(plans: Iterable[BatchPlan]) -> set[str]:
    """Returns the samples whose reward is in these plans."""
    return {rewarded_sample_of(row) for plan in plans for row in plan.rows if row.rl}


def _merge_key(item: tuple[int, Offer]) -> tuple[int, int, int]:
    return item[0], item[1].partition, item[1].offset


def _drop_ranges(drops: Sequence[tuple[Offer, str]]) -> tuple[Drop, ...]:
    """Merges neighbouring drops of a partition for the same reason into one range with its count; if there are more
    than MAX_DROPS ranges, all drops of a partition for the same reason."""
    ordered = sorted(drops, key=lambda item: (item[0].partition, item[0].offset))
    ranges = _merged(ordered)
    if len(ranges) > MAX_DROPS:
        return _merged(sorted(ordered, key=lambda item: (item[0].partition, item[1])))
    return ranges


def _merged(drops: Sequence[tuple[Offer, str]]) -> tuple[Drop, ...]:
    """Merges drops that follow each other in one partition for the same reason."""
    ranges: list[Drop] = []
    for (partition, reason), group in groupby(drops, key=lambda item: (item[0].partition, item[1])):
        offsets = [offer.offset for offer, _ in group]
        ranges.append(
            Drop(
                partition=partition,
                first_offset=offsets[0],
                last_offset=offsets[-1],
                count=len(offsets),
                reason=reason,
            )
        )
    return tuple(ranges)


def lay_out(
    rows: Sequence[PlanRow],
    groups: Sequence[str],
    world_size: int,
    micro_batch_tokens: int,
    whole_groups: bool = False,
) -> list[PlanRow]:
    """Returns the same rows with rank and micro-batch, in the same order.

    Rows of one group (`groups[i]` of row i) stay together as far as the caps allow, because they share their prompt.
    Longest processing time first: units go by falling cost to the rank with the least load, and there to the first
    micro-batch with enough space. A rollout of n tokens costs n (1 + n / ATTENTION_TOKENS); the cap counts tokens,
    because it limits memory. A single rollout over the cap gets its own micro-batch. With `whole_groups` a group is
    never divided, whatever its size: losses on pairs need both answers in one forward pass.
    """
    total = sum(row.n_tokens for row in rows)
    cap = max(1, min(micro_batch_tokens, -(-total // world_size)))
    units: list[list[int]] = []
    size: list[int] = []
    cost: list[float] = []
    for index in sorted(range(len(rows)), key=lambda i: (groups.index(groups[i]), i)):
        tokens = rows[index].n_tokens
        same_group = bool(units) and groups[units[-1][0]] == groups[index]
        if same_group and (whole_groups or size[-1] + tokens <= cap):
            units[-1].append(index)
            size[-1] += tokens
            cost[-1] += tokens * (1.0 + tokens / ATTENTION_TOKENS)
        else:
            units.append([index])
            size.append(tokens)
            cost.append(tokens * (1.0 + tokens / ATTENTION_TOKENS))
    loads = [0.0] * world_size
    micro_batches: list[list[int]] = [[] for _ in range(world_size)]
    placement: dict[int, tuple[int, int]] = {}
    for unit in sorted(range(len(units)), key=lambda u: (-cost[u], units[u][0])):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        loads[rank] += cost[unit]
        token_counts = micro_batches[rank]
        fitting = (m for m, tokens in enumerate(token_counts) if tokens + size[unit] <= micro_batch_tokens)
        micro_batch = next(fitting, len(token_counts))
        if micro_batch == len(token_counts):
            token_counts.append(0)
        token_counts[micro_batch] += size[unit]
        placement.update(dict.fromkeys(units[unit], (rank, micro_batch)))
    return [
        row.model_copy(update={"rank": placement[i][0], "micro_batch": placement[i][1]}) for i, row in enumerate(rows)
    ]


def step_seed(seed: int, step: int) -> int:
    """Returns the seed of a step: 31 bits of sha256 over the run's seed and the step."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class PlanContext:
    """The fields that all plans of one process share."""

    run_id: str
    policy: str
    manifest_digest: str
    world_size: int
    micro_batch_tokens: int
    seed: int
    owner: str
    whole_groups: bool = False
    """True if the samples of a group must share a micro-batch."""
    baseline: float | None = None
    """Baseline of the next step."""


def plan_of(draft: BatchDraft, context: PlanContext, step: int, attempt: int, event_time: int) -> BatchPlan:
    """Returns the plan of a batch for `context.world_size` ranks."""
    rows = [
        PlanRow(
            rollout_id=offer.key,
            digest=offer.digest,
            partition=offer.partition,
            offset=offer.offset,
            n_tokens=offer.n_tokens,
            rl=offer.rl,
            opd=offer.opd,
            rank=0,
            micro_batch=0,
        )
        for offer in draft.offers
    ]
    groups = [offer.task_id for offer in draft.offers]
    return with_plan_id(
        BatchPlan(
            run_id=context.run_id,
            step=step,
            attempt=attempt,
            plan_id="-",
            event_time=event_time,
            manifest_digest=context.manifest_digest,
            policy=context.policy,
            topic=topics.ROLLOUTS,
            rows=tuple(lay_out(rows, groups, context.world_size, context.micro_batch_tokens, context.whole_groups)),
            drops=draft.drops,
            low_water=positions_of(draft.low_water),
            world_size=context.world_size,
            seed=step_seed(context.seed, step),
            owner=context.owner,
            baseline=context.baseline,
        )
    )


def next_attempt(
    plan: BatchPlan,
    context: PlanContext,
    event_time: int,
    present: Mapping[str, Rollout],
    culprits: Mapping[str, str] | None = None,
) -> BatchPlan:
    """Returns a plan of the same rollouts for another world size or configuration, without those forgotten meanwhile
    and without the `culprits` (key -> reason). `present`: the rollouts that are on the log now, by key."""
    dropped = dict(culprits or {}) | {key: FORGOTTEN for key, rollout in present.items() if rollout.forgotten}
    rows = [row for row in plan.rows if row.rollout_id not in dropped]
    # A missing rollout gets its own group; fetching it later raises.
    groups = [present[key].head.task_id if (key := row.rollout_id) in present else key for row in rows]
    drops = [
        Drop(
            partition=row.partition,
            first_offset=row.offset,
            last_offset=row.offset,
            count=1,
            reason=dropped[row.rollout_id],
        )
        for row in plan.rows
        if row.rollout_id in dropped
    ]
    return with_plan_id(
        plan.model_copy(
            update={
                "attempt": plan.attempt + 1,
                "event_time": event_time,
                "manifest_digest": context.manifest_digest,
                "rows": tuple(
                    lay_out(rows, groups, context.world_size, context.micro_batch_tokens, context.whole_groups)
                ),
                "drops": (*plan.drops, *drops),
                "world_size": context.world_size,
                "seed": step_seed(context.seed, plan.step),
                "owner": context.owner,
                "baseline": context.baseline,
            }
        )
    )


def with_plan_id(plan: BatchPlan) -> BatchPlan:
    """Returns the plan with the id that its content determines."""
    return plan.model_copy(update={"plan_id": record_digest(plan, {"plan_id", "event_time", "owner"})})
