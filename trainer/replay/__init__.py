"""Runs that are trained again from their topics.

In: the manifest, plans, results and rollouts of a recorded run.
Out: a comparison step by step, an archive, or a counterfactual run. Begin with `replay.py`.
"""
