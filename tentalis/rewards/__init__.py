"""Rewards. In: a task, its result and feedback. Out: a `Verdict` with a reward in [-1, 1], or unknown.

Scorers are registered by environment and name. Verifiers are pure functions of task and result; judges call a model or
another service. Begin reading with `verdict` (the protocols) and `registry` (the lookup).
"""
