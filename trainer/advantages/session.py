"""Generalised advantage estimation over the turns of a session."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.advantages.graded import Graded, Span, Spans
from trainer.losses.settings import Loss

Point = tuple[int, int, float]
"""Tokens [start, end) and the reward that they earned at once."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn in the batch: its samples, each with the points in time of its answer (at least one)."""

    samples: tuple[tuple[str, tuple[Point, ...]], ...]


Chain = tuple[Turn, ...]
"""Consecutive turns of one session, nothing missing between them."""


def chains(samples: Sequence[Graded], loss: Loss) -> list[Chain]:
    """The sessions of a batch, each cut wherever a turn is missing; a rollout without a session is one by itself.

    A batch is planned from the log, so turns of a session may lie in another one, may have expired or not have happened
    yet. Credit never passes over a turn that is not there: what precedes the gap ends there, with value 0.
    """
    sessions: dict[str, dict[int, list[Graded]]] = defaultdict(lambda: defaultdict(list))
    found: list[Chain] = []
    for sample in sorted(samples, key=lambda sample: sample.rollout_id):
        if sample.session is None or sample.turn is None:
            found.append((Turn(((sample.rollout_id, _points(sample, loss)),)),))
        else:
            sessions[sample.session][sample.turn].append(sample)
    for _, turns in sorted(sessions.items()):
        chain: list[Turn] = []
        previous = None
        for index, members in sorted(turns.items()):
            if previous is not None and index != previous + 1:
                found.append(tuple(chain))
                chain = []
            chain.append(Turn(tuple((each.rollout_id, _points(each, loss)) for each in members)))
            previous = index
        found.append(tuple(chain))
    return found


def gaps(samples: Sequence[Graded]) -> int:
    """Places where turns of a session of the batch are missing between two that are in it, or before its first."""
    sessions: dict[str, set[int]] = defaultdict(set)
    for sample in samples:
        if sample.session is not None and sample.turn is not None:
            sessions[sample.session].add(sample.turn)
    return sum(turn > 0 and turn - 1 not in turns for turns in sessions.values() for turn in turns)


def _points(sample: Graded, loss: Loss) -> tuple[Point, ...]:
    if loss.gae.rewards == "turn" or not sample.steps:
        return ((0, sample.n_tokens, sample.reward),)
    last = len(sample.steps) - 1
    return tuple(
        (start, end, loss.step_weight * score + (sample.reward if index == last else 0.0))
        for index, (start, end, score) in enumerate(sample.steps)
    )


def gae(samples: Sequence[Graded], loss: Loss) -> dict[str, Spans]:
    """A_k = sum over j >= k of (gamma lambda)^(j - k) (r_j + gamma V_(j+1) - V_j) along each chain (arXiv 1506.02438).

    A point k in time is a turn, or a scored step of one. Where a turn has several samples, what precedes it continues
    with their mean. There is no critic. V = 0 (`values: zero`), so that A is the discounted sum of rewards to come; or
    (`position`) V_k is the mean over the batch's *other* chains of the discounted return from their k-th point on, 0
    where no other chain is that long: a baseline that never contains the answer it judges.

    gamma 1, lambda 0.5, rewards 0, 0, 1: 0.25, 0.5, 1.
    """
    found: dict[str, Spans] = {}
    every = chains(samples, loss)
    values = _Values(every, loss.gae.gamma) if loss.gae.values == "position" else None
    decay = loss.gae.gamma * loss.gae.lam
    for number, chain in enumerate(every):
        later, offset = 0.0, _length(chain)
        for turn in reversed(chain):
            offset -= _depth(turn)
            firsts = []
            for rollout_id, points in turn.samples:
                spans: list[Span] = []
                following = later
                for index in reversed(range(len(points))):
                    start, end, reward = points[index]
                    at = offset + index
                    after = offset + _depth(turn) if index == len(points) - 1 else at + 1
                    delta = reward
                    if values is not None:
                        delta += loss.gae.gamma * values.at(number, after) - values.at(number, at)
                    following = delta + decay * following
                    spans.append((start, end, following))
                found[rollout_id] = tuple(reversed(spans))
                firsts.append(following)
            later = _mean(firsts)
    return found


def _depth(turn: Turn) -> int:
    return max(len(points) for _, points in turn.samples)


def _length(chain: Chain) -> int:
    return sum(map(_depth, chain))


def _mean(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


class _Values:
    """Mean discounted returns by position, without the chain that asks."""

    def __init__(self, every: Sequence[Chain], gamma: float) -> None:
        self._returns = [_returns(chain, gamma) for chain in every]
        self._sums: dict[int, tuple[float, int]] = {}
        for returns in self._returns:
            for at, value in returns.items():
                total, count = self._sums.get(at, (0.0, 0))
                self._sums[at] = total + value, count + 1

    def at(self, chain: int, position: int) -> float:
        """V at a position for a chain; 0 behind its end."""
        own = self._returns[chain].get(position)
        if own is None:
            return 0.0
        total, count = self._sums[position]
        return (total - own) / (count - 1) if count > 1 else 0.0


def _returns(chain: Chain, gamma: float) -> dict[int, float]:
    """Discounted return from each position on, the mean over a turn's samples."""
    found: dict[int, float] = {}
    later, offset = 0.0, _length(chain)
    for turn in reversed(chain):
        offset -= _depth(turn)
        collected: dict[int, list[float]] = defaultdict(list)
        for _, points in turn.samples:
            following = later
            for index in reversed(range(len(points))):
                following = points[index][2] + gamma * following
                collected[offset + index].append(following)
        found |= {at: _mean(values) for at, values in collected.items()}
        later = found[offset]
    return found
