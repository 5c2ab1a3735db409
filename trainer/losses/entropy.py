"""The entropy bonus."""

from torch import Tensor


def entropy_bonus(entropies: Tensor) -> Tensor:
    """Returns minus the sum over tokens of H(pi) = -sum_v pi(v) log pi(v), in nats, of the distribution that the token
    was sampled from (at its temperature), float32 [T] with gradient. Denominator: the tokens of both parts of the
    batch."""
    return -entropies.sum()
