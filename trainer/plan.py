"""From offers to plans. Pure: a plan depends on the log's order and the settings, never on who read what when.

Offers merge across partitions by (append time, partition, offset), where the append time of a partition is the running
maximum (a broker's clock may step back), so that within a partition the merge keeps the order of offsets. A batch is
formed only when every partition has offered past its last rollout or is at its end: what comes later has a later time.
One thing does not wait for its turn: a husk counts as soon as it was offered, against the content that lies before it.
"""

import hashlib
import heapq
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas import topics
from schemas.digest import record_digest
from schemas.records import BatchPlan, Drop, PlanRow, Position, Rollout
from trainer.offers import FORGOTTEN, Offer, Segment

FORGED = "forged"

# The length of a sequence of which attention costs as much as everything else: 4 N / (6 layers width), 4,100 for
# SmolLM2-135M, 16,000 for Qwen3-4B. One number for all, for a plan depends on nothing but offers and settings.
ATTENTION_TOKENS = 8192


class LostOffers(RuntimeError):
    """Records of a partition were skipped between two segments: a rank began to read too late."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A batch before it is laid out: its rollouts in merge order, what was dropped, and where reading goes on."""

    rows: tuple[Offer, ...]
    drops: tuple[Drop, ...]
    low_water: dict[int, int]
    forged: tuple[str, ...]


@dataclass(slots=True)
class Planner:
    """Offers not yet used, and what the run has consumed.

    `consumed` maps the key of every rollout in a plan of the lineage to its digest. `next_offset` is, per partition,
    the first offset that nobody has offered; `low_water` the first that no plan has considered. A batch is full with
    `batch_rollouts` rollouts or, if that comes first, `batch_tokens` tokens. `staleness` counts the steps between the
    trained version and one that sampled.
    """

    batch_rollouts: int
    max_staleness: int
    consumed: dict[str, str]
    low_water: dict[int, int]
    batch_tokens: int | None = None
    staleness: Callable[[int, int], int] = operator.sub
    next_offset: dict[int, int] = field(init=False)
    _pending: dict[int, list[tuple[int, Offer]]] = field(init=False)
    _time: dict[int, int] = field(init=False)
    _forgotten: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.next_offset = dict(self.low_water)
        self._pending = {partition: [] for partition in self.low_water}
        self._time = {partition: 0 for partition in self.low_water}

    def take(self, segment: Segment) -> None:
        """Adds what a rank has read, what is known already left out. Raises LostOffers if records between are
        missing."""
        partition = segment.partition
        expected = self.next_offset[partition]
        if segment.start > expected:
            raise LostOffers(
                f"partition {partition} was offered from offset {segment.start}, but the last offer ended at {expected}"
            )
        self._forgotten.update(offer.key for offer in segment.offers if offer.unfit == FORGOTTEN)
        for offer in segment.offers:
            if offer.offset >= max(expected, self.low_water[partition]):
                self._time[partition] = max(self._time[partition], offer.append_time)
                self._pending[partition].append((self._time[partition], offer))
        self.next_offset[partition] = max(expected, segment.end)

    @property
    def pending(self) -> int:
        """Offers that no plan has considered."""
        return sum(map(len, self._pending.values()))

    def caught_up(self, ends: Mapping[int, int]) -> bool:
        """Whether everything below the partitions' end offsets was offered."""
        return all(self.next_offset[partition] >= ends.get(partition, 0) for partition in self.next_offset)

    def waiting(self, version: int, at_most: int | None = None) -> int:
        """How many full batches the offers make, as far as a step on `version` would take them; `at_most`: no more are
        counted."""
        batches = rollouts = tokens = 0
        seen: set[str] = set()
        for pending in self._pending.values():
            for _, offer in pending:
                known = self.consumed.get(offer.key)
                if offer.key in seen or self._reason(offer, known, version) is not None:
                    continue
                seen.add(offer.key)
                rollouts, tokens = rollouts + 1, tokens + offer.n_tokens
                if self._full(rollouts, tokens):
                    batches, rollouts, tokens = batches + 1, 0, 0
                    if batches == at_most:
                        return batches
        return batches

    def has_batch(self, version: int) -> bool:
        """Whether enough rollouts are at hand for a step on `version`; the ends of the partitions decide then. Counting
        needs no order: where only what cannot be trained on comes in, nothing is merged again and again."""
        return self.waiting(version, at_most=1) > 0

    def usable(self, version: int) -> tuple[int, dict[str, int]]:
        """How many of the offers the next step on `version` can have, one batch at most, and how many it passes over,
        by the reason."""
        draft, _ = self._form(version)
        passed_over: Counter[str] = Counter()
        for drop in draft.drops:
            passed_over[drop.reason] += drop.count
        return len(draft.rows), dict(passed_over)

    def draft(self, version: int, ends: Mapping[int, int]) -> Draft | None:
        """The next batch for a step that trains `version`, or None if it cannot be formed yet.

        `ends` are the partitions' end offsets, asked for after the last offer was taken. Changes nothing.
        """
        draft, last = self._form(version)
        if last is None:
            return None
        for partition, pending in self._pending.items():
            past = bool(pending) and _order(pending[-1]) > last
            if not past and self.next_offset[partition] < ends.get(partition, 0) and partition != last[1]:
                return None
        return draft

    def consume(self, rows: Iterable[tuple[str, str]], low_water: Mapping[int, int]) -> None:
        """A plan was published: its rows (key, digest) are used up, everything below `low_water` was considered."""
        self.consumed.update(rows)
        for partition, offset in low_water.items():
            self.low_water[partition] = max(self.low_water[partition], offset)
            # A plan found on the log is executed before its partitions are offered; reading then begins behind it.
            self.next_offset[partition] = max(self.next_offset[partition], self.low_water[partition])
            kept = [item for item in self._pending[partition] if item[1].offset >= self.low_water[partition]]
            self._pending[partition] = kept

    def _form(self, version: int) -> tuple[Draft, tuple[int, int, int] | None]:
        """The batch in merge order, and the place of its last rollout if it is full."""
        rows: list[Offer] = []
        drops: list[tuple[Offer, str]] = []
        low_water = dict(self.low_water)
        seen: dict[str, str] = {}
        last, tokens = None, 0
        for item in heapq.merge(*self._pending.values(), key=_order):
            offer = item[1]
            low_water[offer.partition] = offer.offset + 1
            known = self.consumed.get(offer.key, seen.get(offer.key))
            reason = self._reason(offer, known, version)
            if reason is not None:
                drops.append((offer, reason))
                continue
            seen[offer.key] = offer.digest
            rows.append(offer)
            tokens += offer.n_tokens
            if self._full(len(rows), tokens):
                last = _order(item)
                break
        forged = tuple(offer.key for offer, reason in drops if reason == FORGED)
        return Draft(tuple(rows), _ranges(drops), low_water, forged), last

    def _reason(self, offer: Offer, known: str | None, version: int) -> str | None:
        if known is not None:
            return "duplicate" if known == offer.digest else FORGED
        if offer.key in self._forgotten:
            return FORGOTTEN
        if offer.unfit is not None:
            return offer.unfit
        return "stale" if self.staleness(version, offer.oldest_version) > self.max_staleness else None

    def _full(self, rollouts: int, tokens: int) -> bool:
        return rollouts == self.batch_rollouts or (self.batch_tokens is not None and tokens >= self.batch_tokens)


def _order(item: tuple[int, Offer]) -> tuple[int, int, int]:
    return item[0], item[1].partition, item[1].offset


def _ranges(drops: Sequence[tuple[Offer, str]]) -> tuple[Drop, ...]:
    """Neighbouring drops of a partition for the same reason become one range, with how many it stands for."""
    ranges: list[Drop] = []
    for offer, reason in sorted(drops, key=lambda item: (item[0].partition, item[0].offset)):
        previous = ranges[-1] if ranges else None
        if previous is not None and (previous.partition, previous.reason) == (offer.partition, reason):
            ranges[-1] = previous.model_copy(update={"last_offset": offer.offset, "count": previous.count + 1})
        else:
            ranges.append(
                Drop(
                    partition=offer.partition,
                    first_offset=offer.offset,
                    last_offset=offer.offset,
                    count=1,
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
    """The same rows with rank and micro-batch, in the same order.

    Rows of one group (`groups[i]` of row i) stay together as far as the caps allow, because they share their prompt.
    Longest processing time first: units go by falling cost to the rank with the least load, and there to the first
    micro-batch with room. A rollout of n tokens costs n (1 + n / ATTENTION_TOKENS); the cap is on tokens, for it is
    about memory. A single rollout over the cap has a micro-batch of its own. With `whole_groups` a group is never
    divided, whatever its size: losses on pairs need both answers in one forward pass.
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
    placed: dict[int, tuple[int, int]] = {}
    for unit in sorted(range(len(units)), key=lambda u: (-cost[u], units[u][0])):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        loads[rank] += cost[unit]
        filled = micro_batches[rank]
        room = (m for m, tokens in enumerate(filled) if tokens + size[unit] <= micro_batch_tokens)
        micro_batch = next(room, len(filled))
        if micro_batch == len(filled):
            filled.append(0)
        filled[micro_batch] += size[unit]
        placed.update(dict.fromkeys(units[unit], (rank, micro_batch)))
    return [row.model_copy(update={"rank": placed[i][0], "micro_batch": placed[i][1]}) for i, row in enumerate(rows)]


def step_seed(seed: int, step: int) -> int:
    """The seed of a step: 31 bits of sha256 over the run's seed and the step."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class PlanHead:
    """What the plans of one process have in common."""

    run_id: str
    policy: str
    manifest_digest: str
    world_size: int
    micro_batch_tokens: int
    seed: int
    owner: str
    whole_groups: bool = False
    """Whether the samples of a group must share a micro-batch."""


def plan_of(draft: Draft, head: PlanHead, step: int, attempt: int, event_time: int) -> BatchPlan:
    """The plan of a batch for `head.world_size` ranks."""
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
        for offer in draft.rows
    ]
    low_water = tuple(
        Position(topic=topics.ROLLOUTS, partition=p, offset=offset) for p, offset in sorted(draft.low_water.items())
    )
    groups = [offer.task_id for offer in draft.rows]
    return identified(
        BatchPlan(
            run_id=head.run_id,
            step=step,
            attempt=attempt,
            plan_id="-",
            event_time=event_time,
            manifest_digest=head.manifest_digest,
            policy=head.policy,
            topic=topics.ROLLOUTS,
            rows=tuple(lay_out(rows, groups, head.world_size, head.micro_batch_tokens, head.whole_groups)),
            drops=draft.drops,
            low_water=low_water,
            world_size=head.world_size,
            seed=step_seed(head.seed, step),
            owner=head.owner,
        )
    )


def next_attempt(plan: BatchPlan, head: PlanHead, event_time: int, lying: Mapping[str, Rollout]) -> BatchPlan:
    """The same rollouts for another world size or configuration, without those that were forgotten meanwhile. `lying`:
    what is on the log of them now, by key."""
    forgotten = {key for key, rollout in lying.items() if rollout.forgotten}
    rows = [row for row in plan.rows if row.rollout_id not in forgotten]
    # What is missing is in no group; to fetch it fails, and says so.
    groups = [lying[key].head.task_id if (key := row.rollout_id) in lying else key for row in rows]
    drops = [
        Drop(partition=row.partition, first_offset=row.offset, last_offset=row.offset, count=1, reason=FORGOTTEN)
        for row in plan.rows
        if row.rollout_id in forgotten
    ]
    return identified(
        plan.model_copy(
            update={
                "attempt": plan.attempt + 1,
                "event_time": event_time,
                "manifest_digest": head.manifest_digest,
                "rows": tuple(lay_out(rows, groups, head.world_size, head.micro_batch_tokens, head.whole_groups)),
                "drops": (*plan.drops, *drops),
                "world_size": head.world_size,
                "seed": step_seed(head.seed, plan.step),
                "owner": head.owner,
            }
        )
    )


def identified(plan: BatchPlan) -> BatchPlan:
    """The plan under the id that its content gives it."""
    return plan.model_copy(update={"plan_id": record_digest(plan, {"plan_id", "event_time", "owner"})})
