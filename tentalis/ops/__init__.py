"""Operators' tools: they check a machine, a cluster or a run, and show and erase what the log holds.

In: a machine or a log. Out: a verdict (`doctor`, `verify`), redacted rollouts (`forget`), a queryable store
(`trajectories`).
"""
