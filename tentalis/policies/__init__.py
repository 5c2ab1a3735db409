"""From a published adapter to a served one.

In: policy updates, promotions and pins on the log, rollouts as evidence for the guard.
Out: promotions, adapters loaded into a server after a check, acknowledgements.
Begin with `process.py`; `guard.py` decides what may be served, `sync.py` loads it.
"""
