"""On-policy distillation on the student's own tokens."""

from torch import Tensor


def distillation_advantages(teacher_logprobs: Tensor, sampler_logprobs: Tensor, clip: float) -> Tensor:
    """Returns clip(log pi_teacher - log mu, +-clip) per token, float32 [n]: the advantage with which the clipped
    surrogate moves the student towards the teacher, on tokens that the student chose (Thinking Machines, "On-Policy
    Distillation", 2025; the clip: OpenClaw-RL). Denominator: the OPD tokens of the batch. The caller leaves out
    non-finite differences."""
    return (teacher_logprobs - sampler_logprobs).clamp(-clip, clip)
