"""Parts that the pure folds of several stream applications share. No application is imported here.

In: records of one partition in log order. Out: state, changelog writes and paired feedback.
Begin with `partition.py`, the kernel of sessions, experience and join, then `changelog_buffer.py` and `pairing.py`.
"""
