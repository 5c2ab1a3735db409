"""Aggregation: means per manager, worker and environment in event-time windows.

In: outcomes and feedback. Out: MetaSignal records. Begin with `core.py` (pure), then `processor.py`.
"""
