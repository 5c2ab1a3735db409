"""Recorded conversations: their turns, what was said about each, and where each was trained; and labels of operators.

In: session events, feedback, outcomes, plans and step results. Out: rows and details, and the Feedback of a label.
Begin with `core.py`; `process.py` reads the log and writes labels. `learned.py` makes the lines of the tail of a
gateway, `follow.py` reads the topics for them.
"""
