"""Simulates candidates of known quality and counts those that the guard refuses; pure and seeded.

`python -m tentalis.policies.guard_simulation FILE` writes the table of rates as a page."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tentalis.policies.guard import GuardEvidence, GuardLimits
from tentalis.policies.guard_decision import TrialDecision, decide, looks
from tentalis.policies.guard_statistics import distinct_n, similarity_across

PROMPTS, VOCABULARY, CANDIDATES = 8, 1000, 200
SPREAD = 0.5
"""Standard deviation of an answer's length, as a share of the mean."""


@dataclass(frozen=True, slots=True)
class CandidateKind:
    """A kind of candidate. `right`: probability of a right answer (score 1, else -1; served and base: 0.6). `tokens`:
    mean length (served and base: 24). `cut`: share of answers that end at the limit (served and base: 0.05)."""

    name: str
    right: float = 0.6
    tokens: int = 24
    cut: float = 0.05
    constant: bool = False


KINDS = (
    CandidateKind("equal"),
    CandidateKind("better", right=0.8),
    CandidateKind("slightly worse", right=0.5),
    CandidateKind("clearly worse", right=0.2),
    CandidateKind("one constant sentence", constant=True),
    CandidateKind("3.9 times longer", tokens=94),
    CandidateKind("always at the limit", cut=1.0),
)


@dataclass(frozen=True, slots=True)
class TrialRates:
    """Of the candidates of a kind: the share that is refused, and the mean number of answers of a trial."""

    refused: float
    answers: float


@dataclass(frozen=True, slots=True)
class _SimulatedAnswers:
    """All answers that a model would give, in rounds over the prompts."""

    tokens: list[list[int]]
    scores: tuple[float, ...]
    cut: list[bool]

    def evidence(self, answers: int, *, scores_only: bool = False) -> GuardEvidence:
        """The evidence in the first answers."""
        said, scores = self.tokens[:answers], self.scores[:answers]
        length, score = sum(map(len, said)) / answers, sum(scores) / answers
        if scores_only:
            return GuardEvidence(answers, length, score=score, scores=scores)
        return GuardEvidence(
            answers=answers,
            length=length,
            score=score,
            distinct=distinct_n(said),
            similarity=similarity_across([str(number % PROMPTS) for number in range(answers)], said),
            unfinished=sum(self.cut[:answers]) / answers,
            scores=scores,
        )


def simulated_answers(kind: CandidateKind, rng: np.random.Generator, answers: int) -> _SimulatedAnswers:
    """Answers of a candidate: lengths have a gamma distribution, tokens have frequencies like words (Zipf's law)."""
    weights = 1.0 / np.arange(1, VOCABULARY + 1)
    lengths = np.maximum(5, np.rint(rng.gamma(SPREAD**-2, kind.tokens * SPREAD**2, answers)).astype(int))
    drawn = rng.choice(VOCABULARY, int(lengths.sum()), p=weights / weights.sum())
    said = [answer.tolist() for answer in np.split(drawn, np.cumsum(lengths)[:-1])]
    if kind.constant:
        said = [said[0]] * answers
    scores = tuple(1.0 if right else -1.0 for right in rng.random(answers) < kind.right)
    return _SimulatedAnswers(said, scores, (rng.random(answers) < kind.cut).tolist())


def simulated_trial(kind: CandidateKind, rng: np.random.Generator, limits: GuardLimits) -> tuple[TrialDecision, int]:
    """The decision on a candidate against a draw of the served version and of the base, and its number of answers."""
    rounds = max(1, -(-limits.min_answers // PROMPTS))
    total = PROMPTS * rounds
    ordinary = CandidateKind("served")
    candidate, served, base = (simulated_answers(each, rng, total) for each in (kind, ordinary, ordinary))
    for answers in (PROMPTS * look for look in looks(rounds)):
        decision, _ = decide(
            candidate.evidence(answers),
            limits,
            base=base.evidence(answers),
            served=served.evidence(answers, scores_only=True),
            complete=answers == total,
        )
        if decision is not TrialDecision.MORE:
            break
    return decision, answers


def trial_rates(limits: GuardLimits, candidates: int = CANDIDATES, seed: int = 0) -> dict[str, TrialRates]:
    """The rates by kind of candidate."""
    rates = {}
    for number, kind in enumerate(KINDS):
        rng = np.random.default_rng([seed, number])
        trials = [simulated_trial(kind, rng, limits) for _ in range(candidates)]
        refused = sum(decision is TrialDecision.REFUSE for decision, _ in trials)
        rates[kind.name] = TrialRates(refused / candidates, sum(answers for _, answers in trials) / candidates)
    return rates


def page(rates: Mapping[str, TrialRates]) -> str:
    """The page with the table of rates."""
    limits = GuardLimits()
    rows = "\n".join(f"| {name} | {each.refused:.3f} | {each.answers:.1f} |" for name, each in rates.items())
    return f"""# Error rates of the guard

`python -m tentalis.policies.guard_simulation FILE` writes this page. It simulates {CANDIDATES} trials of each kind of
candidate with the default limits, {PROMPTS} prompts and at most {limits.min_answers} answers. No model takes part.

Served version and base model answer right with probability 0.6 (score 1, else -1), with 24 tokens on average (standard
deviation 12), and 5% of their answers end at the limit of tokens. An equal candidate is the same. A better one is right
with probability 0.8, a slightly worse one with 0.5, a clearly worse one with 0.2. The others score like an equal one.

| candidate | share refused | mean number of answers |
|---|---|---|
{rows}

Without scores, nothing tells a worse candidate from an equal one.
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(trial_rates(GuardLimits())), encoding="utf-8")
