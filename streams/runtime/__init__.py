"""Runs a stream application: one process, one consumer group.

In: a `Processor` (processor.py) and its settings.
Out: records, dead letters and changelog writes, each confirmed before the offset is committed.
Begin with `processor.py` (the interface) and `worker.py` (the process).
"""
