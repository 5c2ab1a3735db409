"""Composition of a step's rollouts: their age, the halves they were joined from, the share of accepted hints. Pure."""

from collections.abc import Iterable, Mapping

from schemas.ids import parse_policy_name
from schemas.records import Rollout

AGE_BUCKETS = {"0": 0, "1": 1, "2": 2, "3_4": 4, "5_8": 8, "9_up": None}
"""The bars of the staleness histogram: name -> the greatest age in versions that it counts."""

JOINED_KINDS = ("rl", "opd", "both")
HINT_COUNTS = ("hints_asked", "hints_accepted")


def oldest_version(rollout: Rollout) -> int:
    """Returns the oldest version of the policy that sampled any of a rollout."""
    return min(parse_policy_name(span.policy)[1] for span in rollout.policy_spans)


def count_rollouts(rollouts: Iterable[Rollout], version: int) -> dict[str, float]:
    """Returns counts of rollouts, to be summed over ranks: `staleness_<bar>` (a bar of the histogram of ages),
    `joined_<kind>`, `hints_asked`, `hints_accepted`. version: the version of the policy that is trained on them."""
    counts = dict.fromkeys(count_names(), 0.0)
    for rollout in rollouts:
        counts[f"staleness_{_age_bucket(version - oldest_version(rollout))}"] += 1.0
        kind = "both" if rollout.has_rl and rollout.has_opd else "opd" if rollout.has_opd else "rl"
        counts[f"joined_{kind}"] += 1.0
        if rollout.head.terms.opd is not None:
            counts["hints_asked"] += 1.0
            counts["hints_accepted"] += float(rollout.has_opd)
    return counts


def count_names() -> tuple[str, ...]:
    """The names of the counts."""
    return (*(f"staleness_{bar}" for bar in AGE_BUCKETS), *(f"joined_{kind}" for kind in JOINED_KINDS), *HINT_COUNTS)


def metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Returns the counts over all ranks, and `hint_acceptance`: of the rollouts whose terms ask for a hint, the
    share that has an OPD part."""
    requested = totals["hints_asked"]
    return {name: totals[name] for name in count_names()} | {
        "hint_acceptance": totals["hints_accepted"] / requested if requested else 0.0
    }


def _age_bucket(age: int) -> str:
    return next(name for name, most in AGE_BUCKETS.items() if most is None or age <= most)
