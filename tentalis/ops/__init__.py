"""The answers to an operator: is it healthy, is it complete, what does it hold?

In: a machine or a log.
Out: a verdict (`doctor`, `verify`), redacted rollouts (`forget`), a queryable store (`trajectories`).
"""
