"""Scoring: tasks open, and results and feedback become the RL half.

In: tasks, results, feedback. Out: Open and Score records on the halves topic. Begin with `processor.py`.
"""
