"""Several values as one, by weight; what is missing is left out, and the rest takes its place."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weighed:
    """`value`: the weighted mean of what is there, None if nothing is. `present`: the share of all weight that is."""

    value: float | None
    present: float
    missing: tuple[str, ...]


def weighed(values: Mapping[str, float | None], weights: Mapping[str, float]) -> Weighed:
    """sum(w v) / sum(w) over the values that are known, in the order of the weights. A value of weight 0 is never
    missed. Raises KeyError for a weight without a value (None is one).

    >>> weighed({"a": 1.0, "b": None, "c": 0.0}, {"a": 3.0, "b": 4.0, "c": 1.0})
    Weighed(value=0.75, present=0.5, missing=('b',))
    """
    there, everything, total = 0.0, 0.0, 0.0
    missing = []
    known: list[float] = []
    for name, weight in weights.items():
        value = values[name]
        everything += weight
        if value is None:
            missing.append(name)
        elif weight:
            there += weight
            total += weight * value
            known.append(value)
    if not known:
        return Weighed(None, 0.0, tuple(missing))
    # Rounding may lead a hair beyond the values.
    return Weighed(min(max(total / there, min(known)), max(known)), there / everything, tuple(missing))
