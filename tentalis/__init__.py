"""Everything that people start or agents use: commands, gateway, workers, rewards, policies, the local stack.

In: a command line, HTTP calls, records. Out: processes, answers, records.
Begin with `cli/main.py` (all commands) and `kafka/topology.py` (all applications and their topics).
"""
