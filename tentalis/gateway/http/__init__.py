"""HTTP without a protocol of models.

In: requests, the key file, settings. Out: checked bodies and keys, error responses, server-sent events.
Begin with `keys.py` (who may call what) and `errors.py`.
"""
