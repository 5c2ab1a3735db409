"""Simulates candidates of known quality and counts those that the guard refuses; pure and seeded.

`python -m tentalis.policies.guard_simulation FILE` writes the table of rates as a page."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tentalis.policies.guard import GuardEvidence, GuardLimits, judge
from tentalis.policies.guard_statistics import distinct_n, similarity_across

PROMPTS, VOCABULARY, CANDIDATES = 8, 1000, 200


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
    CandidateKind("always unfinished", cut=1.0),
)


def simulated_evidence(kind: CandidateKind, rng: np.random.Generator, answers: int) -> GuardEvidence:
    """Evidence of a candidate: its tokens have frequencies like words (Zipf's law)."""
    weights = 1.0 / np.arange(1, VOCABULARY + 1)
    lengths = np.maximum(5, rng.poisson(kind.tokens, answers))
    drawn = rng.choice(VOCABULARY, int(lengths.sum()), p=weights / weights.sum())
    said = [answer.tolist() for answer in np.split(drawn, np.cumsum(lengths)[:-1])]
    if kind.constant:
        said = [said[0]] * answers
    scores = tuple(1.0 if right else -1.0 for right in rng.random(answers) < kind.right)
    return GuardEvidence(
        answers=answers,
        length=sum(map(len, said)) / answers,
        score=sum(scores) / answers,
        distinct=distinct_n(said),
        similarity=similarity_across([str(number % PROMPTS) for number in range(answers)], said),
        unfinished=float(np.mean(rng.random(answers) < kind.cut)),
        scores=scores,
    )


def refusal_rates(limits: GuardLimits, candidates: int = CANDIDATES, seed: int = 0) -> dict[str, float]:
    """The share of refused candidates by kind, each tried against its own draw of the served version and the base."""
    answers, ordinary = max(limits.min_answers, PROMPTS), CandidateKind("served")
    rates = {}
    for number, kind in enumerate(KINDS):
        rng = np.random.default_rng([seed, number])
        refused = 0
        for _ in range(candidates):
            evidence, served, base = (simulated_evidence(each, rng, answers) for each in (kind, ordinary, ordinary))
            refused += bool(judge(evidence, limits, base=base, served=served))
        rates[kind.name] = refused / candidates
    return rates


def page() -> str:
    """The page with the table of rates."""
    limits = GuardLimits()
    rows = "\n".join(f"| {name} | {rate:.3f} |" for name, rate in refusal_rates(limits).items())
    return f"""# Error rates of the guard

`python -m tentalis.policies.guard_simulation FILE` writes this page. It simulates {CANDIDATES} candidates of each kind,
with the default limits and {limits.min_answers} answers, and counts those that the guard refuses. No model takes part.

Served version and base model answer right with probability 0.6 (score 1, else -1), with 24 tokens on average, and 5%
of the answers end at the limit. An equal candidate is the same. Better: 0.8; slightly worse: 0.5; clearly worse: 0.2.
The others score like an equal one.

| candidate | share refused |
|---|---|
{rows}
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
