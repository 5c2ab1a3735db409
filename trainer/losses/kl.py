"""Estimators of the KL divergence from a reference, from samples of the policy."""

from typing import Literal

from torch import Tensor


def kl(kind: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor, clamp: float) -> Tensor:
    """Returns per token an estimate of KL(pi || reference), float32 [T], with x = log reference - log pi clamped to
    +-clamp: k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1 (John Schulman, "Approximating KL Divergence", 2020).

    As *values* k1 and k3 are unbiased, and k1 is often negative; as *losses* the gradient of k1 is zero on average,
    that of k2 is the gradient of the reverse KL, and that of k3 the gradient of the forward KL.

    Example: x = 0.1 gives k1 -0.1, k2 0.005, k3 0.005171.
    """
    x = (reference - logprobs).clamp(-clamp, clamp)
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2.0
    return x.exp() - x - 1.0
