"""The inference servers behind the gateway.

In: the gateway's settings and the acknowledged versions. Out: a route for a call and a pooled connection.
Begin with `routing.py`.
"""
