"""The rollouts that make a step not finite: those out of bounds, then those found by bisection.

The same plan on the same weights gives the same culprits, so a trainer that is killed meanwhile finds them again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from schemas.bounds import out_of_bounds
from schemas.records import BatchPlan, Rollout
from trainer.config.loss import LossConfig
from trainer.distributed.ranks import RankGroup
from trainer.distributed.stop import StopRequest
from trainer.model.policy import canary_tokens
from trainer.step.engine import TrainingDiverged, TrainingEngine
from trainer.step.step import is_finite

log = logging.getLogger(__name__)

NOT_FINITE = "its gradient is not finite"


def find_culprits(
    engine: TrainingEngine,
    plan: BatchPlan,
    version: int,
    rollouts: Mapping[str, Rollout],
    loss: LossConfig,
    rank_group: RankGroup,
    stop: StopRequest,
) -> dict[str, str]:
    """Returns the rollouts to drop from a plan whose step was not finite, at least one, each with the reason. The step
    without them is finite. `rollouts`: this rank's, by key. A collective: all ranks return the same.

    Raises TrainingDiverged if no rollout is the cause, and StopRequested.
    """
    if not bool(engine.policy.token_logprobs(canary_tokens(engine.policy.vocab_size)).isfinite().all()):
        raise TrainingDiverged(
            f"step {plan.step} of run {plan.run_id}: the policy gives log-probs that are not finite, whatever the "
            "rollouts. Roll the policy back to an earlier version (tentalis policy rollback), and lower optimizer.lr"
        )
    own_reasons = {key: reason for key, each in rollouts.items() if (reason := out_of_bounds(each)) is not None}
    reasons = {key: reason for part in rank_group.gather(own_reasons) for key, reason in part.items()}
    rest = [row.rollout_id for row in plan.rows if row.rollout_id not in reasons]

    def finite(keys: Sequence[str]) -> bool:
        wanted = set(keys)
        subset = plan.model_copy(update={"rows": tuple(row for row in plan.rows if row.rollout_id in wanted)})
        return is_finite(engine, subset, version, rollouts, loss, rank_group, stop)

    found = {key: reasons[key] for key in (row.rollout_id for row in plan.rows) if key in reasons}
    found |= dict.fromkeys(culprits_among(rest, finite), NOT_FINITE)
    if not found:
        raise TrainingDiverged(
            f"step {plan.step} of run {plan.run_id} was not finite, but is finite when it is computed again: the "
            "machine computes wrongly. Nothing was written. Check its memory and GPU, and start the trainer again"
        )
    log.warning("step %d: %d of its %d rollouts make it not finite", plan.step, len(found), len(plan.rows))
    return found


def culprits_among(keys: Sequence[str], finite: Callable[[Sequence[str]], bool]) -> list[str]:
    """Returns the keys without which the rest is finite, in order. `finite` is asked about parts of the keys.

    First those that are not finite alone, found by bisection: c culprits among n cost about 2 c log2(n) questions. If
    the rest is not finite together, it is built up from its beginning, and what makes it not finite is left out.
    """
    answers: dict[tuple[str, ...], bool] = {}

    def ask(part: Sequence[str]) -> bool:
        key = tuple(part)
        if key not in answers:
            answers[key] = finite(part)
        return answers[key]

    alone = _not_finite_alone(keys, ask)
    rest = [key for key in keys if key not in alone]
    kept = _largest_finite([], rest, ask)
    return [key for key in keys if key not in kept]


def _not_finite_alone(keys: Sequence[str], finite: Callable[[Sequence[str]], bool]) -> list[str]:
    if not keys or finite(keys):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    return [*_not_finite_alone(keys[:half], finite), *_not_finite_alone(keys[half:], finite)]


def _largest_finite(kept: Sequence[str], keys: Sequence[str], finite: Callable[[Sequence[str]], bool]) -> list[str]:
    """Returns `kept` with as many of the keys as stay finite with it, by bisection. `kept` alone is finite."""
    if not keys or finite([*kept, *keys]):
        return [*kept, *keys]
    if len(keys) == 1:
        return list(kept)
    half = len(keys) // 2
    return _largest_finite(_largest_finite(kept, keys[:half], finite), keys[half:], finite)
