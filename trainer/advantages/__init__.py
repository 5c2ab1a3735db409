"""Advantages: from the rewards of a batch to one number per token span of each rollout. Pure Python, float64, one
module per family; see docs/losses.md.

An estimator sees all graded rollouts of the batch, whichever rank trains them, and returns advantages by rollout. What
it does not return has no RL part. It goes through samples in the order of their ids, so that the order of a batch and
its layout on ranks change no bit.
"""
