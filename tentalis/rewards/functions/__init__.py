"""Reward functions as people write them for TRL, verl and verifiers. In: `rewards.py:score`. Out: a scorer.

A function runs in a separate process, with limits of time and memory; a failure costs one reward and names the line.
Begin reading with `signature` (the conventions), then `scorer` (`load`, `describe`) and `process`.
"""
