"""A training run from its first start to its last step.

In: a configuration and the log. Out: plans, step results, checkpoints and published adapters, in an order that survives
a crash. Begin with `rank_loop.py` (every rank) and `coordinator.py` (the decisions of rank 0).
"""
