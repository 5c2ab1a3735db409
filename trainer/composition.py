"""What a step's rollouts were: how old, joined of which halves, how many of the hints asked for were accepted. Pure."""

from collections.abc import Iterable, Mapping

from schemas.ids import parse_policy_name
from schemas.records import Rollout

AGES = {"0": 0, "1": 1, "2": 2, "3_4": 4, "5_8": 8, "9_up": None}
"""The bars of the staleness histogram: name -> the greatest age in versions that falls into it."""

JOINED = ("rl", "opd", "both")
HINTS = ("hints_asked", "hints_accepted")


def counts(rollouts: Iterable[Rollout], version: int) -> dict[str, float]:
    """Sums over rollouts, to be added up over ranks: `staleness_<bar>`, `joined_<kind>`, `hints_asked`,
    `hints_accepted`. version: that of the policy which is trained on them."""
    found = dict.fromkeys(names(), 0.0)
    for rollout in rollouts:
        oldest = min(parse_policy_name(span.policy)[1] for span in rollout.policy_spans)
        found[f"staleness_{_bar(version - oldest)}"] += 1.0
        kind = "both" if rollout.has_rl and rollout.has_opd else "opd" if rollout.has_opd else "rl"
        found[f"joined_{kind}"] += 1.0
        if rollout.head.terms.opd is not None:
            found["hints_asked"] += 1.0
            found["hints_accepted"] += float(rollout.has_opd)
    return found


def names() -> tuple[str, ...]:
    """The names of the counts."""
    return (*(f"staleness_{bar}" for bar in AGES), *(f"joined_{kind}" for kind in JOINED), *HINTS)


def metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """The counts over all ranks, and `hint_acceptance`: the share of the hints asked for that became a teacher."""
    asked = totals["hints_asked"]
    return {name: totals[name] for name in names()} | {
        "hint_acceptance": totals["hints_accepted"] / asked if asked else 0.0
    }


def _bar(age: int) -> str:
    return next(name for name, most in AGES.items() if most is None or age <= most)
