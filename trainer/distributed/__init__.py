"""The processes of one trainer.

In: the launcher's environment and signals.
Out: ranks that add up gradients, stop together and compute deterministically. Begin with `ranks.py`.
"""
