"""Generalised advantage estimation over the turns of a session."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.group_statistics import mean_of
from trainer.advantages.rewarded_sample import AdvantageSpan, AdvantageSpans, RewardedSample
from trainer.config.loss import LossConfig

RewardPoint = tuple[int, int, float]
"""Tokens [start, end), and the reward earned at that point in time."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One turn in the batch: its samples, each with the points in time of its answer (at least one)."""

    samples: tuple[tuple[str, tuple[RewardPoint, ...]], ...]


TurnChain = tuple[SampledTurn, ...]
"""Consecutive turns of one session, without gaps."""


def session_chains(samples: Sequence[RewardedSample], loss: LossConfig) -> list[TurnChain]:
    """Returns the sessions of a batch, each cut wherever a turn is missing; a rollout without a session is a chain by
    itself.

    A batch is planned from the log, so turns of a session may be in another batch, may have expired or may not have
    happened yet. Credit never crosses a missing turn: the chain before the gap ends there, with value 0.
    """
    sessions: dict[str, dict[int, list[RewardedSample]]] = defaultdict(lambda: defaultdict(list))
    chains: list[TurnChain] = []
    for sample in sorted(samples, key=lambda sample: sample.rollout_id):
        if sample.session_id is None or sample.turn_index is None:
            chains.append((SampledTurn(((sample.rollout_id, _points(sample, loss)),)),))
        else:
            sessions[sample.session_id][sample.turn_index].append(sample)
    for _, turns in sorted(sessions.items()):
        chain: list[SampledTurn] = []
        previous = None
        for index, members in sorted(turns.items()):
            if previous is not None and index != previous + 1:
                chains.append(tuple(chain))
                chain = []
            chain.append(SampledTurn(tuple((sample.rollout_id, _points(sample, loss)) for sample in members)))
            previous = index
        chains.append(tuple(chain))
    return chains


def count_session_gaps(samples: Sequence[RewardedSample]) -> int:
    """Number of turns (after turn 0) in the batch whose predecessor in the session is not in the batch."""
    sessions: dict[str, set[int]] = defaultdict(set)
    for sample in samples:
        if sample.session_id is not None and sample.turn_index is not None:
            sessions[sample.session_id].add(sample.turn_index)
    return sum(turn > 0 and turn - 1 not in turns for turns in sessions.values() for turn in turns)


def _points(sample: RewardedSample, loss: LossConfig) -> tuple[RewardPoint, ...]:
    if loss.gae.rewards == "turn" or not sample.steps:
        return ((0, sample.n_tokens, sample.reward),)
    last = len(sample.steps) - 1
    return tuple(
        (start, end, loss.step_weight * score + (sample.reward if index == last else 0.0))
        for index, (start, end, score) in enumerate(sample.steps)
    )


def gae(samples: Sequence[RewardedSample], loss: LossConfig) -> dict[str, AdvantageSpans]:
    """A_k = sum over j >= k of (gamma lambda)^(j - k) (r_j + gamma V_(j+1) - V_j) along each chain (arXiv 1506.02438).

    A point k in time is a turn, or a scored step of one. Where a turn has several samples, the turn before continues
    with their mean. There is no critic. V = 0 (`values: zero`), so that A is the discounted sum of rewards to come; or
    (`position`) V_k is the mean over the batch's *other* chains of the discounted return from their k-th point on, 0
    where no other chain is that long: a baseline that never contains the answer it is compared with.

    Example: gamma 1, lambda 0.5, rewards 0, 0, 1: 0.25, 0.5, 1.
    """
    spans_by_rollout: dict[str, AdvantageSpans] = {}
    chains = session_chains(samples, loss)
    values = _PositionBaseline(chains, loss.gae.gamma) if loss.gae.values == "position" else None
    decay = loss.gae.gamma * loss.gae.lam
    for chain_index, chain in enumerate(chains):
        turn_advantage, offset = 0.0, _chain_length(chain)
        for turn in reversed(chain):
            offset -= _n_points(turn)
            first_advantages = []
            for rollout_id, points in turn.samples:
                spans: list[AdvantageSpan] = []
                advantage = turn_advantage
                for index in reversed(range(len(points))):
                    start, end, reward = points[index]
                    position = offset + index
                    next_position = offset + _n_points(turn) if index == len(points) - 1 else position + 1
                    delta = reward
                    if values is not None:
                        delta += loss.gae.gamma * values.at(chain_index, next_position) - values.at(
                            chain_index, position
                        )
                    advantage = delta + decay * advantage
                    spans.append((start, end, advantage))
                spans_by_rollout[rollout_id] = tuple(reversed(spans))
                first_advantages.append(advantage)
            turn_advantage = mean_of(first_advantages)
    return spans_by_rollout


def _n_points(turn: SampledTurn) -> int:
    return max(len(points) for _, points in turn.samples)


def _chain_length(chain: TurnChain) -> int:
    return sum(map(_n_points, chain))


class _PositionBaseline:
    """Mean discounted returns by position, leaving out the chain for which they are the baseline."""

    def __init__(self, chains: Sequence[TurnChain], gamma: float) -> None:
        self._returns = [_returns(chain, gamma) for chain in chains]
        self._sums: dict[int, tuple[float, int]] = {}
        for returns in self._returns:
            for position, value in returns.items():
                total, count = self._sums.get(position, (0.0, 0))
                self._sums[position] = total + value, count + 1

    def at(self, chain: int, position: int) -> float:
        """Returns V at a position for a chain; 0 after its end."""
        own = self._returns[chain].get(position)
        if own is None:
            return 0.0
        total, count = self._sums[position]
        return (total - own) / (count - 1) if count > 1 else 0.0


def _returns(chain: TurnChain, gamma: float) -> dict[int, float]:
    """Returns the discounted return from each position on, the mean over a turn's samples."""
    returns: dict[int, float] = {}
    turn_return, offset = 0.0, _chain_length(chain)
    for turn in reversed(chain):
        offset -= _n_points(turn)
        collected: dict[int, list[float]] = defaultdict(list)
        for _, points in turn.samples:
            discounted = turn_return
            for index in reversed(range(len(points))):
                discounted = points[index][2] + gamma * discounted
                collected[offset + index].append(discounted)
        returns |= {position: mean_of(values) for position, values in collected.items()}
        turn_return = returns[offset]
    return returns
