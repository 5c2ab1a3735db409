"""One optimizer step.

In: a plan and its rollouts. Out: updated weights and the step's metrics.
Begin with `step.py`; `objective.py` sums the losses, `engine.py` holds model and optimizer.
"""
