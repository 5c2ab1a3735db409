"""The statistics of the guard: a sequential paired test of scores, and measures of diversity. Pure."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

# Shares of the wealth that the test bets on a drop of the score. A bet must stay below 1/2, as differences reach 2.
BETS = (0.05, 0.1, 0.2, 0.4)
# The wealth above which the scores so far are a reason to ask for more answers. At 1, half of the candidates that are
# as good would be doubted; at 2, a clearly worse one in ten would pass.
DOUBT = 1.5
Ngram = tuple[int, ...]


def wealth_against(candidate: Sequence[float | None], reference: Sequence[float | None]) -> NDArray[np.float64]:
    """The wealth after each pair of answers of a player who bets that the candidate scores worse than the reference.

    Answers are paired by position; pairs without a score on a side are left out. Scores count within -1 to 1. The
    wealth starts at 1. For a candidate whose expected score is no lower on any prompt, it is a mixture of nonnegative
    supermartingales (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting")."""
    pairs = [(c, r) for c, r in zip(candidate, reference, strict=False) if c is not None and r is not None]
    if not pairs:
        return np.ones(1)
    clipped = np.clip(np.asarray(pairs, dtype=np.float64), -1.0, 1.0)
    gains = np.log1p(np.multiply.outer(np.asarray(BETS), clipped[:, 1] - clipped[:, 0]))
    wealth: NDArray[np.float64] = np.exp(np.cumsum(gains, axis=1)).mean(axis=0)
    return wealth


def evidence_of_drop(candidate: Sequence[float | None], reference: Sequence[float | None]) -> float:
    """The greatest e-value, over the answers in order, against "the candidate scores no worse than the reference".

    If that is true, the probability that the value ever reaches 1/alpha is at most alpha (Ville's inequality), however
    many answers follow and whatever the distribution of scores."""
    return float(max(1.0, wealth_against(candidate, reference).max()))


class DropTest:
    """The test of `evidence_of_drop`, continued pair by pair. `greatest`: its value over all pairs so far."""

    def __init__(self) -> None:
        self.greatest = 1.0
        self._log_wealth = np.zeros(len(BETS))

    def add(self, candidate: float, reference: float) -> None:
        """Adds a pair of scores."""
        difference = float(np.clip(reference, -1.0, 1.0) - np.clip(candidate, -1.0, 1.0))
        self._log_wealth += np.log1p(np.asarray(BETS) * difference)
        self.greatest = max(self.greatest, float(np.exp(self._log_wealth).mean()))


def doubts(candidate: Sequence[float | None], reference: Sequence[float | None]) -> bool:
    """True if the scores so far speak for a drop."""
    return bool(wealth_against(candidate, reference)[-1] > DOUBT)


def ngrams(tokens: Sequence[int], n: int) -> list[Ngram]:
    """The n-grams of an answer; a shorter answer is one n-gram."""
    if len(tokens) <= n:
        return [tuple(tokens)] if tokens else []
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct_n(answers: Iterable[Sequence[int]], n: int = 2) -> float | None:
    """Share of different n-grams among all n-grams of the answers; None without any."""
    found = [ngram for answer in answers for ngram in ngrams(answer, n)]
    return len(set(found)) / len(found) if found else None


def similarity_across(prompts: Sequence[str], answers: Sequence[Sequence[int]], n: int = 3) -> float | None:
    """Mean Jaccard similarity of the n-grams of answers to different prompts; None with fewer than two prompts."""
    sets = [frozenset(ngrams(answer, n)) for answer in answers]
    columns = {ngram: column for column, ngram in enumerate(dict.fromkeys(ngram for each in sets for ngram in each))}
    holds = np.zeros((len(sets), len(columns)), dtype=np.float32)
    for row, found in enumerate(sets):
        holds[row, [columns[ngram] for ngram in found]] = 1.0
    sizes, common = holds.sum(axis=1), holds @ holds.T
    union = sizes[:, None] + sizes[None, :] - common
    names = np.asarray(prompts, dtype=object)
    counted = np.triu(names[:, None] != names[None, :], 1) & (union > 0)
    return float(np.mean(common[counted] / union[counted])) if counted.any() else None
