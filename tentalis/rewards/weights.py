"""The weighted mean of several values; missing values are left out and the weights of the rest are renormalised."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """`value`: the weighted mean of the known values, None without any. `present`: their share of the total weight."""

    value: float | None
    present: float
    missing: tuple[str, ...]


def weighted_mean(values: Mapping[str, float | None], weights: Mapping[str, float]) -> WeightedMean:
    """Returns sum(w v) / sum(w) over the known values, in the order of the weights.

    A None of weight 0 does not lower `present`. Raises KeyError for a weight without an entry in `values`.

    >>> weighted_mean({"a": 1.0, "b": None, "c": 0.0}, {"a": 3.0, "b": 4.0, "c": 1.0})
    WeightedMean(value=0.75, present=0.5, missing=('b',))
    """
    present_weight, total_weight, weighted_sum = 0.0, 0.0, 0.0
    missing = []
    known: list[float] = []
    for name, weight in weights.items():
        value = values[name]
        total_weight += weight
        if value is None:
            missing.append(name)
        elif weight:
            present_weight += weight
            weighted_sum += weight * value
            known.append(value)
    if not known:
        return WeightedMean(None, 0.0, tuple(missing))
    # Rounding may put the mean slightly outside the range of the values.
    return WeightedMean(
        min(max(weighted_sum / present_weight, min(known)), max(known)), present_weight / total_weight, tuple(missing)
    )
