"""Whole-session experience: a lesson is extracted from each ended session, and every turn is scored again with it.

In: session events. Out: late OPD halves, one per turn (docs/concepts/hints.md).
Start with `processor.py`; `core.py` tracks the sessions (a pure fold).
"""
