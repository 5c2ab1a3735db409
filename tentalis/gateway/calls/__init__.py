"""One call through the gateway.

In: a client's request. Out: the backend's answer, and a turn on the log before the client hears its end.
Begin with `proxy.py`.
"""
