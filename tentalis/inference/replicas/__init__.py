"""Several replicas of one model server: the choice of a replica per call, their health, and the client that asks them.

In: the URLs of the replicas and the outcome of every call. Out: the answer of one replica, with its true version.
Begin with `router.py` (the choice, pure), then `breaker.py`; `client.py` is the shell of workers and teachers, the
gateway's is `tentalis/gateway/backends/backend.py`.
"""
