"""The reward of an answer from the values of its functions: weighted, summed, and mapped to [-1, 1]. Pure."""

import math
from collections.abc import Sequence

from tentalis.rewards.functions.errors import OutOfRange
from tentalis.rewards.functions.reply import FunctionInfo, FunctionValue
from tentalis.rewards.verdict import Verdict

_ROUNDING = 1e-6


def names(functions: Sequence[FunctionInfo]) -> list[str]:
    """Returns a name for each function, unique among them: functions of the same name are numbered."""
    plain = [each.name for each in functions]
    return [
        name if plain.count(name) == 1 else f"{name}.{plain[: index + 1].count(name)}"
        for index, name in enumerate(plain)
    ]


def total(
    functions: Sequence[FunctionInfo],
    values: Sequence[FunctionValue],
    weights: Sequence[float],
    limits: tuple[float, float] | None,
) -> Verdict:
    """Returns the verdict on an answer: the weighted sum of the known rewards, unknown if none is known.

    Args:
        limits: the lowest and highest sum, which become -1 and 1; None: the sum is the reward.

    Raises:
        OutOfRange: the sum lies outside.
    """
    components: dict[str, float] = {}
    known = []
    for name, value, weight in zip(names(functions), values, weights, strict=True):
        prefix = f"{name}." if len(functions) > 1 else ""
        components |= {f"{prefix}{part}": number for part, number in value.parts.items()}
        if value.reward is None:
            components[f"missing.{name}"] = 1.0
            continue
        known.append(weight * value.reward)
        if len(functions) > 1:
            components[name] = value.reward
    if not known:
        return Verdict.unknown(**components)
    raw = math.fsum(known)
    if limits is not None:
        components["raw"] = raw
    return Verdict(_mapped(raw, limits, functions), components)


def _mapped(raw: float, limits: tuple[float, float] | None, functions: Sequence[FunctionInfo]) -> float:
    low, high = limits or (-1.0, 1.0)
    slack = _ROUNDING * (high - low)
    if not low - slack <= raw <= high + slack:
        place, what = functions[0].place, functions[0].name if len(functions) == 1 else "the weighted sum"
        wider = [math.floor(min(raw, 0.0 if limits is None else low)), math.ceil(max(raw, high))]
        raise OutOfRange(
            f"{place}: {what} is {raw:g}, outside [{low:g}, {high:g}]: set range: [LOW, HIGH] to the lowest and "
            f"highest reward that is possible, such as range: {wider}; it is mapped to [-1, 1]"
        )
    mapped = raw if limits is None else 2.0 * (raw - low) / (high - low) - 1.0
    return min(1.0, max(-1.0, mapped))
