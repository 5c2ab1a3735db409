"""From the rollout topic to packed examples.

In: rollouts as a rank reads them. Out: plans, fetched rollouts, examples and packed micro-batches.
Begin with `candidates.py` (may this rollout be trained on?) and `plan.py` (which rollouts form the next batch).
"""
