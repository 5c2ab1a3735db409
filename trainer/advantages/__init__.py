"""Advantages: rewards of a whole batch in, one number per token span of each rollout out. Pure Python, float64.

An estimator sees the rollouts of all ranks; a rollout that it does not return has no RL part. It visits samples in the
order of their ids, so the batch's order and its layout on ranks do not change a bit. Begin with batch.py, then
group.py; one module per family, the table is in docs/concepts/losses.md.
"""
