"""Compares rewards of the same prompts before and after training: means, intervals, paired test. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

RESAMPLES = 9_999
LEVEL = 0.95
# Values drawn at once: what the bootstrap holds in memory.
_DRAWN_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its bootstrap interval at LEVEL."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rewards of held-out prompts. `prompts`: number of pairs with both rewards known; `unknown`: of the others.

    `p_value`: two-sided paired permutation test of no difference; None for fewer than two pairs.
    """

    prompts: int
    unknown: int
    before: Mean
    after: Mean
    difference: Mean
    p_value: float | None

    def as_json(self) -> dict[str, Any]:
        """Returns the object for `-o json`."""
        return asdict(self)

    def sentence(self) -> str:
        """Returns the comparison in words."""
        pairs = f"{self.prompts} held-out prompts" if self.prompts != 1 else "1 held-out prompt"
        text = f"Reward on {pairs}: before {self.before}, after {self.after}, difference {self.difference}"
        text += f" (intervals of {LEVEL:.0%})."
        if self.p_value is not None:
            text += f" Paired permutation test, two-sided: p = {self.p_value:.2g}."
        if self.unknown:
            text += f" Left out: {self.unknown} prompts with an unknown reward."
        return text


def compare(before: Sequence[float | None], after: Sequence[float | None]) -> Comparison | None:
    """Compares the rewards of the same prompts; None if no prompt has both."""
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    if not pairs:
        return None
    differences = [a - b for b, a in pairs]
    return Comparison(
        len(pairs),
        len(before) - len(pairs),
        mean_of([b for b, _ in pairs]),
        mean_of([a for _, a in pairs]),
        mean_of(differences),
        p_paired(differences) if len(pairs) > 1 else None,
    )


def mean_of(values: Sequence[float]) -> Mean:
    """Returns the mean with its interval: percentiles of the means of RESAMPLES samples with replacement."""
    import numpy as np

    given = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    at_once = max(1, _DRAWN_AT_ONCE // len(given))
    batches = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    means = np.concatenate([given[rng.integers(0, len(given), (rows, len(given)))].mean(axis=1) for rows in batches])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Mean(math.fsum(values) / len(values), float(low), float(high))


def p_paired(differences: Sequence[float]) -> float:
    """Returns the p-value of a two-sided permutation test that flips the signs of paired differences.

    Exact if all flips are at most RESAMPLES, else of RESAMPLES random ones.
    """
    import numpy as np
    from scipy.stats import permutation_test

    def mean(values: Any, axis: int) -> Any:
        return np.mean(values, axis=axis)

    result = permutation_test(
        (np.asarray(differences, dtype=np.float64),),
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)
