"""Turns on the log before their clients hear the end.

In: records. Out: confirmed writes, or records in a spool on disk while the broker is away. Begin with `recorder.py`.
"""
