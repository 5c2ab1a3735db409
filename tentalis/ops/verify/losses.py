"""Lost topics whose loss an operator accepted: what the log cannot show any more, and is no problem of a run. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas import topics
from schemas.records import BatchPlan, Outcome, Rollout
from tentalis.kafka import topology
from tentalis.kafka.loss_audit import AcceptedLoss
from tentalis.ops.verify.model import LoggedRecord

JOIN = topology.named("join").app_id


@dataclass(frozen=True, slots=True)
class AcceptedLosses:
    """The accepted losses of the halves and of the rollouts.

    A loss of the halves counts once the join has accounted for it, because the join first gives outcomes to the tasks
    that it knows.
    """

    halves: Sequence[AcceptedLoss] = ()
    rollouts: Sequence[AcceptedLoss] = ()

    @classmethod
    def of(cls, losses: Iterable[AcceptedLoss]) -> "AcceptedLosses":
        found = list(losses)
        return cls(
            [each for each in found if (each.topic, each.component) == (topics.HALVES, JOIN)],
            [each for each in found if each.topic == topics.ROLLOUTS],
        )

    def halves_lost(self, partition: int, at: int) -> bool:
        """True if halves of this partition that were written at a time (ms) may be lost."""
        return _first_lost(self.halves, partition, at) is not None

    def first_lost(self, partition: int, at: int) -> int | None:
        """Returns the first offset of the rollouts partition that was lost after a time (ms); None if none was."""
        return _first_lost(self.rollouts, partition, at)

    def rollout_lost(self, partition: int, offset: int, at: int) -> bool:
        """True if the rollout that was at this place at a time (ms) was lost later."""
        return any(
            each.first <= offset and (each.end is None or offset < each.end)
            for each in _lost_later(self.rollouts, partition, at)
        )


def _lost_later(losses: Sequence[AcceptedLoss], partition: int, at: int) -> list[AcceptedLoss]:
    return [each for each in losses if each.partition in (None, partition) and at < each.at]


def _first_lost(losses: Sequence[AcceptedLoss], partition: int, at: int) -> int | None:
    return min((each.first for each in _lost_later(losses, partition, at)), default=None)


def lost_rollouts(
    losses: AcceptedLosses,
    rollouts: Mapping[str, Sequence[LoggedRecord[Rollout]]],
    outcomes: Mapping[str, Sequence[LoggedRecord[Outcome]]],
    plans: Iterable[BatchPlan],
) -> frozenset[str]:
    """Returns the ids of rollouts that an outcome or a plan names, and that were lost later with their topic."""
    if not losses.rollouts:
        return frozenset()
    named = {
        rollout_id
        for first, *_ in outcomes.values()
        if (rollout_id := first.record.rollout_id) is not None
        # Its offset is unknown: on a log that was cut off, a rollout that is missing was in the lost part.
        and losses.first_lost(first.partition, first.record.event_time) is not None
    }
    named |= {
        row.rollout_id
        for plan in plans
        for row in plan.rows
        if losses.rollout_lost(row.partition, row.offset, plan.event_time)
    }
    return frozenset(named - rollouts.keys())
