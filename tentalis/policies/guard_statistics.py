"""The statistics of the guard: a sequential paired test of scores, and measures of diversity. Pure."""

from collections.abc import Iterable, Sequence

import numpy as np

# Shares of the wealth that the test bets on a drop of the score. A bet must stay below 1/2, as differences reach 2.
BETS = (0.05, 0.1, 0.2, 0.4)
Ngram = tuple[int, ...]


def evidence_of_drop(candidate: Sequence[float | None], reference: Sequence[float | None]) -> float:
    """The greatest e-value, over the answers in order, against "the candidate scores no worse than the reference".

    Answers are paired by position; pairs without a score on a side are left out. Scores count within -1 to 1. For a
    candidate whose expected score is no lower on any prompt, the value is a mixture of nonnegative supermartingales
    that start at 1. So the probability that it ever reaches 1/alpha is at most alpha (Ville's inequality), however
    many answers follow and whatever the distribution of scores (Waudby-Smith and Ramdas, "Estimating means of bounded
    random variables by betting")."""
    pairs = [(c, r) for c, r in zip(candidate, reference, strict=False) if c is not None and r is not None]
    if not pairs:
        return 1.0
    clipped = np.clip(np.asarray(pairs, dtype=np.float64), -1.0, 1.0)
    gains = np.log1p(np.multiply.outer(np.asarray(BETS), clipped[:, 1] - clipped[:, 0]))
    wealth = np.exp(np.cumsum(gains, axis=1)).mean(axis=0)
    return float(max(1.0, wealth.max()))


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
