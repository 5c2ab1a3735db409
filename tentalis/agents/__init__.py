"""The processes that act: workers answer tasks, the manager issues them, scenarios are its simulated users.

In: tasks, results and what is served. Out: results, and tasks with feedback.
Begin with `workers/process.py` and `manager/process.py`.
"""
