"""The parts that every long-running process needs.

In: environment variables and signals. Out: settings, health and metrics on a port, logs, traces, and an exit code.
Begin with `lifecycle.py` and `settings.py`.
"""
