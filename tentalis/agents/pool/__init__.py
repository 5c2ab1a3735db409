"""`tentalis serve env-pool`: environments offered to other processes and machines over HTTP.

In: calls of the contract of docs/reference/env-pool.md. Out: observations and scores of our environments.
Begin with `leases.py` (who holds which place) and `episode.py` (an environment in terms of the contract); `app.py` is
the HTTP around them, `process.py` runs it.
"""
