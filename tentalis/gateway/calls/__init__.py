"""One call through the gateway.

In: a client's request. Out: the backend's answer, and a turn that is recorded before the client gets the answer's end.
Begin with `proxy.py`.
"""
