"""The local stack: Kafka, model server, applications and trainer, supervised on one machine in one state directory.

In: `StackOptions`. Out: running processes, their logs and `status.json`. Begin reading in `stack.py`, the list of the
processes, and `supervisor.py`, which runs them.
"""
