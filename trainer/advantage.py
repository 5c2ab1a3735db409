"""Advantages: from a reward and the statistics of its group to one number per rollout. Pure."""

from typing import Literal

Estimator = Literal["group_mean", "group_mean_std"]

STD_FLOOR = 1e-4


def advantage(
    reward: float,
    n_requested: int,
    n_closed: int,
    group_mean: float | None,
    group_std: float | None,
    estimator: Estimator = "group_mean",
) -> float | None:
    """The advantage of one sample, or None where the reward says nothing.

    By the *requested* size of the group: n = 1 (a conversation has no group) A = r; n > 1 A = r - mean over the
    samples that closed, and None where fewer than two closed. `group_mean` is the plain difference (Dr. GRPO, arXiv
    2503.20783); `group_mean_std` divides it by (std + 1e-4), the population's standard deviation (GRPO, arXiv
    2402.03300).

    Rewards [1, 0, 0, 1] of a group of four give 0.5, -0.5, -0.5, 0.5, and 1, -1, -1, 1 (almost) when divided.
    """
    if n_requested == 1:
        return reward
    if n_closed < 2 or group_mean is None:
        return None
    difference = reward - group_mean
    if estimator == "group_mean":
        return difference
    if group_std is None:
        return None
    return difference / (group_std + STD_FLOOR)
